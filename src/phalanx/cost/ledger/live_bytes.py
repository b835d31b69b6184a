"""Activations kept on a rank for its backward pass, as columns: bytes under a stack's Keeps.

A block keeps, for t tokens and e bytes per element (Korthikanti et al. 2022, section 4.1; here by width):

    stream       inputs of the block and of its MLP, and both norms' results        t h, over tp ranks with `sp`
    attention    queries, keys, values and the result; latents that they come from  over tp ranks
    recurrences  inputs of the convolution, the scan, the gated norm and the last product
    MLP          inputs of its products and its activation                          over tp ranks
    experts      rows that arrive, inner activations, rows that return; a router's scores and places

Recomputation keeps less: the input of a block, or of a group of them; all but attention's core; all but the named
modules. For our own runtime every tensor is counted (`Keeps.every_tensor`), and a drawn test requires the bytes to
equal the StepProgram's, event by event; published stacks have constants where their tensors were not counted.
"""

from dataclasses import dataclass

import numpy as np

from phalanx.cost.hardware.columns import Column
from phalanx.cost.ledger.kind import BlockKind, groups_on_rank
from phalanx.cost.ledger.layer_flows import carried_bytes, head_slices, kv_heads, routed_rows, stream_bytes
from phalanx.cost.ledger.magnitudes import KEPT_RESULTS
from phalanx.cost.ledger.model_shape import Shape
from phalanx.cost.ledger.policy import PLAIN, Policy
from phalanx.cost.ledger.rank_layout import FORMATS, NARROW, LayoutColumns
from phalanx.schedule.gradients.sharding import Sharding
from phalanx.schedule.layers.head import kept_bytes


@dataclass(frozen=True)
class Keeps:
    """Activations and state kept by a stack: bytes per element of the named tensor, for elements of 2 bytes."""

    policy: Policy = PLAIN
    """Policy of reductions and gathers."""
    flash: Column = 1.0
    """1: attention never writes its scores (flash attention)."""
    whole_bytes: Column = 18.0
    """Bytes of state per parameter without ZeRO: weight 2, gradient 4 (and 2 where both are kept), master 4, moments
    8."""
    replica_bytes: Column = 0.0
    """Further bytes of state per parameter, if gradients are reduced in separate buckets."""
    kept_bytes: Column = 6.0
    """Bytes of state per parameter that ZeRO-1 leaves unsharded."""
    accumulated_bytes: Column = 4.0
    """Bytes of an accumulated gradient element, which ZeRO-2 shards."""
    frees_gradients: Column = 0.0
    """1: gradients are freed between steps, and do not exist before the backward pass makes them (torch's
    `zero_grad(set_to_none=True)`); 0: they have memory of their own."""
    gradients_on_host: Column = 0.0
    """Share of the accumulated gradients that ZeRO-2 shards, and that lie on the host."""
    reduced_bytes: Column = 0.0
    """Bytes of a gradient element in the type in which it is reduced, if below ZeRO-2 it is also kept in that
    type."""
    gradient_bytes: Column = 4.0
    """Bytes per sent gradient element."""
    bucket_buffers: Column = 0.0
    """Buffers of a bucket each into which gradients of sharded state are copied to be reduced: while a backward pass
    runs, or at level 3, where one is enough, for good."""
    shard_bytes: Column = 12.0
    """Bytes of state per parameter that ZeRO-1 shards."""
    full_shard_bytes: Column = 16.0
    """Bytes of state per parameter with ZeRO-3, all of it sharded."""
    kept_hidden: Column = 10.0
    """Bytes per token and hidden element that a block's forward pass keeps for its backward pass: inputs of norms
    and products, residuals, masks of dropout (Korthikanti et al. 2022, equation 1)."""
    kept_norm: Column = 0.0
    """Bytes per element that a root-mean-square norm of several operations keeps beyond the input and the result of a
    fused one: its input in fp32, and the input over its root, which the weight multiplies."""
    kept_casts: Column = 0.0
    """Bytes per token and hidden element that a block keeps in addition if unsharded weights are in fp32 and each
    product casts its operands (torch's autocast): results of norms in fp32, and a copy for each product."""
    kept_qkv: Column = 1.0
    """Number of copies kept of queries, keys, values and attention's result."""
    kept_ffn: Column = 1.0
    """Number of copies kept of the MLP's inner activations."""
    kept_weights: Column = 0.0
    """Bytes per frozen weight of a block that its forward pass makes and keeps for its backward pass."""
    wide_adapters: Column = 1.0
    """1: adapters are in fp32, and so are their inputs and results (peft's autocast_adapter_dtype); each keeps its
    input in 16 bits."""
    kept_score: Column = 5.0
    """Bytes per score if attention writes scores: before and after the softmax, and a mask of dropout."""
    kept_cast: Column = 0.0
    """1: products in 8 bits or less keep cast operands for the backward pass, not 16-bit ones."""
    cast_parameters: Column = 0.0
    """1: parameters of products in 8 bits are themselves stored in 8 bits (in both orders); 0: 8-bit copies are kept
    in addition."""
    kept_routed: Column = 4.0
    """Bytes per routed token and hidden element: the experts' input, and their result if the router's probabilities
    multiply it."""
    kept_inside: Column = 1.0
    """Share of experts' inner activations that is kept; less if their activation is recomputed."""
    per_op: Column = 0.0
    """1: selective recomputation chooses among a block's operations, not just attention's core."""
    result_again: Column = 0.0
    """1: recomputing attention's core repeats the product after it too, so that the core's result is not kept."""
    every_tensor: Column = 0.0
    """1: small tensors and copies count each: norms' and attention's sums, a router's scores and places, the result
    that Ulysses returns; 0: they are part of the constants above."""
    gathers_keys: Column = 0.0
    """1: context parallelism gathers keys and values before attention, instead of passing them around a ring."""


