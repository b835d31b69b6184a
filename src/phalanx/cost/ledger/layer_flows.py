"""Traffic of layers in a micro-batch, by axis: the columns of schedule/layers/collectives.py and context.py, under a
stack's policy.

    tp      blocks: an all-reduce of what attention and of what the MLP adds (parallel residual: of their sum), and of
            the gradient of each one's input. With sequence parallelism: all-gather before, reduce-scatter after each;
            the backward pass gathers gradients, and inputs again for weight gradients (Korthikanti et al. 2022)
            unless these were kept. Blocks may gather in 8 bits, after an all-reduce of the scale. Experts' output is
            complete: only attention, and a shared expert, communicate over tp then. Embedding and head: one each per
            pass; the loss, of 1 and 2 numbers per token.
    ring    R - 1 hops of keys and values, twice as many backward, with their gradients
    ulysses all-to-all of queries, keys, values; of attention's result; and both back
    ep      all-to-all of rows to experts, and back; and the same of their gradients

Recomputation repeats a forward pass (`R`), or attention's core. n: bytes of the residual stream of a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phalanx.cost.hardware.columns import Column
from phalanx.cost.ledger.flow import Flow, Unit
from phalanx.cost.ledger.model_shape import Shape
from phalanx.cost.ledger.policy import Policy
from phalanx.cost.ledger.rank_layout import Layout
from phalanx.schedule.layers.head import slices_over_ranks

SCALAR_BYTES = 4.0
"""Bytes of the loss's numbers per token: fp32, or wider where the activations are."""
SCALE_BYTES = 4.0
"""Bytes of the largest magnitude before a gather in 8 bits: fp32."""
COUNT_BYTES = 8.0
"""Bytes of a count of tokens: int64."""


def layer_flows(shape: Shape, layout: Layout, policy: Policy) -> list[Flow]:
    """Return the traffic of a rank's layers."""
    flows = flows_without_routing(shape, layout, policy)
    if np.any(shape.moe_layers):
        flows += [*_core(shape, layout, "experts"), *expert_flows(shape, layout, policy)]
    return flows


def flows_without_routing(shape: Shape, layout: Layout, policy: Policy) -> list[Flow]:
    """Return the flows that do not depend on the spread of experts, with attention's core of one kind of block."""
    parts = _halves(layout, policy)
    whole = stream_bytes(shape, layout)
    of = _Stream(whole, whole / parts if np.any(parts > 1) else whole, parts)
    flows = [
        *_stream(shape, layout, policy, of, "dense"),
        *_ends(shape, layout, policy, of),
        *_core(shape, layout, "dense"),
    ]
    if np.any(shape.moe_layers):
        flows += _stream(shape, layout, policy, of, "experts")
    return flows


@dataclass(frozen=True)
class _Stream:
    """The residual stream of a micro-batch: its bytes, the bytes of one of its parts, and the number of parts
    sent."""

    whole: Column
    part: Column
    parts: Column


def stream_bytes(shape: Shape, layout: Layout) -> Column:
    """Return n, the bytes of a micro-batch's residual stream on the ranks that share its tokens."""
    return layout.tokens * shape.hidden * layout.activation_bytes


def _halves(layout: Layout, policy: Policy) -> Column:
    """Return the number of operations of a collective of sequence parallelism."""
    return np.where((policy.halves_stream > 0) & (layout.tokens % (2 * layout.tp) == 0), 2.0, 1.0)


def _tp(
    what: str, op: str, unit: Unit, layout: Layout, size: Column, counts: dict[str, Column], beside: Column
) -> Flow:
    return Flow("tp", op, what, unit, layout.tp, layout.tp_stride, size, counts, beside)


