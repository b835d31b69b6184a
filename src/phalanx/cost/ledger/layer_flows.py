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
    cp      recurrences: all-to-all of what they read, and of their result
    sums    Mamba's step, B and C are sums over tp ranks, and so are their gradients
    ep      all-to-all of rows to experts, and back; and the same of their gradients

Recomputation repeats a forward pass (`R`), or attention's core. n: bytes of the residual stream of a micro-batch.
"""

from dataclasses import dataclass

import numpy as np

from phalanx.cost.hardware.columns import Column
from phalanx.cost.ledger.flow import Flow, Unit
from phalanx.cost.ledger.kind import BlockKind, groups_on_rank
from phalanx.cost.ledger.model_shape import Shape
from phalanx.cost.ledger.policy import Policy
from phalanx.cost.ledger.rank_layout import LayoutColumns
from phalanx.schedule.layers.head import slices_over_ranks

SCALAR_BYTES = 4.0
"""Bytes of the loss's numbers per token: fp32, or wider where the activations are."""
SCALE_BYTES = 4.0
"""Bytes of the largest magnitude before a gather in 8 bits: fp32."""
COUNT_BYTES = 8.0
"""Bytes of a count of tokens: int64."""


def layer_flows(shape: Shape, layout: LayoutColumns, policy: Policy) -> list[Flow]:
    """Return the traffic of a rank's layers."""
    flows = flows_without_routing(shape, layout, policy)
    for place, kind in enumerate(shape.kinds):
        if np.any(kind.experts):
            flows += expert_flows(kind, place, layout, policy)
    return flows


def flows_without_routing(shape: Shape, layout: LayoutColumns, policy: Policy) -> list[Flow]:
    """Return the flows that do not depend on the spread of experts."""
    parts = _halves(layout, policy)
    whole = stream_bytes(shape, layout)
    of = _Stream(whole, whole / parts if np.any(parts > 1) else whole, parts)
    flows: list[Flow] = []
    for routes in (False, True):  # blocks without experts, the ends, blocks with experts
        kinds = [(place, kind) for place, kind in enumerate(shape.kinds) if bool(np.any(kind.experts)) == routes]
        flows += [flow for place, kind in kinds for flow in _stream(kind, layout, policy, of, place)]
        flows += [] if routes else _ends(shape, layout, policy, of)
        flows += [
            flow for place, kind in kinds for flow in [*_sums(kind, layout, place), *_core(kind, layout, place)]
        ]
    return flows


@dataclass(frozen=True)
class _Stream:
    """The residual stream of a micro-batch: its bytes, the bytes of one of its parts, and the number of parts
    sent."""

    whole: Column
    part: Column
    parts: Column


def stream_bytes(shape: Shape, layout: LayoutColumns) -> Column:
    """Return n, the bytes of a micro-batch's residual stream on the ranks that share its tokens."""
    return layout.tokens * shape.hidden * layout.activation_bytes


def carried_bytes(shape: Shape, layout: LayoutColumns) -> Column:
    """Return the bytes of all residual streams of a micro-batch, which blocks pass on."""
    return stream_bytes(shape, layout) * shape.most(lambda kind: kind.streams)


def _halves(layout: LayoutColumns, policy: Policy) -> Column:
    """Return the number of operations into which a collective of sequence parallelism is cut."""
    return np.where((policy.halves_stream > 0) & (layout.tokens % (2 * layout.tp) == 0), 2.0, 1.0)


def _tp(
    what: str,
    op: str,
    unit: Unit,
    layout: LayoutColumns,
    size: Column,
    counts: dict[str, Column],
    weight_gathers: Column = 0.0,
) -> Flow:
    return Flow("tp", op, what, unit, layout.tp, layout.tp_stride, size, counts, weight_gathers)


