"""Bytes on a rank as the maximum over instants, for any stack: model state, activations, temporaries.

    start of a backward pass   state + activations in flight + logits + gathered parameters
    update                     state + temporaries of the update

The allocator reserves that maximum, its fragmentation, and memory that is free but cannot be reused yet. With a
pipeline, the fuller of the first rank (most micro-batches in flight, the embedding) and the last (head, logits)
counts. Bytes kept by blocks, and bytes of state, come from the ledger (cost/ledger/live_bytes.py).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from phalanx.cost.analytic.profile import Profile
from phalanx.cost.analytic.update import bucket_bytes
from phalanx.cost.hardware.columns import Column
from phalanx.cost.ledger.gradient_flows import expert_ranks, experts_apart
from phalanx.cost.ledger.kind import BlockKind
from phalanx.cost.ledger.live_bytes import (
    bucket_buffer_bytes,
    cast_weight_bytes,
    end_bytes,
    gathered_key_bytes,
    held_micro_batches,
    live_bytes,
    sliced_head,
    state_bytes,
    whole_gradient_bytes,
)
from phalanx.cost.ledger.model_shape import Shape, padded_shape
from phalanx.cost.ledger.policy import sharding
from phalanx.cost.ledger.rank_layout import LayoutColumns, stages, stages_by_work
from phalanx.schedule.gradients.sharding import Sharding
from phalanx.spec.cluster.chips import CONTEXT_BYTES

QUEUE = 1024
"""Kernel launches that CUDA queues before the CPU has to wait for the GPU."""


@dataclass(frozen=True)
class Memory:
    """Bytes of the fullest rank. `steady`: allocated between steps. `peak`: most allocated; `last`: the same on the
    last pipeline rank. `reserved`: reserved by the allocator; `first`: the same on the first pipeline rank, in a run
    that completed. `shown`: shown by the driver. `terms`: parts that sum to the peak."""

    steady: Column
    peak: Column
    last: Column
    reserved: Column
    first: Column
    shown: Column
    terms: dict[str, Column]
    by_rank: Callable[[int], list[dict[str, Column]]]
    """From the number of pipeline ranks to the terms of each."""


def allocatable_bytes(usable: Column, profile: Profile) -> Column:
    """Return the bytes of a device available to a stack's allocator: `usable` (the device's bytes less the usual
    context and libraries), less the excess of this stack's."""
    return usable - np.maximum(profile.context_bytes - CONTEXT_BYTES, 0.0)


def waiting_bytes(
    shape: Shape, layout: LayoutColumns, profile: Profile, blocks: Column, passes: Column, ahead: Column
) -> Column:
    """Return bytes that are freed but cannot be reused until the GPU has caught up: inputs of collectives, which read
    them on their own stream. They belong to the running block and to those that the CPU has launched ahead of the
    GPU:

        GPU bound    what the queue of launches holds; without a further micro-batch, one forward pass
        warm-up      `passes` of a first rank whose messages wait for the other ranks
    """
    if not np.any(profile.given):
        return 0.0
    queue = QUEUE / np.maximum(profile.launches, 1)
    blocks_ahead = ahead * np.where(layout.micro_batches > layout.pp, queue, np.minimum(blocks, queue))
    warm_up = np.where(np.asarray(profile.waits) > 0, 0.0, np.minimum(blocks * passes, queue))
    blocks_ahead = np.maximum(np.maximum(blocks_ahead, warm_up), 1.0)
    given_bytes = profile.given * layout.tokens * shape.hidden * layout.activation_bytes
    return np.where(layout.tp > 1, given_bytes * blocks_ahead, 0.0)


def _two_matrices(shape: Shape, layout: LayoutColumns, apart: Column) -> Column:
    """Return the elements of the two largest matrices of blocks; of separately sharded experts, three more."""

    def widest(kind: BlockKind) -> Column:
        mixer = np.maximum(kind.heads * np.maximum(kind.head_dim, kind.value_dim), kind.mixed_out)
        return np.maximum(np.maximum(mixer, kind.shared_ffn), kind.ffn)

    dense = shape.hidden * shape.most(widest) / layout.tp
    experts = shape.most(lambda kind: kind.experts * kind.expert_dim * kind.expert_ffn) / (layout.ep * layout.etp)
    return np.where(apart, 2 * dense + 3 * experts, 2 * np.maximum(dense, experts))


