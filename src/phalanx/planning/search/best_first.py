"""`strategy = "auto"`: the fastest strategy that fits, out of all that the trainer runs, by the exact price of a
step.

An exact price comes from a StepProgram: milliseconds for most strategies, far more for a long pipeline. So a strategy
is priced only once it may be among the best, judged by its lower bound. Rows wait in a heap, keyed by the best
estimate so far:

    likely seconds without recomputation  ->  likely seconds  ->  exact price

where likely seconds are for equal chunks. The best strategy is settled once it is faster than the
lower bounds of all unpriced ones. In spaces too large even for that, if the device has published rates, the
vectorised terms of our own stack (planning/search/branch_and_bound.py) choose which strategies are priced.

Lower bounds on the seconds and bytes of a step, whatever its level of ZeRO.

T is the time of all passes of one micro-batch on the ranks that share its layers (tp, cp, ep), with the communication
inside layers. With m micro-batches over p pipeline ranks and equal chunks, each rank computes m T/p and waits

    1f1b, gpipe  (p-1) T/p     interleaved  (p-1) T/(p v)     naive           m (p-1) T/p
    zb-h1        (p-1) T/(3p)  zb-v, dualpipe-v               (p-1) T/(6p)

which unequal chunks undercut. Say that the wait b above is (p-1)/v, and that the chunks of rank k take t_k. It starts
behind a v-th of the passes of the ranks before it, so it is done no earlier than

    (t_1 + ... + t_(k-1)) / v + m t_k

The largest of these p times is least where all are equal: no chunks with T in all are done before

    T / (v (1 - (1 - 1/(m v))^p))

Without a pipeline T is exact. Communication of gradients and parameters and the update are left out: they depend on
ZeRO.

T is timed with all ranks at work. Where they share cores, n of p go on at c(n) times that speed while the others wait
(schedule/pipeline/simulate.py). If n are at work for a(n) T/p seconds, the step is no shorter than the least sum
of a(n) with

    sum n c(n) a(n) = p m            all work is done
    sum (p - n) a(n) >= p b / max c  ranks wait at least as long as above (b T/p), or as that takes at the best speed

whose dual has two variables: the bound is the largest m p y + b p z / max c over the corners (y, z) of n c(n) y +
(p - n) z <= 1. With cores of their own, c = 1, there is one corner, 1/p and 1/p: m + b.

For memory only the model state is counted, spread evenly (Rajbhandari et al. 2020, figure 1): N parameters with
weights of e bytes, gradients of g and optimizer state of o, over S shards, take N times

    zero 0   e + g + o      1   e + g + o/S      2   e + (g + o)/S      3   (e + g + o)/S
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations

import numpy as np

from phalanx.cost.ledger.pipeline_formulas import evaluate_by_schedule, schedule_number
from phalanx.cost.step.pass_terms import pass_terms
from phalanx.cost.step.predict import StepPrediction, predict
from phalanx.cost.step.predict_pipeline import pace, unit_seconds
from phalanx.planning.auto import stage_split
from phalanx.planning.auto.bucket_size import resolve
from phalanx.planning.search import branch_and_bound, space, strategy_columns
from phalanx.planning.search.column_pricing import Floats, Pricing, has_published_rates
from phalanx.planning.search.strategy_columns import Ints, Options, Strategies
from phalanx.schedule.layout import Layout, RankView
from phalanx.spec.cluster.spec import GIB, ClusterSpec
from phalanx.spec.errors import InputError
from phalanx.spec.job import DTYPE_BYTES, Job
from phalanx.spec.model.spec import ModelSpec, parameters
from phalanx.spec.strategy.recompute import encode
from phalanx.spec.strategy.spec import Strategy
from phalanx.spec.strategy.zero_levels import ALL_SHARDED, ZERO_LEVELS

_KEY = ("tp", "sp", "cp", "ulysses", "ep", "etp", "micro_batch")
_ROUNDING = 1 - 1e-9
"""Factor of the bound against rounding."""


class Bounds:
    """Lower bounds on the strategies of a job on a cluster."""

    def __init__(self, model: ModelSpec, cluster: ClusterSpec, job: Job) -> None:
        self._model, self._cluster, self._job = model, cluster, job
        self._passes = cache(self._alone_seconds)

    def of_rows(self, rows: Strategies) -> tuple[Floats, Floats]:
        """Return a lower bound on the seconds of each row, for any recomputation, and its likely seconds."""
        key = np.stack([rows.dp * rows.pp, rows.pp, *(getattr(rows, name) for name in _KEY)], axis=1)
        _, first, own = np.unique(key, axis=0, return_index=True, return_inverse=True)
        alone = [_alone(replace(rows.strategy(int(row)), recompute="none")) for row in first]
        timed = [self._timed(one, stages) for one, stages in zip(alone, rows.pp[first].tolist(), strict=True)]
        passes, corners = _padded(timed)
        own = own.reshape(-1)
        columns = rows.micro_batches(self._job), rows.pp, rows.virtual, rows.schedule
        return _bounds(passes[own], corners[own], *columns)

    def of_strategy(self, s: Strategy) -> tuple[float, float]:
        """Return a lower bound on the seconds of one strategy with its recomputation, and its likely seconds."""
        own = (s.accumulation(self._job), s.pp, s.virtual, schedule_number(s.schedule))
        least, likely = _bounds(*_padded([self._timed(_alone(s), s.pp)]), *(np.array([n]) for n in own))
        return float(least[0]), float(likely[0])

    def bytes_of_rows(self, rows: Strategies) -> Floats:
        """Lower bound on the bytes of each row: the model state, spread evenly over the ranks."""
        routed = sum(p.numel for p in parameters(self._model) if p.of_experts)
        inside = rows.ep * rows.etp
        dense = (self._model.parameter_count - routed) / (rows.tp * rows.pp) * self._per_parameter(rows, rows.shards)
        over = np.maximum(rows.shards * rows.tp / inside, 1)
        least_bytes: Floats = dense + routed / (inside * rows.pp) * self._per_parameter(rows, over)
        return least_bytes

    def _per_parameter(self, rows: Strategies, shards: Floats | Ints) -> Floats:
        p, optimizer = self._job.precision, self._job.optimizer
        moments = len(optimizer.row.matrices.held(optimizer.first_decay))
        e, g, own = (DTYPE_BYTES[dtype] for dtype in (p.compute, p.accumulate_dtype, p.master_dtype))
        o = own * moments + (own if p.master_dtype != p.compute else 0)
        zero = np.where(rows.shards > 1, rows.zero, 0)
        ways = [np.asarray(level.bytes_kept(o, g, e, shards)) * np.ones(len(rows)) for level in ZERO_LEVELS]
        bytes_each: Floats = np.choose(zero, ways)
        return bytes_each

    def _timed(self, alone: Strategy, stages: int) -> tuple[float, Floats]:
        """Return T in seconds of a strategy without pipeline, and the corners for `stages` pipeline ranks."""
        passes, view = self._passes(alone)
        return passes, _corners(pace(view.layout, [pass_terms(view)], self._cluster, stages) or (1.0,) * stages)

    def _alone_seconds(self, alone: Strategy) -> tuple[float, RankView]:
        one = replace(self._job, global_batch=alone.micro_batch * alone.dp)
        view = Layout(self._model, one, alone).stage_view()
        seconds = unit_seconds(view, self._cluster)
        return sum(seconds[name] * len(units) for name, units in view.unit_classes.items()), view


def _alone(s: Strategy) -> Strategy:
    """Return the strategy on the same number of ranks without pipeline and ZeRO: rates are for all ranks at work."""
    return replace(s, dp=s.dp * s.pp, pp=1, virtual=1, schedule=Strategy.schedule, zero=0, shard=None)


def _corners(speeds: Sequence[float]) -> Floats:
    """Return rows of p y, p z / max c, the corners of n c(n) y + (p - n) z <= 1 for `speeds` c(1) to c(p)."""
    p, c = len(speeds), np.array(speeds)
    if (c == 1).all():
        return np.ones((1, 2))
    n = np.arange(1, p + 1)
    sides = np.stack([n * c, p - n], axis=1)
    corners = [(1 / sides[:, 0].max(), 0.0)]
    for i, j in combinations(range(p), 2):
        pair = sides[[i, j]]
        if abs(np.linalg.det(pair)) > 1e-12:
            y, z = np.linalg.solve(pair, np.ones(2))
            if y >= 0 and z >= 0 and (sides @ (y, z) <= 1 + 1e-9).all():
                corners.append((y, z))
    scaled: Floats = np.array(corners) * (p, p / c.max())
    return scaled


def _padded(timed: Sequence[tuple[float, Floats]]) -> tuple[Floats, Floats]:
    """Return T (rows,) and the corners (rows, most corners, 2) of several rows; missing corners are zeros."""
    most = max((len(corners) for _, corners in timed), default=1)
    filled = [np.pad(corners, ((0, most - len(corners)), (0, 0))) for _, corners in timed]
    return np.array([passes for passes, _ in timed]), np.array(filled).reshape(-1, most, 2)


def _bounds(
    passes: Floats, corners: Floats, m: Ints, p: Ints, virtual: Ints, schedule: Ints
) -> tuple[Floats, Floats]:
    """Return the lower bound on the seconds of each row, and the seconds of equal chunks, by the formulas of the
    module's docstring."""
    equal = np.asarray(evaluate_by_schedule(schedule, "least_wait", m, p, virtual), dtype=float)
    v = np.maximum(p - 1, 1) / np.where(p > 1, equal, 1.0)
    unequal = np.where(p > 1, p / (v * (1 - (1 - 1 / (m * v)) ** p)) - m, equal)

    def seconds(wait: Floats) -> Floats:
        waits = np.max(m[:, None] * corners[..., 0] + wait[:, None] * corners[..., 1], axis=1)
        return np.asarray(passes * waits / p)

    return seconds(unequal) * _ROUNDING, seconds(equal)


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
_MOST_PRICES = 120
"""Number of prices after which the search for any strategy that fits stops."""


