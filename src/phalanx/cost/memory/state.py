"""Bytes of a rank's model state: weights, masters, optimizer state, gradients; and of its KV cache, the keys and
values of every token and block, or their latents.

grouped-query attention   2 kv_heads head_dim numbers per token and block; with tp, only for a rank's key heads,
                          with copies on neighbouring ranks if tp exceeds the key heads
latent attention          kv_rank + rope_dim, the same on every tp rank (DeepSeek-AI 2024a, table 1)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from phalanx.cost.compute import compression
from phalanx.cost.memory.attention_core import first_visible_bytes
from phalanx.cost.memory.cache import layer_cache
from phalanx.schedule.generation import Room
from phalanx.schedule.gradients.buckets import (
    NUMBER_BYTES,
    Bucket,
    gathered_elements,
    gathers_in_8_bits,
    layout,
    reduction_slots,
    scale_elements,
    scales,
    slot_sizes,
)
from phalanx.schedule.gradients.compression import outer_reduction
from phalanx.schedule.gradients.sharding import sharding_of
from phalanx.schedule.layers.routing import depends_on_other_tokens, own_tokens
from phalanx.schedule.layers.windows import mask_elements
from phalanx.schedule.layout import RankView
from phalanx.spec.job import DTYPE_BYTES, DType, Job, widest
from phalanx.spec.model.blocks.lowering import architecture
from phalanx.spec.model.spec import ModelSpec, holds_one_tied_copy, parameters
from phalanx.spec.optimizers import COUNT_BYTES
from phalanx.spec.strategy.compressors import Compression
from phalanx.spec.strategy.spec import Strategy


@dataclass(frozen=True)
class State:
    """Bytes that one rank holds throughout a step."""

    parameters: int
    master: int
    gradients: int
    optimizer: int
    buffers: int
    """Memory that buckets and units share in turn (gradients being reduced, gathered parameters), the buffer in which
    tp ranks sum partial gradients, and shards in 8 bits."""
    tables: int
    batch: int
    compression: int = 0
    """Residuals (error feedback) and messages of compressed gradients."""
    scratch: int = 0
    """Temporary bytes of coding a gradient; not in `total`, since no term has their lifetime."""
    cache: int = 0
    """The KV cache of generation."""
    outer: int = 0
    """For replicas that step alone: their masters before these steps, and the outer optimizer's momentum."""

    @property
    def total(self) -> int:
        """Bytes held throughout the step."""
        model = self.parameters + self.master + self.gradients + self.optimizer
        return model + self.buffers + self.tables + self.batch + self.compression + self.cache + self.outer


def updated_elements(local: ModelSpec, s: Strategy, matrices: bool = False) -> int:
    """Return the number of elements that a rank updates, without padding, if shards are equal; with `matrices`, in
    matrices of hidden layers only. `local`: the rank's part of the model. Without ZeRO it updates all elements, even
    if quantised gradients are summed part by part."""
    held = [p for p in parameters(local) if p.matrices or not matrices]
    total = sum(p.numel for p in held)
    if s.shards == 1:
        return total
    experts = sum(p.numel for p in held if p.of_experts) if s.separate_experts else 0
    return (total - experts) // layout(s)[0] + experts // layout(s, experts=True)[0]


def owned_elements(view: RankView, shard: tuple[int, int], matrices: bool = False) -> tuple[int, int]:
    """Return the numbers of elements, and of pieces of parameters, that the rank with this shard updates: its parts
    of the buckets, without padding; with `matrices`, in matrices of hidden layers only."""
    s, elements, pieces = view.strategy, 0, 0
    for bucket in view.buckets:
        part = bucket.padded(s) // bucket.parts(s)
        first, start = shard[bucket.experts] * part, 0
        for p in bucket.parameters:
            overlap = min(start + p.numel, first + part) - max(start, first) if p.matrices or not matrices else 0
            elements, pieces = elements + max(0, overlap), pieces + (overlap > 0)
            start += p.numel
    return elements, pieces