def _stream(shape: Shape, layout: Layout, policy: Policy, stream: _Stream, unit: Unit) -> list[Flow]:
    """Return the collectives of a block over tp: all-reduces, or the collectives of sequence parallelism."""
    split = np.asarray(layout.sp) > 0
    plain = 1.0 - 1.0 * split
    sums = np.where(shape.parallel > 0, 1.0, 2.0)
    inputs: Column = 2.0  # products that read an unsharded input
    if unit == "experts":
        # The experts' own output is complete; without sequence parallelism it is summed as an MLP's is.
        shared = 1.0 * (np.asarray(shape.shared_ffn) > 0)
        sums = np.where(split, 1.0 + shared, 2.0)
        inputs = np.where(split, 1.0 + shared, 2.0)
    # The last collective of a repeated forward pass; experts without a shared one end in their own all-to-all.
    last = (1 - policy.repeats_last) * (np.where(split, shared, 1.0) if unit == "experts" else 1.0)
    repeats = layout.full
    reduce = {"F": plain * sums, "B": plain * inputs, "R": plain * repeats * (sums - last)}
    s = split * stream.parts
    again = inputs * (1 - np.asarray(policy.keeps_gathered))
    gathers = {"F": s * inputs, "B": s * (sums + again), "R": s * repeats * inputs}
    scatters = {"F": s * sums, "B": s * inputs, "R": s * repeats * (sums - last)}
    flows = []
    if np.any(plain):
        flows.append(
            _tp("outputs of layers, gradients of inputs", "all_reduce", unit, layout, stream.whole, reduce, 0.0)
        )
    if np.any(split):
        narrow = np.asarray(layout.narrow_gathers) > 0
        part = np.where(narrow, stream.part / layout.activation_bytes, stream.part)
        flows.append(_tp("inputs of layers", "all_gather", unit, layout, part, gathers, s * again))
        if np.any(narrow):
            once = split * narrow * 1.0
            scales = {"F": once * inputs, "B": once * sums, "R": once * repeats * inputs}
            flows.append(_tp("scales of inputs", "all_reduce", unit, layout, SCALE_BYTES, scales, 0.0))
        flows.append(_tp("outputs of layers", "reduce_scatter", unit, layout, stream.part, scatters, 0.0))
    return flows


def head_slices(shape: Shape, layout: Layout, policy: Policy) -> Column:
    """Return the number of slices into which tp ranks cut the head's tokens; 1: they hold all logits."""
    rows = np.ceil(shape.vocab / layout.tp)
    n = slices_over_ranks(layout.tokens, rows, shape.hidden, layout.activation_bytes)
    return np.where((np.asarray(policy.slices_head) > 0) & (layout.tp > 1) & (np.asarray(layout.splits) == 0), n, 1)


def _ends(shape: Shape, layout: Layout, policy: Policy, stream: _Stream) -> list[Flow]:
    """Return the collectives of embedding, head and loss over tp."""
    slices = head_slices(shape, layout, policy)
    split = 1.0 * (np.asarray(layout.sp) > 0)
    plain, s, what = 1 - split, split * stream.parts, "embedding, head"
    again = s * (slices == 1) * (1 - np.asarray(policy.keeps_gathered))
    flows = [
        _tp(what, "all_reduce", "embed", layout, stream.whole, {"F": plain}, 0.0),
        _tp(what, "reduce_scatter", "embed", layout, stream.part, {"F": s}, 0.0),
        _tp(what, "all_gather", "embed", layout, stream.part, {"B": s}, s),
        _tp(what, "all_reduce", "head", layout, stream.whole, {"B": plain}, 0.0),
        _tp(what, "all_gather", "head", layout, stream.part, {"F": s, "B": again}, again),
        _tp(what, "reduce_scatter", "head", layout, stream.part, {"B": s}, 0.0),
    ]
    flows = [flow for flow in flows if np.any(flow.count())]
    numbers = np.maximum(SCALAR_BYTES, layout.activation_bytes) * layout.tokens
    # Each token's largest logit; its sum of exponentials and its target's logit.
    apart = np.asarray(policy.loss_apart)
    for k, n in ((1, 1 + 2 * apart), (2, 1 - apart)):
        flows.append(_tp("loss", "all_reduce", "head", layout, k * numbers / slices, {"F": n * slices}, 0.0))
    return flows


def kv_heads(shape: Shape, layout: Layout) -> Column:
    """Return the key heads that a tp rank has: with fewer than ranks, neighbours hold copies of one."""
    of_model = np.where(shape.kv_rank > 0, shape.heads, shape.kv_heads)
    return np.maximum(np.floor(of_model / layout.tp), 1.0)


def _core(shape: Shape, layout: Layout, unit: Unit) -> list[Flow]:
    """Return the traffic of attention's core: hops of the ring, all-to-alls of Ulysses."""
    if not np.any(np.asarray(layout.cp) > 1):
        return []
    again = np.minimum(layout.full + layout.selective, 1.0)
    ring, u = layout.cp / layout.ulysses, layout.ulysses
    head = layout.tokens * shape.core_dim * layout.activation_bytes
    kv = np.maximum(np.floor(kv_heads(shape, layout) / u), 1.0)
    hops, heads = np.maximum(ring - 1, 0.0), shape.heads / layout.tp
    out, back = head * (heads + 2 * kv * u), head * heads
    twice = {"F": 1.0, "B": 1.0, "R": again}
    counts = {"F": hops, "B": 2 * hops, "R": again * hops}
    return [
        Flow(
            "ring",
            "send",
            "keys and values",
            unit,
            ring,
            layout.ring_stride,
            head * u * 2 * kv,
            counts,
            chain=layout.chain(ring),
        ),
        Flow("ulysses", "all_to_all", "queries, keys, values", unit, u, layout.cp_stride, out, twice),
        Flow("ulysses", "all_to_all", "attention's results", unit, u, layout.cp_stride, back, twice),
    ]


