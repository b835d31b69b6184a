"""Sizes of a job and a strategy that determine the price of a step, as plain numbers (LayoutColumns)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from phalanx.cost.hardware.columns import Column
from phalanx.cost.ledger.compressed import DENSELY, Compressed
from phalanx.cost.ledger.model_shape import Shape
from phalanx.cost.ledger.pipeline_formulas import bubble, chunks_per_rank, micro_batches_in_flight, schedule_number
from phalanx.cost.ledger.recomputed import NO_MODULES, Modules, recomputation_of
from phalanx.schedule.pipeline.schedules import facts_of
from phalanx.spec.cluster.spec import LARGEST_HOST
from phalanx.spec.job import DTYPE_BYTES, Job
from phalanx.spec.number_formats import NUMBER_FORMATS
from phalanx.spec.strategy.recompute import encode
from phalanx.spec.strategy.spec import Strategy

FORMATS = tuple(f for f in NUMBER_FORMATS.values() if f.priced_as == f.name)
"""Number formats of matrix products that have a price; bfloat16's applies to every compute type."""
NARROW = tuple(f.narrow for f in FORMATS)
"""By FORMATS: whether operands are cast to it."""
FORMAT_INDEX = {
    f.name: FORMATS.index(NUMBER_FORMATS[f.priced_as]) for f in NUMBER_FORMATS.values() if f.priced_as is not None
}
"""Index into FORMATS of the entry that prices each format of products."""