def _stream(kind: BlockKind, layout: LayoutColumns, policy: Policy, stream: _Stream, unit: int) -> list[Flow]:
    """Return the collectives of a block over tp: all-reduces, or the collectives of sequence parallelism."""
    split = np.asarray(layout.sp) > 0
    plain = 1.0 - 1.0 * split
    sums: Column = kind.sublayers
    inputs: Column = kind.sublayers  # products that read an unsharded input
    shared: Column = 1.0
    if np.any(kind.parallel):
        sums = np.where(np.asarray(kind.parallel) > 0, 1.0, sums)
    if np.any(kind.experts):
        # The experts' own output is complete; without sequence parallelism it is summed as an MLP's is.
        shared = np.where(np.asarray(kind.experts) > 0, 1.0 * (np.asarray(kind.shared_ffn) > 0), 1.0)
        routed = np.asarray(kind.experts) > 0
        sums = np.where(
            split, np.where(routed, kind.sublayers - 1 + shared, sums), np.where(routed, kind.sublayers, sums)
        )
        inputs = np.where(split, kind.sublayers - 1 + shared, kind.sublayers)
    # A recomputed block may leave out its last collective, unless a norm reads the result; experts without a shared
    # one end in their own all-to-all.
    last = (1 - policy.repeats_last) * np.where(split, shared, 1.0) * (np.asarray(kind.after_norms) == 0)
    repeats = layout.full
    reduce = {"F": plain * sums, "B": plain * inputs, "R": plain * repeats * (sums - last)}
    s = split * stream.parts
    again = inputs * (1 - np.asarray(policy.keeps_gathered))
    gathers = {"F": s * inputs, "B": s * (sums + again), "R": s * repeats * inputs}
    scatters = {"F": s * sums, "B": s * inputs, "R": s * repeats * (sums - last)}
    flows = []
    if np.any(plain):
        flows.append(_tp("outputs of layers, gradients of inputs", "all_reduce", unit, layout, stream.whole, reduce))
    if np.any(split):
        narrow = np.asarray(layout.narrow_gathers) > 0
        part = np.where(narrow, stream.part / layout.activation_bytes, stream.part)
        flows.append(_tp("inputs of layers", "all_gather", unit, layout, part, gathers, s * again))
        if np.any(narrow):
            once = split * narrow * 1.0
            scales = {"F": once * inputs, "B": once * sums, "R": once * repeats * inputs}
            flows.append(_tp("scales of inputs", "all_reduce", unit, layout, SCALE_BYTES, scales))
        flows.append(_tp("outputs of layers", "reduce_scatter", unit, layout, stream.part, scatters))
    return flows


def head_slices(shape: Shape, layout: LayoutColumns, policy: Policy) -> Column:
    """Return the number of slices into which tp ranks cut the head's tokens; 1: all logits exist at once."""
    rows = np.ceil(shape.vocab / layout.tp)
    n = slices_over_ranks(layout.tokens, rows, shape.hidden, layout.activation_bytes)
    return np.where((np.asarray(policy.slices_head) > 0) & (layout.tp > 1) & (np.asarray(layout.splits) == 0), n, 1)


def _ends(shape: Shape, layout: LayoutColumns, policy: Policy, stream: _Stream) -> list[Flow]:
    """Return the collectives of embedding, head and loss over tp."""
    slices = head_slices(shape, layout, policy)
    split = 1.0 * (np.asarray(layout.sp) > 0)
    plain, s, what = 1 - split, split * stream.parts, "embedding, head"
    again = s * (slices == 1) * (1 - np.asarray(policy.keeps_gathered))
    flows = [
        _tp(what, "all_reduce", "embed", layout, stream.whole, {"F": plain}),
        _tp(what, "reduce_scatter", "embed", layout, stream.part, {"F": s}),
        _tp(what, "all_gather", "embed", layout, stream.part, {"B": s}, s),
        _tp(what, "all_reduce", "head", layout, stream.whole, {"B": plain}),
        _tp(what, "all_gather", "head", layout, stream.part, {"F": s, "B": again}, again),
        _tp(what, "reduce_scatter", "head", layout, stream.part, {"B": s}),
    ]
    flows = [flow for flow in flows if np.any(flow.count())]
    numbers = np.maximum(SCALAR_BYTES, layout.activation_bytes) * layout.tokens
    # Each token's largest logit; its sum of exponentials and its target's logit.
    apart = np.asarray(policy.loss_apart)
    for k, n in ((1, 1 + 2 * apart), (2, 1 - apart)):
        flows.append(_tp("loss", "all_reduce", "head", layout, k * numbers / slices, {"F": n * slices}))
    return flows


def kv_heads(kind: BlockKind, layout: LayoutColumns) -> Column:
    """Return the number of key heads on a tp rank; latent attention has one for each query head."""
    return groups_on_rank(np.where(np.asarray(kind.kv_rank) > 0, kind.heads, kind.kv_heads), layout.tp)