_WHOLE_UNITS = 3
"""Whole units at a time: the one that computes and the next, both gathered, and the unreduced gradient of one."""


def _adapter_bytes(profile: Profile, zero: Sharding, ranks: Column) -> Column:
    """Return bytes of state per parameter of adapters on a rank: a weight of 2, a gradient of 4 and the optimizer's
    state, which ZeRO shards over `ranks` and offloads as it does a whole model's. FSDP gives adapters units of their
    own (huggingface/peft/src/peft/utils/other.py, fsdp_auto_wrap_policy)."""
    shards = np.where(zero.state, ranks, 1.0)
    level3, each = np.asarray(zero.by_unit, dtype=float), np.asarray(zero.reduces_each, dtype=float)
    on_host = profile.parameters_on_host * level3
    weight = 2.0 * (1 - on_host) * np.where(level3 > 0, 1 / shards, 1.0)
    gradient = 4.0 * (1 - on_host * each) * np.where(each > 0, 1 / shards, 1.0)
    return weight + gradient + profile.adapter_state_bytes * (1 - profile.on_host) / shards


class _Rank(NamedTuple):
    """Bytes of a pipeline rank: `state`, persistent from step to step; `transient`, in addition at the peak; and the
    parts of that peak. `held`: the state in use at that time; `update`: 0 unless the peak is in the update."""

    state: Column
    transient: Column
    gathered: Column
    loss: Column
    activations: Column
    held: Column
    update: Column


def _fuller(one: _Rank, other: _Rank) -> _Rank:
    """Return, row by row, the rank with more state and transient bytes."""
    first = one.state + one.transient >= other.state + other.transient
    return _Rank(*(np.where(first, a, b) for a, b in zip(one, other, strict=True)))


def _parameters_of_block(shape: Shape, layout: LayoutColumns) -> tuple[Column, Column]:
    """Return the parameters of a block on a rank, averaged over blocks: without routed experts, and of these
    alone."""
    dense = shape.mean(lambda kind: kind.on_rank(layout.tp))
    return dense, shape.mean(lambda kind: kind.expert_params) / (layout.ep * layout.etp)


class _Ends(NamedTuple):
    """Parameters of embedding and head on the first and on the last rank, and the larger of the two; whether the
    first rank has both."""

    first: Column
    last: Column
    larger: Column
    both: Column


def _ends(shape: Shape, layout: LayoutColumns) -> _Ends:
    """Return the parameters of the ends. If chunks lie in a V, the first rank holds the first and the last chunk;
    else the last rank has the head, or a copy of a tied embedding."""
    one_stage = layout.pp == 1
    both = one_stage | (np.asarray(layout.v_shaped) > 0)
    head = np.where(shape.tied > 0, shape.vocab * shape.hidden, shape.head_params)
    first = np.where(both, shape.ends, shape.embedding_params) / layout.tp
    larger = np.maximum(shape.embedding_params, shape.head_params) / layout.tp
    last = np.where(one_stage, shape.ends, np.where(both, 0.0, head)) / layout.tp
    return _Ends(first, last, larger, both)


_WIDE_LOSS = 12.0
"""Bytes per logit of a loss in fp32: logits, their log-softmax and its gradient. In mixed precision a stack keeps
tensors of 2 bytes, and of 4, one of which may be a cast copy of the logits."""


def _loss_bytes(shape: Shape, layout: LayoutColumns, profile: Profile, last_norm: Column) -> Column:
    """Return the bytes of the loss when its backward pass begins: full logits, or the gradient of sliced ones;
    `last_norm`; and the placeholder of the head's gradient."""
    size = layout.activation_bytes / 2
    wide = np.minimum(2 * profile.kept_logit, _WIDE_LOSS) * size / 2
    each = np.where(size > 1, wide, profile.kept_logit)
    logits = each * layout.tokens * shape.vocab / layout.tp * (1 + shape.depths)
    head_gradient = np.maximum(profile.stand_in, profile.every_tensor) * profile.parameter_bytes
    in_slices, gradient = sliced_head(shape, layout, profile)
    head_gradient = head_gradient * (1 - in_slices * (layout.activation_bytes >= 4))
    logits = np.where(in_slices > 0, gradient, logits)
    return logits + last_norm + head_gradient * shape.vocab * shape.hidden / layout.tp


