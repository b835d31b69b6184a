"""The best of all legal strategies: branch and bound over their columns.

Rows are expanded step by step (planning/search/space.py). Before each step, a row is pruned if none of its
completions can be among the best: its lower bound on memory does not fit, or its lower bound on seconds
(planning/search/column_pricing.py) exceeds the incumbents, strategies known to fit: the best of its own family, and
the `keep` best of all. So every pruned strategy is provably worse; a test compares the result with pricing them all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from phalanx.planning.search import space, strategy_columns
from phalanx.planning.search.column_pricing import Floats, Pricing
from phalanx.planning.search.strategy_columns import Ints, Options, Strategies
from phalanx.spec.strategy.spec import Strategy
from phalanx.spec.strategy.zero_levels import level_columns

FAMILIES = ("DDP", "ZeRO", "HSDP", "TP+DP", "PP+DP", "3D", "with CP", "with EP")
_DDP, _ZERO, _HSDP, _TP, _PP, _3D, _CP, _EP = range(len(FAMILIES))
_CORES, _ROWS = 64, 32
"""Number of cores and rows of each family to expand first: the best of them become the first incumbents."""

_LIKELY_CORES = 1024
"""Number of cores to expand first if strategies of likely equal speed are known."""

_ROUNDING = 1 + 1e-9
"""Tolerance for prices, whose last digits depend on the other rows of a call."""

_FIRST = 256
"""Number of cores of each family to price before others are compared with them."""

_CLOSE = 8
"""Number of strategies to keep that fit only with unequal chunks."""


@dataclass(frozen=True)
class Exploration:
    """The strategies of a search that were priced in full and fit, one array element per row."""

    rows: Strategies
    seconds: Floats
    """Step time of each row, seconds."""
    bytes_: Floats
    """Memory of each row's fullest rank, bytes."""
    family: Ints
    """Index into FAMILIES of each row."""
    cores: Strategies
    """Starting rows of the search: degrees and micro-batch, nothing pruned."""
    legal: int
    """Number of legal strategies."""
    priced: int
    """Number of strategies priced in full, including those that did not fit."""
    close: tuple[Strategy, ...] = ()
    """Strategies that fit with unequal chunks at most, fastest first."""

    @cached_property
    def order(self) -> Ints:
        """Row numbers, fastest first; among equally fast rows the one that needs less memory first, then the one with
        the usual mesh order."""
        return np.lexsort((self.rows.order, self.bytes_, self.seconds))


def family(rows: Strategies) -> Ints:
    """Return the index into FAMILIES of each row."""
    data = np.where(level_columns(rows.zero).state, np.where(rows.shard == rows.dp, _ZERO, _HSDP), _DDP)
    kinds = [rows.ep * rows.etp > 1, rows.cp > 1, (rows.tp > 1) & (rows.pp > 1), rows.tp > 1, rows.pp > 1]
    return np.select(kinds, [_EP, _CP, _3D, _TP, _PP], data)


def may_become(cores: Strategies, families: Sequence[int]) -> npt.NDArray[np.bool_]:
    """Return the mask of cores, experts spread, from which sharding may make a strategy of these families."""
    own = family(cores)
    pure = (own == _DDP) & bool(np.isin([_DDP, _ZERO, _HSDP], families).any())
    return np.asarray(np.isin(own, families) | pure)


def explore(
    pricing: Pricing,
    ranks: int,
    options: Options | None = None,
    keep: int = 10,
    slack: float = 0.0,
    front: float = 0.0,
    watch: Callable[[int, int], None] | None = None,
    families: float = np.inf,
    below: float = np.inf,
    hints: Sequence[Strategy] = (),
) -> Exploration:
    """Find the best strategies over `ranks` ranks by branch and bound.

    The result contains the `keep` fastest strategies that fit, the fastest of each family that is slower than the
    fastest of all by at most the share `families`, and every strategy slower than those by at most the share `slack`;
    strategies that take more than `below` seconds may be missing. With `front` > 0 it also contains the complete
    front of time and memory up to `front` times the shortest step. `watch`: callback with the number of strategies
    priced so far and that of all legal ones. `hints`: strategies that are likely among the best, such as the answer
    to a similar question; they speed up the search and do not change the result. Raises InputError if the job has no
    legal strategy over `ranks` ranks."""
    options = options or Options()
    model, job = pricing.model, pricing.job
    cores = space.cores(model, job, ranks, options)
    legal = int(space.size(cores, model, job, options).sum())
    if not legal:
        raise space.nothing_within(options, ranks)
    incumbents = _Incumbents(pricing, keep, slack, front, families, below)
    if hints and not front:
        incumbents.bound_by([s for s in dict.fromkeys(hints) if space.has_strategy(s, model, job, ranks, options)])
    cores_first = _LIKELY_CORES if incumbents.bounded else _CORES

    def finish(rows: Strategies) -> None:
        """Expand cores with their experts to complete strategies and price them."""
        rows = rows.take(pricing.may_fit(rows, complete=False))
        rows = space.pipelines(rows, model, job, options)
        if not front:  # a slower schedule may need less memory
            rows = rows.take(incumbents.may_win(family(rows), pricing.least_seconds(rows, complete=True)))
        rows = space.recomputations(rows, model, job, options)
        rows = rows.take(pricing.may_fit(rows, complete=True))
        if watch is not None:
            watch(incumbents.priced, legal)
        incumbents.expand(rows, True, _ROWS, lambda r: incumbents.price(space.sharding(r, job, options)))

    # Experts are spread before any memory is bounded: if they do not fit on every rank, they may fit spread out.
    if front or model.experts is None:
        incumbents.expand(space.experts(cores, model, job, options), False, cores_first, finish)
        return incumbents.result(cores, legal)
    by_blocks = _ByBlocks(pricing, cores, options)
    first = by_blocks.first(_FIRST)
    for some in (first, ~first):
        rows = by_blocks.expanded(some, incumbents)
        incumbents.expand(space.apply_limits(rows, job, options, "experts"), False, cores_first, finish)
    return incumbents.result(cores, legal)


