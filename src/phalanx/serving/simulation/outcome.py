"""Latency and throughput of a simulated history: TTFT, time per token, tokens/s, with quantiles.

Under a sustained load the first requests, which arrive at an empty engine, and the last ones, after which none
arrive, are not counted. In a benchmark all are counted, from the first request to the last token.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from phalanx.serving.simulation.requests import Floats
from phalanx.serving.simulation.simulation import RequestHistory


@dataclass(frozen=True)
class Quantiles:
    """Quantiles of a time, in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float

    def at(self, percentile: int) -> float:
        """Return the quantile of 50, 90 or 99 percent."""
        return {50: self.p50, 90: self.p90, 99: self.p99}[percentile]


@dataclass(frozen=True)
class LimitKept:
    """The share of requests within a limit, with its margin by the differences between twenty consecutive parts of
    the simulation."""

    limit: str
    """ttft, tpot or deadline."""
    share: float
    margin: float
    """Half of the 95 % confidence interval of the share."""


@dataclass(frozen=True)
class ServingOutcome:
    """Latency and throughput of a deployment under a load."""

    ttft: Quantiles
    """Time from arrival to the first token: queueing, prefill, and the transfer of the cache."""
    queueing: Quantiles
    """Time from arrival until the request has a slot and pages."""
    tpot: Quantiles
    """Time per token after the first, over all requests."""
    gap: Quantiles
    """Time between two tokens of a request, over all tokens (inter-token latency)."""
    latency: Quantiles
    """Time from arrival to the last token."""
    tokens_per_s: float
    """Tokens generated per second by all workers, in the steady part."""
    requests_per_s: float
    """Requests finished per second, in the steady part."""
    in_flight: float
    """Mean number of running and waiting requests, in the steady part."""
    preemptions: int
    requests: int
    """Number of requests behind the quantiles."""
    makespan_s: float | None = None
    """Seconds of a benchmark, from its first request to its last token; None: a sustained load."""
    kept: tuple[LimitKept, ...] = ()
    """The share of requests within each limit."""


def quantiles(values: Floats) -> Quantiles:
    """Return the quantiles of times; 0 for no times."""
    if not len(values):
        return Quantiles(0.0, 0.0, 0.0, 0.0)
    middle, high, highest = np.quantile(values, (0.5, 0.9, 0.99))
    return Quantiles(float(values.mean()), float(middle), float(high), float(highest))


_PARTS, _QUANTILE = 20, 2.093  # Student's t of 19 degrees of freedom, 97.5 %


def _share_kept(limit: str, times: Floats, most: float) -> LimitKept:
    """Return the share of `times`, in order of arrival, that are at most `most`."""
    under = times <= most
    parts = np.array([part.mean() for part in np.array_split(under, _PARTS) if len(part)])
    spread = float(parts.std(ddof=1)) if len(parts) > 1 else 1.0
    return LimitKept(limit, float(under.mean()), _QUANTILE * spread / len(parts) ** 0.5)


def outcome(
    history: RequestHistory,
    warm: float = 0.1,
    way_s: float = 0.0,
    way_steps: float = 0.0,
    finite: bool = False,
    limits: Mapping[str, float | None] = MappingProxyType({}),
) -> ServingOutcome:
    """Return the outcome of a history, without the first share `warm` of its requests; `finite`: of all of them.

    With timed arrivals, requests that arrived within the first two latencies of a request, and requests running when
    the last one arrived, are not counted either. Users see a first token `way_s` seconds and `way_steps` of the
    request's own steps after it is computed, at the latest with its last token: for HTTP, tokenising, and because
    servers send tokens in intervals. `limits`: seconds of ttft, tpot and deadline.
    """
    h, n = history, len(history.requests)
    skipped, stop = 0 if finite else int(n * warm), n
    timed = h.requests.arrival is not None and not finite and warm > 0
    if timed:
        early = int((h.arrival < h.arrival[0] + 2 * float(np.median(h.done - h.arrival))).sum())
        skipped = min(max(skipped, early), n // 2)
        stop = max(n - int((h.done > h.arrival[-1]).sum()), skipped + max(1, n // 4))
    rows = slice(skipped, stop)
    longer = h.requests.output[rows] > 1
    first, done, arrival = h.first[rows], h.done[rows], h.arrival[rows]
    per_token = (done - first)[longer] / (h.requests.output[rows][longer] - 1)
    wait = first - arrival
    # In a burst a request's own tokens may wait for prompts of many steps; the way waits for single steps only.
    step = per_token if h.after is None or not finite else np.minimum(per_token, h.after[rows][longer])
    wait[longer] += np.minimum(way_steps, h.requests.output[rows][longer] - 1) * step
    wait += way_s
    begin = float(h.arrival[skipped] if timed else np.sort(h.done)[skipped - 1]) if skipped else 0.0
    end = float(h.arrival[-1])
    if finite:
        begin, end = float(h.arrival.min()), float(h.done.max()) + way_s
    elif end <= begin:  # all arrived at once: there is no steady part
        begin, end = 0.0, float(h.done.max())
    latencies = {"ttft": wait, "tpot": per_token, "deadline": done - arrival + way_s}
    return ServingOutcome(
        ttft=quantiles(wait),
        queueing=quantiles(h.admitted[rows] - arrival),
        tpot=quantiles(per_token),
        gap=_of_gaps(h),
        latency=quantiles(done - arrival + way_s),
        tokens_per_s=_tokens(h, begin, end) / (end - begin),
        requests_per_s=float(((h.done > begin) & (h.done <= end)).sum()) / (end - begin),
        in_flight=float((np.clip(h.done, begin, end) - np.clip(h.arrival, begin, end)).sum()) / (end - begin),
        preemptions=h.preemptions,
        requests=stop - skipped,
        makespan_s=end - begin if finite else None,
        kept=tuple(_share_kept(k, latencies[k], most) for k, most in limits.items() if most is not None),
    )


def _tokens(h: RequestHistory, begin: float, end: float) -> float:
    """Count the tokens sent between two times, with parts of runs that cross either time."""
    ends, seconds, tokens = h.sent.T
    inside = np.clip(ends, begin, end) - np.clip(ends - seconds, begin, end)
    return float((tokens * inside / np.maximum(seconds, 1e-300)).sum())


def _of_gaps(h: RequestHistory) -> Quantiles:
    """Return the quantiles, over tokens, of the time since the previous token, which grows evenly within a run."""
    if not len(h.gaps):
        return Quantiles(0.0, 0.0, 0.0, 0.0)
    weight, low, high = h.gaps.T
    values, weights = (
        np.concatenate((low, 0.5 * (low + high), high)),
        np.concatenate((weight, 2 * weight, weight)) / 4,
    )
    order = np.argsort(values)
    values, reached = values[order], np.cumsum(weights[order])
    at = [float(values[np.searchsorted(reached, q * reached[-1])]) for q in (0.5, 0.9, 0.99)]
    return Quantiles(float((values * weights[order]).sum() / reached[-1]), *at)
