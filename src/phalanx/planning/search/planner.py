"""The best strategy for a model on a cluster, and why: both passes of the search, the best of each family, the front
of time and memory, and the reasons against the others."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from phalanx.planning.search import branch_and_bound, no_answer, priced
from phalanx.planning.search.branch_and_bound import FAMILIES, Exploration
from phalanx.planning.search.column_pricing import Pricing
from phalanx.planning.search.priced import PricedStrategy
from phalanx.planning.search.refine import RankedStrategy, RefinedPrices, best_of_each_family
from phalanx.planning.search.stack_options import (
    NarrowerTypes,
    narrower_types,
    runnable_strategies,
    with_best_options,
)
from phalanx.planning.search.stage_lengths import StageLengths, fitting_cuts, lengths
from phalanx.planning.search.strategy_columns import ORDERS, Options
from phalanx.spec.errors import InputError
from phalanx.spec.strategy.spec import Strategy

Objective = Literal["throughput", "memory"]
OBJECTIVES = ("throughput", "memory")
COST_OBJECTIVES = ("gpu-hours", "money", "energy", "carbon")
"""Objectives that fewer GPUs may improve; `days` equals throughput."""
_SLACK = 0.10
"""Slowdown against the fastest strategy, as a share, that the objective `memory` accepts."""
_FRONT = 1.5
"""The front of time and memory extends to this many times the shortest step."""
_FIRST_PASS, _ALIKE = 6, 2
"""Strategies of the first pass for each one kept, since they come in two mesh orders and with many numbers of chunks;
and how many of those that differ only in the number of chunks are kept, since they are each other's neighbours."""
_FIRST = 64
"""Number of strategies of the first pass that an answer keeps for the next question."""
_POINTS, _CLEARLY = 8, 0.98
"""Size of the front shown by default: maximum points, and each point's maximum share of the previous one's memory."""


@dataclass(frozen=True)
class Rejected:
    """A strategy and the reason, in numbers, why it is not the best one."""

    family: str
    priced: PricedStrategy
    reason: str


@dataclass(frozen=True)
class FewerGpus:
    """A smaller number of GPUs whose best strategy is as fast as that of all."""

    gpus: int
    strategy: Strategy
    seconds: float


@dataclass(frozen=True)
class SearchAnswer:
    """The result of a search for one model, job and number of GPUs."""

    prices: RefinedPrices
    """Prices of the second pass: of all strategies that it met, and of later requests."""
    gpus: int
    ranked: tuple[RankedStrategy, ...]
    """Best first by the objective."""
    families: tuple[RankedStrategy, ...]
    """The fastest of each family with a fitting strategy."""
    front: tuple[RankedStrategy, ...]
    """Fastest first, each with less memory than all before it."""
    rejected: tuple[Rejected, ...]
    evaluated: int
    """Number of legal strategies."""
    examined: int
    """Number of strategies priced one by one; a bound excluded the others."""
    seconds: float
    """Time of the search."""
    fewer: FewerGpus | None = None
    lengths: StageLengths | None = None
    """The best strategy with its pipeline split made explicit, if that is uneven."""
    types: tuple[NarrowerTypes, ...] = ()
    """Narrower number types of the stack that would be faster, fastest first."""
    first: tuple[Strategy, ...] = ()
    """The fastest strategies by the formulas of the first pass, of all and of each family."""

    @property
    def pricing(self) -> Pricing:
        """The question, with the options of the stack that make its best strategies faster."""
        return self.prices.pricing

    @property
    def best(self) -> RankedStrategy:
        """The best strategy by the objective."""
        return self.ranked[0]

    @property
    def to_run(self) -> RankedStrategy:
        """The best strategy as written to a plan: with its pipeline split made explicit, if that is uneven."""
        return self.ranked[0] if self.lengths is None else self.lengths.listed


