"""A training step of a stack on a system: terms along its critical path, which sum to the time of the step.

    T = M t + fill + transfers + exposed communication + optimizer

t: one micro-batch through the slowest pipeline rank, M of them; fill: a micro-batch through the other ranks, over
the chunks of a rank (Narayanan et al. 2021, section 2.2).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from phalanx.cost.analytic import compression, kernels
from phalanx.cost.analytic.kernels import Passes
from phalanx.cost.analytic.stacks import Profile
from phalanx.cost.collectives.nccl_model import collective_s, message_s
from phalanx.cost.hardware.columns import Column
from phalanx.cost.hardware.system import System
from phalanx.cost.ledger.model_shape import Shape
from phalanx.cost.ledger.rank_layout import Layout, stages
from phalanx.cost.ledger.sharding import sharding


@dataclass
class Step:
    """Seconds by term along the critical path of the slowest rank. `of`: the factors of each term by name, with which
    its formula in FORMULAS is printed."""

    terms: dict[str, Column] = field(default_factory=dict)
    of: dict[str, dict[str, Column]] = field(default_factory=dict)
    blocks: list[tuple[Column, Passes]] = field(default_factory=list)
    """(number of blocks, a micro-batch's passes of one) for each kind of block, those with a plain MLP first."""
    head: Passes = field(default_factory=lambda: Passes(0.0, 0.0))
    """A micro-batch's passes of the head and the loss."""
    ahead: Column = 1.0
    """1 where the CPU launches ahead of the GPU, 0 where the GPU waits for the CPU; in between where they are as
    fast."""

    @property
    def seconds(self) -> Column:
        """Seconds of the step: the sum of its terms."""
        return sum(self.terms.values())


FORMULAS = {
    "matmul": "micro_batches x blocks x (forward_s + backward_s)",
    "attention": "micro_batches x blocks x (forward_s + backward_s)",
    "memory": "micro_batches x blocks x (forward_s + backward_s)",
    "tp": "micro_batches x blocks x (forward_s + backward_s), the exposed part of two all-reduces each",
    "cp": "micro_batches x blocks x (forward_s + backward_s), keys and values that attention does not overlap",
    "ep": "micro_batches x blocks x (forward_s + backward_s), two all-to-alls each, permutation, the router",
    "recompute": "micro_batches x blocks x repeated_s",
    "launch": "micro_batches x blocks x the time by which a pass's launches exceed its GPU time (max, not sum)",
    "head": "micro_batches x (slowest_s - blocks_s): logits and loss, as far as they make their rank the slowest",
    "bubble": "share x (through_s - slowest_s) / virtual: one micro-batch through the other ranks, times the "
    "schedule's share of it; zero-bubble: makespan_s of its actions - micro_batches x slowest_s",
    "transfers": "(messages x (1 - overlap) + 2 (pp - 1)) x (message_s + gathered_s)",
    "dp": "scatter_s + again_s + gather_s - hidden_s; where every micro-batch reduces: micro_batches x what of them "
    "compute does not overlap",
    "coding": "times x gradients x passes x gradient_bytes / memory bandwidth; if sparse, also what all ranks sent",
    "optimizer": "bytes x parameters / memory bandwidth",
    "other": "fixed seconds per step, and the jitter of the slowest rank",
}


@dataclass(frozen=True)
class _Block:
    """Seconds of one block and micro-batch, forward and backward, by what takes them."""

    matmul: Passes
    attention: Passes
    memory: Passes
    tp: Passes
    cp: Passes
    ep: Passes

    @property
    def parts(self) -> dict[str, Passes]:
        """The passes by term."""
        return {
            "matmul": self.matmul,
            "attention": self.attention,
            "memory": self.memory,
            "tp": self.tp,
            "cp": self.cp,
            "ep": self.ep,
        }

    @property
    def forward(self) -> Column:
        """Seconds of the forward pass."""
        return sum(p.forward for p in self.parts.values())

    @property
    def backward(self) -> Column:
        """Seconds of the backward pass."""
        return sum(p.backward for p in self.parts.values())


def _tensor_parallel(shape: Shape, layout: Layout, system: System, profile: Profile, products: Passes) -> Passes:
    """Return exposed seconds of tensor parallelism in one block: two all-reduces a pass, or with sequence parallelism
    two all-gathers and two reduce-scatters; the backward pass gathers each product's input again, next to the
    gradient of its weight (Korthikanti et al. 2022). Within a node they overlap the neighbouring products, half of a
    block's; between nodes they wait for their hops and overlap nothing."""
    n = layout.tokens * shape.hidden * layout.activation_bytes
    all_reduces = 2 * collective_s("all_reduce", n, layout.tp, layout.tp_stride, system)
    group = (layout.tp, layout.tp_stride, system)
    narrow = np.where((profile.tp_narrow > 0) & (np.asarray(layout.format) == 1), 1 / layout.activation_bytes, 1.0)
    split = 2 * (collective_s("all_gather", n * narrow, *group) + collective_s("reduce_scatter", n, *group))
    total = np.where(layout.sp > 0, split, all_reduces)
    inside = layout.tp * layout.tp_stride <= system.tiers[0].ranks
    hidden = np.where(inside, profile.tp_overlap, 0.0) * total
    return Passes(
        total - np.minimum(hidden, products.forward / 2),
        total - np.minimum(hidden, products.backward / 2),
    )


def _context_parallel(shape: Shape, layout: Layout, system: System, core: Passes) -> Passes:
    """Return exposed seconds of context parallelism in one block. Ring: keys and values travel while attention runs
    over the part received before; what does not fit is exposed. Ulysses: exposed all-to-alls of queries, keys and
    values before attention and of its result after it."""
    kv = np.where(shape.kv_rank > 0, shape.heads, shape.kv_heads) * (shape.head_dim + shape.value_dim)
    n = layout.tokens * kv / layout.tp * layout.activation_bytes
    ring = layout.cp / layout.ulysses
    hop = message_s(n, layout.cp_stride * layout.ulysses, system) * (ring > 1)
    hops = np.maximum(ring - 1, 0)
    overlapping = 1 - 1 / ring
    heads = shape.heads * (shape.head_dim + shape.value_dim) + kv
    bytes_exchanged = layout.tokens * heads / layout.tp * layout.activation_bytes
    all_to_alls = collective_s("all_to_all", bytes_exchanged, layout.ulysses, layout.cp_stride, system)
    return Passes(
        np.maximum(hops * hop - core.forward * overlapping, 0) + hop + all_to_alls,
        np.maximum(2 * hops * hop - core.backward * overlapping, 0) + 2 * hop + all_to_alls,
    )


def _expert_parallel(shape: Shape, layout: Layout, system: System, profile: Profile) -> Passes:
    """Return exposed seconds of expert parallelism in one block: two all-to-alls a pass (dispatch and combine),
    permutation on both sides, and the router."""
    routed = layout.tokens * shape.top_k * shape.hidden / layout.tp
    n = routed * layout.activation_bytes
    sent = 2 * collective_s("all_to_all", n, layout.ep, layout.expert_stride, system)
    permuted = profile.token_bytes * routed / (system.memory_bytes_per_s * system.memory)
    etp_stride = np.where(layout.pp_stride < layout.etp, layout.pp, 1)
    etp_gathers = 2 * collective_s("all_gather", n * layout.etp, layout.etp, etp_stride, system)
    each = (sent + etp_gathers) * (1 - profile.ep_overlap) + permuted + profile.router_s
    return Passes(each, each)


_NONE = Passes(0.0, 0.0)


def _block(shape: Shape, layout: Layout, system: System, profile: Profile, moe: bool) -> _Block:
    """Return the seconds of one block, with experts (`moe`) or a dense MLP."""
    rate = kernels.rate_of(layout, system, profile)
    core = kernels.attention(shape, layout, system, profile)
    inside = layout.tp * layout.tp_stride <= system.tiers[0].ranks
    parts = np.where((profile.tp_split > 0) & inside, layout.tp, 1)
    by = kernels.Products(system, rate, layout.activation_bytes, layout.frozen, parts)
    around = kernels.projections(shape, layout, by)
    if moe:
        inner = kernels.experts(shape, layout, replace(by, rate=rate * profile.grouped, parts=1.0))
        shared = kernels.mlp(shape, layout, np.maximum(shape.shared_ffn, 1), by)
        has = shape.shared_ffn > 0
        inner = Passes(
            inner.forward + np.where(has, shared.forward, 0), inner.backward + np.where(has, shared.backward, 0)
        )
        width = shape.top_k * shape.expert_ffn + shape.shared_ffn
        ep = _expert_parallel(shape, layout, system, profile)
    else:
        inner, width, ep = kernels.mlp(shape, layout, shape.ffn, by), shape.ffn, _NONE
    products = Passes(around.forward + inner.forward, around.backward + inner.backward)
    return _Block(
        matmul=products,
        attention=core,
        memory=kernels.traffic(shape, layout, width, system, profile),
        tp=_tensor_parallel(shape, layout, system, profile, products),
        cp=_context_parallel(shape, layout, system, core),
        ep=ep,
    )


def step(shape: Shape, layout: Layout, system: System, profile: Profile) -> Step:
    """Return the terms of one step."""
    out = Step()
    terms = out.terms
    kinds = [(_block(shape, layout, system, profile, False), shape.layers - shape.moe_layers)]
    if np.any(shape.moe_layers):
        kinds.append((_block(shape, layout, system, profile, True), shape.moe_layers))

    parts = stages(shape, layout, profile.balanced)
    blocks = parts.most
    m, full = layout.micro_batches, layout.full
    sync_factor = 1 + profile.launch_sync * (np.minimum(layout.tp, 8) - 1) / 7
    launched = profile.launches * profile.launch_s * sync_factor
    listed = np.where(layout.tp > 1, profile.listed * layout.tp * profile.list_s * system.held_up, 0.0)
    every_second = kernels.every_second(shape)
    forward: Column = 0.0
    backward: Column = 0.0
    for block, count in kinds:
        share = count / shape.layers * blocks  # blocks of this kind on a rank
        selected = np.where(profile.per_op > 0, every_second * block.matmul.forward, block.attention.forward)
        repeated = full * block.forward + layout.selective * selected
        f = np.maximum(block.forward, launched + listed)
        b = np.maximum(block.backward + repeated, launched * (profile.launch_backward + full) + listed * (1 + full))
        for name, part in block.parts.items():
            terms[name] = terms.get(name, 0) + m * share * (part.forward + part.backward)
            factors = {"micro_batches": m, "blocks": share, "forward_s": part.forward, "backward_s": part.backward}
            out.of[name if len(kinds) == 1 or block is kinds[-1][0] else f"{name}, dense blocks"] = factors
        out.of["recompute"] = {"micro_batches": m, "blocks": share, "repeated_s": repeated}
        out.of["launch"] = {"micro_batches": m, "blocks": share, "forward_s": launched + listed}
        terms["recompute"] = terms.get("recompute", 0) + m * share * repeated
        idle = (f - block.forward) + (b - (block.backward + repeated))
        terms["launch"] = terms.get("launch", 0) + m * share * idle
        out.blocks.append((count, Passes(f, b)))
        # Within a tenth of each other, the variation from block to block decides who is ahead.
        cpu = launched * (1 + profile.launch_backward + full) + listed * (2 + full)
        out.ahead = np.clip((1.1 - cpu / (block.forward + block.backward + repeated)) / 0.2, 0.0, 1.0)
        forward = forward + share * f
        backward = backward + share * b

    products, loss = kernels.head(shape, layout, system, profile)
    out.head = Passes(products.forward + loss / 2, products.backward + loss / 2)
    top = out.head.forward + out.head.backward
    # The last rank has the head too; where blocks do not divide evenly, it has fewer blocks.
    fewer = parts.last * (forward + backward) / blocks
    slowest_blocks = forward + backward
    slowest = np.maximum(slowest_blocks, fewer + top)
    terms["head"] = m * (slowest - slowest_blocks)
    through = shape.layers / blocks * slowest_blocks + top
    out.of["head"] = {"micro_batches": m, "slowest_s": slowest, "blocks_s": slowest_blocks, "head_s": top}
    out.of["bubble"] = {"through_s": through, "slowest_s": slowest, "virtual": layout.virtual, "pp": layout.pp}
    out.of["bubble"]["share"] = layout.bubble
    terms["bubble"] = np.where(layout.pp > 1, layout.bubble * (through - slowest) / layout.virtual, 0.0)

    _transfers(out, shape, layout, system, profile)
    _data_parallel(out, shape, layout, system, profile, forward, backward, blocks)
    terms["other"] = profile.step_s + profile.jitter * np.log2(np.maximum(layout.world / 8, 1)) * m * slowest
    return out


def _transfers(out: Step, shape: Shape, layout: Layout, system: System, profile: Profile) -> None:
    """Add the messages of a pipeline: each tp rank sends its part, which the receivers gather within their node
    (scatter/gather, Narayanan et al. 2021, section 4.1)."""
    n = layout.tokens * shape.hidden * layout.activation_bytes
    sent = message_s(n / layout.tp, layout.pp_stride, system) + profile.stalled_s * system.cut_off
    gather = collective_s("all_gather", n, layout.tp, layout.tp_stride, system)
    gathered = np.where(layout.sp == 0, gather, 0.0)
    steady = 2 * layout.micro_batches * layout.virtual
    # Where a rank has several chunks, the messages of one overlap the compute of the next.
    overlap = np.where(layout.virtual > 1, profile.pp_overlap, 0.0)
    times = steady * (1 - overlap) + 2 * (layout.pp - 1)
    factors = {"messages": steady, "bytes": n / layout.tp, "message_s": sent, "gathered_s": gathered}
    out.of["transfers"] = factors | {"overlap": overlap, "pp": layout.pp}
    out.terms["transfers"] = np.where(layout.pp > 1, times * (sent + gathered), 0.0)


def _data_parallel(
    out: Step,
    shape: Shape,
    layout: Layout,
    system: System,
    profile: Profile,
    forward: Column,
    backward: Column,
    blocks: Column,
) -> None:
    """Add gradient reduction over dp x cp ranks (experts': over the ranks with the same experts), the gathers of
    parameters after the update (ZeRO-1, 2) or for every pass (ZeRO-3), coding, and the update itself."""
    ranks = layout.dp * layout.cp
    stride = layout.data_stride(system.tiers[0].ranks)
    moe_share = shape.moe_layers / shape.layers
    blocks_dense = blocks * ((1 - moe_share) * shape.block_params + moe_share * shape.moe_block_params) / layout.tp
    ends = np.where(layout.pp > 1, np.maximum(shape.embedding_params, shape.head_params), shape.ends) / layout.tp
    dense_params = blocks_dense + ends
    expert_params = blocks * moe_share * shape.expert_params / (layout.ep * layout.etp)
    expert_ranks = np.maximum(ranks * layout.tp / (layout.ep * layout.etp), 1)
    expert_stride = layout.ep * layout.expert_stride
    how = sharding(layout, profile.policy)
    by_unit = how.parameters > 0  # gathered and reduced block by block, not in buckets

    def over(op: str, bytes_: Column, group: Column, distance: Column, cut: Column = 0.0) -> Column:
        """Return seconds of `op` on all gradients or parameters, `bytes_` per element, over `group` ranks at distance
        `distance`: in buckets, or block by block where every pass gathers. Experts go over their own ranks. `cut`:
        bytes per element by which buckets are filled, where it differs from what is sent."""
        filled = np.where(np.asarray(cut) > 0, cut, bytes_)
        buckets = np.where(by_unit, blocks, np.maximum(np.ceil(dense_params * filled / profile.bucket_bytes), 1))
        first = buckets * collective_s(op, dense_params * bytes_ / buckets, group, distance, system)
        if not np.any(expert_params):
            return first
        buckets = np.where(by_unit, blocks, np.maximum(np.ceil(expert_params * filled / profile.bucket_bytes), 1))
        return first + buckets * collective_s(
            op, expert_params * bytes_ / buckets, expert_ranks, expert_stride, system
        )

    shards, replicas = how.shards, how.replicas
    grad, param = profile.gradient_bytes, profile.parameter_bytes
    # With several replicas of the sharded model, each shard is summed over them.
    replica_distance = np.where(shards > 1, layout.dp_stride * shards / layout.cp, stride)
    replicate = over("all_reduce", grad / shards, replicas, replica_distance)
    scatter = np.where(layout.zero >= 1, over("reduce_scatter", grad, shards, stride), 0.0)
    gather = np.where(layout.zero >= 1, over("all_gather", param, shards, stride), 0.0)
    c = layout.compressed
    if np.any(c.kind):
        groups = ((ranks, stride), (shards, stride), (replicas, replica_distance))
        compressed = compression.reduced(c, over, grad, layout.zero, *groups)
        scatter, replicate = (
            np.where(c.kind, new, old) for new, old in zip(compressed, (scatter, replicate), strict=True)
        )
    m = layout.micro_batches
    forward_room = profile.dp_overlap * forward / profile.contention
    backward_room = profile.dp_overlap * backward / profile.contention
    hidden = np.minimum(profile.dp_overlap * (scatter + replicate), backward_room)
    hidden = hidden + np.minimum(profile.gather_overlap * gather, forward)
    once = scatter + replicate + gather - hidden
    # For every micro-batch: parameters in the forward pass, and again in the backward pass, and gradients in the
    # latter; of what is done once a step the same share is hidden as above.
    again = how.regathers * gather
    slowed = (profile.contention - 1) * np.minimum(forward + backward, gather + again + scatter)
    both_passes = np.maximum(gather - forward_room, 0) + np.maximum(again + scatter - backward_room, 0) + slowed
    reduced_each = scatter - np.minimum(profile.dp_overlap * scatter, backward_room)
    gathered_once = gather - np.minimum(profile.gather_overlap * gather, forward)
    last_replicate = np.maximum(replicate - backward_room, 0)
    each = np.where(how.gathers_each > 0, m * both_passes, m * reduced_each + gathered_once) + last_replicate
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
    out.of["optimizer"] = {"parameters": dense_params / shards, "bytes": profile.optimizer_bytes}
    out.terms["dp"] = np.where(ranks > 1, np.where(how.reduces_each > 0, each, once), 0.0) * (1 - layout.frozen)
    if np.any(c.kind):
        times = np.where(how.reduces_each > 0, m, 1)
        coding = compression.coding_s(c, dense_params + expert_params, grad, ranks, system)
        out.of["coding"] = {
            "gradients": dense_params + expert_params,
            "passes": c.passes,
            "gradient_bytes": grad,
            "times": times,
        }
        out.terms["coding"] = np.where(c.kind, times * coding, 0.0)
    expert_shards = np.where(layout.zero >= 1, expert_ranks, 1)
    updated_params = dense_params / shards + expert_params / expert_shards
    out.terms["optimizer"] = (
        (1 - layout.frozen) * profile.optimizer_bytes * updated_params / (system.memory_bytes_per_s * system.memory)
    )
