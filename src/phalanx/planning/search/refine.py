"""The second pass of a search: a candidate's pipeline simulated action by action, with its real chunks.

The first pass prices bubbles by a formula for equal chunks. Here the blocks are cut into chunks
(schedule/partition/balance.py), every action of the schedule takes its chunk's seconds, and the makespan is from
running the schedule (cost/ledger/pipeline_formulas.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain, groupby, zip_longest

import numpy as np

from phalanx.cost.analytic.kernels import Passes
from phalanx.cost.analytic.step import Step
from phalanx.cost.hardware.columns import Column
from phalanx.cost.ledger.flops import model_flops
from phalanx.cost.ledger.model_shape import kinds_of_blocks
from phalanx.cost.ledger.pipeline_formulas import makespans
from phalanx.cost.ledger.rank_layout import blocks_by_work
from phalanx.cost.pipeline_time import Costs, PricedSchedule
from phalanx.cost.pipeline_time import price as price_schedule
from phalanx.planning.search import branch_and_bound, strategy_columns
from phalanx.planning.search.branch_and_bound import FAMILIES, Exploration
from phalanx.planning.search.column_pricing import Floats, Pricing
from phalanx.planning.search.neighbours import neighbours
from phalanx.planning.search.priced import PricedStrategy, price_with_step
from phalanx.planning.search.strategy_columns import ORDERS, SEARCHED, columns_of
from phalanx.schedule.partition.balance import PartitionCosts, Units, explain, partition
from phalanx.schedule.pipeline import stages
from phalanx.schedule.pipeline.given_layout import Blocks, equal_blocks, given_blocks, write_layers
from phalanx.schedule.pipeline.schedules import build as build_schedule
from phalanx.schedule.pipeline.schedules import facts_of
from phalanx.spec.strategy.spec import Strategy

_BLOCK_TERMS = ("matmul", "attention", "recurrence", "memory", "tp", "cp", "ep", "recompute", "adapters", "launch")
PIPELINED = (*_BLOCK_TERMS, "head", "bubble")
"""Terms of a step that a pipeline's makespan replaces."""
GAIN = 0.001
"""Share of the step by which chunks of unequal length must shorten it to be worth a line of configuration."""
_ROUNDING = 1e-9
"""Relative tolerance for sums in another order."""


def seconds_outside_pipeline(terms: Mapping[str, float]) -> float:
    """Return the seconds of a step's terms that its pipeline's makespan does not contain."""
    return sum(value for name, value in terms.items() if name not in PIPELINED)


@dataclass(frozen=True)
class PipelineRun:
    """A pipeline's passes of one step, timed action by action."""

    makespan: float
    """Seconds from the first forward to the last backward pass."""
    blocks: tuple[int, ...]
    """Number of blocks in each chunk."""
    imbalance: float
    """Excess of the slowest rank over the mean rank, as a share of the mean."""
    bubble: float
    """Seconds that the slowest rank waits."""
    mean: float | None = None
    """Seconds of all blocks of a step divided by the number of pipeline ranks; None without a pipeline."""
    unbalanced: bool = False
    """Whether these blocks replace balanced ones, which do not fit."""

    def seconds(self, terms: Mapping[str, float]) -> float:
        """Return the seconds of a step with these terms, the makespan in place of the ones in PIPELINED."""
        return self.makespan + seconds_outside_pipeline(terms)

    def terms(self, formula: Mapping[str, float]) -> dict[str, float]:
        """Return a formula's terms corrected by this run, so that they sum to `seconds`: the blocks' terms become a
        mean rank's, `head` the excess of the slowest rank, `bubble` its waiting."""
        if self.mean is None:
            return dict(formula)
        block_terms = {name: formula[name] for name in _BLOCK_TERMS if name in formula}
        share = self.mean / sum(block_terms.values())
        waits = {"head": self.makespan - self.bubble - self.mean, "bubble": self.bubble}
        return dict(formula) | {name: share * value for name, value in block_terms.items()} | waits