def answer(
    larger: Callable[[int], Pricing],
    gpus: int,
    objective: Objective = "throughput",
    keep: int = 10,
    whole_front: bool = False,
    fewer: bool = True,
    watch: Callable[[int, int], None] | None = None,
    hints: Sequence[Strategy] = (),
    weigh: Callable[[RankedStrategy, Pricing], float] | None = None,
    weighed: int | None = None,
) -> SearchAnswer:
    """Find the best strategies on `gpus` GPUs.

    `larger` returns the same question on another number of GPUs. With `whole_front` no point of the front is missed;
    without it, the front covers what the search for the best strategy met. `fewer`: whether smaller numbers of GPUs
    are tried too. `watch`: callback with the number of legal strategies priced so far. `hints`: strategies that are
    likely among the best, such as the `first` of an answer to a similar question; they do not change the answer.
    `weigh`: the quantity that ranks candidates of the second pass in place of their step time, least first;
    `weighed`: the number of fastest candidates that it ranks, None: all.

    Raises InputError if no strategy is legal, or if none fits: then it names the fewest GPUs that suffice."""
    start = time.perf_counter()
    pricing = larger(gpus)
    options = pricing.options
    if (refusal := no_answer.lacks_operators(pricing)) is not None:
        raise refusal.error(pricing.stack)
    # The first pass: formulas over all legal strategies.
    try:
        slack, front_limit = _SLACK if objective == "memory" else 0.0, _FRONT if whole_front else 0.0
        explored = branch_and_bound.explore(
            pricing, gpus, options, _FIRST_PASS * keep, slack, front_limit, watch, hints=hints
        )
    except InputError as error:
        raise no_answer.nothing_legal(error, pricing, gpus) from None
    if not len(explored.rows) and not explored.close:
        raise no_answer.nothing_fits(pricing, explored, larger, gpus, options)
    # Candidates of the second pass: the fastest, each family's, the front, and the smallest in memory.
    fastest, family_rows = fastest_rows(explored, keep), best_of_each_family(explored)
    front = _first_front(explored, whole_front)
    if objective == "memory" and len(explored.rows):
        near = explored.order[explored.seconds[explored.order] <= (1 + _SLACK) * explored.seconds[explored.order[0]]]
        fastest += [int(row) for row in near[np.argsort(explored.bytes_[near], kind="stable")][:keep]]
    rows = list(dict.fromkeys([*fastest, *family_rows, *front]))
    # The second pass: pipelines timed action by action, then neighbours until none is faster.
    pricing = with_best_options(pricing, [explored.rows.strategy(row) for row in fastest])
    prices = RefinedPrices(pricing)
    chosen = [*(explored.rows.strategy(row) for row in rows), *explored.close]
    candidates = prices.descend(runnable_strategies(pricing, chosen))  # the new options exclude some
    if not candidates:
        raise no_answer.nothing_fits(pricing, explored, larger, gpus, options)
    costs = [(r.seconds, r.priced.bytes_) for r in candidates]
    candidates = [candidates[i] for i in _distinct([r.strategy for r in candidates], costs)]
    candidates = [*fitting_cuts(prices, candidates), *candidates]
    # Rank by the objective.
    each_best = {r.family: r for r in reversed(candidates)}
    families = tuple(each_best[name] for name in FAMILIES if name in each_best)
    by_wish = candidates
    if weigh is not None:
        most = len(candidates) if weighed is None else weighed
        by_wish = sorted(candidates[:most], key=lambda r: weigh(r, pricing)) + candidates[most:]
    ranked = _best_by_memory(candidates, keep) if objective == "memory" else _best(by_wish, keep)
    types = narrower_types(prices, ranked) if objective == "throughput" else ()
    rejected = tuple(_rejected(prices, ranked[0], explored, {r.family for r in families}, options))
    return SearchAnswer(
        prices=prices,
        gpus=gpus,
        ranked=tuple(ranked),
        families=families,
        front=tuple(_front(candidates, whole_front)),
        rejected=rejected,
        evaluated=explored.legal,
        examined=explored.priced,
        seconds=time.perf_counter() - start,
        fewer=_fewer(larger, gpus, ranked[0]) if fewer and objective == "throughput" else None,
        lengths=lengths(prices, ranked[0]),
        types=types,
        first=tuple(explored.rows.strategy(row) for row in _first(explored)),
    )