@dataclass(frozen=True)
class _Share:
    """A rank's costs per block, per parameter of the ends, and per micro-batch in flight. `dense_params`,
    `expert_params`: parameters of a block. Bytes: `block_state`, of a block's state; `end_state`, of the state per
    parameter of the ends; `stored`, `stream`, kept of a micro-batch by a block and by the rest; `recomputed`,
    restored by the backward pass of a block; `unit`, gathered by a pass if units have no buffers; `root_gradient`, of
    a root that is reduced as the backward pass ends; `reduced`, gradients of a block before they are reduced.
    `of_blocks`, `in_buckets`: elements of the buffers in which units take turns, of parameters and of gradients.
    `buckets`: buffers of a backward pass that gradients are copied into.
    `fresh`, `fresh_ends`: gradients that a backward pass makes, of a block and per parameter of the ends. `narrow`: 1
    if blocks are gathered in 8 bits. `updated`: elements of a block that the rank updates; `end_shards`:
    ranks that share the ends."""

    how: Sharding
    profile: Profile
    dense_params: Column
    expert_params: Column
    block_state: Column
    end_state: Column
    larger_end: Column
    stored: Column
    stream: Column
    recomputed: Column
    unit: Column
    root_gradient: Column
    reduced: Column
    of_blocks: Column
    in_buckets: Column
    buckets: Column
    fresh: Column
    fresh_ends: Column
    narrow: Column
    updated: Column
    end_shards: Column

    def on(self, blocks: Column, ends: Column, in_flight: Column, loss_bytes: Column) -> _Rank:
        """Return the bytes of a rank with these blocks, this part of the ends and this loss."""
        how, profile = self.how, self.profile
        params = blocks * (self.dense_params + self.expert_params) + ends
        state = blocks * self.block_state + ends * self.end_state
        idle = np.where(how.state & (how.by_unit == 0), profile.idle_bytes * params, 0.0)
        gathered = self._gathered(blocks, ends, params)
        # Logits are freed before the first block is recomputed, and before its gradients.
        at_loss = loss_bytes >= self.recomputed + self.buckets
        loss = np.where(at_loss, loss_bytes, 0.0)
        on_host = np.minimum(profile.offloaded_blocks, blocks)
        # Two buffers of a block are under way to the host and back.
        resident = blocks - on_host + np.minimum(2.0, on_host) / np.maximum(in_flight, 1.0)
        kept = (resident * self.stored + self.stream) * in_flight
        activations = kept + np.where(at_loss, 0.0, self.recomputed)
        gathered = gathered + np.where(at_loss, 0.0, self.buckets)
        gathered = gathered + np.maximum(self.root_gradient - activations - loss, 0.0)
        transient = activations + loss + gathered
        # Gradients that a step starts without are there when the backward pass reaches the first block.
        fresh = blocks * self.fresh + ends * self.fresh_ends
        fresh = np.clip(activations + loss - self.stored - self.recomputed, 0.0, fresh)
        # Activations reuse the memory of the update's temporaries, which are therefore not live at the peak.
        held_bytes = state - np.minimum(idle, transient) - fresh
        transient = np.maximum(transient - idle, 0.0) - fresh
        updated = blocks * self.updated + ends / self.end_shards
        update = np.maximum(self._update(updated) - self._unsharded(params, updated), 0.0)
        later = update > transient
        return _Rank(
            state,
            np.maximum(transient, update),
            np.where(later, 0.0, gathered),
            np.where(later, 0.0, loss),
            np.where(later, 0.0, activations),
            np.where(later, state, held_bytes),
            np.where(later, update, 0.0),
        )

    def _update(self, elements: Column) -> Column:
        """Return the bytes of temporaries of the update of `elements`. Gradients that are cast for it are copied
        together first; then the copy goes, and so do they, unless they are in a buffer of level 3."""
        how, profile = self.how, self.profile
        copied, cast = profile.accumulated_bytes, profile.cast_gradient
        casts = how.state & (np.asarray(cast) > 0)
        wider = np.maximum(cast, copied)
        first = np.where(casts, copied + wider * (np.asarray(cast) > copied), 0.0)
        then = np.where(casts, wider - copied * (how.by_unit == 0), 0.0)
        most, here = np.where(how.by_unit > 0, profile.update_elements, np.inf), 1 - profile.on_host
        return np.minimum(elements, most) * np.maximum(here * first, here * then + profile.update_bytes)

    def _unsharded(self, params: Column, updated: Column) -> Column:
        """Return the bytes of gradients that are unsharded in the backward pass and shards in the update."""
        how, profile = self.how, self.profile
        dropped = how.state & (how.by_unit == 0) & (how.reduces_each == 0) & (np.asarray(profile.cast_gradient) > 0)
        rest = profile.accumulated_bytes * np.maximum(params - updated, 0.0)
        return whole_gradient_bytes(profile, how) * params + np.where(dropped, rest, 0.0)

    def _gathered(self, blocks: Column, ends: Column, params: Column) -> Column:
        """Return the bytes of gathered parameters and of gradients that are being reduced. Units may take turns in
        buffers: of the larger end and two blocks; three of separately sharded experts."""
        how, profile = self.how, self.profile
        turns, e = np.asarray(profile.unit_buffers), profile.parameter_bytes
        of_blocks = np.where(self.narrow > 0, 1.0, e)
        reduced_in, gathered_in = turns * how.reduces_each * profile.gradient_bytes, turns * e
        # If parameters stay from the forward to the backward pass, all of the rank's are gathered.
        kept = how.by_unit * (ends * e + (params - ends) * of_blocks) + self.reduced
        end, some = np.minimum(ends, self.larger_end), np.minimum(blocks, 2.0) / 2
        in_buffers = turns * (end * e + some * self.of_blocks * of_blocks)
        by_unit = np.where(gathered_in > 0, in_buffers, self.unit)
        return np.where(how.regathers > 0, by_unit, kept) + reduced_in * (end + some * self.in_buckets)