def refine(
    pricing: Pricing, strategies: Sequence[Strategy], below: float = np.inf
) -> list[tuple[PricedStrategy, PipelineRun]]:
    """Return the price and the pipeline run of each strategy, its pipeline timed action by action; strategies that
    certainly take longer than `below` seconds are left out.

    A pipeline without listed blocks (`layers=auto`) is priced with one cut, as if that were listed: equal chunks, or
    balanced ones if they fit and are worth a line of configuration (`_best_cut`); the stack's own cut if it accepts
    no list. Strategies that differ only in sharding share the run of a cut; so do both orders of stages and replicas
    without experts, since they move no group of tp or cp."""
    if not strategies:
        return []
    alike = SEARCHED if pricing.model.experts is None else ()
    alone = [replace(s, zero=0, shard=None, order=ORDERS[0] if s.order in alike else s.order) for s in strategies]
    priced, step = price_with_step(pricing, strategies)
    # The time of a block depends on their number if some of a rank's are offloaded to the host.
    bounded = below < np.inf and not np.any(pricing.profile.offloaded_blocks)
    shortest = _least_makespans(pricing, strategies, step) if bounded else np.zeros(len(strategies))
    limit = (1 + _ROUNDING) * below
    rows = [
        i
        for i, p in enumerate(priced)
        if shortest[i] + (p.strategy.pp == 1) * seconds_outside_pipeline(p.terms) <= limit
    ]
    cuts = _cuts(pricing, [alone[i] for i in rows], _rows_of(step, rows, len(priced)))
    ways = [(i, cut) for i, of_row in zip(rows, cuts, strict=True) for cut in of_row]
    if not ways:
        return []
    priced, step = price_with_step(pricing, [strategies[i] for i, _ in ways], [cut for _, cut in ways])
    fitting: list[list[int]] = []  # for each strategy, the cuts to time
    unbalanced: set[int] = set()  # cuts of strategies that have another cut, which does not fit
    for i, own in groupby(range(len(ways)), lambda k: ways[k][0]):
        places = list(own)
        if any(shortest[i] + seconds_outside_pipeline(priced[k].terms) <= limit for k in places):
            fitting.append(_cuts_to_time(pricing, priced, places))
            unbalanced |= set(fitting[-1]) if len(fitting[-1]) < len(places) else set()
    first: dict[tuple[Strategy, Blocks | None], int] = {}
    for k in chain(*fitting):
        first.setdefault((alone[ways[k][0]], ways[k][1]), k)
    columns = _rows_of(step, list(first.values()), len(priced))
    runs = dict(zip(first, _runs(pricing, [s for s, _ in first], columns, [c for _, c in first]), strict=True))

    def timed(k: int) -> tuple[PricedStrategy, PipelineRun]:
        p, pipeline = priced[k], runs[alone[ways[k][0]], ways[k][1]]
        pipeline = replace(pipeline, unbalanced=k in unbalanced)
        return replace(p, seconds=pipeline.seconds(p.terms), terms=pipeline.terms(p.terms)), pipeline

    return [_best_cut([timed(k) for k in places]) for places in fitting]


def _cuts_to_time(pricing: Pricing, priced: Sequence[PricedStrategy], places: Sequence[int]) -> list[int]:
    """Return the places of a strategy's cuts that leave the headroom of a search; if none does, the place of the
    smallest."""
    fitting = [k for k in places if priced[k].bytes_ <= pricing.usable_by_default]
    return fitting or [min(places, key=lambda k: priced[k].bytes_)]


def _best_cut(cuts: Sequence[tuple[PricedStrategy, PipelineRun]]) -> tuple[PricedStrategy, PipelineRun]:
    """Return the first cut (equal chunks if they fit), unless another one clearly shortens the step."""
    best, *others = cuts
    for other in others:
        if other[0].seconds <= (1 - GAIN) * best[0].seconds:
            best = other
    return best


def with_listed_blocks(pricing: Pricing, s: Strategy) -> Strategy:
    """Return a strategy with its pipeline split made explicit; unchanged without a pipeline."""
    given = s.pp == 1 or given_blocks(s, pricing.extra, int(pricing.shape.layers)) is not None
    return s if given else replace(s, layers=write_layers(refine(pricing, [s])[0][1].blocks))


def _rows_of(step: Step, rows: list[int], count: int) -> Step:
    """Return some of a step's `count` rows, reduced to the terms and passes that a pipeline's run reads."""

    def taken(column: Column) -> Column:
        return np.broadcast_to(column, count)[rows]

    def both(passes: Passes) -> Passes:
        return Passes(taken(passes.forward), taken(passes.backward))

    terms = {name: taken(step.terms[name]) for name in PIPELINED if name in step.terms}
    blocks = [(number, both(passes)) for number, passes in step.blocks]
    return Step(terms=terms, blocks=blocks, head=both(step.head))


