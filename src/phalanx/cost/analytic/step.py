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
from phalanx.cost.analytic.model_shape import Shape
from phalanx.cost.analytic.rank_layout import Layout, stages
from phalanx.cost.analytic.stacks import Profile
from phalanx.cost.collectives.nccl_model import collective_s, message_s
from phalanx.cost.hardware.columns import Column
from phalanx.cost.hardware.system import System


@dataclass
class Step:
    """Seconds by term along the critical path of the slowest rank; `of`: a term's factors by name, from which its
    formula (FORMULAS) is told with numbers."""

    terms: dict[str, Column] = field(default_factory=dict)
    of: dict[str, dict[str, Column]] = field(default_factory=dict)
    blocks: list[tuple[Column, Passes]] = field(default_factory=list)
    """How many blocks of each kind the model has, those with a plain MLP first, and a micro-batch's passes of one."""
    head: Passes = field(default_factory=lambda: Passes(0.0, 0.0))
    """A micro-batch's passes of the head and the loss."""
    ahead: Column = 1.0
    """1 where the CPU launches ahead of the GPU, 0 where the GPU waits for it; between, where they are as fast."""

    @property
    def seconds(self) -> Column:
        return sum(self.terms.values())


FORMULAS = {
    "matmul": "micro_batches x blocks x (forward_s + backward_s)",
    "attention": "micro_batches x blocks x (forward_s + backward_s)",
    "memory": "micro_batches x blocks x (forward_s + backward_s)",
    "tp": "micro_batches x blocks x (forward_s + backward_s), what overlap leaves of two all-reduces each",
    "cp": "micro_batches x blocks x (forward_s + backward_s), what attention does not hide of keys and values",
    "ep": "micro_batches x blocks x (forward_s + backward_s), two all-to-alls each, permutation, the router",
    "recompute": "micro_batches x blocks x repeated_s",
    "launch": "micro_batches x blocks x what a pass's launches take longer than the GPU (max, not sum)",
    "head": "micro_batches x (slowest_s - blocks_s): logits and loss where they are not a faster rank's",
    "bubble": "share x (through_s - slowest_s) / virtual: one micro-batch through the others, and the schedule's "
    "share of that; zero-bubble: makespan_s of its actions - micro_batches x slowest_s",
    "transfers": "(messages x (1 - overlap) + 2 (pp - 1)) x (message_s + gathered_s)",
    "dp": "scatter_s + again_s + gather_s - hidden_s; ZeRO-3: micro_batches x what does not fit beside compute",
    "coding": "times x gradients x passes x gradient_bytes / memory bandwidth; and of sparse what all ranks sent",
    "optimizer": "bytes x parameters / memory bandwidth",
    "other": "once a step, and the slowest rank's jitter",
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
        return sum(p.forward for p in self.parts.values())

    @property
    def backward(self) -> Column:
        return sum(p.backward for p in self.parts.values())


def _tensor_parallel(shape: Shape, layout: Layout, system: System, profile: Profile, beside: Passes) -> Passes:
    """Two all-reduces a pass, or with sequence parallelism as many all-gathers and reduce-scatters; backward gathers
    each product's input again beside the gradient of its weight (Korthikanti et al. 2022). They hide behind the
    products next to them, which are half of a block's, as far as those last; between nodes they wait for their hops,
    and nothing does."""
    n = layout.tokens * shape.hidden * layout.activation_bytes
    reduced = 2 * collective_s("all_reduce", n, layout.tp, layout.tp_stride, system)
    among = (layout.tp, layout.tp_stride, system)
    narrow = np.where((profile.tp_narrow > 0) & (np.asarray(layout.format) == 1), 1 / layout.activation_bytes, 1.0)
    halves = 2 * (collective_s("all_gather", n * narrow, *among) + collective_s("reduce_scatter", n, *among))
    whole = np.where(layout.sp > 0, halves, reduced)
    inside = layout.tp * layout.tp_stride <= system.tiers[0].ranks
    hidden = np.where(inside, profile.tp_overlap, 0.0) * whole
    return Passes(
        whole - np.minimum(hidden, beside.forward / 2),
        whole - np.minimum(hidden, beside.backward / 2),
    )


def _context_parallel(shape: Shape, layout: Layout, system: System, core: Passes) -> Passes:
    """Keys and values go round beside attention over the blocks before; what does not fit there is seen. Ulysses:
    all-to-alls of queries, keys and values before attention and of its result behind, which nothing hides."""
    kv = np.where(shape.kv_rank > 0, shape.heads, shape.kv_heads) * (shape.head_dim + shape.value_dim)
    n = layout.tokens * kv / layout.tp * layout.activation_bytes
    ring = layout.cp / layout.ulysses
    hop = message_s(n, layout.cp_stride * layout.ulysses, system) * (ring > 1)
    hops = np.maximum(ring - 1, 0)
    part = 1 - 1 / ring
    heads = shape.heads * (shape.head_dim + shape.value_dim) + kv
    turned = layout.tokens * heads / layout.tp * layout.activation_bytes
    turns = collective_s("all_to_all", turned, layout.ulysses, layout.cp_stride, system)
    return Passes(
        np.maximum(hops * hop - core.forward * part, 0) + hop + turns,
        np.maximum(2 * hops * hop - core.backward * part, 0) + 2 * hop + turns,
    )


def _expert_parallel(shape: Shape, layout: Layout, system: System, profile: Profile) -> Passes:
    """Tokens to their experts and back: two all-to-alls a pass; permutation on both sides; the router's wait."""
    routed = layout.tokens * shape.top_k * shape.hidden / layout.tp
    n = routed * layout.activation_bytes
    sent = 2 * collective_s("all_to_all", n, layout.ep, layout.expert_stride, system)
    permuted = profile.token_bytes * routed / (system.memory_bytes_per_s * system.memory)
    beside = np.where(layout.pp_stride < layout.etp, layout.pp, 1)
    inside = 2 * collective_s("all_gather", n * layout.etp, layout.etp, beside, system)
    one = (sent + inside) * (1 - profile.ep_overlap) + permuted + profile.router_s
    return Passes(one, one)


_NONE = Passes(0.0, 0.0)


def _block(shape: Shape, layout: Layout, system: System, profile: Profile, moe: bool) -> _Block:
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
    """The terms of one step."""
    out = Step()
    found = out.terms
    kinds = [(_block(shape, layout, system, profile, False), shape.layers - shape.moe_layers)]
    if np.any(shape.moe_layers):
        kinds.append((_block(shape, layout, system, profile, True), shape.moe_layers))

    parts = stages(shape, layout, profile.balanced)
    held = parts.most
    m, full = layout.micro_batches, layout.full
    behind = 1 + profile.launch_sync * (np.minimum(layout.tp, 8) - 1) / 7
    launched = profile.launches * profile.launch_s * behind
    listed = np.where(layout.tp > 1, profile.listed * layout.tp * profile.list_s * system.held_up, 0.0)
    every_second = kernels.every_second(shape)
    forward: Column = 0.0
    backward: Column = 0.0
    for block, count in kinds:
        share = count / shape.layers * held  # of this kind on a rank
        some = np.where(profile.per_op > 0, every_second * block.matmul.forward, block.attention.forward)
        repeated = full * block.forward + layout.selective * some
        f = np.maximum(block.forward, launched + listed)
        b = np.maximum(block.backward + repeated, launched * (profile.launch_backward + full) + listed * (1 + full))
        for name, part in block.parts.items():
            found[name] = found.get(name, 0) + m * share * (part.forward + part.backward)
            own = {"micro_batches": m, "blocks": share, "forward_s": part.forward, "backward_s": part.backward}
            out.of[name if len(kinds) == 1 or block is kinds[-1][0] else f"{name}, dense blocks"] = own
        out.of["recompute"] = {"micro_batches": m, "blocks": share, "repeated_s": repeated}
        out.of["launch"] = {"micro_batches": m, "blocks": share, "forward_s": launched + listed}
        found["recompute"] = found.get("recompute", 0) + m * share * repeated
        idle = (f - block.forward) + (b - (block.backward + repeated))
        found["launch"] = found.get("launch", 0) + m * share * idle
        out.blocks.append((count, Passes(f, b)))
        # By a tenth, what varies from block to block decides.
        cpu = launched * (1 + profile.launch_backward + full) + listed * (2 + full)
        out.ahead = np.clip((1.1 - cpu / (block.forward + block.backward + repeated)) / 0.2, 0.0, 1.0)
        forward = forward + share * f
        backward = backward + share * b

    products, loss = kernels.head(shape, layout, system, profile)
    out.head = Passes(products.forward + loss / 2, products.backward + loss / 2)
    top = out.head.forward + out.head.backward
    # The last rank has the head as well; where blocks do not divide, it is one of those with fewer.
    fewer = parts.last * (forward + backward) / held
    whole = forward + backward
    slowest = np.maximum(whole, fewer + top)
    found["head"] = m * (slowest - whole)
    through = shape.layers / held * whole + top
    out.of["head"] = {"micro_batches": m, "slowest_s": slowest, "blocks_s": whole, "head_s": top}
    out.of["bubble"] = {"through_s": through, "slowest_s": slowest, "virtual": layout.virtual, "pp": layout.pp}
    out.of["bubble"]["share"] = layout.bubble
    found["bubble"] = np.where(layout.pp > 1, layout.bubble * (through - slowest) / layout.virtual, 0.0)

    _transfers(out, shape, layout, system, profile)
    _data_parallel(out, shape, layout, system, profile, forward, backward, held)
    found["other"] = profile.step_s + profile.jitter * np.log2(np.maximum(layout.world / 8, 1)) * m * slowest
    return out


def _transfers(out: Step, shape: Shape, layout: Layout, system: System, profile: Profile) -> None:
    """What a pipeline sends: a part per tp rank, gathered behind in the node (scatter/gather, Narayanan et al. 2021,
    section 4.1)."""
    n = layout.tokens * shape.hidden * layout.activation_bytes
    sent = message_s(n / layout.tp, layout.pp_stride, system) + profile.stalled_s * system.cut_off
    whole = collective_s("all_gather", n, layout.tp, layout.tp_stride, system)
    gathered = np.where(layout.sp == 0, whole, 0.0)
    steady = 2 * layout.micro_batches * layout.virtual
    # One chunk's messages travel beside the next one's work, where a rank has more than one.
    overlap = np.where(layout.virtual > 1, profile.pp_overlap, 0.0)
    times = steady * (1 - overlap) + 2 * (layout.pp - 1)
    own = {"messages": steady, "bytes": n / layout.tp, "message_s": sent, "gathered_s": gathered}
    out.of["transfers"] = own | {"overlap": overlap, "pp": layout.pp}
    out.terms["transfers"] = np.where(layout.pp > 1, times * (sent + gathered), 0.0)


def _data_parallel(
    out: Step,
    shape: Shape,
    layout: Layout,
    system: System,
    profile: Profile,
    forward: Column,
    backward: Column,
    held: Column,
) -> None:
    """Gradients over dp x cp, of experts over what is left of it; parameters gathered after the update (ZeRO-1, 2) or
    for every pass (ZeRO-3); the update."""
    ranks = layout.dp * layout.cp
    stride = layout.data_stride(system.tiers[0].ranks)
    moe_share = shape.moe_layers / shape.layers
    dense = held * ((1 - moe_share) * shape.block_params + moe_share * shape.moe_block_params) / layout.tp
    ends = np.where(layout.pp > 1, np.maximum(shape.embedding_params, shape.head_params), shape.ends) / layout.tp
    own = dense + ends
    routed = held * moe_share * shape.expert_params / (layout.ep * layout.etp)
    expert_ranks = np.maximum(ranks * layout.tp / (layout.ep * layout.etp), 1)
    expert_stride = layout.ep * layout.expert_stride
    # ZeRO-3: per micro-batch, gathered for both passes and scattered in the second; unless it keeps for a whole step
    # what it has gathered.
    passes = (np.asarray(layout.zero) >= 3) & (np.asarray(layout.gathers_once) == 0)

    def over(op: str, bytes_: Column, among: Column, apart: Column, cut: Column = 0.0) -> Column:
        """In buckets, for every pass block by block, over `among` ranks of the data axis at distance `apart`; experts
        over what is left of it. `cut`: bytes of an element by which buckets are filled, where others travel."""
        filled = np.where(np.asarray(cut) > 0, cut, bytes_)
        buckets = np.where(passes, held, np.maximum(np.ceil(own * filled / profile.bucket_bytes), 1))
        first = buckets * collective_s(op, own * bytes_ / buckets, among, apart, system)
        if not np.any(routed):
            return first
        buckets = np.where(passes, held, np.maximum(np.ceil(routed * filled / profile.bucket_bytes), 1))
        return first + buckets * collective_s(op, routed * bytes_ / buckets, expert_ranks, expert_stride, system)

    shards = np.where(layout.zero >= 1, np.minimum(np.maximum(layout.shards, 1), ranks), 1)
    replicas = ranks / shards
    grad, param = profile.gradient_bytes, profile.parameter_bytes
    # Shards are summed over the replicas of a model's shards, where there are more than one.
    apart = np.where(shards > 1, layout.dp_stride * shards / layout.cp, stride)
    again = over("all_reduce", grad / shards, replicas, apart)
    scatter = np.where(layout.zero >= 1, over("reduce_scatter", grad, shards, stride), 0.0)
    gather = np.where(layout.zero >= 1, over("all_gather", param, shards, stride), 0.0)
    c = layout.compressed
    if np.any(c.kind):
        groups = ((ranks, stride), (shards, stride), (replicas, apart))
        coded = compression.reduced(c, over, grad, layout.zero, *groups)
        scatter, again = (np.where(c.kind, new, old) for new, old in zip(coded, (scatter, again), strict=True))
    m = layout.micro_batches
    ahead = profile.dp_overlap * forward / profile.contention
    behind = profile.dp_overlap * backward / profile.contention
    hidden = np.minimum(profile.dp_overlap * (scatter + again), behind)
    hidden = hidden + np.minimum(profile.gather_overlap * gather, forward)
    once = scatter + again + gather - hidden
    slowed = (profile.contention - 1) * np.minimum(forward + backward, 2 * gather + scatter)
    each = np.maximum(gather - ahead, 0) + np.maximum(gather + scatter - behind, 0) + slowed
    last = np.maximum(again - behind, 0)
    out.of["dp"] = {
        "ranks": ranks,
        "shards": shards,
        "gradient_bytes": own * grad,
        "gradients": own + routed,
        "scatter_s": scatter,
        "again_s": again,
        "gather_s": gather,
        "hidden_s": hidden,
    }
    out.of["optimizer"] = {"parameters": own / shards, "bytes": profile.optimizer_bytes}
    out.terms["dp"] = np.where(ranks > 1, np.where(passes, m * each + last, once), 0.0) * (1 - layout.frozen)
    if np.any(c.kind):
        times = np.where(passes, m, 1)
        coding = c.coding_s(own + routed, grad, ranks, system)
        out.of["coding"] = {"gradients": own + routed, "passes": c.passes, "gradient_bytes": grad, "times": times}
        out.terms["coding"] = np.where(c.kind, times * coding, 0.0)
    expert_shards = np.where(layout.zero >= 1, expert_ranks, 1)
    updated = own / shards + routed / expert_shards
    out.terms["optimizer"] = (
        (1 - layout.frozen) * profile.optimizer_bytes * updated / (system.memory_bytes_per_s * system.memory)
    )
