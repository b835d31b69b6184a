"""What happens once a step, or beside each pass, to gradients and parameters: reduction over the replicas, gathers of
sharded parameters, coding of compressed gradients, and the update."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phalanx.cost.analytic import compression
from phalanx.cost.analytic.block import seconds_of
from phalanx.cost.analytic.kernels import Passes
from phalanx.cost.analytic.profile import Profile
from phalanx.cost.collectives.nccl_model import collective_s
from phalanx.cost.hardware.columns import Column
from phalanx.cost.hardware.system import System
from phalanx.cost.ledger.flow import Held
from phalanx.cost.ledger.gradient_flows import Types, expert_ranks, gradient_flows, parameters_of
from phalanx.cost.ledger.model_shape import Shape
from phalanx.cost.ledger.rank_layout import Layout
from phalanx.cost.ledger.sharding import sharding


def bucket_bytes(layout: Layout, profile: Profile) -> Column:
    """Return the bytes of gradients that a stack reduces together."""
    return np.maximum(profile.bucket_bytes, profile.rank_bucket_bytes * layout.dp * layout.cp)


@dataclass(frozen=True)
class Terms:
    """Seconds by term, and by term what its formula reads (FORMULAS)."""

    seconds: dict[str, Column]
    of: dict[str, dict[str, Column]]


def _held(shape: Shape, layout: Layout, blocks: Column) -> Held:
    """Return what the fullest rank holds, `blocks` of them."""
    moe_share = shape.moe_layers / shape.layers
    return Held(blocks * (1 - moe_share), blocks * moe_share, 1.0, 1.0 * (np.asarray(layout.pp) == 1))


def reduced(shape: Shape, layout: Layout, system: System, profile: Profile, blocks: Column, passes: Passes) -> Terms:
    """Return `dp`: gradient reduction over dp x cp ranks (experts': over the ranks with the same experts) and the
    gathers of parameters after the update (ZeRO-1, 2) or for every pass (ZeRO-3), as far as a micro-batch's `passes`
    through the rank's blocks do not hide them; and `coding`."""
    ranks = layout.dp * layout.cp
    stride = layout.data_stride(system.tiers[0].ranks)
    how, held = sharding(layout, profile.policy), _held(shape, layout, blocks)
    params = parameters_of(shape, layout, held)
    dense_params, expert_params = params.dense, params.experts
    shards, replicas = how.shards, how.replicas
    forward, backward = passes.forward, passes.backward
    grad, param = profile.gradient_bytes, profile.parameter_bytes
    cut = bucket_bytes(layout, profile)
    m = layout.micro_batches
    totals = {"reduce_scatter": 0.0 * m, "all_reduce": 0.0 * m, "all_gather": 0.0 * m}
    for flow in gradient_flows(shape, layout, how, Types(grad, param, grad), held, stride, cut):
        totals[flow.op] = totals[flow.op] + flow.count() * seconds_of(flow, system)
    reductions = np.where(how.reduces_each > 0, m, 1.0)
    # Parameters that come from the host do so before each gather.
    fetched = profile.parameters_on_host * param * (dense_params + expert_params) / np.maximum(shards, 1)
    gathers = np.where(how.gathers_each > 0, m * (1 + how.regathers), 1.0)
    replicates = np.asarray(how.replicates_each)
    scatter, replicate, gather = (
        totals["reduce_scatter"] / reductions,
        totals["all_reduce"] / np.where(replicates > 0, m, 1.0),
        totals["all_gather"] / gathers + fetched / system.host_bytes_per_s,
    )
    replica_distance = np.where(shards > 1, layout.dp_stride * shards / layout.cp, stride)
    expert_ranks_ = expert_ranks(layout)

    def over(op: str, bytes_: Column, group: Column, distance: Column, filled: Column = 0.0) -> Column:
        """Return seconds of `op` on all compressed gradients, `bytes_` per element, over `group` ranks at distance
        `distance`, in buckets filled by `cut` bytes per element."""
        result: Column = 0.0
        for n, among, between in ((dense_params, group, distance), (expert_params, expert_ranks_, layout.edp_stride)):
            buckets = np.where(how.parameters > 0, blocks, np.maximum(np.ceil(n * filled / cut), 1))
            result = result + buckets * collective_s(op, n * bytes_ / buckets, among, between, system) * (n > 0)
        return result

    c = layout.compressed
    if np.any(c.kind):
        groups = ((ranks, stride), (shards, stride), (replicas, replica_distance))
        compressed = compression.reduced(c, over, grad, layout.zero, *groups)
        scatter, replicate = (
            np.where(c.kind, new, old) for new, old in zip(compressed, (scatter, replicate), strict=True)
        )
    forward_room = profile.dp_overlap * forward / profile.contention
    backward_room = profile.dp_overlap * backward / profile.contention
    hidden = np.minimum(profile.dp_overlap * (scatter + replicate), backward_room)
    hidden = hidden + np.minimum(profile.gather_overlap * gather, forward)
    once = scatter + replicate + gather - hidden
    # For every micro-batch: parameters in the forward pass, and again in the backward pass, and gradients in the
    # latter; of what is done once a step the same share is hidden as above.
    again = how.regathers * gather
    reduction = scatter + replicates * replicate
    slowed = (profile.contention - 1) * np.minimum(forward + backward, gather + again + reduction)
    both_passes = np.maximum(gather - forward_room, 0) + np.maximum(again + reduction - backward_room, 0) + slowed
    # Nothing is computed beside the gather of a pass's first unit, nor beside the reduction of its last one.
    both_passes = both_passes + (gather + reduction) / np.maximum(params.units, 1)
    reduced_each = reduction - np.minimum(profile.dp_overlap * reduction, backward_room)
    gathered_once = gather - np.minimum(profile.gather_overlap * gather, forward)
    last_replicate = (1 - replicates) * np.maximum(replicate - backward_room, 0)
    each = np.where(how.gathers_each > 0, m * both_passes, m * reduced_each + gathered_once) + last_replicate
    out = Terms({}, {})
    out.of["dp"] = {
        "ranks": ranks,
        "shards": shards,
        "gradient_bytes": dense_params * grad,
        "gradients": dense_params + expert_params,
        "scatter_s": scatter,
        "again_s": replicate,
        "gather_s": gather,
        "hidden_s": hidden,
    }
    every = (how.reduces_each > 0) | (replicates > 0)
    out.seconds["dp"] = np.where(ranks > 1, np.where(every, each, once), 0.0) * (1 - layout.frozen)
    if np.any(c.kind):
        times = np.where(how.reduces_each > 0, m, 1)
        coding = compression.coding_s(c, dense_params + expert_params, grad, ranks, system)
        out.of["coding"] = {
            "gradients": dense_params + expert_params,
            "passes": c.passes,
            "gradient_bytes": grad,
            "times": times,
        }
        out.seconds["coding"] = np.where(c.kind, times * coding, 0.0)
    return out


def updated(shape: Shape, layout: Layout, system: System, profile: Profile, blocks: Column) -> Terms:
    """Return `optimizer`: the update of a rank's shards."""
    how, params = sharding(layout, profile.policy), parameters_of(shape, layout, _held(shape, layout, blocks))
    expert_shards = np.where(how.level >= 1, expert_ranks(layout), 1)
    updated_params = params.dense / how.shards + params.experts / expert_shards
    here = profile.optimizer_bytes / (system.memory_bytes_per_s * system.memory)
    # On the host: gradients down, the update there, parameters up, one after another.
    there = (profile.accumulated_bytes + profile.parameter_bytes) / system.host_bytes_per_s
    there = there + profile.optimizer_bytes / system.host_memory_bytes_per_s
    each_s = (1 - profile.on_host) * here + profile.on_host * there
    if np.any(profile.orthogonal):
        each_s = each_s + profile.orthogonal * _orthogonal_s(shape, system)
    factors = {"parameters": params.dense / how.shards, "bytes": profile.optimizer_bytes}
    return Terms({"optimizer": (1 - layout.frozen) * each_s * updated_params}, {"optimizer": factors})


def _orthogonal_s(shape: Shape, system: System) -> Column:
    """Return seconds per parameter of Muon's five Newton-Schulz iterations X <- a X + (b A + c A A) X, A = X X^T, of
    matrices (n, w) with n <= w: 2 n w (2 n) + 2 n^3 FLOP each (Jordan et al. 2024)."""
    narrow: Column = np.where(
        shape.moe_layers > 0, np.minimum(shape.hidden, np.maximum(shape.expert_ffn, 1)), shape.hidden
    )
    wide = np.where(
        shape.moe_layers > 0, np.maximum(shape.hidden, shape.expert_ffn), np.maximum(shape.hidden, shape.ffn)
    )
    return 5 * (4 * narrow + 2 * narrow**2 / wide) / (system.peak_bf16 * system.gemm)
