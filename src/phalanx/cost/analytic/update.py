"""Seconds of what happens to gradients and parameters: reduction over the replicas, gathers of sharded parameters,
coding of compressed gradients, and the update."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from phalanx.cost.analytic import compression
from phalanx.cost.analytic.flow_times import seconds_of
from phalanx.cost.analytic.kernels import Passes
from phalanx.cost.analytic.profile import FIELDS, Profile
from phalanx.cost.collectives.nccl_model import collective_s, ranks_per_block
from phalanx.cost.hardware.columns import Column
from phalanx.cost.hardware.system import System
from phalanx.cost.ledger.flow import UnitCount, some_blocks
from phalanx.cost.ledger.gradient_flows import (
    ROOT,
    Parameters,
    Types,
    expert_ranks,
    gradient_flows,
    outer_flows,
    parameters_of,
)
from phalanx.cost.ledger.model_shape import Shape
from phalanx.cost.ledger.policy import sharding
from phalanx.cost.ledger.rank_layout import LayoutColumns
from phalanx.schedule.gradients.sharding import Sharding


def bucket_bytes(layout: LayoutColumns, profile: Profile) -> Column:
    """Return the bytes of gradients that a stack reduces together."""
    return np.maximum(profile.bucket_bytes, profile.rank_bucket_bytes * layout.dp * layout.cp)


@dataclass(frozen=True)
class Terms:
    """Seconds by term, and the factors of each term's formula (FORMULAS)."""

    seconds: dict[str, Column]
    of: dict[str, dict[str, Column]]


def _units_held(shape: Shape, layout: LayoutColumns, blocks: Column) -> UnitCount:
    """Return the units of the fullest rank: `blocks` blocks and the embedding, and the head too without a pipeline or
    with chunks in a V."""
    both = (np.asarray(layout.pp) == 1) | (np.asarray(layout.v_shaped) > 0)
    return some_blocks(shape.kinds, blocks, 1.0, 1.0 * both)


class _Once(NamedTuple):
    """Seconds of one reduction over the shards, of one over their replicas, of one gather of parameters, and of one
    for the backward pass, which still has the root's parameters."""

    scatter: Column
    replicate: Column
    gather: Column
    again: Column


def reduction(
    shape: Shape, layout: LayoutColumns, system: System, profile: Profile, blocks: Column, passes: Passes
) -> Terms:
    """Return the term `dp`: exposed seconds of gradient reduction over dp x cp ranks (experts': over the ranks with
    the same experts) and of the gathers of parameters after the update or for every pass; and the term `coding`.
    `passes`: of a micro-batch through the rank's blocks."""
    ranks, m, grad = layout.dp * layout.cp, layout.micro_batches, profile.gradient_bytes
    zero, held = sharding(layout, profile.policy), _units_held(shape, layout, blocks)
    params = parameters_of(shape, layout, held)
    once = _once(shape, layout, system, profile, held)
    c = layout.compressed
    # Compressed gradients replace the dense reduction.
    if np.any(c.kind):
        scatter, replicate = _compressed(layout, system, profile, blocks, params)
        once = once._replace(
            scatter=np.where(c.kind, scatter, once.scatter), replicate=np.where(c.kind, replicate, once.replicate)
        )
    # What the passes do not hide, and the factors of the formula.
    alone = 1 / np.maximum(params.units, 1)
    if not np.all(shape.wraps_blocks):
        of_root = params.kept / np.maximum(params.all, 1)
        others = (1 - of_root) / np.maximum(params.units - params.kept_units, 1)
        alone = np.where(shape.wraps_blocks, alone, of_root + others)
    # Shards and their replicas are different groups, whose collectives hold compute up differently.
    stride, distance = layout.data_stride(system.tiers[0].ranks), _replica_distance(layout, zero, system)
    over_replicas = np.asarray(zero.replicates_each) * once.replicate
    over_shards = once.gather + zero.regathers * once.again + once.scatter
    share = np.where(zero.shards > 1, over_replicas / np.maximum(over_replicas + over_shards, 1e-30), 1.0)
    by_shards = _contention(np.where(zero.shards > 1, zero.shards, ranks), stride, system, profile)
    by_replicas = _contention(np.where(zero.shards > 1, zero.replicas, ranks), distance, system, profile)
    contention = by_shards + share * (by_replicas - by_shards)
    exposed, hidden = _exposed(once, zero, profile, passes, m, alone, contention)
    out = Terms({}, {})
    out.of["dp"] = {
        "ranks": ranks,
        "shards": zero.shards,
        "gradient_bytes": params.dense * grad,
        "gradients": params.dense + params.experts,
        "scatter_s": once.scatter,
        "again_s": once.replicate,
        "gather_s": once.gather,
        "hidden_s": hidden,
        "copied_s": _copied(zero, params, layout, system, profile),
    }
    out.seconds["dp"] = np.where(ranks > 1, exposed + out.of["dp"]["copied_s"], 0.0)
    if np.any(c.kind):
        times = zero.reductions(m)
        coding = compression.coding_s(c, params.dense + params.experts, grad, ranks, system)
        out.of["coding"] = {
            "gradients": params.dense + params.experts,
            "passes": c.passes,
            "gradient_bytes": grad,
            "times": times,
        }
        out.seconds["coding"] = np.where(c.kind, times * coding, 0.0)
    return out