def _least_makespans(pricing: Pricing, strategies: Sequence[Strategy], step: Step) -> Floats:
    """Return a lower bound on each strategy's makespan over all cuts into chunks: some rank does at least the mean
    rank's work, and at least its share of the blocks of each kind, in whole blocks."""
    pp = np.array([s.pp for s in strategies])
    m = np.array([s.accumulation(pricing.job) for s in strategies])
    each = [(np.asarray(count), passes.forward + passes.backward) for count, passes in step.blocks]
    mean = (sum(count * seconds for count, seconds in each) + step.head.forward + step.head.backward) / pp
    of_kind = [np.ceil(count / pp) * seconds for count, seconds in each]
    work = sum(step.terms.get(name, 0.0) for name in PIPELINED)
    return np.asarray(np.where(pp > 1, m * np.maximum.reduce([mean, *of_kind]), work))


def run_placed(pricing: Pricing, s: Strategy, step: Step, count: int) -> list[float]:
    """Return the seconds of a strategy's step under `count` placements, with its pipeline timed action by action.
    `step`: columns of one row per placement; the strategy lists its blocks."""
    columns = {name: np.broadcast_to(term, count) for name, term in step.terms.items()}
    runs = _runs(pricing, [s] * count, step)
    return [run.seconds({name: float(term[i]) for name, term in columns.items()}) for i, run in enumerate(runs)]


def _chunks(
    pricing: Pricing, strategies: Sequence[Strategy], step: Step, cuts: Sequence[Blocks | None] = ()
) -> dict[int, _Chunks]:
    """Return the costs of the chunks of each strategy with a pipeline, by its index; `cuts`: the blocks of each chunk
    unless prescribed."""
    count = len(strategies)
    kinds = [_rows(passes, count) for _, passes in step.blocks]
    heads = _rows(step.head, count)
    places = kinds_of_blocks(pricing.model, pricing.extra.mtp)
    chunks: dict[int, _Chunks] = {}
    for i, (s, cut) in enumerate(zip_longest(strategies, cuts)):
        if s.pp > 1:
            passes = tuple(kinds[place][i] for place in places)
            given = given_blocks(s, pricing.extra, len(places)) or cut
            chunks[i] = _Chunks(s.schedule, s.pp, s.virtual, passes, heads[i], given)
    return chunks


def _cuts(pricing: Pricing, strategies: Sequence[Strategy], step: Step) -> list[tuple[Blocks | None, ...]]:
    """Return the candidate cuts of each strategy, equal chunks first; (None,) if the blocks are prescribed, or there
    is no pipeline."""
    open_ = {i: c for i, c in _chunks(pricing, strategies, step).items() if c.given is None}
    cuts: list[tuple[Blocks | None, ...]] = [(None,)] * len(strategies)
    for i, chunks in open_.items():
        if pricing.lists_blocks:
            equal = equal_blocks(int(pricing.shape.layers), len(stages.rank_of(strategies[i])))
            cuts[i] = tuple(dict.fromkeys((equal, _cut(chunks)[0])))
        else:
            cuts[i] = (_of_the_stack(pricing, strategies[i]),)
    return cuts


def _of_the_stack(pricing: Pricing, s: Strategy) -> Blocks:
    """Return the blocks of each chunk as divided by a stack that accepts no list: by work, or equally."""
    if np.any(pricing.profile.balanced):
        return blocks_by_work(pricing.shape, s.pp)
    return equal_blocks(int(pricing.shape.layers), len(stages.rank_of(s)))


def _runs(
    pricing: Pricing, strategies: Sequence[Strategy], step: Step, cuts: Sequence[Blocks | None] = ()
) -> list[PipelineRun]:
    """Time the pipelines of strategies whose steps are columns; equal ones share one run. `cuts`: the blocks of each
    chunk unless prescribed; without it, blocks are cut here."""
    count = len(strategies)
    work = np.broadcast_to(sum(step.terms.get(name, 0.0) for name in PIPELINED), count)
    pipelines = {
        i: (chunks, strategies[i].accumulation(pricing.job))
        for i, chunks in _chunks(pricing, strategies, step, cuts).items()
    }
    runs = _time_pipelines(list(dict.fromkeys(pipelines.values())))
    return [
        runs[pipelines[i]] if i in pipelines else PipelineRun(float(work[i]), (pricing.model.layers,), 0.0, 0.0)
        for i in range(count)
    ]


