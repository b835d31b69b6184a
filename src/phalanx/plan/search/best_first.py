"""`strategy = "auto"`: of all strategies that the trainer runs the fastest that fits, by our own exact price.

A price is a StepProgram's: milliseconds for most strategies, far more for a long pipeline. So no strategy is priced
before it is clear that it may be among the best (plan/bounds.py has what each promises). Rows wait in a heap by what
is known of them:

    seconds without recomputation  ->  seconds  ->  its price

where the first two are expected ones, a little over the least. The best is settled where it is faster than the least
seconds of all that have no price. Of spaces too large even for that, where the device has published rates, the
vectorised terms of our own stack (plan/explore.py) choose who is priced.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from phalanx.cost.step.predict import Prediction, predict
from phalanx.plan.auto import stage_split
from phalanx.plan.auto.bucket_size import resolve
from phalanx.plan.search import branch_and_bound, space
from phalanx.plan.search.column_pricing import Floats, Pricing, published
from phalanx.plan.search.lower_bounds import Bounds, expected
from phalanx.plan.search.space import Options, Strategies
from phalanx.spec.cluster.spec import GIB, ClusterSpec
from phalanx.spec.errors import InputError
from phalanx.spec.job import Job
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.spec import Strategy

STACK = "phalanx"
OPTIONS = Options(orders=space.ORDERS[:1])
"""What the trainer runs: the mesh has one order."""
SHOWN = 16
"""How many of the best are looked for: the first is what is wanted, the others are its alternatives."""
_LARGE = 50_000
"""Strategies beyond which the vectorised terms choose first."""
_FIRST = 24
"""How many of those they hand on, beside the best of each family."""
_PATIENCE = 40
"""Prices after which no alternatives are looked for any more,"""
_MOST = 120
"""and nothing that fits."""


@dataclass(frozen=True)
class Candidate:
    """A strategy with its price; `reason` says why it was rejected ("" where it was not), `bucket_reason` why its
    bucket is as large as it is ("" where it was given, or there is none), `layers_reason` likewise of the chunks."""

    strategy: Strategy
    prediction: Prediction
    reason: str = ""
    bucket_reason: str = ""
    layers_reason: str = ""

    @property
    def seconds(self) -> float:
        return float(self.prediction.step_time_s)

    @property
    def asked(self) -> Strategy:
        """The strategy without what was resolved for it: as somebody would ask for it."""
        found = replace(self.strategy, bucket="auto") if self.bucket_reason else self.strategy
        return replace(found, layers="auto") if self.layers_reason else found


@dataclass(frozen=True)
class Searched:
    """What was priced: those that fit first, fastest first. `legal`: strategies there are, over `worlds` ranks.
    `settled`: whether no other promises to be faster than the first; else they were left out by estimates."""

    candidates: tuple[Candidate, ...]
    legal: int
    worlds: tuple[int, ...]
    settled: bool

    @property
    def best(self) -> Candidate:
        return self.candidates[0]


def search(model: ModelSpec, cluster: ClusterSpec, job: Job, worlds: Sequence[int]) -> Searched:
    """The best strategies over any of so many ranks. Raises InputError where none is legal, or none fits: with what
    the smallest one needs."""
    cores = _cores(model, job, worlds)
    if not len(cores):
        few = next((n for n in range(max(worlds) - 1, 0, -1) if len(_cores(model, job, [n]))), 1)
        reason = (
            f"no split of {max(worlds)} ranks divides job.global_batch = {job.global_batch} and the model's sizes"
        )
        raise InputError("strategy", "auto", reason, f"use {few} ranks, or another batch")
    legal = int(space.size(cores, model, job, OPTIONS).sum())
    settled = legal <= _LARGE or not published(cluster)
    if settled:
        rows = space.pipelines(space.experts(cores, model), model, job, OPTIONS)
        rows = space.sharding(space.recomputing(rows, model, OPTIONS), OPTIONS)
        found, settled = _best_first(model, cluster, job, rows)
    else:
        found = [price(model, cluster, job, s) for s in _first_pass(model, cluster, job, worlds)]
    found.sort(key=lambda c: (bool(c.reason), c.seconds))
    if not found:
        found = [price(model, cluster, job, _smallest(model, cluster, job, cores))]
    if found[0].reason:
        least = min(found, key=lambda c: int(c.prediction.memory_bytes))
        raise InputError(
            "strategy", "auto", f"nothing fits: {least.asked} {least.reason}", "use a smaller model, seq or batch"
        )
    return Searched(tuple(found), legal, tuple(worlds), settled)


def price(model: ModelSpec, cluster: ClusterSpec, job: Job, strategy: Strategy) -> Candidate:
    """One strategy with its bucket and its chunks resolved, its prediction, and whether it fits."""
    strategy, why = stage_split.resolve(model, cluster, job, strategy)
    strategy, bucket_reason = resolve(model, cluster, job, strategy)
    prediction = predict(model, cluster, job, strategy)
    need, have = int(prediction.memory_bytes), cluster.device.usable_bytes
    reason = f"needs {need / GIB:.1f} of {have / GIB:.1f} GiB" if need > have else ""
    return Candidate(strategy, prediction, reason, bucket_reason, why)


def _cores(model: ModelSpec, job: Job, worlds: Sequence[int]) -> Strategies:
    found = []
    for ranks in worlds:
        try:
            found.append(space.cores(model, job, ranks))
        except InputError as wrong:
            if wrong.field != "--gpus":  # of the job, whatever the ranks
                raise
    return space.joined(found) if found else space.of([])


def _first_pass(model: ModelSpec, cluster: ClusterSpec, job: Job, worlds: Sequence[int]) -> list[Strategy]:
    """The best by the vectorised terms, and the best of each family; none where nothing fits."""
    pricing, chosen = Pricing(model, cluster, job, STACK), []
    for ranks in worlds:
        found = branch_and_bound.explore(pricing, ranks, OPTIONS, _FIRST)
        first = [int(np.flatnonzero(found.family[found.order] == kind)[0]) for kind in np.unique(found.family)]
        places = dict.fromkeys([*range(min(_FIRST, len(found.order))), *first])
        chosen += [found.rows.strategy(int(found.order[place])) for place in places]
    return chosen


def _others(rows: Strategies, seconds: Floats, found: Sequence[Candidate]) -> list[Strategy]:
    """Of each family of which none was priced the one that is likely to be fastest: somebody asks why not."""
    kinds = branch_and_bound.family(rows)
    known = branch_and_bound.family(space.of([c.asked for c in found]))
    missing = (np.flatnonzero(kinds == kind) for kind in np.setdiff1d(kinds, known))
    return [rows.strategy(int(own[np.argmin(seconds[own])])) for own in missing]


def _smallest(model: ModelSpec, cluster: ClusterSpec, job: Job, cores: Strategies) -> Strategy:
    """By estimate: all sharded, all repeated."""
    all_ = np.ones_like(cores.zero)
    sharded = np.where(cores.dp * cores.cp > 1, 3, 0)
    rows = replace(
        cores, zero=sharded, shard=np.where(sharded, cores.dp, 1), recompute=space.RECOMPUTE.index("full") * all_
    )
    return rows.strategy(int(np.argmin(_estimated(model, cluster, job, rows))))


def _estimated(model: ModelSpec, cluster: ClusterSpec, job: Job, rows: Strategies) -> Floats:
    """Bytes on the fullest rank, by formulas."""
    return np.broadcast_to(Pricing(model, cluster, job, STACK).memory(rows).reserved, len(rows))


def _best_first(model: ModelSpec, cluster: ClusterSpec, job: Job, rows: Strategies) -> tuple[list[Candidate], bool]:
    """Some priced, and whether no other promises to be faster than the first of them that fits. Where the fastest do
    not fit, and many of them, those that are estimated to be the smallest are tried."""
    found: list[Candidate] = []
    bounds = Bounds(model, cluster, job)
    rows = rows.take(bounds.bytes_of_rows(rows) <= cluster.device.usable_bytes)
    least = bounds.of_rows(rows)
    # Of equally fast ones that of which more is known is first: 0 is the price, of a place in `found`.
    heap = [(seconds, 2, row) for row, seconds in enumerate(expected(least, rows.pp).tolist())]
    heapq.heapify(heap)
    fitting = 0
    while heap and fitting < SHOWN and len(found) < (_PATIENCE if fitting else _MOST):
        _, unknown, row = heapq.heappop(heap)
        if unknown == 0:
            fitting += not found[row].reason
            continue
        s = rows.strategy(row)
        if unknown == 2 and s.recompute != "none":
            least[row] = bounds.of(s)
            heapq.heappush(heap, (float(expected(least[row], rows.pp[row])), 1, row))
            continue
        found.append(price(model, cluster, job, s))
        least[row] = np.inf
        heapq.heappush(heap, (found[-1].seconds, 0, len(found) - 1))
    fit = [c.seconds for c in found if not c.reason]
    if fit:
        found += [price(model, cluster, job, s) for s in _others(rows, expected(least, rows.pp), found)]
        fit = [c.seconds for c in found if not c.reason]
    if fit or not heap:
        return found, bool(fit and min(fit) <= least.min(initial=np.inf))
    for row in np.argsort(_estimated(model, cluster, job, rows), kind="stable")[:_MOST]:
        found.append(price(model, cluster, job, rows.strategy(int(row))))
        if not found[-1].reason:
            break
    return found, False