def _copied(zero: Sharding, params: Parameters, layout: LayoutColumns, system: System, profile: Profile) -> Column:
    """Return seconds of copying ZeRO-3's gathered parameters out of a buffer, and gradients into one."""
    if not np.any(profile.copies_units):
        return 0.0
    m = layout.micro_batches
    gathered = 2 * profile.parameter_bytes * zero.gathers(m)
    reduced = (profile.parameter_bytes + profile.gradient_bytes) * zero.reductions(m)
    each = profile.copies_units * zero.parameters * (gathered + (1 - layout.frozen) * reduced)
    return each * (params.dense + params.experts) / (system.memory_bytes_per_s * system.memory)


def _once(shape: Shape, layout: LayoutColumns, system: System, profile: Profile, held: UnitCount) -> _Once:
    """Return the seconds of one reduction and one gather, for uncompressed gradients."""
    zero, params = sharding(layout, profile.policy), parameters_of(shape, layout, held)
    grad, param, m = profile.gradient_bytes, profile.parameter_bytes, layout.micro_batches
    stride = layout.data_stride(system.tiers[0].ranks)
    totals = {"reduce_scatter": 0.0 * m, "all_reduce": 0.0 * m, "all_gather": 0.0 * m}
    of_root: Column = 0.0 * m
    for flow in gradient_flows(
        shape, layout, zero, Types(grad, param, grad), held, stride, bucket_bytes(layout, profile)
    ):
        seconds = flow.count() * seconds_of(flow, system)
        totals[flow.op] = totals[flow.op] + seconds
        of_root = of_root + (flow.what == ROOT) * seconds
    # Parameters that come from the host do so before each gather.
    fetched = profile.parameters_on_host * param * (params.dense + params.experts) / np.maximum(zero.shards, 1)
    # Where blocks are units the root is small, and both passes are taken to gather as much.
    rest = np.where(shape.wraps_blocks, 0.0, of_root)
    again = (totals["all_gather"] - rest) / zero.gathers(m) + fetched / system.host_bytes_per_s
    # Frozen parameters have no gradient and no update, but where they are sharded every pass gathers them.
    trained, moved = 1 - layout.frozen, np.where(zero.parameters, 1.0, 1 - layout.frozen)
    return _Once(
        trained * totals["reduce_scatter"] / zero.reductions(m),
        trained * totals["all_reduce"] / zero.replications(m),
        moved * (again + rest / m),
        moved * again,
    )