def timeline(pricing: Pricing, s: Strategy, blocks: tuple[int, ...], micro_batches: int) -> PricedSchedule:
    """Return the times of each pass of a pipeline's first `micro_batches` micro-batches, without transfers between
    stages. `blocks`: the number of blocks of each chunk."""
    facts = facts_of(s.schedule)
    chunks = s.virtual if facts.takes_virtual else facts.chunks
    return price_schedule(build_schedule(s.schedule, s.pp, micro_batches, chunks), chunk_costs(pricing, s, blocks))


def chunk_costs(pricing: Pricing, s: Strategy, blocks: tuple[int, ...]) -> Costs:
    """Return the seconds of each chunk's passes, without transfers between stages. `blocks`: as for `timeline`."""
    step = pricing.step(columns_of([s]))
    kinds = [_rows(passes, 1)[0] for _, passes in step.blocks]
    passes = [kinds[place] for place in kinds_of_blocks(pricing.model, pricing.extra.mtp)]
    return _costs(passes, _rows(step.head, 1)[0], blocks)


def _rows(passes: Passes, count: int) -> list[tuple[float, float]]:
    """Return (forward, backward) seconds of each of `count` rows."""
    forward, backward = (np.broadcast_to(part, count) for part in (passes.forward, passes.backward))
    return [(float(f), float(b)) for f, b in zip(forward, backward, strict=True)]


@dataclass(frozen=True)
class _Chunks:
    """Costs of a pipeline's chunks. `passes`: seconds of each block's forward and backward pass; `head`: the same for
    the head; `given`: prescribed blocks of each chunk, None to balance them."""

    schedule: str
    pp: int
    virtual: int
    passes: tuple[tuple[float, float], ...]
    head: tuple[float, float]
    given: tuple[int, ...] | None


def _time_pipelines(pipelines: Sequence[tuple[_Chunks, int]]) -> dict[tuple[_Chunks, int], PipelineRun]:
    """Return the run of each pipeline with its number of micro-batches; pipelines of equal actions are timed in one
    call."""
    same: dict[tuple[str, int, int], list[tuple[_Chunks, int]]] = {}
    for chunks, m in pipelines:
        same.setdefault((chunks.schedule, chunks.pp, chunks.virtual), []).append((chunks, m))
    runs: dict[tuple[_Chunks, int], PipelineRun] = {}
    for (schedule, pp, virtual), alike in same.items():
        cuts = [_cut(chunks) for chunks, _ in alike]
        slowest = [max(rank.seconds for rank in shares.ranks) for _, shares in cuts]
        costs = [_costs(c.passes, c.head, blocks) for (c, _), (blocks, _) in zip(alike, cuts, strict=True)]
        totals = makespans(schedule, pp, virtual, [m for _, m in alike], costs, slowest)
        for (chunks, m), (blocks, shares), most, total in zip(alike, cuts, slowest, totals, strict=True):
            mean = m * sum(f + b for f, b in chunks.passes) / pp
            waits = max(total - m * most, 0.0)  # sums in another order may differ in the last bit
            runs[chunks, m] = PipelineRun(total, blocks, shares.imbalance, waits, mean)
    return runs


@lru_cache(maxsize=1024)
def _cut(chunks: _Chunks) -> tuple[tuple[int, ...], PartitionCosts]:
    """Return the blocks of each chunk and the work of each rank."""
    units = Units(0.0, tuple(f + b for f, b in chunks.passes), sum(chunks.head))
    ranks = stages.rank_of(Strategy(pp=chunks.pp, virtual=chunks.virtual, schedule=chunks.schedule))
    blocks = chunks.given or partition(units, ranks).blocks
    return blocks, explain(units, ranks, blocks)


def _costs(passes: Sequence[tuple[float, float]], head: tuple[float, float], blocks: tuple[int, ...]) -> Costs:
    """Return the seconds of each chunk's passes; weight gradients take half of a backward pass."""
    forward, backward, start = [], [], 0
    for count in blocks:
        chunk = passes[start : start + count]
        start += count
        forward.append(sum(f for f, _ in chunk))
        backward.append(sum(b for _, b in chunk))
    forward[-1] += head[0]
    backward[-1] += head[1]
    half = [b / 2 for b in backward]
    return Costs(forward, half, half)