_OPERAND_BYTES = tuple(float(f.bytes_per_value) if f.narrow else 2.0 for f in FORMATS)
"""By FORMATS: bytes per element of a product's operand, including scales of blocks; 2 if it is not cast."""
_PARAMETERS = tuple(f.bits == 8 for f in FORMATS)
"""By FORMATS: whether parameters can be stored in it."""


def state_bytes(layout: LayoutColumns, keeps: Keeps, zero: Sharding, shards: Column) -> Column:
    """Return bytes of state for each parameter that a rank computes with, sharded over `shards` ranks. Weights and
    gradients are unsharded at ZeRO-1; accumulated gradients are sharded if every micro-batch reduces them; at ZeRO-3
    everything is sharded, except the gradients of a stack that reduces them once a step and accumulates them in the
    type in which it does."""
    accumulated = keeps.accumulated_bytes
    one = keeps.kept_bytes + keeps.shard_bytes / shards
    two = (
        keeps.kept_bytes
        - keeps.reduced_bytes
        - accumulated
        + (keeps.shard_bytes + accumulated * (1 - keeps.gradients_on_host)) / shards
    )
    three = keeps.full_shard_bytes / shards + whole_gradient_bytes(keeps, zero)
    sharded = np.where(zero.by_unit > 0, three, np.where(zero.reduces_each > 0, two, one))
    whole = keeps.whole_bytes + keeps.replica_bytes * (layout.dp * layout.cp > 1)
    # Experts with a single copy have nothing to shard; reduced gradients are not kept at ZeRO-2 either.
    only_copy = whole - np.asarray(keeps.reduced_bytes) * (zero.reduces_each > 0)
    single = (shards <= 1) & (zero.by_unit == 0) & (np.asarray(keeps.policy.levels_alone) == 0)
    sharded = np.where(single, only_copy, sharded)
    return np.where(zero.state, sharded, whole) + layout.outer_bytes / np.where(zero.state, shards, 1)