def group_elements_on_rank(kind: BlockKind, layout: LayoutColumns) -> Column:
    """Return the elements of a recurrence's first product that heads of a group share, on a tp rank."""
    groups = np.maximum(kind.scan_groups, 1)
    return kind.mixed_shared / groups * groups_on_rank(groups, layout.tp)


def _sums(kind: BlockKind, layout: LayoutColumns, unit: int) -> list[Flow]:
    """Return the all-reduces inside a recurrence: of the inputs that are sums over tp ranks, and of their
    gradients."""
    if not np.any(kind.scan_sums):
        return []
    size = layout.tokens * layout.activation_bytes * kind.scan_sums
    some = 1.0 * (np.asarray(kind.scan_sums) > 0)
    counts = {"F": some, "B": some, "R": some * layout.full}
    return [_tp("sums inside recurrences", "all_reduce", unit, layout, size, counts)]


def _core(kind: BlockKind, layout: LayoutColumns, unit: int) -> list[Flow]:
    """Return the traffic of attention's core (hops of the ring, all-to-alls of Ulysses) and of a recurrence."""
    if not np.any(np.asarray(layout.cp) > 1):
        return []
    flows = _attention_core(kind, layout, unit) if np.any(kind.heads) else []
    return [*flows, *_recurrence(kind, layout, unit)] if np.any(kind.scan_heads) else flows


def _recurrence(kind: BlockKind, layout: LayoutColumns, unit: int) -> list[Flow]:
    """Return the all-to-alls of a recurrence over all ranks of cp: of its inputs, so that each rank has whole
    sequences for a part of the heads, and of its result back. If there are more ranks than groups, each gets its
    group (Megatron-LM d98e8a6, core/ssm/mamba_context_parallel.py:119-133)."""
    e = layout.tokens * layout.activation_bytes
    groups = np.maximum(kind.scan_groups, 1)
    here = groups_on_rank(groups, layout.tp)
    width = kind.scan_in / layout.tp + kind.scan_shared / groups * here * np.maximum(np.floor(layout.cp / here), 1.0)
    twice = {phase: kind.recurs * n for phase, n in {"F": 1.0, "B": 1.0, "R": layout.full}.items()}
    over = (layout.cp, layout.apart(layout.cp, layout.cp_stride))
    back = e * kind.scan_heads * kind.scan_dim / layout.tp
    return [
        Flow("cp", "all_to_all", "inputs of recurrences", unit, *over, e * width, twice),
        Flow("cp", "all_to_all", "results of recurrences", unit, *over, back, twice),
    ]


def _attention_core(kind: BlockKind, layout: LayoutColumns, unit: int) -> list[Flow]:
    """Return the hops of the ring and the all-to-alls of Ulysses."""
    again = np.minimum(layout.full + layout.selective, 1.0)
    ring, u = layout.cp / layout.ulysses, layout.ulysses
    head = layout.tokens * kind.core_dim * layout.activation_bytes
    kv = np.maximum(np.floor(kv_heads(kind, layout) / u), 1.0)
    hops, heads = np.maximum(ring - 1, 0.0) * kind.attends, kind.heads / layout.tp
    out, back = head * (heads + 2 * kv * u), head * heads
    twice = {phase: kind.attends * n for phase, n in {"F": 1.0, "B": 1.0, "R": again}.items()}
    counts = {"F": hops, "B": 2 * hops, "R": again * hops}
    near, far = layout.apart(u, layout.cp_stride), layout.apart(ring, layout.ring_stride)
    size, links = head * u * 2 * kv, layout.chain(ring)
    return [
        Flow("ring", "send", "keys and values", unit, ring, far, size, counts, chain=links),
        Flow("ulysses", "all_to_all", "queries, keys, values", unit, u, near, out, twice),
        Flow("ulysses", "all_to_all", "attention's results", unit, u, near, back, twice),
    ]


