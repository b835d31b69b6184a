"""Traffic of data parallelism in a step: gradients reduced and parameters gathered, under a level of ZeRO and a
policy.

    unsharded   all-reduce of gradients over dp x cp
    sharded     reduce-scatter over the shards, all-reduce of each shard over its replicas (HSDP), all-gather of
                parameters over the shards

each as often as the Sharding states (schedule/gradients/sharding.py). Blocks' parameters may be gathered in 8 bits at
level 3; their scales, and parameters that are not matrices, are then reduced once a step.

Experts reduce and shard over the ranks with the same experts, edp = dp cp tp / (ep etp), if these are not the ranks
of the other parameters. The head stays gathered from its forward to its backward pass. tp ranks sum partial
gradients; the first and the last pipeline rank sum the gradient of a tied embedding.
"""

from dataclasses import dataclass

import numpy as np

from phalanx.cost.hardware.columns import Column
from phalanx.cost.ledger.flow import Flow, UnitCount
from phalanx.cost.ledger.model_shape import Shape
from phalanx.cost.ledger.policy import Policy
from phalanx.cost.ledger.rank_layout import LayoutColumns
from phalanx.schedule.gradients.buckets import NUMBER_BYTES
from phalanx.schedule.gradients.sharding import Sharding

ROOT = "parameters of the root"
"""Name of the data that is gathered once for both passes: the unit around all others, or the head."""


@dataclass(frozen=True)
class Types:
    """Bytes per element: of a sent gradient, of a gathered parameter, of an accumulated gradient."""

    gradient: Column
    parameter: Column
    accumulated: Column = 4.0


@dataclass(frozen=True)
class Parameters:
    """Parameters on a rank. `dense`: all but experts; `blocks`: the part of `dense` in blocks; `kept`: the root's or
    the head's, gathered once for both passes. `units`: number of units in all; `kept_units`: of `kept`; a tied
    embedding is a separate unit."""

    dense: Column
    experts: Column
    blocks: Column
    kept: Column
    units: Column
    kept_units: Column

    @property
    def all(self) -> Column:
        """All parameters, including experts."""
        return self.dense + self.experts


def parameters_of(shape: Shape, layout: LayoutColumns, rank_units: UnitCount) -> Parameters:
    """Return the parameters of a rank with these units, or of several ranks together with theirs."""
    counted_kinds = list(zip(rank_units.blocks, shape.kinds, strict=True))
    blocks = sum(count * kind.on_rank(layout.tp) for count, kind in counted_kinds)
    vocab = np.ceil(shape.vocab / layout.tp) * shape.hidden
    positions = np.where(shape.embedding_params > 0, shape.embedding_params - shape.vocab * shape.hidden, 0.0)
    tied = np.asarray(shape.tied) > 0
    norm = np.where(tied, shape.head_params, shape.head_params - shape.vocab * shape.hidden)
    # One rank with both ends shares a tied embedding between them; else the first and the last have a copy each.
    shared = tied & ((np.asarray(layout.pp) == 1) | (np.asarray(layout.v_shaped) > 0))
    own_head = np.where(shared, 0.0, vocab)
    embed, head = rank_units.embed * (vocab + positions), rank_units.head * (own_head + norm)
    kept = np.where(shared, head + rank_units.embed * vocab, head)
    copies = np.where(shared, np.minimum(rank_units.embed + rank_units.head, 1.0), rank_units.embed + rank_units.head)
    kept_units = rank_units.head + np.where(tied, copies, 0.0)
    units = rank_units.all_blocks + rank_units.embed * (~tied | (positions > 0)) + kept_units
    experts = sum(count * kind.expert_params for count, kind in counted_kinds) / (layout.ep * layout.etp)
    if not np.all(shape.wraps_blocks):  # the root's are gathered once
        kept = np.where(shape.wraps_blocks, kept, shape.root_params / layout.tp / layout.pp)
        kept_units = np.where(shape.wraps_blocks, kept_units, 1.0)
        units = np.where(shape.wraps_blocks, units, shape.unit_count / layout.pp + 1)
    return Parameters(blocks + embed + head, experts, blocks, kept, units, kept_units)