def whole_gradient_bytes(keeps: Keeps, zero: Sharding) -> Column:
    """Return bytes per parameter of the unsharded gradients that a rank at ZeRO-3 accumulates if they are reduced
    once a step, in the type in which they are reduced; else 0."""
    sent = np.minimum(keeps.accumulated_bytes, keeps.gradient_bytes)
    sent = np.where(np.asarray(keeps.reduced_bytes) > 0, keeps.reduced_bytes, sent)
    return np.asarray(zero.by_unit) * sent * (1 - zero.reduces_each)


def bucket_buffer_bytes(keeps: Keeps, zero: Sharding, bucket: Column) -> tuple[Column, Column]:
    """Return the bytes of the buffers, of `bucket` bytes each, into which gradients are copied to be reduced: in a
    backward pass, and for good (one, at level 3)."""
    buffers = np.asarray(keeps.bucket_buffers)
    level3 = np.asarray(zero.by_unit) > 0
    return (
        np.where(zero.state & ~level3, buffers, 0.0) * bucket,
        np.where(zero.state & level3, np.minimum(buffers, 1.0), 0.0) * bucket,
    )


def operand_bytes(layout: LayoutColumns, keeps: Keeps) -> Column:
    """Return bytes per element of a product's input when kept for the backward pass."""
    cast = np.choose(np.asarray(layout.format, dtype=int), _OPERAND_BYTES)
    return np.where(np.asarray(keeps.kept_cast) > 0, cast, 2.0)


def cast_weight_bytes(layout: LayoutColumns, keeps: Keeps) -> Column:
    """Return bytes per parameter of a block's products kept in addition to the parameters: their values in 8 bits or
    less, in both orders that the products of both passes need, unless the parameters themselves are such values."""
    kind = np.asarray(layout.format, dtype=int)
    separate = np.where((np.asarray(keeps.cast_parameters) > 0) & np.choose(kind, _PARAMETERS), 0.0, 1.0)
    cast = 2 * np.choose(kind, _OPERAND_BYTES) * np.choose(kind, NARROW)
    return np.asarray(keeps.kept_cast) * separate * cast


def _ways(layout: LayoutColumns) -> Column:
    """Return the ranks that share the residual stream's tokens."""
    return np.where(layout.sp > 0, layout.tp, 1)


def _gathered_share(layout: LayoutColumns, keeps: Keeps) -> Column:
    """Return the share of the stream kept in addition to a rank's own tokens, if gathered inputs are kept."""
    return np.asarray(keeps.policy.keeps_gathered) * (1 - 1 / _ways(layout))


def _wide(layout: LayoutColumns) -> Column:
    """Return bytes of a sum or a score: fp32, or wider where activations are."""
    return np.maximum(layout.activation_bytes, 4.0)


@dataclass(frozen=True)
class _Widths:
    """Elements per token on a rank: `heads`, `kv` (key heads); of queries, keys, values, attention's result."""

    heads: Column
    kv: Column
    queries: Column
    keys: Column
    values: Column
    result: Column


def _widths(kind: BlockKind, layout: LayoutColumns, keeps: Keeps) -> _Widths:
    """Return the widths of attention on a rank."""
    pads = np.asarray(keeps.policy.pads_core) > 0
    key, value = (np.where(pads, kind.core_dim, d) for d in (kind.head_dim, kind.value_dim))
    heads, kv = kind.heads / layout.tp, kv_heads(kind, layout)
    values = np.where(np.asarray(kind.kv_width) > kind.head_dim, value, 0.0)  # keys may be the values
    return _Widths(heads, kv, heads * key, kv * key, kv * np.where(pads, value, values), heads * value)