def _share(shape: Shape, layout: LayoutColumns, profile: Profile, ends: _Ends, stream: Column) -> _Share:
    """Return a rank's costs; `stream`: bytes of a micro-batch that no block keeps."""
    dense_params, expert_params = _parameters_of_block(shape, layout)
    params = dense_params + expert_params
    zero = sharding(layout, profile.policy)
    separate_experts = np.asarray(experts_apart(layout)) > 0
    expert_shards = np.where(separate_experts, np.where(zero.state, expert_ranks(layout), 1.0), zero.shards)
    dense_bytes = state_bytes(layout, profile, zero, zero.shards)
    expert_bytes = state_bytes(layout, profile, zero, expert_shards)
    cast_bytes = cast_weight_bytes(layout, profile)
    block_state = dense_params * (dense_bytes + cast_bytes) + expert_params * (expert_bytes + cast_bytes)
    narrow = (np.asarray(layout.narrow_gathers) > 0) * zero.parameters  # plus a rounded byte per sharded master
    block_state = block_state + narrow * (dense_params / zero.shards + expert_params / expert_shards)
    block = live_bytes(shape, layout, profile)
    # The backward pass of a block has all its tensors at once; of `group` blocks where only their first input is
    # kept.
    by_operation = layout.selective * np.asarray(profile.per_op)
    recomputed = np.where(layout.full + by_operation > 0, layout.group * block.kept, block.freed)
    norms = shape.magnitudes.norm_bytes(profile.wide_adapters) / layout.tp  # of a forward pass
    # Where parameters stay and gradients are sharded: a block's gradients until they are reduced, in place of the
    # activations that its backward pass freed.
    reduced = zero.reduces_each * np.maximum(profile.gradient_bytes * params - block.stored, 0.0)
    state_shards, trained = np.where(zero.state, zero.shards, 1.0), 1.0 - layout.frozen
    unit = np.where(shape.wraps_blocks, params, shape.unit_params / layout.tp)
    root = np.where(shape.wraps_blocks, shape.ends, shape.root_params) / layout.tp
    matrix = np.maximum(_two_matrices(shape, layout, separate_experts) / 2, ends.larger)
    in_turn = np.where(
        np.asarray(profile.by_matrix) > 0, _WHOLE_UNITS * matrix, (_WHOLE_UNITS - layout.frozen) * unit + root
    )
    # A single rank computes with its shard itself.
    in_turn = np.where((zero.shards <= 1) & (profile.parameters_on_host == 0), trained * unit, in_turn)
    of_blocks = 2 * dense_params + np.where(separate_experts, 3.0, 2.0) * expert_params
    # Gradients of several micro-batches add up from the first on.
    fresh = profile.accumulated_bytes * profile.frees_gradients * (layout.micro_batches <= 1)
    fresh = fresh * np.where(zero.state, 1 - np.asarray(profile.gradients_on_host), 1.0)
    sharded = (np.asarray(zero.by_unit) > 0) | (np.asarray(zero.reduces_each) > 0)
    gradient_shards, of_experts = np.where(sharded, zero.shards, 1.0), np.where(sharded, expert_shards, 1.0)
    return _Share(
        zero,
        profile,
        dense_params,
        expert_params,
        block_state
        + _adapter_bytes(profile, zero, zero.shards) * shape.adapters / layout.tp
        + _adapter_bytes(profile, zero, expert_shards) * shape.expert_adapters / (layout.ep * layout.etp),
        dense_bytes,
        ends.larger,
        block.stored,
        stream,
        recomputed + gathered_key_bytes(shape, layout, profile) + layout.full * norms,
        in_turn * profile.parameter_bytes,
        np.where(shape.wraps_blocks, 0.0, root * profile.parameter_bytes * zero.reduces_each),
        np.where(np.asarray(profile.unit_buffers) > 0, 0.0, reduced),
        of_blocks,
        # At level 2 a matrix has a bucket of its own.
        np.where(zero.parameters, of_blocks, _two_matrices(shape, layout, separate_experts)),
        bucket_buffer_bytes(profile, zero, bucket_bytes(layout, profile))[0],
        fresh * (dense_params / gradient_shards + expert_params / of_experts),
        fresh / gradient_shards,
        narrow,
        (dense_params / state_shards + expert_params / np.where(zero.state, expert_shards, 1.0)) * trained,
        state_shards / np.maximum(trained, 1e-9),
    )


