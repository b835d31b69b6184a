"""Seconds and bytes of many strategies at once: the terms of a step (cost/stack), over columns of strategies."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from phalanx.cost.analytic.chips import system_of
from phalanx.cost.analytic.memory import Memory, memory
from phalanx.cost.analytic.model_shape import Shape, shape
from phalanx.cost.analytic.pipeline_formulas import NAMES, bubble, chunks_per_rank, in_flight
from phalanx.cost.analytic.rank_layout import FORMATS, Layout
from phalanx.cost.analytic.stacks import Profile, profile
from phalanx.cost.analytic.step import Step, step
from phalanx.cost.hardware.columns import Column
from phalanx.cost.hardware.system import System
from phalanx.plan.search.space import ORDERS, RECOMPUTE, Ints, Options, Strategies, repeated
from phalanx.schedule.pipeline.schedules import SCHEDULES
from phalanx.spec.cluster.spec import ClusterSpec
from phalanx.spec.errors import InputError
from phalanx.spec.job import DTYPE_BYTES, Job
from phalanx.spec.model.spec import ModelSpec

Floats = npt.NDArray[np.float64]
_SLICE = 16_384
"""Rows priced together: their columns stay in the cache."""


@dataclass(frozen=True)
class Pricing:
    """What all strategies of a question share."""

    model: ModelSpec
    cluster: ClusterSpec
    job: Job
    stack: str

    @cached_property
    def shape(self) -> Shape:
        return shape(self.model)

    @cached_property
    def system(self) -> System:
        return system_of(self.cluster)

    @cached_property
    def profile(self) -> Profile:
        return profile(self.stack)

    @cached_property
    def options(self) -> Options:
        """What a search chooses from. Megatron and what is built on it have no zero-bubble schedules; where
        scores are never written, repeating attention's core frees nothing; of links all alike one order is all,
        and so it is where none but that is run."""
        own = self.stack.startswith(("phalanx", "torchtitan"))
        flash = bool(np.all(self.profile.flash))
        rates = {t.bandwidth_bytes_per_s_per_gpu_per_direction for t in self.cluster.tiers}
        return Options(
            schedules=NAMES if own else tuple(name for name in NAMES if SCHEDULES[name].in_megatron),
            recompute=tuple(kind for kind in RECOMPUTE if not (flash and kind == "selective")),
            orders=ORDERS if len(rates) > 1 and self.stack != "phalanx" else ORDERS[:1],
        )

    def layout(self, rows: Strategies) -> Layout:
        full, selective = self._recomputed

        def as_float(column: Ints) -> Floats:
            return column.astype(np.float64)  # once, or every operation does it

        m = rows.micro_batches(self.job)
        first, last = in_flight(rows.schedule, m, rows.pp)
        inside, stages = rows.tp * rows.cp, rows.order == ORDERS.index("dp/pp/cp/tp")
        return Layout(
            tp=as_float(rows.tp),
            sp=as_float(rows.sp),
            pp=as_float(rows.pp),
            virtual=chunks_per_rank(rows.schedule, rows.virtual),
            dp=as_float(rows.dp),
            cp=as_float(rows.cp),
            ulysses=as_float(rows.ulysses),
            ep=as_float(rows.ep),
            etp=as_float(rows.etp),
            zero=as_float(rows.zero),
            shards=as_float(rows.shards),
            micro_batch=as_float(rows.micro_batch),
            micro_batches=as_float(m),
            seq=self.job.seq,
            full=full[rows.recompute],
            selective=selective[rows.recompute],
            format=FORMATS.index("bfloat16"),
            activation_bytes=DTYPE_BYTES[self.job.precision.compute],
            gathers_once=1.0 * ((rows.zero == 3) & (rows.pp > 1)),
            tp_stride=1.0,
            cp_stride=as_float(rows.tp),
            dp_stride=as_float(np.where(stages, inside * rows.pp, inside)),
            pp_stride=as_float(np.where(stages, inside, inside * rows.dp)),
            bubble=bubble(rows.schedule, m, rows.pp, rows.virtual),
            in_flight=first,
            in_flight_last=last,
        )

    @cached_property
    def _recomputed(self) -> tuple[Floats, Floats]:
        """The shares of the blocks that each kind of recomputation repeats whole, and in part."""
        n = self.model.layers
        kinds = [repeated(name, n) for name in RECOMPUTE]
        shares = [[own.count(part) / n for own in kinds] for part in ("full", "selective")]
        return np.array(shares[0]), np.array(shares[1])

    def step(self, rows: Strategies) -> Step:
        """The terms, with the bubble of each row's own schedule."""
        return step(self.shape, self.layout(rows), self.system, self.profile)

    def seconds(self, rows: Strategies) -> Floats:
        """Of a step."""
        return _sliced(rows, lambda part: self.step(part).seconds)

    def memory(self, rows: Strategies) -> Memory:
        """On the fullest rank, where the CPU launches ahead of the GPU."""
        return memory(self.shape, self.layout(rows), self.profile)

    def bytes_(self, rows: Strategies) -> Floats:
        """What "fits" is judged by: reserved at most."""
        return _sliced(rows, lambda part: self.memory(part).reserved)

    def least_seconds(self, rows: Strategies, whole: bool) -> Floats:
        """No way to shard these rows is faster: what gradients and parameters take to travel is left out, the update
        is over all shards, stages are neighbours, or replicas where that brings experts together. Of cores (`whole`
        false), that have plain 1f1b and repeat nothing, no schedule and recomputation is either: their bubble is
        left out too."""
        sharded = np.where(rows.dp * rows.cp > 1, 1, 0)
        best = replace(rows, zero=sharded, shard=rows.dp, order=np.ones_like(rows.order))

        def least(part: Strategies) -> Column:
            found = self.step(part)
            return found.seconds - found.terms["dp"] - (0 if whole else found.terms["bubble"])

        seconds = _sliced(best, least)
        apart = np.flatnonzero((rows.ep * rows.etp > rows.tp * rows.cp) & (rows.pp > 1) & (rows.dp > 1))
        if len(apart):
            other = best.take(apart)
            other = replace(other, order=np.zeros_like(other.order))
            seconds[apart] = np.minimum(seconds[apart], _sliced(other, least))
        return seconds

    def least_bytes(self, rows: Strategies, whole: bool) -> Floats:
        """The same of memory: of the ways to shard over all ranks the smallest; of cores, one micro-batch at a time
        and the smallest recomputation."""
        found = np.full(len(rows), np.inf)
        for zero, kind in self._least_ways(whole):
            found = np.minimum(found, self.bytes_(_smallest_of(rows, zero, kind, whole)))
        return found

    def may_fit(self, rows: Strategies, whole: bool) -> npt.NDArray[np.bool_]:
        """Whether the least bytes fit: as soon as one way does, no other is looked at."""
        found = np.zeros(len(rows), dtype=bool)
        for zero, kind in self._least_ways(whole):
            open_ = np.flatnonzero(~found)
            own = self.bytes_(_smallest_of(rows.take(open_), zero, kind, whole))
            found[open_[own <= self.usable]] = True
        return found

    def _least_ways(self, whole: bool) -> list[tuple[int, str]]:
        """ZeRO stage and recomputation ("": the row's own) among which the smallest one is, likely ones first."""
        kinds = [""] if whole else sorted(self.options.recompute, key=lambda kind: kind != "full")
        return [(zero, kind) for kind in kinds for zero in self._smallest]

    @cached_property
    def _smallest(self) -> tuple[int, ...]:
        """ZeRO stages one of which is the smallest over all ranks: 2 always keeps less than 1, and less than 0 where
        a stack's constants say so of two shards already."""
        p = self.profile
        two = p.kept_bytes - 4 + (p.shard_bytes + 4) / 2
        return (3, 2) if np.all(p.whole_bytes + p.replica_bytes >= two) else (3, 2, 0)

    @property
    def usable(self) -> int:
        return self.cluster.device.usable_bytes


def published(cluster: ClusterSpec) -> bool:
    """Whether its device is one of which the terms know the rates; a measured machine mostly is none."""
    try:
        system_of(cluster)
    except InputError:
        return False
    return True


def _smallest_of(rows: Strategies, zero: int, recompute: str, whole: bool) -> Strategies:
    """All sharded; of cores, one micro-batch at a time with this recomputation."""
    sharded = rows.dp * rows.cp > 1
    best = replace(rows, zero=np.where(sharded, zero, 0), shard=np.where(zero, rows.dp, 1))
    if whole:
        return best
    one = np.ones_like(rows.dp)
    return replace(best, schedule=NAMES.index("naive") * one, recompute=RECOMPUTE.index(recompute) * one)


def _sliced(rows: Strategies, price: Column) -> Floats:
    found = np.empty(len(rows))
    for at in range(0, len(rows), _SLICE):
        part = rows.take(slice(at, at + _SLICE))
        found[at : at + _SLICE] = price(part)
    return found
