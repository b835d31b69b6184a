"""Bytes on a rank as the maximum over instants, for any stack: state, what passes leave behind, what comes and goes.

    start of a backward pass   state + activations in flight + logits + gathered parameters
    update                     state + what the update makes

What the allocator reserves is that, what it loses between blocks of unlike sizes, and what is free but cannot be
used again yet. Of a pipeline the first rank (most micro-batches in flight, the embedding) and the last (the head,
logits). Our own runtime's bytes are exact (cost/memory.py); those of published stacks follow from the formulas of
Korthikanti et al. 2022 with each stack's constants.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phalanx.cost.analytic.model_shape import Shape
from phalanx.cost.analytic.rank_layout import Layout, stages
from phalanx.cost.analytic.stacks import Profile
from phalanx.cost.hardware.columns import Column

QUEUE = 1024
"""Launches that CUDA takes before the CPU has to wait for the GPU."""


@dataclass(frozen=True)
class Memory:
    """Bytes of the fullest rank. `steady`: allocated between steps; `peak`: allocated at most, `last` on the last
    pipeline rank; `reserved`: what the allocator takes, `first` on the first pipeline rank in a run that has come to
    its end; `shown`: by the driver. `terms`: what makes up the peak."""

    steady: Column
    peak: Column
    last: Column
    reserved: Column
    first: Column
    shown: Column
    terms: dict[str, Column]


def _per_parameter(layout: Layout, profile: Profile, shards: Column) -> Column:
    """Bytes of state per parameter that a rank computes with, by ZeRO stage: 1 and 2 keep weights and gradients whole
    (2 drops the gradient in its own 4 bytes), 3 shards everything."""
    one = profile.kept_bytes + profile.shard_bytes / shards
    two = profile.kept_bytes - 4 + (profile.shard_bytes + 4) / shards
    three = profile.full_shard_bytes / shards
    found = np.where(layout.zero == 1, one, np.where(layout.zero == 2, two, three))
    whole = profile.whole_bytes + profile.replica_bytes * (layout.dp * layout.cp > 1)
    return np.where(layout.zero == 0, whole, found)


def block_bytes(shape: Shape, layout: Layout, profile: Profile) -> Column:
    """What the forward pass of a block leaves for its backward pass, on average over dense blocks and experts."""
    own = np.where(layout.sp > 0, layout.tp, 1)
    t = layout.tokens
    hidden = profile.kept_hidden / own * shape.hidden
    q = shape.heads * (shape.head_dim + shape.value_dim)
    kv = np.where(shape.kv_rank > 0, shape.heads, shape.kv_heads) * (shape.head_dim + shape.value_dim)
    attention = profile.kept_qkv * 2 * (q + kv) / layout.tp
    scores = np.where(
        (profile.flash > 0) | (layout.selective > 0),
        0.0,
        profile.kept_score * shape.heads * layout.seq / layout.cp / layout.tp,
    )
    inside = 2 * profile.kept_ffn * shape.mlp_matrices / layout.tp
    moe = shape.moe_layers / shape.layers
    routed = shape.top_k * (shape.expert_ffn * inside + 4 * shape.hidden / layout.tp)
    mlp = (1 - moe) * shape.ffn * inside + moe * (routed + shape.shared_ffn * inside)
    size = layout.activation_bytes / 2
    return t * size * (hidden + attention + scores + mlp)


def operation_bytes(shape: Shape, layout: Layout) -> Column:
    """What a block leaves where recomputation goes operation by operation, and keeps its input, attention's result
    and every second product: queries, values, one of the MLP's first two, its last."""
    q, v = shape.heads * shape.head_dim, shape.kv_heads * shape.value_dim
    moe = shape.moe_layers / shape.layers
    ffn = (1 - moe) * shape.ffn + moe * (shape.top_k * shape.expert_ffn + shape.shared_ffn)
    wide = shape.heads * shape.value_dim + q + v + ffn + shape.hidden
    own = np.where(layout.sp > 0, layout.tp, 1)
    return layout.tokens * layout.activation_bytes * (shape.hidden / own + wide / layout.tp)


def waiting_bytes(
    shape: Shape, layout: Layout, profile: Profile, blocks: Column, passes: Column, ahead: Column
) -> Column:
    """What is free but cannot be used again before the GPU is there: what blocks give to collectives, which read it
    on a stream of their own. That is of the block at work, and of those that the CPU has launched ahead of the GPU:

        GPU bound    what the queue of launches holds; without a further micro-batch, one forward pass
        warm-up      `passes`, those of a first rank whose messages wait for the other ranks
    """
    if not np.any(profile.given):
        return 0.0
    queue = QUEUE / np.maximum(profile.launches, 1)
    before = ahead * np.where(layout.micro_batches > layout.pp, queue, np.minimum(blocks, queue))
    warm_up = np.where(np.asarray(profile.waits) > 0, 0.0, np.minimum(blocks * passes, queue))
    before = np.maximum(np.maximum(before, warm_up), 1.0)
    given = profile.given * layout.tokens * shape.hidden * layout.activation_bytes
    return np.where(layout.tp > 1, given * before, 0.0)