@dataclass(frozen=True)
class Candidate:
    """A strategy with its exact price."""

    strategy: Strategy
    """The strategy with its bucket size and the blocks of its chunks resolved."""
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
    """Find the fastest strategies that fit, over any of the world sizes `worlds`. Raises InputError if no strategy is
    legal, or if none fits: it then states the need of the smallest one."""
    cores = _cores(model, job, worlds)
    if not len(cores):
        fewer = next((n for n in range(max(worlds) - 1, 0, -1) if len(_cores(model, job, [n]))), 1)
        reason = (
            f"no split of {max(worlds)} ranks divides job.global_batch = {job.global_batch} and the model's sizes"
        )
        raise InputError("strategy", "auto", reason, f"use {fewer} ranks, or another batch")
    # Price all strategies best first, or, of too many, those that the formulas choose.
    legal = int(space.size(cores, model, job, OPTIONS).sum())
    exhaustive = legal <= _LARGE or not has_published_rates(cluster)
    if exhaustive:
        rows = space.pipelines(space.experts(cores, model, job, OPTIONS), model, job, OPTIONS)
        rows = space.sharding(space.recomputations(rows, model, job, OPTIONS), job, OPTIONS)
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
    """Return the cores over all world sizes that have any."""
    parts = []
    for ranks in worlds:
        try:
            parts.append(space.cores(model, job, ranks))
        except InputError as error:
            if error.field != "gpus":  # a fault of the job, whatever the world size
                raise
    return strategy_columns.concatenate(parts) if parts else strategy_columns.columns_of([])


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


