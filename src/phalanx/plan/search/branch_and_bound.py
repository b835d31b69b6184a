"""The best of all legal strategies: branch and bound over their columns.

Rows are multiplied step by step (plan/space.py). Before each step a row is dropped of which no way to go on can be
among the best: its least bytes do not fit, or its least seconds (plan/pricing.py) are more than those of strategies
that are known to fit: the best of its own family, and so many of the best of all as are asked for. So what is
dropped was decided, not forgotten; a test holds the result against pricing every strategy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from phalanx.plan.search import space
from phalanx.plan.search.column_pricing import Floats, Pricing
from phalanx.plan.search.space import Ints, Options, Strategies

FAMILIES = ("DDP", "ZeRO", "HSDP", "TP+DP", "PP+DP", "3D", "with CP", "with EP")
_DDP, _ZERO, _HSDP, _TP, _PP, _3D, _CP, _EP = range(len(FAMILIES))
_CORES, _ROWS = 16, 32
"""Of each family, how many cores and rows are priced first: the best of them are marks for the others."""


@dataclass(frozen=True)
class Found:
    """What was priced in full, and of how many. `seconds`, `bytes_`: of `rows`; `family`: places in FAMILIES.""" ""

    rows: Strategies
    seconds: Floats
    bytes_: Floats
    family: Ints
    cores: Strategies
    legal: int
    priced: int

    @cached_property
    def order(self) -> Ints:
        """Fastest first; of equally fast ones that with more memory left."""
        return np.lexsort((self.bytes_, self.seconds))


def family(rows: Strategies) -> Ints:
    """Which family each row is of."""
    data = np.where(rows.zero == 0, _DDP, np.where(rows.shard == rows.dp, _ZERO, _HSDP))
    kinds = [rows.ep * rows.etp > 1, rows.cp > 1, (rows.tp > 1) & (rows.pp > 1), rows.tp > 1, rows.pp > 1]
    return np.select(kinds, [_EP, _CP, _3D, _TP, _PP], data)


def explore(
    pricing: Pricing,
    ranks: int,
    options: Options | None = None,
    keep: int = 10,
    slack: float = 0.0,
    front: float = 0.0,
) -> Found:
    """Of all strategies over so many ranks: the `keep` best and the best of each family, and all that are slower than
    those by a share of `slack` at most. With `front`, all that take at most so many times the shortest step and of
    which no faster one needs less memory.

    Raises InputError where the job has no strategy at all.
    """
    options = options or Options()
    model, job = pricing.model, pricing.job
    cores = space.cores(model, job, ranks)
    legal = int(space.size(cores, model, job, options).sum())
    marks = _Marks(pricing, keep, slack, front)

    def finish(rows: Strategies) -> None:
        """Cores with their experts, for whole ones may be too large and a part of them not, to the end."""
        rows = rows.take(pricing.may_fit(rows, whole=False))
        rows = space.recomputing(space.pipelines(rows, model, job, options), model, options)
        rows = rows.take(pricing.may_fit(rows, whole=True))
        marks.through(rows, True, _ROWS, lambda r: marks.see(space.sharding(r, options)))

    marks.through(space.experts(cores, model), False, _CORES, finish)
    return marks.found(cores, legal)


class _Marks:
    """What was priced in full, and what a row must reach to be worth it."""

    def __init__(self, pricing: Pricing, keep: int, slack: float, front: float) -> None:
        self._pricing, self._keep, self._slack, self._front = pricing, keep, slack, front
        self._steps, self._least = np.zeros(0), np.zeros(0)  # of the front: seconds, and the least bytes by then
        self._parts: list[tuple[Strategies, Floats, Floats]] = []
        self._most = np.full(len(FAMILIES), np.inf)
        self._overall, self._best, self._priced = np.inf, np.zeros(0), 0

    def see(self, rows: Strategies) -> None:
        """Price rows in full: seconds of those that fit."""
        self._priced += len(rows)
        bytes_ = self._pricing.bytes_(rows)
        rows, bytes_ = rows.take(bytes_ <= self._pricing.usable), bytes_[bytes_ <= self._pricing.usable]
        seconds = self._pricing.seconds(rows)
        self._parts.append((rows, seconds, bytes_))
        np.minimum.at(self._most, family(rows), seconds)
        known = np.concatenate([self._best, seconds])
        if len(known) > self._keep:
            known = np.partition(known, self._keep)[: self._keep + 1]
            self._overall = float(known[self._keep])
        self._best = known
        if self._front and len(seconds):
            steps, least = np.concatenate([self._steps, seconds]), np.concatenate([self._least, bytes_])
            order = np.lexsort((least, steps))
            steps, least = steps[order], least[order]
            before = np.minimum.accumulate(np.concatenate([[np.inf], least[:-1]]))
            self._steps, self._least = steps[least < before], least[least < before]

    def through(self, rows: Strategies, whole: bool, batch: int, go_on: Callable[[Strategies], None]) -> None:
        """Go on with rows in batches, those of each family that promise most first, and larger ones as the marks
        settle, until the others promise less than is known."""
        least = self._pricing.least_seconds(rows, whole)
        order = np.argsort(least, kind="stable")
        rows, least = rows.take(order), least[order]
        bytes_ = np.full(len(rows), np.nan)
        while len(rows):
            kinds = family(rows)
            now = np.zeros(len(rows), dtype=bool)
            for kind in range(len(FAMILIES)):
                now[np.flatnonzero(kinds == kind)[:batch]] = True
            go_on(rows.take(now))
            left = ~now & self.reached(rows, least)
            if self._front:
                near = np.flatnonzero(~now & ~left & (least <= self._front * self._fastest))
                unknown = near[np.isnan(bytes_[near])]
                bytes_[unknown] = self._pricing.least_bytes(rows.take(unknown), whole)
                left[near] = self.in_front(least[near], bytes_[near])
            rows, least, bytes_ = rows.take(left), least[left], bytes_[left]
            batch *= 2

    def reached(self, rows: Strategies, least: Floats) -> npt.NDArray[np.bool_]:
        """Whether rows with these least seconds may be among the best of all or of their family. Of plain data
        parallelism, whose families differ by sharding, all may."""
        most = np.maximum(self._most, self._overall)
        most[_DDP] = np.inf
        found: npt.NDArray[np.bool_] = least <= most[family(rows)] * (1 + self._slack)
        return found

    @property
    def _fastest(self) -> float:
        return float(self._steps[0]) if len(self._steps) else np.inf

    def in_front(self, least: Floats, bytes_: Floats) -> npt.NDArray[np.bool_]:
        """Whether no faster row that is known needs as little memory as rows with these least seconds and bytes."""
        faster = np.searchsorted(self._steps, least, side="right")
        found: npt.NDArray[np.bool_] = bytes_ < np.concatenate([[np.inf], self._least])[faster]
        return found

    def found(self, cores: Strategies, legal: int) -> Found:
        parts = [(cores.take(slice(0)), np.zeros(0), np.zeros(0)), *self._parts]
        rows = space.joined([part[0] for part in parts])
        seconds, bytes_ = (np.concatenate([part[i] for part in parts]) for i in (1, 2))
        return Found(rows, seconds, bytes_, family(rows), cores, legal, self._priced)
