"""A training step of a stack on a system: terms along its critical path, which sum to the time of the step.

    T = M t + fill + transfers + exposed communication + optimizer

t: one micro-batch through the slowest pipeline rank, M of them; fill: a micro-batch through the other ranks, over
the chunks of a rank (Narayanan et al. 2021, section 2.2).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from phalanx.cost.profiles import Profile
from phalanx.cost.stack import compute
from phalanx.cost.stack.columns import Column
from phalanx.cost.stack.compute import Passes
from phalanx.cost.stack.layout import Layout
from phalanx.cost.stack.shape import Shape
from phalanx.cost.stack.system import System
from phalanx.cost.stack.traffic import collective_s, message_s


@dataclass
class Step:
    """Seconds by term; `of`: what each was computed from, by name, for explanations."""

    terms: dict[str, Column] = field(default_factory=dict)
    of: dict[str, dict[str, Column]] = field(default_factory=dict)
    blocks: list[tuple[Column, Passes]] = field(default_factory=list)
    """How many blocks of each kind the model has, those with a plain MLP first, and a micro-batch's passes of one."""
    head: Passes = Passes(0.0, 0.0)
    """A micro-batch's passes of the head and the loss."""

    @property
    def seconds(self) -> Column:
        return sum(self.terms.values())


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


def _tensor_parallel(shape: Shape, layout: Layout, system: System, profile: Profile) -> Passes:
    """Two all-reduces a pass, or with sequence parallelism as many all-gathers and reduce-scatters; backward gathers
    each product's input again beside the gradient of its weight (Korthikanti et al. 2022)."""
    n = layout.tokens * shape.hidden * layout.activation_bytes
    reduced = 2 * collective_s("all_reduce", n, layout.tp, 1, system)
    halves = 2 * (
        collective_s("all_gather", n, layout.tp, 1, system) + collective_s("reduce_scatter", n, layout.tp, 1, system)
    )
    seen = np.where(layout.sp > 0, halves, reduced) * (1 - profile.tp_overlap)
    return Passes(seen, seen)


def _context_parallel(shape: Shape, layout: Layout, system: System, core: Passes) -> Passes:
    """Keys and values go round beside attention over the blocks before; what does not fit there is seen."""
    kv = np.where(shape.kv_rank > 0, shape.heads, shape.kv_heads) * (shape.head_dim + shape.value_dim)
    n = layout.tokens * kv / layout.tp * layout.activation_bytes
    hop = message_s(n, layout.tp, system) * (layout.cp > 1)
    hops = np.maximum(layout.cp - 1, 0)
    part = 1 - 1 / layout.cp
    return Passes(
        np.maximum(hops * hop - core.forward * part, 0) + hop,
        np.maximum(2 * hops * hop - core.backward * part, 0) + 2 * hop,
    )


def _expert_parallel(shape: Shape, layout: Layout, system: System, profile: Profile) -> Passes:
    """Tokens to their experts and back: two all-to-alls a pass; permutation on both sides; the router's wait."""
    routed = layout.tokens * shape.top_k * shape.hidden / layout.tp
    n = routed * layout.activation_bytes
    sent = 2 * collective_s("all_to_all", n, layout.ep, layout.etp, system)
    permuted = profile.token_bytes * routed / (system.memory_bytes_per_s * system.memory)
    inside = 2 * collective_s("all_gather", n * layout.etp, layout.etp, 1, system)
    one = (sent + inside) * (1 - profile.ep_overlap) + permuted + profile.router_s
    return Passes(one, one)


_NONE = Passes(0.0, 0.0)