def _best(candidates: Sequence[RankedStrategy], keep: int) -> list[RankedStrategy]:
    """Return the first candidates, without variants of an earlier one."""
    return [candidates[i] for i in _without_variants([r.strategy for r in candidates])][:keep]


def _best_by_memory(candidates: Sequence[RankedStrategy], keep: int) -> list[RankedStrategy]:
    """Return the smallest candidates of those that are almost as fast as the first."""
    near_best = [r for r in candidates if r.seconds <= (1 + _SLACK) * candidates[0].seconds]
    return sorted(near_best, key=lambda r: r.priced.bytes_)[:keep]


def _first(explored: Exploration) -> list[int]:
    """Return the rows of the fastest strategies of the first pass, of all and of each family."""
    best = [int(row) for row in explored.order[:_FIRST]]
    kinds = explored.family[explored.order]
    of_families = [int(row) for kind in np.unique(kinds) for row in explored.order[kinds == kind][:2]]
    return list(dict.fromkeys([*best, *of_families]))


def fastest_rows(explored: Exploration, keep: int) -> list[int]:
    """Return the rows of the `keep` fastest strategies of a first pass, without near-duplicates: those that differ
    only in mesh order at the same price, or only in the number of chunks."""
    order = [int(row) for row in explored.order[: _FIRST_PASS * keep]]
    strategies = [explored.rows.strategy(row) for row in order]
    costs = [(explored.seconds[row], explored.bytes_[row]) for row in order]
    distinct = _distinct(strategies, costs)
    return [order[distinct[i]] for i in _without_variants([strategies[i] for i in distinct])][:keep]


def _without_variants(strategies: Sequence[Strategy]) -> list[int]:
    """Return the indices of strategies, keeping the first `_ALIKE` of those that differ only in the number of
    chunks."""
    met: Counter[Strategy] = Counter()
    kept = []
    for i, s in enumerate(strategies):
        alike = replace(s, virtual=1, schedule=Strategy.schedule, layers="auto")
        met[alike] += 1
        if met[alike] <= _ALIKE:
            kept.append(i)
    return kept


def _distinct(strategies: Sequence[Strategy], costs: Sequence[tuple[float, float]]) -> list[int]:
    """Return the indices of strategies without those that differ from another only in mesh order, at the same seconds
    and bytes: the usual order stays."""
    kept: dict[tuple[Strategy, float, float], int] = {}
    for i, (s, (seconds, bytes_)) in enumerate(zip(strategies, costs, strict=True)):
        usual = replace(s, order=ORDERS[0])
        if s == usual:
            kept[usual, seconds, bytes_] = i
        else:
            kept.setdefault((usual, seconds, bytes_), i)
    return list(kept.values())


