"""`strategy = "auto"`: the fastest strategy that fits, out of all that the trainer runs, by the exact price of a
step.

An exact price comes from a StepProgram: milliseconds for most strategies, far more for a long pipeline. So a strategy
is priced only once it may be among the best, judged by its lower bound (planning/search/lower_bounds.py). Rows wait
in a heap, keyed by the best estimate so far:

    expected seconds without recomputation  ->  expected seconds  ->  exact price

where expected seconds lie a little above the lower bound. The best strategy is settled once it is faster than the
lower bounds of all unpriced ones. In spaces too large even for that, if the device has published rates, the
vectorised terms of our own stack (planning/search/branch_and_bound.py) choose which strategies are priced.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from phalanx.cost.step.predict import StepPrediction, predict
from phalanx.planning.auto import stage_split
from phalanx.planning.auto.bucket_size import resolve
from phalanx.planning.search import branch_and_bound, space, strategy_columns
from phalanx.planning.search.column_pricing import Floats, Pricing, published
from phalanx.planning.search.lower_bounds import Bounds, expected
from phalanx.planning.search.strategy_columns import Options, Strategies
from phalanx.spec.cluster.spec import GIB, ClusterSpec
from phalanx.spec.errors import InputError
from phalanx.spec.job import Job
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.recompute import encode
from phalanx.spec.strategy.spec import Strategy
from phalanx.spec.strategy.zero_levels import ALL_SHARDED

STACK = "phalanx"
OPTIONS = Options(orders=strategy_columns.ORDERS[:1])
"""Options of the trainer: a single order of the mesh axes."""
SHOWN = 16
"""Number of fastest fitting strategies to find: the best and its alternatives."""
_LARGE = 50_000
"""Number of strategies beyond which the vectorised terms choose which are priced."""
_FIRST = 24
"""Number of strategies chosen by the vectorised terms, in addition to the best of each family."""
_PATIENCE = 40
"""Number of prices after which the search for alternatives stops."""
_MOST = 120
"""Number of prices after which the search for any strategy that fits stops."""


@dataclass(frozen=True)
class Candidate:
    """A strategy with its exact price."""

    strategy: Strategy
    """With its bucket size and the blocks of its chunks resolved."""
    prediction: StepPrediction
    reason: str = ""
    """Why the strategy was rejected; "" if it fits."""
    bucket_reason: str = ""
    """Reason for the bucket size; "" if the user chose it, or there are no buckets."""
    layers_reason: str = ""
    """Reason for the cut of blocks into chunks; "" if the user chose it, or there is no pipeline."""

    @property
    def seconds(self) -> float:
        """Step time."""
        return float(self.prediction.step_time_s)

    @property
    def as_requested(self) -> Strategy:
        """The strategy as a user would write it: `auto` where bucket or chunks were resolved."""
        strategy = replace(self.strategy, bucket="auto") if self.bucket_reason else self.strategy
        return replace(strategy, layers="auto") if self.layers_reason else strategy


@dataclass(frozen=True)
class SearchResult:
    """The result of a search."""

    candidates: tuple[Candidate, ...]
    """The priced strategies: those that fit first, fastest first."""
    legal: int
    """Number of legal strategies over all `worlds`."""
    worlds: tuple[int, ...]
    """World sizes that were searched."""
    exhaustive: bool
    """Whether the bounds prove that no unpriced strategy is faster; if False, estimates ruled out the others."""

    @property
    def best(self) -> Candidate:
        """The fastest strategy that fits."""
        return self.candidates[0]


def search(model: ModelSpec, cluster: ClusterSpec, job: Job, worlds: Sequence[int]) -> SearchResult:
    """Find the fastest strategies that fit, over any of the world sizes `worlds`.

    Raises InputError if no strategy is legal, or if none fits: it then states the need of the smallest one.
    """
    cores = _cores(model, job, worlds)
    if not len(cores):
        fewer = next((n for n in range(max(worlds) - 1, 0, -1) if len(_cores(model, job, [n]))), 1)
        reason = (
            f"no split of {max(worlds)} ranks divides job.global_batch = {job.global_batch} and the model's sizes"
        )
        raise InputError("strategy", "auto", reason, f"use {fewer} ranks, or another batch")
    # Price all strategies best first, or, of too many, those that the formulas choose.
    legal = int(space.size(cores, model, job, OPTIONS).sum())
    exhaustive = legal <= _LARGE or not published(cluster)
    if exhaustive:
        rows = space.pipelines(space.experts(cores, model, job, OPTIONS), model, job, OPTIONS)
        rows = space.sharding(space.recomputing(rows, model, job, OPTIONS), job, OPTIONS)
        candidates, exhaustive = _best_first(model, cluster, job, rows)
    else:
        candidates = [price(model, cluster, job, s) for s in _first_pass(model, cluster, job, worlds)]
    candidates.sort(key=lambda c: (bool(c.reason), c.seconds))
    # Nothing fits: report the strategy of least memory.
    if not candidates:
        candidates = [price(model, cluster, job, _smallest(model, cluster, job, cores))]
    if candidates[0].reason:
        least = min(candidates, key=lambda c: int(c.prediction.memory_bytes))
        raise InputError(
            "strategy",
            "auto",
            f"nothing fits: {least.as_requested} {least.reason}",
            "use a smaller model, seq or batch",
        )
    return SearchResult(tuple(candidates), legal, tuple(worlds), exhaustive)


def price(model: ModelSpec, cluster: ClusterSpec, job: Job, strategy: Strategy) -> Candidate:
    """Price one strategy exactly: resolve its bucket and chunks, predict its step, and check that it fits."""
    strategy, why = stage_split.resolve(model, cluster, job, strategy)
    strategy, bucket_reason = resolve(model, cluster, job, strategy)
    prediction = predict(model, cluster, job, strategy)
    need, have = int(prediction.memory_bytes), cluster.device.usable_bytes
    reason = f"needs {need / GIB:.1f} of {have / GIB:.1f} GiB" if need > have else ""
    return Candidate(strategy, prediction, reason, bucket_reason, why)


def _cores(model: ModelSpec, job: Job, worlds: Sequence[int]) -> Strategies:
    parts = []
    for ranks in worlds:
        try:
            parts.append(space.cores(model, job, ranks))
        except InputError as error:
            if error.field != "gpus":  # a fault of the job, whatever the world size
                raise
    return strategy_columns.joined(parts) if parts else strategy_columns.of([])


def _first_pass(model: ModelSpec, cluster: ClusterSpec, job: Job, worlds: Sequence[int]) -> list[Strategy]:
    """Return the best strategies by the vectorised terms, and the best of each family; empty if nothing fits."""
    pricing, chosen = Pricing(model, cluster, job, STACK), []
    for ranks in worlds:
        explored = branch_and_bound.explore(pricing, ranks, OPTIONS, _FIRST)
        first = [
            int(np.flatnonzero(explored.family[explored.order] == kind)[0]) for kind in np.unique(explored.family)
        ]
        picks = dict.fromkeys([*range(min(_FIRST, len(explored.order))), *first])
        chosen += [explored.rows.strategy(int(explored.order[place])) for place in picks]
    return chosen


def _others(rows: Strategies, seconds: Floats, candidates: Sequence[Candidate]) -> list[Strategy]:
    """Return, for each family without a price, the strategy with the least expected seconds, so that a user can
    compare."""
    kinds = branch_and_bound.family(rows)
    known = branch_and_bound.family(strategy_columns.of([c.as_requested for c in candidates]))
    missing = (np.flatnonzero(kinds == kind) for kind in np.setdiff1d(kinds, known))
    return [rows.strategy(int(members[np.argmin(seconds[members])])) for members in missing]


def _smallest(model: ModelSpec, cluster: ClusterSpec, job: Job, cores: Strategies) -> Strategy:
    """Return the candidate of least estimated memory: everything sharded and recomputed."""
    all_ = np.ones_like(cores.zero)
    sharded = np.where(cores.dp * cores.cp > 1, ALL_SHARDED, 0)
    rows = replace(cores, zero=sharded, shard=np.where(sharded, cores.dp, 1), recompute=encode("full") * all_)
    return rows.strategy(int(np.argmin(_estimated(model, cluster, job, rows))))


def _estimated(model: ModelSpec, cluster: ClusterSpec, job: Job, rows: Strategies) -> Floats:
    """Return the bytes on the fullest rank of each row, by the vectorised formulas."""
    return np.broadcast_to(Pricing(model, cluster, job, STACK).memory(rows).reserved, len(rows))


def _best_first(model: ModelSpec, cluster: ClusterSpec, job: Job, rows: Strategies) -> tuple[list[Candidate], bool]:
    """Price strategies best first; return them, and whether the bounds prove the fastest that fits to be the best.

    If none of the first `_MOST` strategies fits, the strategies of least estimated memory are tried."""
    candidates: list[Candidate] = []
    bounds = Bounds(model, cluster, job)
    rows = rows.take(bounds.bytes_of_rows(rows) <= cluster.device.usable_bytes)
    least = bounds.of_rows(rows)
    # (seconds, missing precision, row). Ties go to the more precise: 0 has its exact price, and `row` is then an
    # index into `candidates`; 1 lacks only the price; 2 also lacks the time of recomputation.
    heap = [(seconds, 2, row) for row, seconds in enumerate(expected(least, rows.pp).tolist())]
    heapq.heapify(heap)
    fitting = 0
    while heap and fitting < SHOWN and len(candidates) < (_PATIENCE if fitting else _MOST):
        _, missing, row = heapq.heappop(heap)
        if missing == 0:
            fitting += not candidates[row].reason
            continue
        s = rows.strategy(row)
        if missing == 2 and s.recompute != "none":
            least[row] = bounds.of(s)
            heapq.heappush(heap, (float(expected(least[row], rows.pp[row])), 1, row))
            continue
        candidates.append(price(model, cluster, job, s))
        least[row] = np.inf
        heapq.heappush(heap, (candidates[-1].seconds, 0, len(candidates) - 1))
    fit = [c.seconds for c in candidates if not c.reason]
    if fit:
        candidates += [price(model, cluster, job, s) for s in _others(rows, expected(least, rows.pp), candidates)]
        fit = [c.seconds for c in candidates if not c.reason]
    if fit or not heap:
        return candidates, bool(fit and min(fit) <= least.min(initial=np.inf))
    for row in np.argsort(_estimated(model, cluster, job, rows), kind="stable")[:_MOST]:
        candidates.append(price(model, cluster, job, rows.strategy(int(row))))
        if not candidates[-1].reason:
            break
    return candidates, False