class _ByBlocks:
    """Cores with their experts, bounded by the passes of their blocks alone: these are priced once for all cores with
    equal blocks, and with each spread of experts only if the best spread may win."""

    def __init__(self, pricing: Pricing, cores: Strategies, options: Options) -> None:
        self._pricing, self._options, self._cores, self._family = pricing, options, cores, family(cores)
        self._kinds, self._kind = space.cores_by_block(cores)
        self._least = pricing.block_seconds(self._kinds, spread=False)[self._kind]

    def first(self, count: int) -> npt.NDArray[np.bool_]:
        """Return the mask of the `count` cores of each family with the lowest bounds."""
        chosen = np.zeros(len(self._cores), dtype=bool)
        for place in range(_EP):
            own = np.flatnonzero(self._family == place)
            chosen[own[np.argsort(self._least[own], kind="stable")[:count]]] = True
        chosen[np.argsort(self._least, kind="stable")[:count]] = True
        return chosen

    def expanded(self, some: npt.NDArray[np.bool_], incumbents: _Incumbents) -> Strategies:
        """Return the cores in the mask `some` with every spread of experts that may be among the best of all or of
        its family."""
        apart = np.full_like(self._family, _EP)
        may = incumbents.may_win(self._family, self._least) | incumbents.may_win(apart, self._least)
        cores = np.flatnonzero(some & may)
        kinds, kind = np.unique(self._kind[cores], return_inverse=True)
        ways, of_kind = space.with_experts(self._kinds.take(kinds), self._pricing.model, self._options)
        bound = self._pricing.block_seconds(ways)
        alone = ways.ep * ways.etp == 1
        kept = np.flatnonzero(alone | incumbents.may_win(np.full(len(ways), _EP), bound))
        rows, core, way = space.spread_experts(self._cores.take(cores), kind, ways.take(kept), of_kind[kept])
        families = np.where(alone[kept][way], self._family[cores][core], _EP)
        return rows.take(incumbents.may_win(families, bound[kept][way]))