@dataclass(frozen=True)
class LayoutColumns:
    """The sizes of a strategy and a job. `shards`: ranks over which ZeRO shards. `format`: index into FORMATS.
    `activation_bytes`: bytes of an activation element. `full`, `selective`: share of the blocks whose forward pass,
    or attention core, is recomputed. Strides: see `strides`."""

    tp: Column
    sp: Column
    pp: Column
    virtual: Column
    dp: Column
    cp: Column
    ulysses: Column
    ep: Column
    etp: Column
    zero: Column
    shards: Column
    micro_batch: Column
    micro_batches: Column
    seq: Column
    full: Column
    selective: Column
    format: Column
    activation_bytes: Column
    tp_stride: Column
    """Distance in ranks from a rank to the next one along an axis of the mesh; determined by the order of axes."""
    cp_stride: Column
    dp_stride: Column
    pp_stride: Column
    bubble: Column = 1.0
    """The schedule's bubble over the bubble of 1f1b with equally many chunks per rank."""
    in_flight: Column = 0.0
    """Micro-batches whose activations the first pipeline rank holds at once; 0: as 1f1b or interleaved does."""
    in_flight_last: Column = 1.0
    """The same on the last pipeline rank."""
    v_shaped: Column = 0.0
    """1: the chunks of a pipeline lie in a V."""
    splits: Column = 0.0
    """1: the schedule runs gradients of inputs and of weights as separate actions."""
    frozen: Column = 0.0
    """1: weights have no gradients (only adapters are trained)."""
    compressed: Compressed = DENSELY
    """Compression of gradients."""
    group: Column = 1.0
    """Blocks between two inputs that full recomputation keeps."""
    modules: Modules = NO_MODULES
    """Recomputed modules of every block."""
    narrow_gathers: Column = 0.0
    """1: operands of blocks' products are gathered in 8 bits (job.precision.gather): parameters at level 3 of ZeRO,
    tokens under sequence parallelism."""
    document: Column = 0.0
    """Mean tokens of the documents to which attention is confined; 0: the whole sequence."""
    first_blocks: Column = -1.0
    """Prescribed blocks of the first pipeline rank; -1: as spread by `stages`."""
    most_blocks: Column = -1.0
    """Prescribed blocks of the fullest rank."""
    last_blocks: Column = -1.0
    """Prescribed blocks of the last rank."""
    most_place: Column = -1.0
    """Place of the first fullest rank, if blocks are prescribed."""
    dp_local: Column = 1.0
    """Number of replicas that step alone (strategy.local); `dp` is the degree inside one."""
    local: Column = 0.0
    """Steps between their synchronisations; 0: gradients are reduced in every step."""
    outer_bytes: Column = 0.0
    """Bytes per parameter that the outer optimizer keeps on the shards."""
    changes: Compressed = DENSELY
    """Traffic of the changes of replicas that take steps alone."""
    outer_cover: Column = 0.0
    """Share of all steps in which changes of replicas that step alone are in transit."""
    outer_traffic: Column = 0.0
    """Bytes per parameter that the outer optimizer's update reads and writes."""
    node: Column = 0.0
    """Ranks of a node; 0: not known."""

    @property
    def tokens(self) -> Column:
        """Tokens of one micro-batch on one rank."""
        return self.micro_batch * self.seq / self.cp

    @property
    def world(self) -> Column:
        """World size."""
        return self.tp * self.pp * self.dp * self.cp * self.dp_local

    def data_stride(self, node: Column) -> Column:
        """Return the distance in ranks to the next rank with the same part of the model, over dp and cp together. If
        the mesh has other axes between these two, it is the stride with which as many of these ranks are in a node of
        `node` ranks."""
        between = np.where(self.cp_stride < self.dp_stride, node / self.cp, node / self.dp)
        near, far = np.minimum(self.cp_stride, self.dp_stride), np.maximum(self.cp_stride, self.dp_stride)
        inner = np.where(self.cp_stride < self.dp_stride, self.cp, self.dp)
        both = np.clip(between, near, far / inner)
        return np.where(np.asarray(self.cp) == 1, self.dp_stride, np.where(self.dp == 1, self.cp_stride, both))

    def on_nodes(self, node: Column) -> LayoutColumns:
        """Return the layout on nodes of `node` ranks: groups that straddle them, such as tp=3 on nodes of 8, get a
        stride with as few ranks per node as the worst group has. If possible, ranks are spread equally over racks and
        pods: 256 ranks on racks of 72 are 64 on each of 4."""
        each = self.world / np.ceil(self.world / np.asarray(node))
        equal = (np.asarray(node) > LARGEST_HOST) & (each == np.floor(each))
        on = replace(self, node=np.where(equal, each, node))
        return replace(on, tp_stride=on.apart(self.tp, self.tp_stride))

    def apart(self, size: Column, stride: Column) -> Column:
        """Return the stride of groups of `size` ranks on the nodes, if these are known."""
        if not np.any(np.asarray(self.node) > 0):
            return stride
        corrected = _straddling(size, stride, self.node, self.world)
        return stride if corrected is None else corrected

    def chain(self, ranks: Column) -> Column:
        """Return Flow.chain for messages along `ranks` ranks with the stride of their axis."""
        return ranks

    @property
    def expert_stride(self) -> Column:
        """Distance in ranks to the rank with the next experts: ep x etp takes a stage's innermost ranks first, and
        other stages may lie between them."""
        return self.etp * np.where(self.pp_stride < self.ep * self.etp, self.pp, 1)

    @property
    def edp_stride(self) -> Column:
        """Distance in ranks to the next rank with the same experts."""
        return self.ep * self.expert_stride

    @property
    def etp_stride(self) -> Column:
        """Distance in ranks to the rank with the next part of the same expert."""
        return np.where(self.pp_stride < self.etp, self.pp, 1)

    @property
    def ring_stride(self) -> Column:
        """Distance in ranks to the next rank of a ring: ulysses takes the innermost ranks of cp."""
        return self.cp_stride * self.ulysses

    @property
    def step_tokens(self) -> Column:
        """Tokens of one step on all ranks."""
        return self.micro_batch * self.micro_batches * self.dp * self.dp_local * self.seq


@dataclass(frozen=True)
class PlacedLayout(LayoutColumns):
    """A layout with ranks placed on GPUs: each axis has the stride with which an even mesh has as many ranks of a
    group in every block. `cp_stride` is that of ulysses."""

    data: Column = 1.0
    """Stride over dp and cp together."""
    expert: Column = 1.0
    """Stride to the next experts."""
    same_expert: Column = 1.0
    """Stride to the next rank with the same experts."""
    expert_part: Column = 1.0
    """Stride to the next part of the same expert."""
    ring: Column = 1.0
    """Stride of the slowest hop of a ring."""

    def on_nodes(self, node: Column) -> LayoutColumns:
        """Return this layout: its strides already account for the nodes."""
        return self

    def data_stride(self, node: Column) -> Column:
        """Return `data`, regardless of the size of a node."""
        return self.data

    def chain(self, ranks: Column) -> Column:
        """Return 1: a stride of a pipeline or a ring is already its slowest hop's."""
        return 1.0

    @property
    def expert_stride(self) -> Column:
        """Return `expert`."""
        return self.expert

    @property
    def edp_stride(self) -> Column:
        """Return `same_expert`."""
        return self.same_expert

    @property
    def etp_stride(self) -> Column:
        """Return `expert_part`."""
        return self.expert_part

    @property
    def ring_stride(self) -> Column:
        """Return `ring`."""
        return self.ring