def routed_rows(shape: Shape, layout: Layout, held: Column) -> Column:
    """Return the rows that `held` experts take of the tokens that a rank routes, each token's choices in perfect
    balance and no expert beyond its capacity (schedule/layers/routing.py)."""
    tokens, count = layout.tokens / layout.tp, np.maximum(shape.experts, 1)
    limit = np.minimum(tokens, np.ceil(np.maximum(shape.capacity, 0) * shape.top_k * tokens / count))
    limit = np.where(np.asarray(shape.capacity) > 0, limit, np.inf)
    each = np.floor(tokens * shape.top_k / count)
    over = np.minimum(tokens * shape.top_k - each * count, held)
    chosen = over * np.minimum(each + 1, limit) + (held - over) * np.minimum(each, limit)
    by_experts = held * np.where(np.asarray(shape.experts_choose) > 0, limit, 0.0)
    return np.where(np.asarray(shape.experts_choose) > 0, by_experts, chosen)


def expert_flows(shape: Shape, layout: Layout, policy: Policy) -> list[Flow]:
    """Return the traffic of routing: rows to experts and back, counts, choices."""
    # Rows to experts and back.
    copies = np.where(policy.sends_copies > 0, layout.etp, 1.0)
    ranks = layout.ep * copies
    axis = "ep" if not np.any((policy.sends_copies > 0) & (np.asarray(layout.etp) > 1)) else "ep+etp"
    row, stride = shape.hidden * layout.activation_bytes, np.where(copies > 1, layout.expert_stride / layout.etp, 1.0)
    stride = np.where(copies > 1, stride, layout.expert_stride)
    count = np.maximum(shape.experts, 1)
    sent = routed_rows(shape, layout, count) * copies * row
    received = routed_rows(shape, layout, count / layout.ep) * ranks * row
    once = {"F": 1.0, "B": 1.0, "R": layout.full}
    flows = [
        Flow(axis, "all_to_all", "tokens to experts", "experts", ranks, stride, sent, once),
        Flow(axis, "all_to_all", "experts' results", "experts", ranks, stride, received, once),
    ]
    # A token sent to one of etp ranks is gathered by all of them.
    if np.any((policy.sends_copies == 0) & (np.asarray(layout.etp) > 1)):
        gathered = np.where(policy.sends_copies > 0, 0.0, sent * layout.etp)
        for what in ("rows of an expert", "experts' results"):
            flows.append(Flow("etp", "all_gather", what, "experts", layout.etp, layout.etp_stride, gathered, once))
    # Counts before the rows, and choices that depend on other tokens.
    if np.any(policy.sends_counts):
        counts = policy.sends_counts
        size = count * layout.etp * COUNT_BYTES
        forward = {"F": counts, "R": counts * layout.full}
        flows.append(Flow(axis, "all_to_all", "counts", "experts", ranks, stride, size, forward))
        sharing = layout.cp * layout.tp
        wide = np.where((np.asarray(shape.experts_choose) > 0) & (np.asarray(layout.activation_bytes) > 4), 2.0, 1.0)
        choices = sharing * np.ceil(layout.tokens / layout.tp) * shape.gathers_choices * wide
        some = {phase: n * (np.asarray(shape.gathers_choices) > 0) for phase, n in forward.items()}
        stride = np.minimum(layout.tp_stride, layout.cp_stride)
        flows.append(Flow("tokens", "all_gather", "choices", "experts", sharing, stride, choices, some))
    return flows


def messages(shape: Shape, layout: Layout, policy: Policy, boundaries: Column) -> Flow:
    """Return the messages of a pipeline over `boundaries` boundaries between chunks on different ranks, forward and
    backward, in a step."""
    whole = stream_bytes(shape, layout)
    parts = np.where((np.asarray(layout.sp) > 0) | (policy.scatters_messages > 0), layout.tp, 1.0)
    n = layout.micro_batches * boundaries
    return Flow(
        "pp",
        "send",
        "activations and gradients",
        "rank",
        layout.pp,
        layout.pp_stride,
        whole / parts,
        {"F": n, "B": n},
        chain=layout.chain(layout.pp),
    )


def boundaries(layout: Layout) -> Column:
    """Return the boundaries between chunks that lie on different ranks, over a whole pipeline: in a V its two middle
    chunks are neighbours on one rank."""
    chunks = layout.pp * layout.virtual
    return np.where(np.asarray(layout.pp) > 1, chunks - 1 - (np.asarray(layout.v_shaped) > 0), 0.0)