def _attention_bytes(kind: BlockKind, layout: LayoutColumns, keeps: Keeps) -> tuple[Column, Column]:
    """Return bytes per token that attention keeps, for 2-byte elements: of its core's inputs (queries, keys, values
    and their sources), and of the core (the result, sums, tensors exchanged by Ulysses)."""
    w = _widths(kind, layout, keeps)
    keeps_every = np.asarray(keeps.every_tensor)
    sums = keeps_every * _wide(layout) * 2 / layout.activation_bytes
    inputs = 2 * keeps.kept_qkv * (w.queries + w.keys + w.values)
    latent = 2 * (2 * kind.q_rank + 2 * kind.kv_rank + kind.rope_dim + kind.result_low / layout.tp)
    inputs = inputs + latent + sums * (1.0 * (kind.kv_rank > 0) + (kind.q_rank > 0))
    normed = np.asarray(kind.normed_heads)
    each = 2 + keeps.kept_norm * 2 / layout.activation_bytes
    inputs = inputs + normed * (each * (w.queries + w.keys) + sums * (w.heads + w.kv))
    # A gate, and the gated result; an index.
    inputs = inputs + 2 * (2 * kind.gate / layout.tp + kind.index_kept)
    inputs = inputs + 2 * mixer_kept(kind, layout)
    narrow = (w.result > w.heads * kind.value_dim) * w.heads * kind.value_dim
    result = 2 * (keeps.kept_qkv * w.result + narrow) + sums * w.heads
    exchanged = 2 * (np.maximum(layout.ulysses / w.kv, 1.0) - 1) * (w.keys + w.values)
    returned = 2 * np.where(narrow > 0, 0.0, w.result)
    return inputs, result + keeps_every * (np.asarray(layout.ulysses) > 1) * (exchanged + returned)


def _experts_bytes(kind: BlockKind, layout: LayoutColumns, keeps: Keeps, inside: Column, saved: Column) -> Column:
    """Return bytes that experts keep of a micro-batch, for 2-byte elements: rows as they arrive, inside experts, and
    as they return, and the router's bytes. `inside`: bytes per row and inner element; `saved`: bytes per element of
    the input that a cast saves."""
    count = np.maximum(kind.experts, 1)
    sent = routed_rows(kind, layout, count)
    arriving = routed_rows(kind, layout, count / layout.ep) * layout.ep * layout.etp
    returning = np.where(keeps.policy.sends_copies > 0, sent * layout.etp, sent)
    rows = np.minimum(keeps.kept_routed, 2.0) - saved
    rows = arriving * rows + returning * np.maximum(keeps.kept_routed - 2.0, 0.0)
    own = layout.tokens / layout.tp
    kept = arriving * keeps.kept_inside * inside * kind.expert_ffn / layout.etp + rows * kind.expert_dim
    small = own * (_wide(layout) * kind.router_scores + kind.router_places)
    sorted_ = (np.asarray(layout.ep * layout.etp) > 1) & (kind.experts / layout.ep > 1)
    small = small + 8 * arriving * sorted_
    return kept + np.asarray(keeps.every_tensor) * small * 2 / layout.activation_bytes


def mixer_kept(kind: BlockKind, layout: LayoutColumns) -> Column:
    """Return the elements per token that a recurrence or a convolution keeps on a rank."""
    if not np.any(kind.mixed):
        return 0.0
    groups = np.maximum(kind.scan_groups, 1)
    return kind.mixed_kept / layout.tp + kind.mixed_shared_kept / groups * groups_on_rank(groups, layout.tp)