def _straddling(size: Column, stride: Column, node: Column, world: Column) -> Column | None:
    """Return the strides of an axis on nodes of `node` ranks; None if no row's groups straddle nodes. Groups fill
    blocks of size x stride neighbouring ranks. If these neither divide a node nor are whole nodes, some group has
    only gcd(block, node) / stride ranks in a node."""
    block = np.asarray(size * stride)
    straddles = (np.asarray(size) > 1) & (np.asarray(world) > node) & (block % node != 0) & (node % block != 0)
    if not np.any(straddles):
        return None
    members = np.maximum(np.gcd(block.astype(np.int64), np.asarray(node).astype(np.int64)) // stride, 1)
    return np.where(straddles, np.maximum(stride, node / members), stride)


@dataclass(frozen=True)
class Stages:
    """Blocks on a pipeline rank: on the fullest (`most`), on the first, which has the embedding, and on the last,
    which has the head."""

    most: Column
    last: Column
    first: Column
    fullest: Column = 1.0
    """Index of the first rank with `most` blocks if the first has fewer; else 1."""


def stages(shape: Shape, layout: LayoutColumns, balanced: Column) -> Stages:
    """Return the spread of blocks over pipeline ranks: even by count, or, if `balanced`, by work, as in
    `blocks_by_work`."""
    most = np.ceil(shape.layers / layout.pp)  # with several chunks per rank too: longer ones go round-robin
    last = np.floor(shape.layers / layout.pp)
    each = _work(shape) / layout.pp
    last_by_work = np.maximum(shape.layers - _whole((layout.pp - 1) * each), 0)
    by_work = (np.asarray(balanced) > 0) & (np.asarray(layout.pp) > 1)
    most = np.where(by_work, np.minimum(_whole(each), shape.layers), most)
    last = np.where(by_work, last_by_work, last)
    given = np.asarray(layout.most_blocks) >= 0
    return Stages(
        np.where(given, layout.most_blocks, most),
        np.where(given, layout.last_blocks, last),
        np.where(given, layout.first_blocks, most),
        np.maximum(layout.most_place, 1.0),
    )


def _work(shape: Shape) -> Column:
    """Return the work of a model in units of blocks: the head counts by its multiplied weights relative to a
    block's."""
    return shape.layers + _head_in_blocks(shape)


def _whole(blocks: Column) -> Column:
    """Return ceil(blocks), tolerant of rounding errors."""
    return np.ceil(blocks - 1e-9)


def blocks_by_work(shape: Shape, pp: int) -> tuple[int, ...]:
    """Return the blocks of each pipeline rank if every rank takes blocks until it has its share of the work
    (nanotron, src/nanotron/models/base.py:187); each rank between the ends has at least one."""
    layers, each = int(shape.layers), float(_work(shape)) / pp
    ends = [min(int(_whole(rank * each)), layers - max(pp - 1 - rank, 0)) for rank in range(1, pp)]
    return tuple(np.diff([0, *ends, layers]).tolist())


def _head_in_blocks(shape: Shape) -> Column:
    """Return the head's weights over a block's active ones."""
    return shape.vocab * shape.hidden / shape.mean(lambda kind: kind.active_params)


def stages_by_work(shape: Shape, layout: LayoutColumns) -> Stages:
    """Return the spread of blocks over pipeline ranks by our own partition (schedule/partition/balance.py): the
    fewest possible on the fullest rank, with the head counted in blocks; the head's rank (the first one in a V) has
    the remainder. Prescribed blocks stay."""
    head, p = _head_in_blocks(shape), layout.pp
    fewer = np.floor((shape.layers + head) / p)

    def left(most: Column) -> Column:
        """Return the blocks on the head's rank if the others have `most`."""
        return np.maximum(shape.layers - (p - 1) * most, 0.0)

    slowest, slower = (np.maximum(most, left(most) + head) for most in (fewer, fewer + 1))
    most = np.where(slowest <= slower, fewer, fewer + 1)
    with_head = np.maximum(np.floor(most - head), left(most))
    # The others share the rest; the remainder lies on the last of them.
    others = np.maximum(p - 1, 1)
    inner, more = np.divmod(shape.layers - with_head, others)
    v_shaped, even = np.asarray(layout.v_shaped) > 0, stages(shape, layout, 0.0)
    apart = (np.asarray(p) > 1) & (np.asarray(layout.most_blocks) < 0)
    return Stages(
        np.where(apart, most, even.most),
        np.where(apart, np.where(v_shaped, inner, with_head), even.last),
        np.where(apart, np.where(v_shaped, with_head, inner), even.first),
        np.where(apart, np.maximum(others - more, 1.0), even.fullest),
    )


_HEAVIER = np.array([1.5 * max(16 / f.bits, 1.0) for f in FORMATS])
"""By FORMATS: upper bound on a head's seconds per weight over a block's. Its loss moves logits too, and its products
stay in 16 bits where a block's are narrow."""


def least_cut_layout(shape: Shape, layout: LayoutColumns) -> LayoutColumns:
    """Return layouts with at most as many blocks on each rank as under any balanced or equal cut, for a lower bound
    on the memory of all cuts: on the fullest rank the mean rounded up, on the first one at most the mean, and on the
    head's rank the mean less the blocks for which the head may count. Prescribed blocks stay."""
    p, mean = layout.pp, shape.layers / layout.pp
    head = _HEAVIER[np.asarray(layout.format, dtype=int)] * _head_in_blocks(shape)
    with_head = np.maximum(np.floor(mean - head * (p - 1) / p) - 1, 0.0)
    v_shaped, open_ = np.asarray(layout.v_shaped) > 0, (np.asarray(p) > 1) & (np.asarray(layout.most_blocks) < 0)
    # Blocks of unlike weight are spread by their seconds, so that a rank may have only heavy ones.
    heaviest = shape.most(lambda kind: kind.active_params) / shape.mean(lambda kind: kind.active_params)
    spread = np.where(len(shape.kinds) > 2, heaviest, 1.0)
    few = np.maximum(np.floor(mean / spread) - shape.routes, 0.0)
    return replace(
        layout,
        first_blocks=np.where(open_, np.where(v_shaped, with_head, few), layout.first_blocks),
        most_blocks=np.where(open_, np.ceil(mean), layout.most_blocks),
        last_blocks=np.where(open_, np.where(v_shaped, few, with_head), layout.last_blocks),
        most_place=np.where(open_, p - 1.0, layout.most_place),
    )


def strides(s: Strategy) -> dict[str, int]:
    """Return the distance in ranks from a rank to the next one along each axis of the mesh."""
    result, stride = {}, 1
    for axis in reversed(s.order.split("/")):
        result[axis] = stride
        stride *= getattr(s, axis)
    return result


def layout(s: Strategy, job: Job, layers: int, number_format: str = "bfloat16") -> LayoutColumns:
    """Return the LayoutColumns of one strategy. Raises KeyError for a number format without a price."""
    m, number, stride = s.accumulation(job), schedule_number(s.schedule), strides(s)
    first, last = micro_batches_in_flight(number, m, s.pp)
    chunks = float(chunks_per_rank(number, s.virtual)) if s.pp > 1 else s.virtual
    again = recomputation_of(encode(s.recompute), layers, s.pp * chunks)
    return LayoutColumns(
        tp=s.tp,
        sp=float(s.sp),
        pp=s.pp,
        virtual=chunks,
        dp=s.dp // s.dp_local,
        cp=s.cp,
        ulysses=s.ulysses,
        ep=s.ep,
        etp=s.etp,
        zero=s.zero,
        shards=s.shards,
        micro_batch=s.micro_batch,
        micro_batches=m,
        seq=job.seq,
        full=float(again.full),
        selective=float(again.selective),
        group=float(again.group),
        modules=again.modules,
        format=FORMAT_INDEX[number_format],
        activation_bytes=DTYPE_BYTES[job.precision.compute],
        narrow_gathers=float(job.precision.gathers_narrow),
        bubble=float(bubble(number, m, s.pp, s.virtual)),
        in_flight=float(first),
        in_flight_last=float(last),
        v_shaped=float(s.pp > 1 and facts_of(s.schedule).v_shaped),
        splits=float(s.pp > 1 and facts_of(s.schedule).split_backward),
        tp_stride=stride["tp"],
        cp_stride=stride["cp"],
        dp_stride=stride["dp"],
        pp_stride=stride["pp"],
        dp_local=s.dp_local,
        local=s.local,
        outer_bytes=job.outer_bytes + job.under_way_bytes if s.local else 0.0,
        outer_cover=job.outer.cover(s.outer_compressor is not None) / max(s.local, 1),
        outer_traffic=job.outer_traffic,
    )