def _scales(shape: Shape, layout: LayoutColumns, held: UnitCount) -> tuple[Column, Column]:
    """Return the number of elements that are reduced so that blocks can be gathered in 8 bits, scales among them: for
    all but experts, and for experts."""
    dense: Column = 0.0
    experts: Column = 0.0
    for count, kind in zip(held.blocks, shape.kinds, strict=True):
        dense = dense + count * (kind.matrices + kind.others_on_rank(layout.tp))
        matrices = kind.expert_matrices * kind.experts / layout.ep
        experts = experts + count * (matrices + kind.expert_others / (layout.ep * layout.etp))
    return dense, experts


@dataclass(frozen=True)
class _Group:
    """Parameters that reduce over the same ranks."""

    axis: str
    params: Column
    kept: Column
    ranks: Column
    stride: Column
    shards: Column
    replicas: Column
    replica_stride: Column
    units: Column
    """Number of units in which they are gathered and reduced, if that is done by unit."""
    kept_units: Column
    narrow: Column
    """Number of `params` gathered in 8 bits, and of their units."""
    narrow_units: Column
    numbers: Column
    """Number of elements reduced to gather in 8 bits."""
    twice: Column = 0.0
    """Number of `params` whose gradients two chunks of the rank reduce, each in its own backward pass."""


def experts_apart(layout: LayoutColumns) -> Column:
    """Return the mask of rows whose experts reduce over other ranks than the rest of the model."""
    return layout.tp * layout.ep * layout.etp > 1


def expert_ranks(layout: LayoutColumns) -> Column:
    """Return edp, the ranks with the same experts."""
    return np.maximum(layout.dp * layout.cp * layout.tp / (layout.ep * layout.etp), 1)


def _expert_units(shape: Shape, rank_units: UnitCount) -> Column:
    """Return the number of a rank's blocks that have experts."""
    return sum((n * kind.routes for n, kind in zip(rank_units.blocks, shape.kinds, strict=True)), start=np.zeros(()))


def gradient_flows(
    shape: Shape,
    layout: LayoutColumns,
    zero: Sharding,
    types: Types,
    rank_units: UnitCount,
    stride: Column,
    bucket_bytes: Column,
) -> list[Flow]:
    """Return the collectives of gradients and parameters of a rank with these units. `stride`: distance in ranks
    along dp and cp together. `bucket_bytes`: bytes of gradients reduced together, if not by unit."""
    p = parameters_of(shape, layout, rank_units)
    separate_experts = experts_apart(layout)
    ranks, edp = layout.dp * layout.cp, expert_ranks(layout)
    replica_stride = np.where(zero.shards > 1, layout.dp_stride * zero.shards / layout.cp, stride)
    # Dense parameters, and experts that reduce over the same ranks.
    dense = p.dense + np.where(separate_experts, 0.0, p.experts)
    narrow = (np.asarray(layout.narrow_gathers) > 0) & zero.parameters
    numbers, of_experts = _scales(shape, layout, rank_units) if np.any(narrow) else (0.0, 0.0)
    blocks = narrow * (p.blocks + np.where(separate_experts, 0.0, p.experts))
    numbers = numbers + np.where(separate_experts, 0.0, of_experts)
    units, over = narrow * rank_units.all_blocks, (ranks, stride, zero.shards, zero.replicas, replica_stride)
    # A tied embedding is reduced by two chunks if the rank has both ends of a V.
    both_ends = (
        (np.minimum(rank_units.embed, rank_units.head) > 0)
        & (np.asarray(shape.tied) > 0)
        & (np.asarray(layout.pp) > 1)
    )
    twice = both_ends * (np.asarray(layout.v_shaped) > 0) * _embedding(shape, layout)
    groups = [_Group("dp", dense, p.kept, *over, p.units, p.kept_units, blocks, units, narrow * numbers, twice)]
    # Experts that reduce over ranks of their own.
    if np.any(p.experts):
        params, shards = np.where(separate_experts, p.experts, 0.0), np.where(zero.state, edp, 1.0)
        between = layout.edp_stride
        over, units = (edp, between, shards, edp / shards, between), _expert_units(shape, rank_units)
        numbers = narrow * np.where(separate_experts, of_experts, 0.0)
        groups.append(_Group("edp", params, 0.0, *over, units, 0.0, narrow * params, narrow * units, numbers))
    flows: list[Flow] = []
    for group in groups:
        flows += _of_group(group, layout.micro_batches, zero, types, bucket_bytes)
    return flows


