"""The strategies that fit a job on a cluster, priced, best first.

Today: data parallelism with ZeRO and HSDP, by micro-batch; every later axis joins this enumeration.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from phalanx.cost.predict import Prediction, predict, predict_all
from phalanx.spec.cluster import GIB, ClusterSpec
from phalanx.spec.errors import InputError
from phalanx.spec.job import Job
from phalanx.spec.model import ModelSpec
from phalanx.spec.strategy import Strategy, check, divisors


@dataclass(frozen=True)
class Candidate:
    """A strategy with its price; `reason` says why it was rejected ("" where it was not)."""

    strategy: Strategy
    prediction: Prediction
    reason: str = ""


def enumerate_strategies(job: Job, ranks: int, dp: int | None = None) -> list[Strategy]:
    """Every legal (dp, zero, shard, micro_batch), none twice: dp up to `ranks`, or just the given one."""
    replicas = [dp] if dp else [d for d in divisors(job.global_batch) if d <= ranks]
    stages: tuple[Literal[0, 1, 2, 3], ...] = (0, 1, 2, 3)
    return [
        Strategy(dp=d, zero=zero, shard=shard if shard < d else None, micro_batch=m)
        if zero
        else Strategy(dp=d, micro_batch=m)
        for d in replicas
        for zero in stages
        for shard in (divisors(d)[1:] if zero else [1])
        for m in divisors(job.global_batch // d)
    ]


def search(model: ModelSpec, cluster: ClusterSpec, job: Job, dp: int | None = None) -> list[Candidate]:
    """All candidates, those that fit first, fastest first.

    Raises InputError where no strategy fits, with what the smallest one needs.
    """
    check(Strategy(dp=dp or 1), model, job, None)
    strategies = enumerate_strategies(job, cluster.ranks, dp)
    times = predict_all(model, cluster, job, strategies).step_time_s
    found = [price(model, cluster, job, strategies[i]) for i in np.argsort(times, kind="stable")]
    found.sort(key=lambda c: bool(c.reason))
    if found[0].reason:
        least = min(found, key=lambda c: int(c.prediction.memory_bytes))
        raise InputError(
            "strategy", "auto", f"nothing fits: {least.strategy} {least.reason}", "use a smaller model, seq or batch"
        )
    return found


def price(model: ModelSpec, cluster: ClusterSpec, job: Job, strategy: Strategy) -> Candidate:
    """One strategy with its prediction, and whether it fits."""
    prediction = predict(model, cluster, job, strategy)
    need, have = int(prediction.memory_bytes), cluster.device.usable_bytes
    reason = f"needs {need / GIB:.1f} of {have / GIB:.1f} GiB" if need > have else ""
    return Candidate(strategy, prediction, reason)