def _compressed(
    layout: LayoutColumns, system: System, profile: Profile, blocks: Column, params: Parameters
) -> tuple[Column, Column]:
    """Return seconds of one reduction of compressed gradients over the shards, and over their replicas."""
    zero, cut, expert_ranks_ = sharding(layout, profile.policy), bucket_bytes(layout, profile), expert_ranks(layout)
    shards, stride = zero.shards, layout.data_stride(system.tiers[0].ranks)

    def over(op: str, bytes_: Column, group: Column, distance: Column, filled: Column = 0.0) -> Column:
        """Return seconds of `op` on all compressed gradients, `bytes_` per element, over `group` ranks at distance
        `distance`, in buckets filled by `cut` bytes per element."""
        result: Column = 0.0
        for n, among, between in (
            (params.dense, group, distance),
            (params.experts, expert_ranks_, layout.edp_stride),
        ):
            buckets = np.where(zero.by_unit > 0, blocks, np.maximum(np.ceil(n * filled / cut), 1))
            result = result + buckets * collective_s(op, n * bytes_ / buckets, among, between, system) * (n > 0)
        return result

    distance = _replica_distance(layout, zero, system)
    groups = ((layout.dp * layout.cp, stride), (shards, stride), (zero.replicas, distance))
    scatter, replicate = compression.compressed_reduction(
        layout.compressed, over, profile.gradient_bytes, zero.state, *groups
    )
    return scatter, replicate


def _replica_distance(layout: LayoutColumns, zero: Sharding, system: System) -> Column:
    """Return the distance in ranks between the replicas of a shard."""
    stride = layout.data_stride(system.tiers[0].ranks)
    return np.where(zero.shards > 1, layout.dp_stride * zero.shards / layout.cp, stride)


_CONTENTION = FIELDS["contention"]
"""Slowdown of compute because a collective's kernels occupy processors."""


def _contention(ranks: Column, stride: Column, system: System, profile: Profile) -> Column:
    """Return the slowdown of compute that overlaps a collective over `ranks` at distance `stride`. The part beyond
    the processors' is due to memory traffic at the rate of the links in a node; a group with few ranks in each node
    is limited by its ports, and has proportionally less traffic."""
    inner, *outer = system.tiers
    least = np.minimum(profile.contention, _CONTENTION)
    if not outer:
        return profile.contention
    members = ranks_per_block(ranks, stride, inner)
    ports = members * outer[0].bytes_per_s_per_gpu_per_direction / inner.bytes_per_s_per_gpu_per_direction
    pace = np.where(np.asarray(ranks) > members, np.minimum(ports, 1.0), 1.0)
    return least + (profile.contention - least) * pace


def _exposed(
    once: _Once, zero: Sharding, profile: Profile, passes: Passes, m: Column, alone: Column, contention: Column
) -> tuple[Column, Column]:
    """Return the exposed seconds per step of reductions and gathers with `m` micro-batches, and the hidden seconds if
    these happen once a step. `alone`: share of the parameters in the unit gathered first and reduced last."""
    (scatter, replicate, gather, again), (forward, backward) = once, (passes.forward, passes.backward)
    replicates = np.asarray(zero.replicates_each)
    forward_room = profile.dp_overlap * forward / contention
    backward_room = profile.dp_overlap * backward / contention
    hidden = np.minimum(profile.dp_overlap * (scatter + replicate), backward_room)
    hidden = hidden + np.minimum(profile.gather_overlap * gather, forward)
    # For every micro-batch: parameters in the forward pass, and again in the backward pass, and gradients in the
    # latter; the same share of once-a-step collectives is hidden as above.
    again = zero.regathers * again
    reduction = scatter + replicates * replicate
    slowed = (contention - 1) * np.minimum(forward + backward, gather + again + reduction)
    both_passes = np.maximum(gather - forward_room, 0) + np.maximum(again + reduction - backward_room, 0)
    # No compute overlaps the gather of a pass's first unit, nor the reduction of its last one.
    both_passes = np.minimum(both_passes + alone * (gather + reduction), gather + again + reduction)
    # A reference's pass gathers its parameters too.
    both_passes = both_passes + slowed + profile.scored * np.maximum(gather - forward_room, alone * gather)
    reduced_each = reduction - np.minimum(profile.dp_overlap * reduction, backward_room)
    gathered_once = gather - np.minimum(profile.gather_overlap * gather, forward)
    last_replicate = (1 - replicates) * np.maximum(replicate - backward_room, 0)
    each = np.where(zero.gathers_each > 0, m * both_passes, m * reduced_each + gathered_once) + last_replicate
    every = (zero.reduces_each > 0) | (replicates > 0)
    return np.where(every, each, scatter + replicate + gather - hidden), hidden


