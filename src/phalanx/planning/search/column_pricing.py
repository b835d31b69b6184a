"""Seconds and bytes of many strategies at once: the terms of a step (cost/analytic) over columns of strategies."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.cost.analytic.block import block_kinds, least_block_kinds
from phalanx.cost.analytic.chips import system_of
from phalanx.cost.analytic.memory import Memory, allocatable_bytes, memory
from phalanx.cost.analytic.option_effects import constants, extended_shape, layout_with_options, require_priced
from phalanx.cost.analytic.profile import Profile
from phalanx.cost.analytic.step import Step, step
from phalanx.cost.hardware.columns import Column
from phalanx.cost.hardware.system import System
from phalanx.cost.ledger.model_shape import Shape, shape
from phalanx.cost.ledger.pipeline_formulas import (
    bubble,
    chunks_per_rank,
    micro_batches_in_flight,
    schedule_names,
    schedule_number,
    splits_backward,
    v_shaped,
)
from phalanx.cost.ledger.rank_layout import FORMAT_INDEX, LayoutColumns, least_cut_layout
from phalanx.cost.ledger.recomputed import recomputation_of
from phalanx.frameworks.registry import DOCUMENTED, facts, priced_stack
from phalanx.frameworks.stack import Stack, counted
from phalanx.planning.search import HEADROOM, limits
from phalanx.planning.search.limits import SearchLimits
from phalanx.planning.search.strategy_columns import ORDERS, SEARCHED, Ints, Options, Strategies, concatenate
from phalanx.schedule.pipeline.given_layout import ends_of
from phalanx.schedule.pipeline.schedules import facts_of
from phalanx.spec.cluster.spec import ClusterSpec
from phalanx.spec.errors import InputError
from phalanx.spec.job import DTYPE_BYTES, Job
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.recompute import encode
from phalanx.spec.strategy.spec import Strategy
from phalanx.spec.strategy.stack_options import AS_RELEASED, OPTION_FIELDS, StackOptions
from phalanx.spec.strategy.where import Condition

Floats = npt.NDArray[np.float64]
_SLICE = 16_384
"""Rows priced together: enough that calls cost little compared with arithmetic, few enough for the cache."""


@dataclass(frozen=True)
class Pricing:
    """A model, cluster, job and software stack, under which columns of strategies are priced.

    Methods take strategies as columns (`rows`) and return one number per row. For lower bounds, `complete` is False
    for cores (plain 1f1b, no recomputation, no sharding chosen yet), True for rows with everything but the sharding
    chosen."""

    model: ModelSpec
    cluster: ClusterSpec
    job: Job
    stack: str
    """Name of the software stack (frameworks/registry.py)."""
    number_format: str = "bfloat16"
    """Number format of matrix products, by name."""
    rates: System | None = None
    """Rates of chips and links more accurate than the cluster's datasheets; None: the datasheets'."""
    wanted: tuple[Condition, ...] = ()
    """Conditions on the strategies that a search may offer."""
    extra: StackOptions = AS_RELEASED
    """Options of the stack beyond the strategies."""
    free: bool = False
    """Whether a search may offer layouts that the stack's row refuses: for stacks of published runs, which ran."""
    headroom: float = 0.0
    """Share of a device's memory that stays free."""

    @cached_property
    def shape(self) -> Shape:
        """The model's sizes used by the formulas."""
        return extended_shape(shape(self.model), self.extra)

    @cached_property
    def system(self) -> System:
        """Rates of the cluster's chips and links. Raises InputError for a device without published rates."""
        return self.rates or system_of(self.cluster)

    @cached_property
    def profile(self) -> Profile:
        """Constants and policies of the software stack. Raises InputError for options without a price."""
        require_priced(self.extra, self.cluster.device.kind, self.number_format)
        return constants(self.stack, self.job, shape(self.model), self.extra)

    @cached_property
    def options(self) -> Options:
        """Choices open to a search: levels of ZeRO, schedules and Ulysses that the stack runs. With flash attention,
        selective recomputation frees nothing, unless the product after it is repeated too. The order of the mesh
        matters only if links differ, and our runtime has one."""
        row = self.row
        stack = priced_stack(self.stack).as_priced if row is None else row
        flash = bool(np.all(self.profile.flash)) and not np.any(self.profile.result_again)
        kinds = limits.recompute_kinds(row, self.model, flash, bool(np.all(self.profile.per_op)))
        rates = {t.bandwidth_bytes_per_s_per_gpu_per_direction for t in self.cluster.tiers}
        return Options(
            schedules=(*stack.schedules, *limits.schedule_files(self.wanted)),
            recompute=tuple(kind for kind in kinds if stack.refusal(Strategy(recompute=kind)) is None),
            orders=SEARCHED if len(rates) > 1 and self.stack != "phalanx" else SEARCHED[:1],
            limits=SearchLimits(stack, self.wanted, self._constants),
            extra=self.extra,
            zero=stack.zero,
            zero_in_pipeline=stack.zero_in_pipeline,
            ulysses=stack.ulysses,
            local=limits.steps_alone(self.wanted),
        )

    @property
    def row(self) -> Stack | None:
        """The row of the stack's refusals; None for constants without one (older releases, any stack)."""
        return None if self.free else DOCUMENTED.get(self.stack)

    @property
    def lists_blocks(self) -> bool:
        """Whether the blocks of each chunk can be listed: `layers=auto` then means the search's best cut, else the
        stack's own."""
        return self.row is None or self.row.strategy["layers"].values is None

    @property
    def _constants(self) -> dict[str, Any]:
        """Constants read by limits: sizes of model and job, options, GPUs of a node."""
        own = {name: getattr(self.extra, name) for name in OPTION_FIELDS} | facts(self.model, self.job)
        return own | counted(self.extra, self.model.layers) | {"gpus_per_node": self.cluster.ranks_per_node}

    def layout(self, rows: Strategies) -> LayoutColumns:
        """Translate rows into the columns that the formulas read, as rank_layout.layout does for one strategy."""

        def as_float(column: Ints) -> Floats:
            return column.astype(np.float64)  # convert once, not in every operation

        m = rows.micro_batches(self.job)
        first, last = micro_batches_in_flight(rows.schedule, m, rows.pp)
        stride = _strides(rows)
        virtual = chunks_per_rank(rows.schedule, rows.virtual)
        again = recomputation_of(rows.recompute, self.model.layers, rows.pp * virtual)
        even = LayoutColumns(
            tp=as_float(rows.tp),
            sp=as_float(rows.sp),
            pp=as_float(rows.pp),
            virtual=virtual,
            dp=as_float(rows.dp // rows.dp_local),
            cp=as_float(rows.cp),
            ulysses=as_float(rows.ulysses),
            ep=as_float(rows.ep),
            etp=as_float(rows.etp),
            zero=as_float(rows.zero),
            shards=as_float(rows.shards),
            micro_batch=as_float(rows.micro_batch),
            micro_batches=as_float(m),
            seq=self.job.seq,
            full=again.full,
            selective=again.selective,
            group=again.group,
            modules=again.modules,
            format=FORMAT_INDEX[self.number_format],
            activation_bytes=DTYPE_BYTES[self.job.precision.compute],
            narrow_gathers=float(self.job.precision.gathers_narrow),
            tp_stride=as_float(stride["tp"]),
            cp_stride=as_float(stride["cp"]),
            dp_stride=as_float(stride["dp"]),
            pp_stride=as_float(stride["pp"]),
            bubble=bubble(rows.schedule, m, rows.pp, rows.virtual),
            in_flight=first,
            in_flight_last=last,
            v_shaped=v_shaped(rows.schedule),
            splits=splits_backward(rows.schedule) * (rows.pp > 1),
            dp_local=as_float(rows.dp_local),
            local=as_float(rows.local),
            outer_bytes=np.where(rows.local, self.job.outer_bytes + self.job.under_way_bytes, 0.0),
            outer_cover=self.job.outer.cover(compressed=False) / np.maximum(rows.local, 1),
            outer_traffic=self.job.outer_traffic,
        )
        return layout_with_options(even, self.extra, self._given_blocks(rows))

    def _given_blocks(self, rows: Strategies) -> Sequence[Column] | None:
        """Return columns of the blocks of the first, the fullest and the last pipeline rank and of the place of the
        fullest, -1 in rows without prescribed blocks; None if the options prescribe none."""
        o = self.extra
        if not (o.first_stage_layers or o.last_stage_layers or o.embedding_as_layer or o.loss_as_layer):
            return None
        keys = np.stack([rows.pp, rows.virtual, rows.schedule], axis=1)
        keys, place = np.unique(keys, axis=0, return_inverse=True)
        ends = [self._ends(*key.tolist()) for key in keys]
        columns = np.array(ends, dtype=float)[place.reshape(-1)]
        return [*columns.T]

    def _ends(self, pp: int, virtual: int, schedule: int) -> tuple[int, ...]:
        s = Strategy(pp=pp, virtual=virtual, schedule=schedule_names()[schedule])
        return ends_of(s, self.extra, self.model.layers + self.extra.mtp)

    def step(self, rows: Strategies) -> Step:
        """Step time by term, seconds, with the bubble of each row's schedule."""
        return step(self.shape, self.layout(rows), self.system, self.profile)

    def seconds(self, rows: Strategies) -> Floats:
        """Step time of each row."""
        return _by_slices(rows, lambda part: self.step(part).seconds)

    def memory(self, rows: Strategies) -> Memory:
        """Bytes of the fullest rank by term, with the CPU launching ahead of the GPU."""
        return memory(self.shape, self.layout(rows), self.profile)

    def held(self, how: LayoutColumns) -> Column:
        """Peak reserved bytes of the fullest rank of each element of a layout."""
        return memory(self.shape, how, self.profile).reserved

    def bytes_(self, rows: Strategies) -> Floats:
        """Peak reserved bytes of the fullest rank, with equal chunks unless blocks are prescribed; a row fits if they
        do not exceed `usable`."""
        return _by_slices(rows, lambda part: self.memory(part).reserved)

    def least_of_cuts(self, rows: Strategies) -> Memory:
        """Lower bound on memory over all cuts into chunks that `layers=auto` may mean, with the CPU not launching
        ahead of the GPU."""
        how = self.layout(rows)
        if self.lists_blocks:
            how = least_cut_layout(self.shape, how)
        return memory(self.shape, how, self.profile, ahead=0.0)

    def least_reserved(self, rows: Strategies) -> Floats:
        """Reserved bytes of `least_of_cuts`."""
        return _by_slices(rows, lambda part: self.least_of_cuts(part).reserved)

    def least_seconds(self, rows: Strategies, complete: bool) -> Floats:
        """Lower bound on the seconds of each row over all shardings. Communication of gradients and parameters is
        left out, the update is divided over all shards, and the order of the mesh is the better one: stages as
        neighbours, or replicas where that keeps experts together. For cores the bubble is left out too, so that the
        bound holds for all schedules and kinds of recomputation."""
        sharded = np.where(rows.dp * rows.cp > 1, 1, 0)
        best = replace(rows, zero=sharded, shard=rows.dp, order=np.ones_like(rows.order))

        def least(part: Strategies) -> Column:
            priced = step(self.shape, self.layout(part), self.system, self.profile, replicas=False)
            return priced.seconds - (0 if complete else priced.terms["bubble"])

        seconds = _by_slices(best, least)
        spread = np.flatnonzero((rows.ep * rows.etp > rows.tp * rows.cp) & (rows.pp > 1) & (rows.dp > 1))
        if len(spread):
            other = best.take(spread)
            other = replace(other, order=np.zeros_like(other.order))
            seconds[spread] = np.minimum(seconds[spread], _by_slices(other, least))
        return seconds

    def block_seconds(self, rows: Strategies, spread: bool = True) -> Floats:
        """Seconds of all blocks' passes in a step of rows without a pipeline: a lower bound on the step of every
        strategy with these ranks in pipelines of any length, since some rank has at least the mean number of blocks,
        and experts are never closer together. Without `spread`, a lower bound over all ways to spread experts."""
        best = replace(rows, zero=np.where(rows.dp * rows.cp > 1, 1, 0), shard=rows.dp)
        kinds_of = block_kinds if spread else least_block_kinds

        def passes(part: Strategies) -> Column:
            how = self.layout(part).on_nodes(self.system.tiers[0].ranks)
            kinds = kinds_of(self.shape, how, self.system, self.profile)
            m = self.job.global_batch / (how.micro_batch * how.dp)  # of a pipeline's ranks together: not whole
            return m * sum(count * (block.forward + block.backward) for block, count in kinds)

        return _by_slices(best, passes)

    def least_bytes(self, rows: Strategies, complete: bool, of_any_cut: bool = True) -> Floats:
        """Lower bound on the bytes of each row over all shardings, and over all cuts unless `of_any_cut` is off; for
        cores also over all schedules and kinds of recomputation."""
        smallest = np.full(len(rows), np.inf)
        for zero, kind, schedule in self._least_ways(complete):
            has = np.flatnonzero(self._has_level(rows, zero))
            some = _smallest_of(rows.take(has), zero, kind, schedule)
            bytes_ = self.least_reserved(some) if of_any_cut else self.bytes_(some)
            smallest[has] = np.minimum(smallest[has], bytes_)
        return smallest

    def may_fit(self, rows: Strategies, complete: bool) -> npt.NDArray[np.bool_]:
        """Whether the lower bound on memory of each row fits; faster than `least_bytes`, since one way that fits is
        enough."""
        fits, hopeless = np.zeros(len(rows), dtype=bool), np.zeros(len(rows), dtype=bool)
        has = {zero: self._has_level(rows, zero) for zero in self._smallest}
        most = np.maximum.reduce([np.where(of_rows, zero, -1) for zero, of_rows in has.items()])
        ways = self._least_ways(complete)
        too_much = {schedule: np.zeros(len(rows), dtype=bool) for *_, schedule in ways}
        while ways and not np.all(fits | hopeless):
            undecided = np.flatnonzero(~fits & ~hopeless)
            count = max(1, _SLICE // len(undecided))  # with few rows, many pairs are tried in one call
            parts, own, level, shape = [], [], [], []
            for zero, kind, schedule in ways[:count]:
                those = undecided[has[zero][undecided]]
                parts.append(_smallest_of(rows.take(those), zero, kind, schedule))
                own.append(those)
                level.append(np.full(len(those), zero))
                shape.append(np.full(len(those), schedule))
            some, row, zeros, names = concatenate(parts), *(np.concatenate(each) for each in (own, level, shape))
            for start in range(0, len(row), _SLICE):
                part = slice(start, start + _SLICE)
                needed = self.least_of_cuts(some.take(part))
                fits[row[part][needed.reserved <= self.usable]] = True
                # No level keeps less state than the highest: rows that exceed the device with it, however they are
                # recomputed, or without gathers on either end of a pipeline, fit at none.
                gathered = 2 * (1 + self.profile.fragments) * needed.terms["gathered"]
                least = needed.reserved - gathered if complete else needed.steady
                over = (zeros[part] == most[row[part]]) & (least > self.usable)
                for schedule, of_shape in too_much.items():
                    of_shape[row[part][over & (names[part] == schedule)]] = True
            hopeless = np.logical_and.reduce(list(too_much.values()))
            ways = ways[count:]
        return fits

    def _least_ways(self, complete: bool) -> list[tuple[int, str, str]]:
        """(ZeRO level, recomputation, schedule) among which is the one of least memory, likely ones first; "" means
        the row's own. Chunks in a V put both ends on the first rank, where others put one on each end."""
        if complete:
            return [(zero, "", "") for zero in self._smallest]
        kinds = sorted(self.options.recompute, key=lambda kind: kind != "full")
        shapes = ["naive", *[name for name in self.options.schedules if facts_of(name).v_shaped][:1]]
        return [(zero, kind, schedule) for schedule in shapes for kind in kinds for zero in self._smallest]

    @cached_property
    def _smallest(self) -> tuple[int, ...]:
        """ZeRO levels among which is the one of least memory, likely ones first; 0 only if the stack's constants do
        not say that two shards keep less."""
        p = self.profile
        levels = sorted({*self.options.zero, *self.options.zero_in_pipeline}, reverse=True)
        less = 1 in levels and np.all(p.whole_bytes + p.replica_bytes >= p.kept_bytes + p.shard_bytes / 2)
        return tuple(level for level in levels if level or not less)

    def _has_level(self, rows: Strategies, zero: int) -> npt.NDArray[np.bool_]:
        """Whether the stack has a ZeRO level for each row; rows with nothing to shard over count with every level."""
        alone, piped = zero in self.options.zero, zero in self.options.zero_in_pipeline
        return np.asarray(np.where(rows.pp > 1, piped, alone) | (rows.dp * rows.cp == 1))

    @property
    def usable(self) -> int:
        """Bytes of a device available to a strategy: the stack allocator's, less the headroom."""
        return int((1 - self.headroom) * self.allocatable)

    @property
    def usable_by_default(self) -> int:
        """Bytes of a device available to a strategy with the default headroom, so that the meaning of `layers=auto`
        does not depend on the caller."""
        return int((1 - max(self.headroom, HEADROOM)) * self.allocatable)

    @property
    def allocatable(self) -> int:
        """Bytes of a device available to the stack's allocator."""
        return int(float(allocatable_bytes(self.cluster.device.usable_bytes, self.profile)))


def _strides(rows: Strategies) -> dict[str, Ints]:
    """Return the distance in ranks to the next rank along each axis, by axis, in each row's order."""
    sizes = {"pp": rows.pp, "dp": rows.dp, "cp": rows.cp, "tp": rows.tp}
    if not len(rows) or rows.order.max() < len(SEARCHED):  # as in every search: without a loop over orders
        inside, stages_inside = rows.tp * rows.cp, rows.order == SEARCHED.index("dp/pp/cp/tp")
        dp = np.where(stages_inside, inside * rows.pp, inside)
        pp = np.where(stages_inside, inside, inside * rows.dp)
        return {"tp": np.ones_like(rows.tp), "cp": rows.tp, "dp": dp, "pp": pp}
    result = {axis: np.ones_like(size) for axis, size in sizes.items()}
    for number in np.unique(rows.order).tolist():
        those = rows.order == number
        stride: Ints = np.ones_like(rows.tp)[those]
        for axis in reversed(ORDERS[number].split("/")):
            result[axis][those] = stride
            stride = stride * sizes[axis][those]
    return result


def has_published_rates(cluster: ClusterSpec) -> bool:
    """Whether the rates of the cluster's device are published; for a measured machine they rarely are."""
    try:
        system_of(cluster)
    except InputError:
        return False
    return True


def _smallest_of(rows: Strategies, zero: int, recompute: str, schedule: str) -> Strategies:
    """Return rows sharded over all ranks at this level of ZeRO; with a `schedule`, also with this recomputation and
    schedule ("": the rows' own)."""
    one, pipelined = np.ones_like(rows.dp), rows.pp > 1
    best = replace(rows, zero=zero * one, shard=rows.dp if zero else one)
    if not schedule:
        return best
    number = np.where(pipelined, schedule_number(schedule), schedule_number("naive")) * one
    return replace(best, schedule=number, recompute=encode(recompute) * one)


def _by_slices(rows: Strategies, price: Column) -> Floats:
    """Apply `price` to slices of the rows that fit the cache."""
    result = np.empty(len(rows))
    for start in range(0, len(rows), _SLICE):
        part = rows.take(slice(start, start + _SLICE))
        result[start : start + _SLICE] = price(part)
    return result