def _of_group(g: _Group, m: Column, zero: Sharding, types: Types, bucket_bytes: Column) -> list[Flow]:
    """Return the collectives of a group's parameters and gradients in a step of `m` micro-batches."""
    by_unit = zero.by_unit > 0

    def flow(
        op: str,
        payload: str,
        params: Column,
        e: Column,
        ranks: Column,
        stride: Column,
        times: Column,
        units: Column = g.units,
    ) -> Flow:
        """Return an operation on `params` elements of e bytes, in buckets or by unit, `times` times a step."""
        cut = np.maximum(np.ceil(params * e / bucket_bytes), 1.0)
        pieces = np.where(by_unit, np.maximum(units, 1.0), cut)
        count = np.where(params > 0, pieces * times, 0.0)
        counts = {"B" if "grad" in payload else "F": count}
        return Flow(g.axis, op, payload, "rank", ranks, stride, params * e / pieces, counts)

    # Gradients: all-reduced, or scattered to shards and summed over their replicas.
    sharded = 1.0 * (np.asarray(g.shards) > 1)
    reductions, replications, gathers = zero.reductions(m), zero.replications(m), zero.gathers(m)
    head_params = g.kept * zero.regathers  # these are gathered once for both passes
    unsharded = flow(
        "all_reduce", "gradients", g.params, types.gradient, g.ranks, g.stride, replications * ~zero.state
    )
    scatter = flow("reduce_scatter", "gradients", g.params, types.gradient, g.shards, g.stride, reductions * sharded)
    again = m * sharded * zero.reduces_each
    tied = flow("reduce_scatter", "gradients", g.twice, types.gradient, g.shards, g.stride, again, 1.0)
    each, over = g.params / g.shards, (g.replicas, g.replica_stride)
    across = flow("all_reduce", "gradients of shards", each, types.accumulated, *over, replications * zero.state)
    # Parameters: by unit, the head's once for both passes, and blocks in 8 bits with their scales.
    e, over = types.parameter, (g.shards, g.stride)
    rest = g.units - g.narrow_units - g.kept_units * zero.regathers
    gather = flow("all_gather", "parameters", g.params - g.narrow - head_params, e, *over, gathers * sharded, rest)
    once = flow("all_gather", ROOT, head_params, e, *over, m * sharded, g.kept_units)
    eight = flow("all_gather", "8-bit parameters", g.narrow, 1.0, *over, gathers * sharded, g.narrow_units)
    size, one = g.numbers * NUMBER_BYTES, sharded * (np.asarray(g.numbers) > 0)
    scales = Flow(g.axis, "all_reduce", "scales", "rank", g.shards, g.stride, size, {"F": one})
    return [f for f in (unsharded, scatter, tied, across, gather, once, eight, scales) if np.any(f.count())]