def block_bytes(kind: BlockKind, layout: LayoutColumns, keeps: Keeps) -> Column:
    """Return the bytes that a block's forward pass keeps for its backward pass without recomputation, including its
    input but not its output."""
    moe = kind.routes
    # Both norms' results are operands; experts get the second one unquantised.
    operand = operand_bytes(layout, keeps)
    saved = 2.0 - operand
    # With a parallel residual there is none between attention and MLP, which may share a norm.
    parallel = np.asarray(kind.parallel)
    stream = keeps.kept_hidden * kind.sublayers / 2 - 2 * parallel - 2 * (kind.sublayers - kind.norms)
    stream = stream + 2 * kind.after_norms - (kind.norms - moe) * saved + 2 * kind.sublayers * _mixed(kind)
    sums = np.where(np.asarray(kind.rms) > 0, _wide(layout) * 2 / layout.activation_bytes, 4.0)
    sums = np.asarray(keeps.every_tensor) * sums
    norms, eager = kind.norms + kind.after_norms, np.where(np.asarray(kind.rms) > 0, keeps.kept_norm, 0.0)
    casts = np.where(np.asarray(layout.zero) == 0, keeps.kept_casts, 0.0) * kind.sublayers / 2
    stream = stream + (norms * eager + casts) * 2 / layout.activation_bytes
    hidden = (stream * kind.hidden + norms * sums) / _ways(layout)
    # Inputs gathered for products are kept in place of a rank's part of the norms' results.
    normed = 2 * kind.norms - (kind.norms - moe) * saved
    hidden = hidden + _gathered_share(layout, keeps) * normed * kind.hidden
    # Attention keeps its result in 16 bits; the product after it keeps another, where it is cast.
    results = kind.heads * kind.value_dim + kind.result_low + kind.mixed_out
    cast = np.where(saved > 0, operand, 0.0) * results / layout.tp
    inputs, core = _attention_bytes(kind, layout, keeps)
    scores = np.where(
        (keeps.flash > 0) | (layout.selective > 0),
        0.0,
        keeps.kept_score * kind.heads * layout.seq / layout.cp / layout.tp,
    )
    each = 2 * keeps.kept_ffn * kind.mlp_matrices - saved
    mlp = kind.ffn * each / layout.tp
    t, size = layout.tokens, layout.activation_bytes / 2
    kept = t * size * (hidden + inputs + core + cast + scores + mlp)
    if np.any(moe):
        experts = _experts_bytes(kind, layout, keeps, each, saved) + t * kind.shared_ffn * each / layout.tp
        kept = kept + moe * size * experts
    return kept


def _mixed(kind: BlockKind) -> Column:
    """Return the number of hidden states per sublayer that hyper-connections keep in addition to a plain residual:
    all streams but one, their joined stream, and the sublayer's result (Xie et al. 2025, section 4.3)."""
    return np.where(np.asarray(kind.streams) > 1, kind.streams + 1, 0.0)


def freed_bytes(kind: BlockKind, layout: LayoutColumns, keeps: Keeps) -> Column:
    """Return the bytes of a block that recomputation of its parts frees. Of attention's core: nothing but its scores,
    unless the product after it is repeated too. Of modules:

        layernorm       the norms' results, which are operands; experts get theirs unquantised
        mla_up_proj     queries, keys and values, from their latents; attention's result stays
        moe_act         the activation's result inside experts
        mlp_act         the activation's result inside the dense MLP
        mlp, moe        inner activations, and cast operands, but not the input
        shared_experts  their inner activations
        mhc             residual streams and their joined stream, but not sublayers' results

    (Megatron-Core 0.19, megatron/core/transformer/transformer_config.py:546)."""
    m, size = layout.modules, layout.activation_bytes / 2
    freed: Column = 0.0
    if np.any(keeps.result_again):
        _, core = _attention_bytes(kind, layout, keeps)
        freed = keeps.result_again * layout.selective * core
    if not m.any:
        return layout.tokens * size * freed
    moe = kind.routes
    operand = operand_bytes(layout, keeps)
    saved = 2.0 - operand
    norms = ((kind.sublayers - moe) * operand + moe * 2.0) / _ways(layout) * kind.hidden
    w = _widths(kind, layout, keeps)
    up = keeps.kept_qkv * 2 * (w.queries + (w.keys + w.values) * (kind.kv_rank > 0)) * kind.latent
    streams = 2 * kind.sublayers * np.maximum(_mixed(kind) - 1, 0.0) * kind.hidden / _ways(layout)
    inside = (2 * keeps.kept_ffn * kind.mlp_matrices - saved) / layout.tp
    act = np.where(kind.mlp_matrices > 2, 1.0, 0.5) * 2 * keeps.kept_ffn - saved
    act = np.maximum(act, 0.0) / layout.tp
    routed_act = kind.top_k * kind.expert_ffn * act
    routed = kind.top_k * (kind.expert_ffn * inside + (keeps.kept_routed - saved) * kind.expert_dim / layout.tp)
    shared = kind.shared_ffn * inside
    experts = np.where(m.moe > 0, routed + shared, m.moe_act * routed_act + m.shared_experts * shared)
    dense = kind.ffn * np.where(m.mlp > 0, inside, m.mlp_act * act)
    freed = freed + m.layernorm * norms + m.mla_up_proj * up + m.mhc * streams + dense + moe * experts
    return layout.tokens * size * freed


