"""The best strategy for a model on a cluster, and why: both passes of the search, families, front, and what was
rejected."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from phalanx.plan.search import branch_and_bound, priced, space, why_not
from phalanx.plan.search.branch_and_bound import FAMILIES, Found
from phalanx.plan.search.column_pricing import Pricing
from phalanx.plan.search.neighbours import neighbours
from phalanx.plan.search.priced import Priced
from phalanx.plan.search.refine import Ranked, Second, best_of_each
from phalanx.plan.search.space import Options, Strategies
from phalanx.spec.cluster.spec import GIB
from phalanx.spec.errors import InputError
from phalanx.spec.strategy.spec import Strategy

Objective = Literal["throughput", "memory"]
OBJECTIVES = ("throughput", "memory")
THRIFT = ("gpu-hours", "money")
"""Of which there are fewer where fewer GPUs are taken; days are throughput."""
_SLACK = 0.10
"""How much slower than the fastest a strategy may be that is chosen for the memory that it leaves."""
_NEAR = 64
"""How many fewer GPUs are tried where the batch cannot be split over all."""
_FRONT = 1.5
"""The front of time and memory goes up to this many times the shortest step."""
_POINTS, _CLEARLY = 8, 0.98
"""Of the front that is shown unasked: how many points at most, each with clearly less memory than the one before."""


@dataclass(frozen=True)
class Rejected:
    """A strategy with the reason, in numbers, why it is not the best one."""

    family: str
    priced: Priced
    reason: str


@dataclass(frozen=True)
class Fewer:
    """The best strategy on fewer GPUs, where it is as fast."""

    gpus: int
    strategy: Strategy
    seconds: float


@dataclass(frozen=True)
class Answer:
    """`ranked`: best first. `families`: the best of each that has any. `front`: fastest first, each with less memory
    than all before it. `evaluated`: all legal strategies; `examined`: those priced one by one, the others were
    decided by a bound. `seconds`: of the search."""

    pricing: Pricing
    gpus: int
    ranked: tuple[Ranked, ...]
    families: tuple[Ranked, ...]
    front: tuple[Ranked, ...]
    rejected: tuple[Rejected, ...]
    evaluated: int
    examined: int
    seconds: float
    fewer: Fewer | None = None

    @property
    def best(self) -> Ranked:
        return self.ranked[0]


def answer(
    larger: Callable[[int], Pricing],
    gpus: int,
    objective: Objective = "throughput",
    keep: int = 10,
    whole_front: bool = False,
) -> Answer:
    """Search. `larger`: the question on so many GPUs of the same kind. `whole_front`: no point of it is missed; else
    it is that of what the search for the best has met. Raises InputError where nothing is legal, or nothing fits:
    then with the least hardware that would do."""
    start = time.perf_counter()
    pricing = larger(gpus)
    options = pricing.options
    try:
        slack, upto = _SLACK if objective == "memory" else 0.0, _FRONT if whole_front else 0.0
        found = branch_and_bound.explore(pricing, gpus, options, keep, slack, upto)
    except InputError as wrong:
        raise _with_a_number(wrong, pricing, gpus) from None
    if not len(found.rows):
        raise _nothing_fits(pricing, found, larger, gpus, options)
    kept, each = [int(row) for row in found.order[:keep]], best_of_each(found)
    front = _promising(found, whole_front)
    if objective == "memory":
        near = found.order[found.seconds[found.order] <= (1 + _SLACK) * found.seconds[found.order[0]]]
        kept += [int(row) for row in near[np.argsort(found.bytes_[near], kind="stable")][:keep]]
    rows = list(dict.fromkeys([*kept, *each, *front]))
    second = Second(pricing)
    every = second.descended([found.rows.strategy(row) for row in rows])
    each_best = {r.family: r for r in reversed(every)}
    families = tuple(each_best[name] for name in FAMILIES if name in each_best)
    ranked = every[:keep]
    if objective == "memory":
        near_best = [r for r in every if r.seconds <= (1 + _SLACK) * every[0].seconds]
        ranked = sorted(near_best, key=lambda r: r.priced.bytes_)[:keep]
    rejected = tuple(_rejected(second, ranked[0], found, {r.family for r in families}, options))
    return Answer(
        pricing=pricing,
        gpus=gpus,
        ranked=tuple(ranked),
        families=families,
        front=tuple(_front(every, whole_front)),
        rejected=rejected,
        evaluated=found.legal,
        examined=found.priced,
        seconds=time.perf_counter() - start,
        fewer=_fewer(larger, gpus, ranked[0]) if objective == "throughput" else None,
    )


def _with_a_number(wrong: InputError, pricing: Pricing, gpus: int) -> InputError:
    """Of GPUs that share nothing evenly: how many would."""
    for n in range(gpus - 1, max(gpus - _NEAR, 0), -1) if wrong.field == "--gpus" else ():
        try:
            space.cores(pricing.model, pricing.job, n)
        except InputError:
            continue
        return InputError(wrong.field, wrong.value, wrong.reason, f"use {n}, or another batch")
    return wrong


def _fewer(larger: Callable[[int], Pricing], gpus: int, best: Ranked) -> Fewer | None:
    """Whether some of the GPUs might as well stand idle. Fewer take at least what the FLOPs take at the best rate
    that kernels reach, so mostly nothing needs to be searched."""
    pricing, found = larger(gpus), None
    node = pricing.cluster.ranks_per_node
    for n in sorted({gpus // 4, gpus // 2, (gpus - 1) // node * node} - {0}):
        if best.mfu * gpus / n > np.max(pricing.system.gemm):
            continue
        candidate = best_on(larger(n), n)
        if candidate and candidate[1] <= best.seconds and (not found or candidate[1] < found.seconds):
            found = Fewer(n, candidate[0].strategy, candidate[1])
    return found


def thriftiest(larger: Callable[[int], Pricing], most: int) -> int:
    """How many GPUs, of `most` and its halves, take the fewest GPU-seconds for a step; `most` where none fit."""
    spent, n = {most: np.inf}, most
    while n:
        found = best_on(larger(n), n)
        if found:
            spent[n] = n * found[1]
        n //= 2
    return min(spent, key=lambda n: spent[n])


def _promising(found: Found, whole: bool) -> list[int]:
    """The front of the first pass."""
    order = found.order
    order = order[found.seconds[order] <= _FRONT * found.seconds[order[0]]]
    least = np.minimum.accumulate(found.bytes_[order])
    clearly = 1.0 if whole else _CLEARLY
    points = [int(i) for i in order[np.concatenate([[True], least[1:] < clearly * least[:-1]])]]
    return points if whole else points[:_POINTS]


def _front(every: Sequence[Ranked], whole: bool) -> list[Ranked]:
    """Of what the second pass has priced, fastest first: each with less memory than all faster ones, or else those
    with clearly less."""
    points = [every[0]]
    for r in every:
        if r.priced.bytes_ < (1.0 if whole else _CLEARLY) * points[-1].priced.bytes_:
            points.append(r)
    points = [r for r in points if r.seconds <= _FRONT * every[0].seconds]
    return points if whole else points[:_POINTS]


def _rejected(second: Second, best: Ranked, found: Found, has: set[str], options: Options) -> Iterable[Rejected]:
    """Families of which nothing fits, by the member of least memory; and the neighbours of the best one."""
    pricing = second.pricing
    for p, kind in _misfits(pricing, found.cores, has, options):
        yield Rejected(kind, p, why_not.why_not(p, best.priced, pricing))
    near = neighbours(best.strategy, pricing)
    for (what, _), other in zip(near, second.of([s for _, s in near]), strict=True):
        if other.priced.fits and other.seconds < best.seconds:
            continue  # faster, but with less memory left, which is what was asked for
        yield Rejected(other.family, other.priced, f"{what}: {why_not.why_not(other.priced, best.priced, pricing)}")


def _misfits(pricing: Pricing, cores: Strategies, has: set[str], options: Options) -> Iterable[tuple[Priced, str]]:
    """By family without a strategy that fits, the one that lacks least, of plain cores."""
    rows = cores.take((cores.cp == 1) & (cores.micro_batch == 1))
    rows = space.sharding(space.recomputing(rows, pricing.model, options), options)
    kinds, bytes_ = branch_and_bound.family(rows), pricing.bytes_(rows)
    for kind, name in enumerate(FAMILIES):
        own = np.flatnonzero(kinds == kind)
        if name in has or not len(own):
            continue
        least = own[np.argmin(bytes_[own])]
        if bytes_[least] > pricing.usable:
            yield priced.price(pricing, [rows.strategy(int(least))])[0], name


def _nothing_fits(
    pricing: Pricing, found: Found, larger: Callable[[int], Pricing], gpus: int, options: Options
) -> InputError:
    every: dict[str, Priced] = {kind: p for p, kind in _misfits(pricing, found.cores, set(), options)}
    most = min(every.values(), key=lambda p: p.bytes_, default=None)
    needs = f": {most.strategy} {why_not.why_not(most, None, pricing)}" if most else ""
    enough = least_ranks(larger, gpus, pricing.cluster.ranks_per_node, options)
    device = f"{pricing.cluster.device.name}, {pricing.cluster.device.usable_bytes / GIB:.1f} GiB each"
    mend = f"{enough} of them would do ({device})" if enough else "no number of them would do: shorten seq"
    return InputError("--gpus", gpus, f"nothing fits{needs}", mend)


def best_on(pricing: Pricing, gpus: int) -> tuple[Priced, float, float] | None:
    """The best strategy on so many GPUs, its seconds with the pipeline as it runs, and MFU; None where none fits."""
    try:
        found = branch_and_bound.explore(pricing, gpus, pricing.options, keep=1)
    except InputError:
        return None
    if not len(found.rows):
        return None
    rows = dict.fromkeys([int(found.order[0]), *best_of_each(found)])
    first = Second(pricing).descended([found.rows.strategy(row) for row in rows])[0]
    return first.priced, first.seconds, first.mfu


_MOST = 2**17
"""GPUs beyond which nobody looks."""


_CORES = 400


def fits_somewhere(pricing: Pricing, ranks: int, options: Options) -> bool:
    """Whether any strategy over so many ranks fits: those whose least bytes promise most are looked at in full."""
    try:
        cores = space.cores(pricing.model, pricing.job, ranks)
    except InputError:
        return False
    cores = space.experts(cores, pricing.model)
    least = pricing.least_bytes(cores, whole=False)
    able = np.flatnonzero(least <= pricing.usable)
    able = able[np.argsort(least[able])][:_CORES]
    rows = space.pipelines(cores.take(able), pricing.model, pricing.job, options)
    rows = space.recomputing(rows, pricing.model, options)
    return bool(len(rows) and np.any(pricing.least_bytes(rows, whole=True) <= pricing.usable))


def least_ranks(larger: Callable[[int], Pricing], above: int, node: int, options: Options) -> int | None:
    """The fewest GPUs, in whole nodes, more than `above`, over which something fits; None where none within reach do.
    `larger`: the question on so many GPUs. Memory falls with ranks, but not every number of them divides a batch: so
    twice as many until something fits, then every eighth of the way from the last that did not."""
    low = high = max(above, node)
    while not fits_somewhere(larger(high), high, options):
        low, high = high, 2 * high
        if high > _MOST:
            return None
    for part in range(1, 8):
        middle = (low + (high - low) * part // 8) // node * node
        if low < middle < high and fits_somewhere(larger(middle), middle, options):
            return middle
    return high