def _unpriced_families(rows: Strategies, seconds: Floats, candidates: Sequence[Candidate]) -> list[Strategy]:
    """Return, for each family without a price, the strategy with the least expected seconds, so that a user can
    compare."""
    kinds = branch_and_bound.family(rows)
    known = branch_and_bound.family(strategy_columns.columns_of([c.as_requested for c in candidates]))
    missing = (np.flatnonzero(kinds == kind) for kind in np.setdiff1d(kinds, known))
    return [rows.strategy(int(members[np.argmin(seconds[members])])) for members in missing]


def _smallest(model: ModelSpec, cluster: ClusterSpec, job: Job, cores: Strategies) -> Strategy:
    """Return the core of least estimated memory, with everything sharded and recomputed."""
    all_ = np.ones_like(cores.zero)
    sharded = np.where(cores.dp * cores.cp > 1, ALL_SHARDED, 0)
    rows = replace(cores, zero=sharded, shard=np.where(sharded, cores.dp, 1), recompute=encode("full") * all_)
    return rows.strategy(int(np.argmin(_estimated_bytes(model, cluster, job, rows))))


def _estimated_bytes(model: ModelSpec, cluster: ClusterSpec, job: Job, rows: Strategies) -> Floats:
    """Return the bytes on the fullest rank of each row, by the vectorised formulas."""
    return np.broadcast_to(Pricing(model, cluster, job, STACK).memory(rows).reserved, len(rows))


def _best_first(model: ModelSpec, cluster: ClusterSpec, job: Job, rows: Strategies) -> tuple[list[Candidate], bool]:
    """Price strategies best first; return them, and whether the bounds prove the fastest that fits to be the best.

    If none of the first `_MOST_PRICES` strategies fits, the strategies of least estimated memory are tried."""
    candidates: list[Candidate] = []
    bounds = Bounds(model, cluster, job)
    rows = rows.take(bounds.bytes_of_rows(rows) <= cluster.device.usable_bytes)
    least, likely = bounds.of_rows(rows)
    # (seconds, missing precision, row). Ties go to the more precise: 0 has its exact price, and `row` is then an
    # index into `candidates`; 1 lacks only the price; 2 also lacks the time of recomputation.
    heap = [(seconds, 2, row) for row, seconds in enumerate(likely.tolist())]
    heapq.heapify(heap)
    fitting = 0
    while heap and fitting < SHOWN and len(candidates) < (_PATIENCE if fitting else _MOST_PRICES):
        _, missing, row = heapq.heappop(heap)
        if missing == 0:
            fitting += not candidates[row].reason
            continue
        s = rows.strategy(row)
        if missing == 2 and s.recompute != "none":
            least[row], likely[row] = bounds.of_strategy(s)
            heapq.heappush(heap, (float(likely[row]), 1, row))
            continue
        candidates.append(price(model, cluster, job, s))
        least[row] = likely[row] = np.inf
        heapq.heappush(heap, (candidates[-1].seconds, 0, len(candidates) - 1))
    fit = [c.seconds for c in candidates if not c.reason]
    if fit:
        candidates += [price(model, cluster, job, s) for s in _unpriced_families(rows, likely, candidates)]
        fit = [c.seconds for c in candidates if not c.reason]
    if fit or not heap:
        return candidates, bool(fit and min(fit) <= least.min(initial=np.inf))
    for row in np.argsort(_estimated_bytes(model, cluster, job, rows), kind="stable")[:_MOST_PRICES]:
        candidates.append(price(model, cluster, job, rows.strategy(int(row))))
        if not candidates[-1].reason:
            break
    return candidates, False