def _block(shape: Shape, layout: Layout, system: System, profile: Profile, moe: bool) -> _Block:
    rate = compute.rate_of(layout, system, profile)
    core = compute.attention(shape, layout, system, profile)
    around = compute.projections(shape, layout, system, rate)
    if moe:
        inner = compute.experts(shape, layout, system, rate * profile.grouped)
        shared = compute.mlp(shape, layout, np.maximum(shape.shared_ffn, 1), system, rate)
        has = shape.shared_ffn > 0
        inner = Passes(
            inner.forward + np.where(has, shared.forward, 0), inner.backward + np.where(has, shared.backward, 0)
        )
        width = shape.top_k * shape.expert_ffn + shape.shared_ffn
        ep = _expert_parallel(shape, layout, system, profile)
    else:
        inner, width, ep = compute.mlp(shape, layout, shape.ffn, system, rate), shape.ffn, _NONE
    return _Block(
        matmul=Passes(around.forward + inner.forward, around.backward + inner.backward),
        attention=core,
        memory=compute.traffic(shape, layout, width, system, profile),
        tp=_tensor_parallel(shape, layout, system, profile),
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

    held = np.ceil(shape.layers / (layout.pp * layout.virtual)) * layout.virtual
    held = np.minimum(held, np.ceil(shape.layers / layout.pp) + (layout.virtual > 1) * layout.virtual)
    m, full = layout.micro_batches, layout.full
    lists = np.where(layout.tp > 1, profile.listed * layout.tp * system.rank_s, 0.0)
    launched = np.hypot(profile.launch_s, lists)
    forward: Column = 0.0
    backward: Column = 0.0
    for block, count in kinds:
        share = count / shape.layers * held  # of this kind on a rank
        repeated = full * block.forward + layout.selective * block.attention.forward
        f = np.maximum(block.forward, launched)
        b = np.maximum(block.backward + repeated, launched * (profile.launch_backward + full))
        for name, part in block.parts.items():
            found[name] = found.get(name, 0) + m * share * (part.forward + part.backward)
        found["recompute"] = found.get("recompute", 0) + m * share * repeated
        idle = f + b - block.forward - block.backward - repeated
        found["launch"] = found.get("launch", 0) + m * share * idle
        out.blocks.append((count, Passes(f, b)))
        forward = forward + share * f
        backward = backward + share * b

    products, loss = compute.head(shape, layout, system, profile)
    out.head = Passes(products.forward + loss / 2, products.backward + loss / 2)
    top = out.head.forward + out.head.backward
    # The last rank has the head as well; where blocks do not divide, it is one of those with fewer.
    fewer = np.floor(shape.layers / layout.pp) * (forward + backward) / held
    whole = forward + backward
    slowest = np.maximum(whole, fewer + top)
    found["head"] = m * (slowest - whole)
    through = shape.layers / held * whole + top
    found["bubble"] = np.where(layout.pp > 1, (through - slowest) / layout.virtual, 0.0)

    _transfers(found, shape, layout, system, profile)
    _data_parallel(found, shape, layout, system, profile, forward, backward, held)
    found["other"] = profile.step_s + profile.jitter * np.log2(np.maximum(layout.world / 8, 1)) * m * slowest
    return out


def _transfers(found: dict[str, Column], shape: Shape, layout: Layout, system: System, profile: Profile) -> None:
    """What a pipeline sends: with scatter/gather a part per tp rank, gathered behind in the node."""
    cut = np.where((layout.sp > 0) | (profile.scatter_gather > 0), layout.tp, 1)
    n = layout.tokens * shape.hidden * layout.activation_bytes
    stride = layout.stage_stride
    sent = message_s(n / cut, stride, system)
    gathered = np.where((cut > 1) & (layout.sp == 0), collective_s("all_gather", n, layout.tp, 1, system), 0.0)
    times = 2 * layout.micro_batches * layout.virtual + 2 * (layout.pp - 1)
    found["transfers"] = np.where(layout.pp > 1, times * (sent + gathered) * (1 - profile.pp_overlap), 0.0)


def _data_parallel(
    found: dict[str, Column],
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
    stride = layout.data_stride
    moe_share = shape.moe_layers / shape.layers
    dense = held * ((1 - moe_share) * shape.block_params + moe_share * shape.moe_block_params) / layout.tp
    ends = np.where(layout.pp > 1, np.maximum(shape.embedding_params, shape.head_params), shape.ends) / layout.tp
    own = dense + ends
    routed = held * moe_share * shape.expert_params / (layout.ep * layout.etp)
    expert_ranks = np.maximum(ranks * layout.tp / (layout.ep * layout.etp), 1)
    expert_stride = layout.ep * layout.etp

    def over(op: str, bytes_: Column, among: Column, apart: Column) -> Column:
        """In buckets over `among` ranks of the data axis at distance `apart`; experts over what is left of it."""
        buckets = np.maximum(np.ceil(own * bytes_ / profile.bucket_bytes), 1)
        first = buckets * collective_s(op, own * bytes_ / buckets, among, apart, system)
        if not np.any(routed):
            return first
        buckets = np.maximum(np.ceil(routed * bytes_ / profile.bucket_bytes), 1)
        return first + buckets * collective_s(op, routed * bytes_ / buckets, expert_ranks, expert_stride, system)

    shards = np.where(layout.zero >= 1, np.minimum(np.maximum(layout.shards, 1), ranks), 1)
    replicas = ranks / shards
    grad, param = profile.gradient_bytes, profile.parameter_bytes
    # Shards are summed over the replicas of a model's shards, where there are more than one.
    again = over("all_reduce", grad / shards, replicas, stride * shards)
    scatter = np.where(layout.zero >= 1, over("reduce_scatter", grad, shards, stride), 0.0)
    gather = np.where(layout.zero >= 1, over("all_gather", param, shards, stride), 0.0)
    m = layout.micro_batches
    ahead = profile.dp_overlap * forward / profile.contention
    behind = profile.dp_overlap * backward / profile.contention
    hidden = np.minimum(profile.dp_overlap * (scatter + again), behind)
    hidden = hidden + np.minimum(profile.gather_overlap * gather, forward)
    once = scatter + again + gather - hidden
    # ZeRO-3: per micro-batch, gathered for both passes and scattered in the second.
    slowed = (profile.contention - 1) * np.minimum(forward + backward, 2 * gather + scatter)
    each = np.maximum(gather - ahead, 0) + np.maximum(gather + scatter - behind, 0) + slowed
    last = np.maximum(again - behind, 0)
    found["dp"] = np.where(ranks > 1, np.where(layout.zero >= 3, m * each + last, once), 0.0)
    expert_shards = np.where(layout.zero >= 1, expert_ranks, 1)
    updated = own / shards + routed / expert_shards
    found["optimizer"] = profile.optimizer_bytes * updated / (system.memory_bytes_per_s * system.memory)