@dataclass(frozen=True)
class RankedStrategy:
    """A strategy that survived the first pass, priced with its pipeline timed action by action."""

    family: str
    """One of FAMILIES."""
    priced: PricedStrategy
    run: PipelineRun
    mfu: float
    """Model FLOP/s as a share of the bf16 peak."""

    @property
    def strategy(self) -> Strategy:
        """The strategy itself."""
        return self.priced.strategy

    @property
    def seconds(self) -> float:
        """Step time."""
        return self.priced.seconds


class RefinedPrices:
    """The second pass's prices of the strategies of one question, each computed once."""

    def __init__(self, pricing: Pricing) -> None:
        self.pricing = pricing
        self._known: dict[Strategy, RankedStrategy] = {}
        self._close: dict[Strategy, list[tuple[str, Strategy]]] = {}

    @cached_property
    def _flops(self) -> float:
        """FLOPs of the model in a step: the same for all strategies."""
        return float(
            np.max(model_flops(self.pricing.shape, self.pricing.layout(strategy_columns.columns_of([Strategy()]))))
        )

    def price(self, strategies: Sequence[Strategy], below: float = np.inf) -> list[RankedStrategy]:
        """Price each strategy, in the order of `strategies`, leaving out those that certainly take longer than
        `below` seconds."""
        new = [s for s in dict.fromkeys(strategies) if s not in self._known]
        if new:
            kinds = dict(zip(new, branch_and_bound.family(strategy_columns.columns_of(new)), strict=True))
            for p, run in refine(self.pricing, new, below):
                mfu = self._flops / (p.seconds * p.strategy.world * float(self.pricing.system.peak_bf16))
                self._known[p.strategy] = RankedStrategy(FAMILIES[kinds[p.strategy]], p, run, mfu)
        return [self._known[s] for s in strategies if s in self._known]

    def neighbours(self, s: Strategy) -> list[tuple[str, Strategy]]:
        """Return (change, strategy) of each neighbour of a strategy."""
        if s not in self._close:
            self._close[s] = neighbours(s, self.pricing)
        return self._close[s]

    def _recomputing(self, s: Strategy) -> list[Strategy]:
        """Return the neighbours of a strategy that differ in recomputation."""
        return [other for _, other in self.neighbours(s) if replace(other, recompute=s.recompute) == s]

    def met(self) -> list[RankedStrategy]:
        """Return every priced strategy, fitting or not."""
        return list(self._known.values())

    def descend(self, strategies: Sequence[Strategy], slower: bool = True) -> list[RankedStrategy]:
        """Descend from the fastest of `strategies` to faster neighbours until none is faster. Where balanced chunks
        do not fit, neighbours that recompute more are tried too: they may be faster with balanced chunks.

        Return every fitting strategy met on the way, fastest first; empty if none of `strategies` fits. Without
        `slower`, neighbours that are certainly slower than the fastest are left out."""
        fitting = {r.strategy: r for r in self.price(strategies) if r.priced.fits}
        if not fitting:
            return []
        fastest = min(r.seconds for r in fitting.values())
        again = [s for r in fitting.values() if r.run.unbalanced for s in self._recomputing(r.strategy)]
        fitting |= {r.strategy: r for r in self.price(again, fastest) if r.priced.fits}
        expanded: Strategy | None = None
        while (best := min(fitting, key=lambda s: fitting[s].seconds)) != expanded:
            expanded = best
            close = [s for _, s in self.neighbours(best)]
            below = np.inf if slower else fitting[best].seconds
            fitting |= {r.strategy: r for r in self.price(close, below) if r.priced.fits}
        return sorted(fitting.values(), key=lambda r: r.seconds)


def best_of_each_family(explored: Exploration) -> list[int]:
    """Return the row of the fastest strategy of each family that has one, by the first pass."""
    rows: dict[int, int] = {}
    kinds = explored.family[explored.order]
    for kind in range(len(FAMILIES)):
        if np.any(kinds == kind):
            rows[kind] = int(explored.order[np.argmax(kinds == kind)])
    return list(rows.values())