def model_state(view: RankView) -> State:
    """Return the model state of a rank: unsharded without ZeRO, else its shards of the padded buckets and the memory
    in which they are gathered or reduced; and its share of the batch, as int64 token ids."""
    job, s, local, cut = view.job, view.strategy, view.local, view.buckets
    p, sharding = job.precision, sharding_of(s)
    padded = view.padded
    gradients = sum(padded)  # elements; parameters are views of buckets only with ZeRO-1 and 2
    n = gradients if sharding.state else local.parameter_count
    shard_elements = sum(size // b.parts(s) for b, size in zip(cut, padded, strict=True)) if sharding.state else n
    master, reduce, accumulate = (DTYPE_BYTES[d] for d in (p.master_dtype, p.reduce_dtype, p.accumulate_dtype))
    c = s.compressor
    if c is not None:
        reduce = accumulate  # the compressor reads gradients in the accumulate dtype
    compute, separate_reduce_buffer = DTYPE_BYTES[p.compute], c is None and p.reduce_dtype != p.accumulate_dtype
    elements, pieces = shard_elements, len(parameters(local))
    if sharding.state and view.shard is not None:
        elements, pieces = owned_elements(view, view.shard)
    separate = job.separate
    context, model = view.context, view.model
    rows = context.tokens if context.parallel and not separate else model.max_seq
    rotary = rows * model.rotary_width * compute if model.position == "rotary" else 0
    # The mask of a window is built once, the same for every sequence.
    hiding = {w for i in view.stage.held_blocks if (w := view.stage.window_of(i)) is not None and w < job.seq}
    mask = 0 if separate else sum(mask_elements(job.seq, w) for w in hiding) * compute
    if context.parallel:
        mask = 0 if separate else sum(first_visible_bytes(view.stage, context, 1, False).values())
        mask += (context.tokens + job.seq) * 8  # positions
    coded: tuple[Compression, Sequence[Bucket], Strategy] | None = None if c is None else (c, cut, s)
    if s.outer_compressor is not None:
        alone, changes = outer_reduction(cut, s)
        coded = s.outer_compressor, changes, alone
    in_flight = sum(reduction_slots(view.stage, cut, s)[1]) * reduce if sharding.reduces_each else 0
    if sharding.parameters:
        sized = [(b, gathered_elements(b, size, p)) for b, size in zip(cut, padded, strict=True)]
        gathered = sum(size for b, size in sized if b.unit == "model")
        for experts in (False, True):
            sizes = [size for b, size in reversed(sized) if b.unit != "model" and b.experts == experts]
            gathered += sum(sizes) if sharding.keeps_gathered else sum(slot_sizes(sizes))
        in_flight += gathered * compute + _narrow_bytes(view)
    return State(
        parameters=0 if sharding.parameters else n * compute,
        master=shard_elements * master if sharding.parameters or p.master_dtype != p.compute else 0,
        gradients=shard_elements * accumulate
        if sharding.reduces_each
        else gradients * (accumulate + reduce * separate_reduce_buffer),
        optimizer=_optimizer_bytes(view, elements, pieces),
        buffers=in_flight + partial_gradient_bytes(view),
        tables=rotary + mask + _expert_tables(view),
        batch=job.global_batch // s.dp * prod(context.shape(1, job.batch_rows)) * 8,
        compression=compression.held_bytes(*coded, accumulate) if coded else 0,
        scratch=compression.scratch_bytes(*coded, accumulate) if coded else 0,
        outer=elements * job.outer_bytes + _under_way(view) if s.local else 0,
    )


def _under_way(view: RankView) -> int:
    """Return the bytes of the changes that replicas send while they take further steps: of the largest fragment."""
    sizes = [0] * view.job.outer.fragments
    for b, size in zip(view.buckets, view.padded, strict=True):
        sizes[b.fragment] += size // b.parts(view.strategy) if view.strategy.shards > 1 else size
    return max(sizes) * DTYPE_BYTES[view.job.precision.accumulate_dtype] if view.job.outer.delay else 0


def _optimizer_bytes(view: RankView, elements: int, pieces: int) -> int:
    """Return bytes of the optimizer's state for `elements` elements in `pieces` pieces of parameters."""
    o, s, master = view.job.optimizer, view.strategy, DTYPE_BYTES[view.job.precision.master_dtype]
    in_matrices = of_matrices = 0
    if o.row.matrices != o.row.others:
        if s.shards > 1 and view.shard is not None:
            in_matrices, of_matrices = owned_elements(view, view.shard, matrices=True)
        else:  # the shard with the most of the other elements
            for b, size in zip(view.buckets, view.padded, strict=True):
                parts = b.parts(s) if s.shards > 1 else 1
                in_matrices += max(0, size // parts - (size - sum(p.numel for p in b.parameters if p.matrices)))
            of_matrices = sum(p.matrices > 0 for p in parameters(view.local))
    kinds = ((o.row.matrices, in_matrices, of_matrices), (o.row.others, elements - in_matrices, pieces - of_matrices))
    moments = sum(n * len(rule.held(o.first_decay)) for rule, n, _ in kinds)
    return moments * master + COUNT_BYTES * sum(count for rule, _, count in kinds if rule.counts_steps)


def update_bytes(view: RankView, elements: int) -> int:
    """Return the peak bytes allocated by the update of `elements` elements: gradients cast to the masters' type, and
    temporaries of one orthogonalised matrix."""
    p = view.job.precision
    compute, master = DTYPE_BYTES[p.compute], DTYPE_BYTES[p.master_dtype]
    temporary = max((x.temporary_bytes(compute, master) for x in view.exchanges), default=0)
    return cast_gradients(elements, view.job) + temporary


def _narrow_bytes(view: RankView) -> int:
    """Return bytes for gathers in 8 bits (zero=3): a rank's shards, their scales, and parameters that are not
    matrices."""
    s, p = view.strategy, view.job.precision
    cut = [b for b in view.buckets if gathers_in_8_bits(b, p)]
    matrices = sum(scales(parameter) for b in cut for parameter in b.parameters)
    shards = sum(b.padded(s) // b.parts(s) for b in cut)
    reduced = scale_elements(cut)
    return shards + (reduced + matrices) * NUMBER_BYTES + (reduced - matrices) * DTYPE_BYTES[p.compute]


def _expert_tables(view: RankView) -> int:
    """Return bytes of buffers of layers with experts: load counters, balance biases, and indices of the rank's
    tokens."""
    x, s = view.model.experts, view.strategy
    if x is None:
        return 0
    layers = sum(i not in x.dense_layers for i in view.stage.held_blocks)
    tables = layers * ((x.count + 3) * 8 + x.count * 4 * (x.balance_bias is not None))
    if depends_on_other_tokens(x, s):
        tables += (s.micro_batch * view.job.seq + own_tokens(view.tokens, s.tp, 0)) * 8
    return tables


def partial_gradient_bytes(view: RankView) -> int:
    """Return bytes of the buffer in which tp ranks sum partial gradients."""
    return 0 if view.strategy.tp == 1 else view.summed_elements * _accumulate_bytes(view)


def tied_gradient_bytes(view: RankView) -> int:
    """Return bytes of a tied embedding's gradient, to which the first and the last pipeline rank each contribute;
    else 0."""
    if not holds_one_tied_copy(view.stage):
        return 0
    bucket = next(b for b in view.buckets if b.parameters[0].unit == "model")
    return bucket.padded(view.strategy) // bucket.parts(view.strategy) * _accumulate_bytes(view)


def _accumulate_bytes(view: RankView) -> int:
    """Return bytes of an accumulated gradient's element."""
    return DTYPE_BYTES[view.job.precision.accumulate_dtype]


def cast_gradients(elements: int, job: Job) -> int:
    """Return bytes of `elements` gradients cast to the master dtype during the update; 0 if they have it already."""
    p = job.precision
    return 0 if p.master_dtype == p.accumulate_dtype else elements * DTYPE_BYTES[p.master_dtype]


def cache_bytes(local: ModelSpec, room: Room, dtype: DType) -> int:
    """Return the bytes of a rank's cache, in elements of `dtype`; states of recurrences are of its widest type.
    `local`: the rank's part of the model."""
    blocks, e, total = architecture(local).blocks, DTYPE_BYTES[dtype], 0
    for k in (layer_cache(s) for i in local.held_blocks for s in blocks[i].sublayers):
        if k is not None:
            rolling = room.last_tokens(k.window)
            total += k.token * e * (room.tokens if rolling is None else room.seats * rolling)
            total += room.seats * (k.state * DTYPE_BYTES[widest(dtype)] + k.inputs * e)
    return total
