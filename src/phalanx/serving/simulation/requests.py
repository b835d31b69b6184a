"""Requests in columns: arrivals, lengths, and the other inputs of their scheduling.

Arrivals are a closed loop (each of `users` sends the next request when the last is answered), random at a rate, or
given by a trace; `users` also limits concurrent requests at a rate, as in benchmarks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from phalanx.spec.errors import InputError

Integers = np.ndarray[Any, np.dtype[np.int64]]
Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Requests:
    """n requests in order of arrival. Raises InputError for lengths below 1 and invalid arrivals."""

    input: Integers
    """(n,) tokens of the prompt."""
    output: Integers
    """(n,) tokens to generate."""
    arrival: Floats | None
    """(n,) seconds, ascending; None: closed loop."""
    users: int = 0
    """Concurrent requests of a closed loop; the most concurrent ones with timed arrivals, 0: no limit."""
    ramp_s: float = 0.0
    """Seconds over which the users of a closed loop evenly send their first requests, because equal requests that
    begin together would stay together."""
    reused: Integers | None = None
    """(n,) leading tokens of the prompt that are in the cache. None: no tokens."""
    priority: Integers | None = None
    """(n,) lower goes first. None: first come, first served."""
    adapter: Integers | None = None
    """(n,) number of a LoRA adapter, from 0. None: no adapters."""

    def __post_init__(self) -> None:
        n = len(self.input)
        if n < 1:
            raise InputError("requests", n, "there are none")
        for name, values, least in (
            ("input", self.input, 1),
            ("output", self.output, 1),
            ("reused", self.reused, 0),
            ("adapter", self.adapter, 0),
        ):
            if values is None:
                continue
            if len(values) != n:
                raise InputError(f"requests.{name}", len(values), f"there are {n} requests")
            if (bad := np.flatnonzero(values < least)).size:
                reason = f"must be at least {least}"
                raise InputError(f"requests.{name}[{bad[0]}]", int(values[bad[0]]), reason)
        if self.reused is not None and (bad := np.flatnonzero(self.reused >= self.input)).size:
            reason = "leaves nothing of the prompt to compute"
            raise InputError(f"requests.reused[{bad[0]}]", int(self.reused[bad[0]]), reason)
        if self.arrival is None:
            if self.users < 1:
                raise InputError("concurrency", self.users, "must be at least 1")
        elif len(self.arrival) != n or not np.all(np.isfinite(self.arrival)):
            raise InputError("requests.arrival", len(self.arrival), f"must be {n} finite numbers of seconds")
        elif self.arrival[0] < 0 or np.any(np.diff(self.arrival) < 0):
            raise InputError("requests.arrival", float(self.arrival.min()), "times must ascend from 0")

    def __len__(self) -> int:
        return len(self.input)

    def first(self, n: int) -> Requests:
        """Return the first n requests."""
        columns = ("input", "output", "arrival", "reused", "priority", "adapter")
        part: dict[str, Any] = {name: None if (c := getattr(self, name)) is None else c[:n] for name in columns}
        return replace(self, **part)


def equal_requests(n: int, input: int, output: int) -> Requests:
    """Return n equal requests, in a closed loop of one user."""
    lengths = np.full(n, input, np.int64), np.full(n, output, np.int64)
    return Requests(*lengths, None, 1)


def closed_loop(requests: Requests, users: int, ramp_s: float = 0.0) -> Requests:
    """Return the requests in a closed loop of `users`, who begin within `ramp_s` seconds."""
    return replace(requests, arrival=None, users=users, ramp_s=ramp_s)


def with_arrivals(
    requests: Requests, per_second: float, seed: int, burstiness: float = 1.0, most: int = 0
) -> Requests:
    """Return the requests with random arrivals at a rate, at most `most` of them concurrent (0: no limit).

    `burstiness`: shape of the gamma distribution of times between requests: 1: a Poisson process; less: bursts;
    infinity: evenly spaced. The times are scaled to the rate exactly (vLLM, benchmarks/serve.py, get_request). Raises
    InputError for a rate that is not positive."""
    if not 0 < per_second < float("inf"):
        raise InputError("rate", per_second, "must be positive: requests per second")
    if burstiness == float("inf"):
        gaps = np.full(len(requests), 1 / per_second)
    else:
        gaps = np.random.default_rng(seed).gamma(burstiness, 1 / (per_second * burstiness), len(requests))
    arrival = np.cumsum(gaps)
    return replace(requests, arrival=arrival * (len(requests) / per_second / arrival[-1]), users=most)


def gamma_requests(n: int, input: int, output: int, variation: float, longest: int, seed: int) -> Requests:
    """Return n requests whose lengths have a gamma distribution with this coefficient of variation, scaled to these
    means exactly. Answers of ShareGPT have it, with 1.02: their median is 0.65 of the mean, their percentiles 90, 95
    and 99 are 2.4, 3.1 and 4.0 times the mean (github.com/djangodevreng/dgx-spark-benchmarks, 5636536,
    08-sharegpt.json of dense models: times of whole requests under a light load).

    Lengths are at least 1, and a request has at most `longest` tokens in all. variation = 0: equal requests.
    """
    if not variation:
        return equal_requests(n, input, output)
    draw = np.random.default_rng(seed)
    drawn = [np.maximum(draw.gamma(variation**-2, size=n), 1e-9) for _ in range(2)]
    lengths = [
        np.clip(np.rint(mean * x / x.mean()), 1, longest - 1) for mean, x in zip((input, output), drawn, strict=True)
    ]
    prompts = lengths[0].astype(np.int64)
    return Requests(prompts, np.minimum(lengths[1], longest - prompts).astype(np.int64), None, 1)


def uniform_requests(n: int, input: tuple[int, int], output: tuple[int, int], seed: int) -> Requests:
    """Return n requests with uniform lengths, in a closed loop of one user. `input`, `output`: (fewest, most)
    tokens."""
    draw = np.random.default_rng(seed)
    prompts, answers = (draw.integers(low, high + 1, n) for low, high in (input, output))
    return Requests(prompts, answers, None, 1)


def with_reuse(requests: Requests, rate: float, page: int) -> Requests:
    """Return the requests with a share `rate` of each prompt in the cache, in whole pages of `page` tokens."""
    whole = (requests.input * rate).astype(np.int64) // page * page
    most = (requests.input - 1) // page * page
    return replace(requests, reused=np.minimum(whole, most))


def with_adapters(requests: Requests, count: int, seed: int) -> Requests:
    """Return the requests, each with a random one of `count` LoRA adapters."""
    return replace(requests, adapter=np.random.default_rng(seed).integers(0, count, len(requests)))