def operation_bytes(kind: BlockKind, layout: LayoutColumns) -> Column:
    """Return the bytes that a block keeps if recomputation selects operations: its input, attention's result, and the
    results of every second product (queries, values, one of the MLP's first two, its last). Of experts, whose grouped
    products are not among the selected operations, it keeps the tokens that were exchanged, on their way and back."""
    q, v = kind.heads * kind.head_dim, kind.kv_heads * kind.value_dim
    exchanged = np.where(np.asarray(layout.ep) > 1, 2 * kind.top_k * kind.expert_dim, 0.0)
    wide = kind.heads * kind.value_dim + q + v + kind.ffn + kind.shared_ffn + exchanged + kind.hidden
    wide = wide + (kind.mixed + kind.mixed_shared) / 2 + kind.mixed_out
    return layout.tokens * layout.activation_bytes * (kind.hidden / _ways(layout) + wide / layout.tp)


@dataclass(frozen=True)
class BlockBytes:
    """Bytes of a block and micro-batch. `kept`: without recomputation; `freed`: the part of `kept` that recomputed
    parts free; `stored`: kept on the device or the host from the forward to the backward pass."""

    kept: Column
    freed: Column
    stored: Column


def live_bytes(shape: Shape, layout: LayoutColumns, keeps: Keeps) -> BlockBytes:
    """Return the bytes kept by a block, on average over the model's."""
    kept = shape.mean(lambda kind: block_bytes(kind, layout, keeps))
    kept = kept + KEPT_RESULTS * 2 * layout.tokens * shape.magnitudes.outputs / layout.tp
    kept = kept + keeps.kept_weights * shape.of_block / layout.tp
    kept = kept + layout.frozen * _of_adapters(shape, layout, keeps)
    freed = np.minimum(shape.mean(lambda kind: freed_bytes(kind, layout, keeps)), kept)
    input_bytes = carried_bytes(shape, layout) / _ways(layout)
    by_operation = layout.selective * np.asarray(keeps.per_op)
    stored = layout.full * input_bytes / layout.group + (1 - layout.full - by_operation) * (kept - freed)
    if np.any(keeps.per_op):
        stored = stored + by_operation * shape.mean(lambda kind: operation_bytes(kind, layout))
    return BlockBytes(kept, freed, stored)


def _of_adapters(shape: Shape, layout: LayoutColumns, keeps: Keeps) -> Column:
    """Return the bytes that adapters of a block keep, of their inputs and inside, less the operands that frozen
    products do not keep: results of norms, the input of the MLP's last product, and attention's result in 8 bits.
    Adapters in fp32 keep a copy each; those in 16 bits share inputs, and attention's result, which stays anyway."""
    a, wide = shape.adapted, np.asarray(keeps.wide_adapters)
    operand = np.where(wide > 0, 2.0, operand_bytes(layout, keeps))
    inside = shape.adapters * a.number / np.maximum(a.inputs + a.outputs, 1.0)
    inputs = np.where(wide > 0, a.inputs, a.inputs - a.shared - a.results)
    of_norms = shape.mean(lambda kind: (kind.norms + kind.after_norms) * kind.hidden) / _ways(layout)
    of_mlps = shape.mean(lambda kind: kind.ffn) / layout.tp
    of_results = shape.mean(lambda kind: kind.heads * kind.value_dim) / layout.tp * (operand < 2)
    kept = 2 * (inputs + inside) / layout.tp - operand * (of_norms + of_mlps + of_results)
    return layout.tokens * layout.activation_bytes / 2 * kept