class _Incumbents:
    """The strategies priced so far, and the bounds that a row must beat to be worth expanding."""

    def __init__(
        self, pricing: Pricing, keep: int, slack: float, front: float, families: float, below: float
    ) -> None:
        self._pricing, self._keep, self._slack, self._front = pricing, keep, slack, front
        self._families, self._below = families, below
        self._steps, self._least = np.zeros(0), np.zeros(0)  # the front: seconds, least bytes up to there
        self._parts: list[tuple[Strategies, Floats, Floats]] = []
        self._close: list[tuple[float, Strategy]] = []
        self._best_of_family = np.full(len(FAMILIES), np.inf)
        self._overall_bound, self._fastest_seconds, self.priced = np.inf, np.zeros(0), 0

    @property
    def bounded(self) -> bool:
        """Whether enough strategies are known that bounds prune rows."""
        return bool(np.isfinite(self._overall_bound))

    def bound_by(self, strategies: Sequence[Strategy]) -> None:
        """Tighten the bounds by distinct strategies that the search has not priced yet."""
        if not strategies:
            return
        rows = strategy_columns.columns_of(strategies)
        rows = rows.take(self._pricing.bytes_(rows) <= self._pricing.usable)
        seconds = self._pricing.seconds(rows) * _ROUNDING
        np.minimum.at(self._best_of_family, family(rows), seconds)
        if len(seconds) > self._keep:
            self._overall_bound = float(np.partition(seconds, self._keep)[self._keep])

    def price(self, rows: Strategies) -> None:
        """Price complete strategies, keep those that fit, and tighten the bounds."""
        self.priced += len(rows)
        rows = rows.take(self._pricing.least_reserved(rows) <= self._pricing.usable)
        bytes_ = self._pricing.bytes_(rows)
        fits = bytes_ <= self._pricing.usable
        if not np.all(fits):
            self._add_close(rows.take(~fits))
        rows, bytes_ = rows.take(fits), bytes_[fits]
        seconds = self._pricing.seconds(rows)
        self._parts.append((rows, seconds, bytes_))
        np.minimum.at(self._best_of_family, family(rows), seconds)
        known = np.concatenate([self._fastest_seconds, seconds])
        if len(known) > self._keep:
            known = np.partition(known, self._keep)[: self._keep + 1]
            self._overall_bound = min(self._overall_bound, float(known[self._keep]))
        self._fastest_seconds = known
        if self._front and len(seconds):
            steps, least = np.concatenate([self._steps, seconds]), np.concatenate([self._least, bytes_])
            order = np.lexsort((least, steps))
            steps, least = steps[order], least[order]
            before = np.minimum.accumulate(np.concatenate([[np.inf], least[:-1]]))
            self._steps, self._least = steps[least < before], least[least < before]

    def _add_close(self, rows: Strategies) -> None:
        """Keep the fastest of rows that may fit."""
        seconds = self._pricing.seconds(rows)
        places = np.argsort(seconds, kind="stable")[:_CLOSE]
        new = [(float(seconds[i]), rows.strategy(int(i))) for i in places if seconds[i] <= self._overall_bound]
        self._close = sorted([*self._close, *new], key=lambda item: item[0])[:_CLOSE]

    def expand(
        self, rows: Strategies, complete: bool, batch: int, continue_with: Callable[[Strategies], None]
    ) -> None:
        """Call `continue_with` on batches of rows until no remaining row can beat the incumbents. Each batch takes
        the rows of each family with the lowest bounds, and is twice as large as the one before. Rows that fit in a
        single batch need no bounds. `complete`: as for `Pricing.least_seconds`."""
        families = family(rows)
        if np.bincount(families, minlength=1).max() <= batch:
            continue_with(rows)
            return
        least = self._pricing.least_seconds(rows, complete)
        bytes_ = np.full(len(rows), np.nan)
        queue = np.argsort(least, kind="stable")
        if self.bounded and not self._front:
            queue = queue[self.may_win(families[queue], least[queue])]
        while len(queue):
            chosen = np.zeros(len(queue), dtype=bool)
            for place in range(len(FAMILIES)):
                chosen[np.flatnonzero(families[queue] == place)[:batch]] = True
            continue_with(rows.take(queue[chosen]))
            queue = queue[~chosen]
            remaining = self.may_win(families[queue], least[queue])
            if self._front:
                near = np.flatnonzero(~remaining & (least[queue] <= self._front * self._fastest))
                unknown = queue[near[np.isnan(bytes_[queue[near]])]]
                bytes_[unknown] = self._pricing.least_bytes(rows.take(unknown), complete)
                remaining[near] = self.may_extend_front(least[queue[near]], bytes_[queue[near]])
            queue = queue[remaining]
            batch *= 2

    def may_win(self, families: Ints, least: Floats) -> npt.NDArray[np.bool_]:
        """Return the mask of rows, given their families and lower bounds on seconds, that may still be among the best
        of all or of their family. Rows of plain data parallelism always may: sharding, which is expanded last,
        decides their family."""
        bound = self._best_of_family.copy()
        bound[_DDP] = np.inf
        fastest = self._fastest_seconds.min(initial=np.inf)
        bound = np.maximum(np.minimum(bound, (1 + self._families) * fastest), self._overall_bound)
        bound = np.minimum(bound, self._below)
        return np.asarray(least <= bound[families] * (1 + self._slack))

    @property
    def _fastest(self) -> float:
        return float(self._steps[0]) if len(self._steps) else np.inf

    def may_extend_front(self, least: Floats, bytes_: Floats) -> npt.NDArray[np.bool_]:
        """Return the mask of rows, given lower bounds on seconds and bytes, that need less memory than every
        incumbent at least as fast."""
        faster = np.searchsorted(self._steps, least, side="right")
        return np.asarray(bytes_ < np.concatenate([[np.inf], self._least])[faster])

    def result(self, cores: Strategies, legal: int) -> Exploration:
        """Collect everything priced so far."""
        parts = [(cores.take(slice(0)), np.zeros(0), np.zeros(0)), *self._parts]
        rows = strategy_columns.concatenate([part[0] for part in parts])
        seconds, bytes_ = (np.concatenate([part[i] for part in parts]) for i in (1, 2))
        close = tuple(s for least, s in self._close if least <= self._overall_bound)
        return Exploration(rows, seconds, bytes_, family(rows), cores, legal, self.priced, close)