def routed_rows(kind: BlockKind, layout: LayoutColumns, held: Column) -> Column:
    """Return the number of rows that `held` experts get from the tokens that a rank routes, with perfectly balanced
    choices and no expert beyond its capacity (schedule/layers/routing.py)."""
    tokens, count = layout.tokens / layout.tp, np.maximum(kind.experts, 1)
    limit = np.minimum(tokens, np.ceil(np.maximum(kind.capacity, 0) * kind.top_k * tokens / count))
    limit = np.where(np.asarray(kind.capacity) > 0, limit, np.inf)
    each = np.floor(tokens * kind.top_k / count)
    over = np.minimum(tokens * kind.top_k - each * count, held)
    chosen = over * np.minimum(each + 1, limit) + (held - over) * np.minimum(each, limit)
    by_experts = held * np.where(np.asarray(kind.experts_choose) > 0, limit, 0.0)
    return np.where(np.asarray(kind.experts_choose) > 0, by_experts, chosen)


def expert_flows(kind: BlockKind, unit: int, layout: LayoutColumns, policy: Policy) -> list[Flow]:
    """Return the traffic of routing: rows to experts and back, counts, choices."""
    copies = np.where(policy.sends_copies > 0, layout.etp, 1.0)
    ranks = layout.ep * copies
    axis = "ep" if not np.any((policy.sends_copies > 0) & (np.asarray(layout.etp) > 1)) else "ep+etp"
    row = kind.expert_dim * layout.activation_bytes
    stride = layout.apart(ranks, layout.expert_stride / np.where(copies > 1, layout.etp, 1.0))
    count = np.maximum(kind.experts, 1)
    sent = routed_rows(kind, layout, count) * copies * row
    received = routed_rows(kind, layout, count / layout.ep) * ranks * row
    once = {phase: kind.routes * n for phase, n in {"F": 1.0, "B": 1.0, "R": layout.full}.items()}
    flows = [
        Flow(axis, "all_to_all", "tokens to experts", unit, ranks, stride, sent, once),
        Flow(axis, "all_to_all", "experts' results", unit, ranks, stride, received, once),
    ]
    # A token sent to one of etp ranks is gathered by all of them.
    if np.any((policy.sends_copies == 0) & (np.asarray(layout.etp) > 1)):
        gathered = np.where(policy.sends_copies > 0, 0.0, sent * layout.etp)
        for what in ("rows of an expert", "experts' results"):
            flows.append(Flow("etp", "all_gather", what, unit, layout.etp, layout.etp_stride, gathered, once))
    # Counts before the rows, and choices that depend on other tokens.
    if np.any(policy.sends_counts):
        counts = policy.sends_counts * kind.routes
        size = count * layout.etp * COUNT_BYTES
        forward = {"F": counts, "R": counts * layout.full}
        flows.append(Flow(axis, "all_to_all", "counts", unit, ranks, stride, size, forward))
        sharing = layout.cp * layout.tp
        wide = np.where((np.asarray(kind.experts_choose) > 0) & (np.asarray(layout.activation_bytes) > 4), 2.0, 1.0)
        choices = sharing * np.ceil(layout.tokens / layout.tp) * kind.gathers_choices * wide
        some = {phase: n * (np.asarray(kind.gathers_choices) > 0) for phase, n in forward.items()}
        stride = np.minimum(layout.tp_stride, layout.cp_stride)
        flows.append(Flow("tokens", "all_gather", "choices", unit, sharing, stride, choices, some))
    return flows


def messages(shape: Shape, layout: LayoutColumns, policy: Policy, boundaries: Column) -> Flow:
    """Return the messages of a pipeline over `boundaries` boundaries between chunks on different ranks, forward and
    backward, in a step."""
    whole = carried_bytes(shape, layout)
    parts = np.where((np.asarray(layout.sp) > 0) | (policy.scatters_messages > 0), layout.tp, 1.0)
    n, stride = layout.micro_batches * boundaries, layout.apart(layout.pp, layout.pp_stride)
    what, counts, links = "activations and gradients", {"F": n, "B": n}, layout.chain(layout.pp)
    return Flow("pp", "send", what, "rank", layout.pp, stride, whole / parts, counts, chain=links)


def boundaries(layout: LayoutColumns) -> Column:
    """Return the number of boundaries between chunks on different ranks in a whole pipeline; in a V the two middle
    chunks are on one rank."""
    chunks = layout.pp * layout.virtual
    return np.where(np.asarray(layout.pp) > 1, chunks - 1 - (np.asarray(layout.v_shaped) > 0), 0.0)