def _constant_bytes(
    shape: Shape, layout: LayoutColumns, profile: Profile, share: _Share, most_params: Column
) -> tuple[Column, Column]:
    """Return bytes that every rank holds permanently, and the part of them that compression holds."""
    # Products that accumulate their weights' gradients in place return a placeholder, kept for each shape; the head's
    # goes with the loss.
    of_expert = shape.mean(lambda kind: kind.expert_params / np.maximum(kind.experts, 1))
    per_shape = share.dense_params + of_expert / layout.etp
    stand_in = profile.stand_in * profile.parameter_bytes * per_shape
    buffers = np.where(layout.tp > 1, profile.buffers * layout.tokens * shape.hidden * layout.activation_bytes, 0.0)
    replicas, zero, bucket = layout.dp * layout.cp, sharding(layout, profile.policy), bucket_bytes(layout, profile)
    buffers = buffers + bucket_buffer_bytes(profile, zero, bucket)[1]
    coded = layout.compressed.held_bytes(most_params, profile.gradient_bytes, replicas, bucket)
    shards = np.where(zero.state, zero.shards, 1)
    coded = coded + layout.changes.held_bytes(most_params / shards, profile.gradient_bytes, layout.dp_local, bucket)
    return profile.constant_bytes + buffers + stand_in + coded, coded