def outer_flows(
    shape: Shape, layout: LayoutColumns, zero: Sharding, types: Types, rank_units: UnitCount, bucket_bytes: Column
) -> list[Flow]:
    """Return the all-reduces, once in `layout.local` steps, that synchronise replicas which step alone: of the change
    of each shard, in the type of accumulated gradients, in the buckets of the gradients; if changes are compressed,
    the collectives that replace them."""
    p, edp = parameters_of(shape, layout, rank_units), expert_ranks(layout)
    stride, once = layout.dp_stride * layout.dp, (np.asarray(layout.local) > 0) / np.maximum(layout.local, 1)
    apart = experts_apart(layout)
    result = []
    for params, shards, units in (
        (p.dense + np.where(apart, 0.0, p.experts), zero.shards, p.units),
        (np.where(apart, p.experts, 0.0), np.where(zero.state, edp, 1), _expert_units(shape, rank_units)),
    ):
        cut = np.ceil(params * types.gradient / bucket_bytes)
        pieces = np.maximum(np.where(zero.by_unit > 0, units, cut), 1.0)
        size = params / np.maximum(shards, 1) / pieces * types.accumulated
        count = np.where(size > 0, pieces * once, 0.0)
        what = "changes of replicas that step alone"
        for op, share in layout.changes.messages(types.accumulated, layout.dp_local):
            sent = size * share / types.accumulated
            result.append(Flow("dp", op, what, "rank", layout.dp_local, stride, sent, {"B": count}))
    return [f for f in result if np.any(f.count())]


def summed_copies(
    shape: Shape, layout: LayoutColumns, policy: Policy, zero: Sharding, types: Types, units: UnitCount
) -> Flow:
    """Return the all-reduce over tp of partial gradients: under sequence parallelism of all replicated parameters;
    else of replicated parameters whose gradient covers only a rank's heads or tokens; and of key heads with copies.
    It is one operation on accumulated gradients, or one for each parameter whenever gradients are reduced."""
    split = np.asarray(layout.sp) > 0
    elements: Column = 0.0
    norms = np.minimum(units.head, 1.0)
    for count, kind in zip(units.blocks, shape.kinds, strict=True):
        copies = np.where(layout.tp > kind.copied_groups, kind.kv, 0.0)
        elements = elements + count * (np.where(split, kind.whole, kind.own) + copies)
        norms = norms + count * (kind.norms + kind.after_norms)
    norms = np.maximum(norms, 1.0)
    ends = shape.embed_whole * np.minimum(units.embed, 1.0) + shape.head_whole * np.minimum(units.head, 1.0)
    elements = elements + np.where(split, ends, 0.0)
    size = elements / np.maximum(zero.shards, 1) * types.accumulated
    apart = np.asarray(policy.copies_each) > 0
    each = ~zero.state | (zero.reduces_each > 0)  # else they are added up first, in the reduced type
    size = np.where(apart, elements * np.where(each, types.parameter, types.gradient) / norms, size)
    times = np.where(each, layout.micro_batches, 1.0)
    count = np.where(apart, norms * times, 1.0) * (elements > 0)
    return Flow("tp", "all_reduce", "copies", "rank", layout.tp, layout.tp_stride, size, {"B": count})


def _embedding(shape: Shape, layout: LayoutColumns) -> Column:
    """Return the elements of the token embedding that a rank of tp holds."""
    return np.ceil(shape.vocab / layout.tp) * shape.hidden


def tied_embedding(shape: Shape, layout: LayoutColumns, how: Sharding, types: Types) -> Flow:
    """Return the all-reduce of a tied embedding's gradient between the first and the last pipeline rank."""
    size = _embedding(shape, layout) / np.maximum(how.shards, 1) * types.accumulated
    count = 1.0 * ((np.asarray(shape.tied) > 0) & (np.asarray(layout.pp) > 1) & (np.asarray(layout.v_shaped) == 0))
    stride = layout.pp_stride * layout.pp / 2  # inside a node if the whole pipeline is
    return Flow(
        "embed", "all_reduce", "tied embedding", "rank", np.where(count, 2.0, 1.0), stride, size, {"B": count}
    )
