"""The strategies that fit a job on a cluster, priced, best first.

Today: data parallelism with ZeRO and HSDP, by micro-batch; every later axis joins this enumeration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from phalanx.cost.predict import Prediction, predict, predict_all
from phalanx.plan.bucket import resolve
from phalanx.schedule.stages import check
from phalanx.spec.cluster import GIB, ClusterSpec
from phalanx.spec.errors import InputError
from phalanx.spec.job import Job
from phalanx.spec.model import ModelSpec
from phalanx.spec.strategy import Strategy, divisors


@dataclass(frozen=True)
class Candidate:
    """A strategy with its price; `reason` says why it was rejected ("" where it was not), `bucket_reason` why its
    bucket is as large as it is ("" where it was given, or there is none)."""

    strategy: Strategy
    prediction: Prediction
    reason: str = ""
    bucket_reason: str = ""

    @property
    def asked(self) -> Strategy:
        """The strategy without what was resolved for it: as somebody would ask for it."""
        return replace(self.strategy, bucket="auto") if self.bucket_reason else self.strategy


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
    bucketed = _resolved(model, cluster, job, strategies)
    times = predict_all(model, cluster, job, [s for s, _ in bucketed]).step_time_s
    found = [_priced(model, cluster, job, *bucketed[i]) for i in np.argsort(times, kind="stable")]
    found.sort(key=lambda c: bool(c.reason))
    if found[0].reason:
        least = min(found, key=lambda c: int(c.prediction.memory_bytes))
        raise InputError(
            "strategy", "auto", f"nothing fits: {least.asked} {least.reason}", "use a smaller model, seq or batch"
        )
    return found


def price(model: ModelSpec, cluster: ClusterSpec, job: Job, strategy: Strategy) -> Candidate:
    """One strategy with its bucket resolved, its prediction, and whether it fits."""
    return _priced(model, cluster, job, *resolve(model, cluster, job, strategy))


def _resolved(
    model: ModelSpec, cluster: ClusterSpec, job: Job, strategies: Sequence[Strategy]
) -> list[tuple[Strategy, str]]:
    """Every strategy with its bucket and the reason, which are the same whatever the micro-batch."""
    known: dict[Strategy, tuple[Strategy, str]] = {}
    found = []
    for s in strategies:
        like = replace(s, micro_batch=1)
        if like not in known:
            known[like] = resolve(model, cluster, job, like)
        found.append((replace(s, bucket=known[like][0].bucket), known[like][1]))
    return found


def _priced(model: ModelSpec, cluster: ClusterSpec, job: Job, strategy: Strategy, bucket_reason: str) -> Candidate:
    prediction = predict(model, cluster, job, strategy)
    need, have = int(prediction.memory_bytes), cluster.device.usable_bytes
    reason = f"needs {need / GIB:.1f} of {have / GIB:.1f} GiB" if need > have else ""
    return Candidate(strategy, prediction, reason, bucket_reason)