def memory(
    shape: Shape, layout: LayoutColumns, profile: Profile, ahead: Column = 1.0, room: Column = np.inf
) -> Memory:
    """Return the Memory of the fullest rank, as numbers or columns. `ahead`: Step.ahead; the default, 1, has the most
    memory waiting. `room`: bytes of the device that the allocator can have."""
    shape = padded_shape(shape, layout.tp, profile.vocab_multiple)
    parts = stages(shape, layout, profile.balanced)
    if np.any(profile.by_work):
        parts = stages_by_work(shape, layout)
    ends = _ends(shape, layout)
    stream, last_norm = end_bytes(shape, layout, profile)
    share = _share(shape, layout, profile, ends, stream)
    flight, flight_last = held_micro_batches(layout, profile.policy)
    # Exchanges that overlap another micro-batch run one chunk ahead; without a pipeline one block, whose forward pass
    # goes with another's backward pass (Megatron-LM d98e8a64, megatron/core/pipeline_parallel/combined_1f1b.py:48,
    # schedules.py:966).
    flight = flight + profile.overlaps_experts / np.where(layout.pp == 1, parts.most, layout.virtual)
    most_params = parts.most * (share.dense_params + share.expert_params) + np.maximum(ends.first, ends.last)
    constant, coded = _constant_bytes(shape, layout, profile, share, most_params)
    loss, one_stage = _loss_bytes(shape, layout, profile, last_norm), layout.pp == 1
    last_blocks = np.where(one_stage, parts.most, np.maximum(parts.last, 0))
    first_loss, last_loss = np.where(ends.both, loss, 0.0), np.where(ends.both & ~one_stage, 0.0, loss)

    def parts_of(rank: _Rank) -> dict[str, Column]:
        return {
            "state": rank.held,
            "activations": rank.activations,
            "logits": rank.loss,
            "gathered": rank.gathered,
            "update": rank.update,
            "buffers": constant - coded,
            "compression": coded,
        }

    first_rank = share.on(parts.first, ends.first, flight, first_loss)
    last_rank = share.on(last_blocks, ends.last, flight_last, last_loss)

    def by_rank(pp: int) -> list[dict[str, Column]]:
        """Return the parts of each pipeline rank. Between the ends, blocks are even and passes in flight fall so."""
        between = (shape.layers - parts.first - last_blocks) / max(pp - 2, 1)
        inner = [
            share.on(between, 0.0 * ends.first, flight + (flight_last - flight) * i / (pp - 1), 0.0 * first_loss)
            for i in range(1, pp - 1)
        ]
        return [parts_of(rank) for rank in (first_rank, *inner, *([last_rank] if pp > 1 else []))]

    a, b = first_rank, last_rank
    if np.any(parts.first < parts.most):  # then a rank behind the first may be fuller
        falls = (flight - flight_last) / np.maximum(layout.pp - 1, 1) * parts.fullest
        falls = np.where(np.asarray(profile.by_work) > 0, falls, 1 / layout.virtual)
        a = _fuller(a, share.on(parts.most, 0.0 * ends.first, np.maximum(flight - falls, 1.0), 0.0 * first_loss))
    first_fuller = a.state + a.transient >= b.state + b.transient
    steady = np.maximum(a.state, b.state) + constant
    peak = np.maximum(a.state + a.transient, b.state + b.transient) + constant

    passes = np.maximum(np.minimum(layout.pp, layout.micro_batches) - 2, 0)
    waiting_a = waiting_bytes(shape, layout, profile, parts.most, passes, ahead)
    waiting_b = waiting_bytes(shape, layout, profile, last_blocks, 0.0, ahead)
    least, least_b = (r.state + (1 + profile.fragments) * r.transient + constant for r in (a, b))
    reserved = np.maximum(np.maximum(least + waiting_a, least_b + waiting_b), steady)
    # A run that completed with a full device waited for the GPU; half of the remaining room was used, on average.
    room_left = np.maximum(room - least, 0.0)
    first = np.maximum(least + np.where(waiting_a <= room_left, waiting_a, room_left / 2), a.state + constant)
    both = zip(parts_of(a).items(), parts_of(b).values(), strict=True)
    terms = {name: one if one is other else np.where(first_fuller, one, other) for (name, one), other in both}
    last_peak = b.state + b.transient + constant
    return Memory(steady, peak, last_peak, reserved, first, reserved + profile.context_bytes, terms, by_rank)