def _fewer(larger: Callable[[int], Pricing], gpus: int, best: RankedStrategy) -> FewerGpus | None:
    """Return the number of fewer GPUs with the fastest step, if that is as fast as on all; else None. A step takes at
    least its FLOPs at the best rate of kernels, so a search is rarely needed."""
    pricing, fewest = larger(gpus), None
    node = pricing.cluster.ranks_per_node
    for n in sorted({gpus // 4, gpus // 2, (gpus - 1) // node * node} - {0}):
        if best.mfu * gpus / n > np.max(pricing.system.gemm):
            continue
        candidate = best_on(larger(n), n, (1 + _CLOSE) * best.seconds)
        if candidate and candidate.seconds <= best.seconds and (not fewest or candidate.seconds < fewest.seconds):
            fewest = FewerGpus(n, candidate.strategy, candidate.seconds)
    return fewest


def _first_front(explored: Exploration, whole: bool) -> list[int]:
    """Return the rows of the front of time and memory, by the first pass."""
    order = explored.order
    if not len(order):
        return []
    order = order[explored.seconds[order] <= _FRONT * explored.seconds[order[0]]]
    least = np.minimum.accumulate(explored.bytes_[order])
    clearly = 1.0 if whole else _CLEARLY
    points = [int(i) for i in order[np.concatenate([[True], least[1:] < clearly * least[:-1]])]]
    return points if whole else points[:_POINTS]


def _front(candidates: Sequence[RankedStrategy], whole: bool) -> list[RankedStrategy]:
    """Return the front of the strategies priced by the second pass, fastest first. With `whole`, each point needs
    less memory than all faster ones; without it, clearly less, and points are few."""
    points = [candidates[0]]
    for r in candidates:
        if r.priced.bytes_ < (1.0 if whole else _CLEARLY) * points[-1].priced.bytes_:
            points.append(r)
    points = [r for r in points if r.seconds <= _FRONT * candidates[0].seconds]
    return points if whole else points[:_POINTS]


def _rejected(
    prices: RefinedPrices, best: RankedStrategy, explored: Exploration, has: set[str], options: Options
) -> Iterable[Rejected]:
    """Return the smallest member of each family that does not fit, and the neighbours of the best strategy."""
    pricing = prices.pricing
    for p, kind in no_answer.misfits(pricing, explored.cores, has, options):
        yield Rejected(kind, p, priced.why_not(p, best.priced, pricing))
    close = prices.neighbours(replace(best.strategy, layers="auto"))
    for (what, _), other in zip(close, prices.price([s for _, s in close]), strict=True):
        if other.priced.fits and other.seconds < best.seconds:
            continue  # faster, but needs more memory, and memory is the objective
        yield Rejected(other.family, other.priced, f"{what}: {priced.why_not(other.priced, best.priced, pricing)}")


FOR_OPTIONS = 6
"""Number of strategies with which the options of a stack are tried."""


_CLOSE = 0.25
"""Share by which a family's fastest may trail the fastest of all, by the formulas, and still be tried as the best."""


def best_on(pricing: Pricing, gpus: int, below: float = np.inf) -> RankedStrategy | None:
    """Return the best strategy on `gpus` GPUs; None if nothing fits, or if all take more than `below` seconds by the
    formulas."""
    explored = first_pass(pricing, gpus, below)
    return None if explored is None else best_of(pricing, explored)


def first_pass(pricing: Pricing, gpus: int, below: float = np.inf) -> Exploration | None:
    """Return the strategies chosen by the formulas on `gpus` GPUs; None if none is legal, fits and takes at most
    `below` seconds."""
    try:
        explored = branch_and_bound.explore(pricing, gpus, pricing.options, keep=1, families=_CLOSE, below=below)
    except InputError:
        return None
    return explored if len(explored.rows) or explored.close else None


def best_of(pricing: Pricing, explored: Exploration) -> RankedStrategy | None:
    """Return the best strategy of a first pass by the prices of the second, with the options of the stack that make
    it faster; None if nothing fits."""
    fastest = [explored.rows.strategy(row) for row in fastest_rows(explored, FOR_OPTIONS)]
    pricing = with_best_options(pricing, fastest)
    prices = RefinedPrices(pricing)
    # With the options, the fastest by the formulas may not fit; one of those with which they were tried does.
    of_families = [explored.rows.strategy(row) for row in best_of_each_family(explored)]
    chosen = runnable_strategies(pricing, dict.fromkeys([*fastest, *of_families, *explored.close]))
    candidates = prices.descend(chosen, slower=False)
    return next(iter([*fitting_cuts(prices, candidates), *candidates]), None)