def sliced_head(shape: Shape, layout: LayoutColumns, keeps: Keeps) -> tuple[Column, Column]:
    """Return (1 if the head processes its tokens in slices, else 0; the bytes that it then keeps from its forward to
    its backward pass in place of logits: the gradient of its weight and, if the stream is split, of other ranks'
    tokens)."""
    e, t = layout.activation_bytes, layout.tokens
    rows = np.ceil(shape.vocab / layout.tp)
    wide = rows * shape.hidden * np.maximum(e, 4)
    alone = np.asarray(keeps.policy.slices_head) * (layout.tp == 1) * (np.asarray(layout.splits) == 0)
    alone = alone * (kept_bytes(t, rows, shape.hidden, e) < t * rows * e)
    less = alone + (head_slices(shape, layout, keeps.policy) > 1)
    of_others = t * shape.hidden * e * (1 - 1 / _ways(layout))
    return less, wide + of_others


def end_bytes(shape: Shape, layout: LayoutColumns, keeps: Keeps) -> tuple[Column, Column]:
    """Return the bytes kept by embedding and head in addition to logits: the stream that enters the first block, and
    tensors of the last norm. 0 if these are part of the stack's constants."""
    stream = stream_bytes(shape, layout) / _ways(layout)
    sums = np.where(np.asarray(shape.rms) > 0, _wide(layout), 2 * layout.activation_bytes)
    every = np.asarray(keeps.every_tensor)
    normed = stream + _gathered_share(layout, keeps) * stream_bytes(shape, layout)
    return every * stream, every * (normed + sums * layout.tokens / _ways(layout))


def gathered_key_bytes(shape: Shape, layout: LayoutColumns, keeps: Keeps) -> Column:
    """Return the bytes of a block's keys and values over the whole sequence, if context parallelism gathers them."""
    if not np.any(keeps.gathers_keys):
        return 0.0
    ring = layout.cp / layout.ulysses

    def whole(kind: BlockKind) -> Column:
        w = _widths(kind, layout, keeps)
        return layout.tokens * ring * (w.keys + w.values) * layout.activation_bytes

    return np.where(ring > 1, keeps.gathers_keys * shape.most(whole), 0.0)


def held_micro_batches(layout: LayoutColumns, policy: Policy) -> tuple[Column, Column]:
    """Return the number of micro-batches whose activations the first and the last pipeline rank hold at once, of m on
    p ranks of v chunks each. 1f1b: min(m, p) and 1; interleaved, in rounds of g: the first rank runs ahead by
    2 (p - 1) + (v - 1) g chunks, the last by (v - 1) g (Narayanan et al. 2021, section 2.2; Megatron-LM,
    megatron/core/pipeline_parallel/schedules.py), and a chunk is a v-th of what a rank holds."""
    m, p, v = layout.micro_batches, layout.pp, layout.virtual
    rounds = np.where(np.asarray(policy.equal_rounds) > 0, m / np.maximum(np.floor(m / p), 1.0), p)
    first = np.where(v > 1, ((v - 1) * rounds + 2 * (p - 1) + 1) / v, p)
    last = np.where(v > 1, ((v - 1) * rounds + 1) / v, 1.0)
    given = np.asarray(layout.in_flight) > 0
    first = np.where(given, layout.in_flight, np.minimum(first, m))
    return first, np.where(given, layout.in_flight_last, np.minimum(last, m))