def memory(shape: Shape, layout: Layout, profile: Profile, ahead: Column = 1.0, room: Column = np.inf) -> Memory:
    """Of one rank, numbers or columns. `ahead`: as of the Step; by default the most that waits. `room`: what the
    allocator can have of the device."""
    parts = stages(shape, layout, profile.balanced)
    moe = shape.moe_layers / shape.layers
    dense = ((1 - moe) * shape.block_params + moe * shape.moe_block_params) / layout.tp
    routed = moe * shape.expert_params / (layout.ep * layout.etp)
    shards = np.maximum(layout.shards, 1)
    expert_shards = np.maximum(shards * layout.tp / (layout.ep * layout.etp), 1)
    each = _per_parameter(layout, profile, shards)
    expert = _per_parameter(layout, profile, expert_shards)
    alone = layout.pp == 1
    tied = shape.tied > 0
    # With pp > 1 the last rank holds a copy of a tied embedding for its head.
    first_ends = np.where(alone, shape.ends, shape.embedding_params) / layout.tp
    last_ends = np.where(alone, shape.ends, np.where(tied, shape.vocab * shape.hidden, shape.head_params)) / layout.tp

    kept = block_bytes(shape, layout, profile)
    input_ = layout.tokens * shape.hidden * layout.activation_bytes / np.where(layout.sp > 0, layout.tp, 1)
    some = layout.selective * np.asarray(profile.per_op)
    stored = layout.full * input_ + some * operation_bytes(shape, layout) + (1 - layout.full - some) * kept
    again = np.where(layout.full + some > 0, kept, 0.0)
    flight = np.minimum(layout.micro_batches, layout.pp)
    # Interleaved: the first rank runs ahead by 2 (pp - 1) + (v - 1) pp chunks, the last by (v - 1) pp (Megatron's
    # schedules.py); a chunk is a v-th of what a rank holds.
    more = np.where(layout.virtual > 1, 1 + (layout.pp - 1) / (layout.pp * layout.virtual), 1.0)
    known = np.asarray(layout.in_flight) > 0
    flight = np.where(known, layout.in_flight, flight * more)
    behind = np.minimum(layout.micro_batches, ((layout.virtual - 1) * layout.pp + 1) / layout.virtual)
    behind = np.where(known, layout.in_flight_last, behind)
    # Products that sum their weights' gradients in place return one that stands for them, kept for each shape; the
    # head's goes with the loss.
    shapes = dense + moe * shape.expert_params / np.maximum(shape.experts, 1) / layout.etp
    stand_in = profile.stand_in * profile.parameter_bytes * shapes
    logits = profile.kept_logit * layout.tokens * shape.vocab / layout.tp
    logits = logits + profile.stand_in * profile.parameter_bytes * shape.vocab * shape.hidden / layout.tp
    # ZeRO-3: two blocks gathered, and one block's gradient before it is reduced.
    unit = (dense + routed) * 3 * profile.parameter_bytes + shape.ends / layout.tp * profile.parameter_bytes
    sharded = (layout.zero >= 3) & (shards > 1)
    kept_whole = sharded & (np.asarray(layout.gathers_once) > 0)
    buffers = np.where(layout.tp > 1, profile.buffers * layout.tokens * shape.hidden * layout.activation_bytes, 0.0)
    most = parts.most * (dense + routed) + np.maximum(first_ends, last_ends)
    among = layout.dp * layout.cp
    coded = layout.compressed.held_bytes(most, profile.gradient_bytes, among, profile.bucket_bytes)
    still = profile.constant_bytes + buffers + stand_in + coded

    found = []
    last_blocks = np.where(alone, parts.most, np.maximum(parts.last, 0))
    for blocks, ends, in_flight, top in (
        (parts.most, first_ends, flight, np.where(alone, logits, 0.0)),
        (last_blocks, last_ends, behind, logits),
    ):
        state = blocks * (dense * each + routed * expert) + ends * each
        idle = np.where(
            (layout.zero == 1) | (layout.zero == 2), profile.idle_bytes * (blocks * (dense + routed) + ends), 0.0
        )
        # What was gathered for a whole step is all that the rank has.
        whole = (blocks * (dense + routed) + ends) * profile.parameter_bytes
        gathered = np.where(kept_whole, whole, np.where(sharded, unit, 0.0))
        # Logits are gone when the first block is repeated.
        loss = np.where(top >= again, top, 0.0)
        held = blocks * in_flight * stored + np.where(top >= again, 0.0, again)
        found.append((state, np.maximum(held + loss + gathered - idle, 0.0), gathered, loss, held))
    (state_a, coming_a, gathered_a, top_a, act_a), (state_b, coming_b, gathered_b, top_b, act_b) = found
    fuller = state_a + coming_a >= state_b + coming_b
    state = np.where(fuller, state_a, state_b)
    steady = np.maximum(state_a, state_b) + still
    peak = np.maximum(state_a + coming_a, state_b + coming_b) + still

    passes = np.maximum(np.minimum(layout.pp, layout.micro_batches) - 2, 0)
    waiting_a = waiting_bytes(shape, layout, profile, parts.most, passes, ahead)
    waiting_b = waiting_bytes(shape, layout, profile, last_blocks, 0.0, ahead)
    least, least_b = (s + (1 + profile.fragments) * c + still for s, c in ((state_a, coming_a), (state_b, coming_b)))
    reserved = np.maximum(np.maximum(least + waiting_a, least_b + waiting_b), steady)
    # A run that went on where the device was full waited for the GPU: half of the room that was left, on average.
    left = np.maximum(room - least, 0.0)
    first = np.maximum(least + np.where(waiting_a <= left, waiting_a, left / 2), state_a + still)
    terms = {
        "state": state,
        "activations": np.where(fuller, act_a, act_b),
        "logits": np.where(fuller, top_a, top_b),
        "gathered": np.where(fuller, gathered_a, gathered_b),
        "buffers": still - coded,
        "compression": coded,
    }
    last = state_b + coming_b + still
    return Memory(steady, peak, last, reserved, first, reserved + profile.context_bytes, terms)