def update(shape: Shape, layout: LayoutColumns, system: System, profile: Profile, blocks: Column) -> Terms:
    """Return the term `optimizer`: the update of a rank's shards."""
    zero, params = sharding(layout, profile.policy), parameters_of(shape, layout, _units_held(shape, layout, blocks))
    expert_shards = np.where(zero.state, expert_ranks(layout), 1)
    updated_params = params.dense / zero.shards + params.experts / expert_shards
    here = profile.optimizer_bytes / (system.memory_bytes_per_s * system.memory)
    # On the host: gradients down, the update there, parameters up, one after another.
    there = np.maximum(profile.accumulated_bytes, profile.cast_gradient) + profile.parameter_bytes
    there = there / system.host_bytes_per_s
    sharers = np.minimum(layout.world, system.host_sharers)
    there = there + profile.optimizer_bytes / (system.host_memory_bytes_per_s * system.host_sharers / sharers)
    each_s = (1 - profile.on_host) * here + profile.on_host * there
    if np.any(profile.orthogonal):
        each_s = each_s + profile.orthogonal * _orthogonal_s(shape, system)
    factors = {"parameters": params.dense / zero.shards, "bytes": profile.optimizer_bytes}
    return Terms({"optimizer": (1 - layout.frozen) * each_s * updated_params}, {"optimizer": factors})


def outer_synchronisation(
    shape: Shape, layout: LayoutColumns, system: System, profile: Profile, blocks: Column, passes_s: Column
) -> Terms:
    """Return the term `outer`: a step's share of synchronising replicas that step alone (strategy.local). Messages
    overlap the passes, `passes_s` in each step, that follow before they are applied (job.outer.delay)."""
    if not np.any(layout.local):
        return Terms({}, {})
    zero, held = sharding(layout, profile.policy), _units_held(shape, layout, blocks)
    types = Types(profile.gradient_bytes, profile.parameter_bytes, profile.gradient_bytes)
    sent: Column = 0.0
    moved: Column = 0.0
    for flow in outer_flows(shape, layout, zero, types, held, bucket_bytes(layout, profile)):
        sent = sent + flow.count() * seconds_of(flow, system)
        moved = moved + flow.count() * flow.bytes
    changes, g = layout.changes, profile.gradient_bytes
    elements = moved / sum(size for _, size in changes.messages(g, layout.dp_local))
    update = elements * layout.outer_traffic / (system.memory_bytes_per_s * system.memory)
    update = update + compression.coding_s(changes, elements, g, layout.dp_local, system)
    factors = {"replicas": layout.dp_local, "local": layout.local, "sent_s": sent, "update_s": update}
    exposed = np.maximum(sent - layout.outer_cover * passes_s, 0.0)
    return Terms({"outer": exposed + update}, {"outer": factors})


def _orthogonal_s(shape: Shape, system: System) -> Column:
    """Return seconds per parameter of Muon's five Newton-Schulz iterations X <- a X + (b A + c A A) X, A = X X^T, of
    matrices (n, w) with n <= w: 2 n w (2 n) + 2 n^3 FLOP each (Jordan et al. 2024)."""
    experts, ffn = shape.most(lambda kind: kind.expert_ffn), shape.most(lambda kind: kind.ffn)
    routes = np.asarray(shape.routes) > 0
    narrow: Column = np.where(routes, np.minimum(shape.hidden, np.maximum(experts, 1)), shape.hidden)
    wide = np.maximum(shape.hidden, np.where(routes, experts, ffn))
    return 5 * (4 * narrow + 2 * narrow**2 / wide) / (system.peak_bf16 * system.gemm)
