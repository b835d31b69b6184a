"""A training step of a stack on a system: terms along its critical path, which sum to the time of the step.

    T = M t + fill + transfers + exposed communication + optimizer

t: one micro-batch through the slowest pipeline rank, M of them; fill: a micro-batch through the other ranks, over
the chunks of a rank (Narayanan et al. 2021, section 2.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from phalanx.cost.analytic import compression, kernels
from phalanx.cost.analytic.kernels import Passes
from phalanx.cost.analytic.stacks import Profile
from phalanx.cost.collectives.nccl_model import collective_s, message_s
from phalanx.cost.hardware.columns import Column
from phalanx.cost.hardware.system import System
from phalanx.cost.ledger.flow import Flow, Held
from phalanx.cost.ledger.gradient_flows import Types, expert_ranks, gradient_flows, parameters_of
from phalanx.cost.ledger.layer_flows import layer_flows, messages, routed_rows, stream_bytes
from phalanx.cost.ledger.live_bytes import live_bytes
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
    "ep": "micro_batches x blocks x (forward_s + backward_s), two all-to-alls each, permutation, the router, waiting "
    "for the fullest rank",
    "recompute": "micro_batches x blocks x repeated_s",
    "launch": "micro_batches x blocks x the time by which a pass's launches, or both together, exceed its GPU time",
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
    """Seconds of one block and micro-batch, forward and backward, by what takes them; `again`: seconds of the modules
    that the backward pass computes again."""

    matmul: Passes
    attention: Passes
    memory: Passes
    tp: Passes
    cp: Passes
    ep: Passes
    again: Column = 0.0

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


_Flows = Sequence[Flow]


class _Timer:
    """Seconds of flows on a system; flows of the same bytes over the same ranks are timed once."""

    def __init__(self, system: System) -> None:
        self.system = system
        self._known: dict[tuple[str, int, int], tuple[Flow, Column]] = {}

    def one(self, flow: Flow) -> Column:
        """Return seconds of one of a flow's operations."""
        key = (flow.op, id(flow.bytes), id(flow.ranks))
        if key not in self._known:  # with the flow, lest its arrays' numbers be given to others
            self._known[key] = flow, _seconds(flow, self.system)
        return self._known[key][1]


def _seconds(flow: Flow, system: System) -> Column:
    """Return seconds of one of a flow's operations."""
    if flow.op == "send":
        return message_s(flow.bytes, flow.stride, system, flow.chain) * (np.asarray(flow.ranks) > 1)
    return collective_s(flow.op, flow.bytes, flow.ranks, flow.stride, system)


def _tensor_parallel(flows: _Flows, layout: Layout, timer: _Timer, profile: Profile, products: Passes) -> Passes:
    """Return exposed seconds of tensor parallelism in one block. Within a node collectives overlap the neighbouring
    products, half of a block's; between nodes they wait for their hops and overlap nothing. What only weight
    gradients read is gathered beside the backward pass's products."""
    forward: Column = 0.0
    backward: Column = 0.0
    beside: Column = 0.0
    for flow in flows:
        each = timer.one(flow)
        if flow.op == "all_gather":
            narrow = np.where(
                (profile.tp_narrow > 0) & (np.asarray(layout.format) == 1), 1 / layout.activation_bytes, 1.0
            )
            if np.any(narrow < 1):
                each = _seconds(replace(flow, bytes=flow.bytes * narrow), timer.system)
        forward = forward + flow.count("F") * each
        backward = backward + (flow.count("B") - flow.beside) * each
        beside = beside + flow.beside * each
    inside = np.where(layout.tp * layout.tp_stride <= timer.system.tiers[0].ranks, profile.tp_overlap, 0.0)
    room = products.backward / 2
    return Passes(
        forward - np.minimum(inside * forward, products.forward / 2),
        backward - np.minimum(inside * backward, room) + np.maximum(beside - products.backward, 0.0),
    )


def _context_parallel(flows: _Flows, layout: Layout, system: System, profile: Profile, core: Passes) -> Passes:
    """Return exposed seconds of context parallelism in one block. Ring: keys and values travel while attention runs
    over the part received before; what does not fit is exposed, and so is the gradients' last hop, beside which
    nothing is left to compute. Ulysses: exposed all-to-alls of queries, keys and values before attention and of its
    result after it."""
    if not flows:
        return _NONE
    exchanged: Column = 0.0
    ring: Column = 0.0
    for flow in flows:
        if flow.axis == "ring":
            ring = _seconds(flow, system)
        else:
            exchanged = exchanged + flow.count("F") * _seconds(flow, system)
    degree = layout.cp / layout.ulysses
    if np.any(profile.gathers_keys):
        # Gathered before attention, again in the backward pass, and their gradients scattered after it: nothing of
        # attention runs meanwhile.
        around = np.maximum(degree - 1, 0) * ring
        return Passes(around + exchanged, 2 * around + exchanged)
    hops, overlapping = np.maximum(degree - 1, 0), 1 - 1 / degree
    last = ring * (degree > 1)
    return Passes(
        np.maximum(hops * ring - core.forward * overlapping, 0) + exchanged,
        np.maximum(2 * hops * ring - last - core.backward * overlapping, 0) + last + exchanged,
    )


def _expert_parallel(
    flows: _Flows, shape: Shape, layout: Layout, system: System, profile: Profile, products: Passes, compute: Passes
) -> Passes:
    """Return exposed seconds of expert parallelism in one block: all-to-alls (dispatch and combine), permutation on
    both sides, the router, and waiting for the rank whose experts got the most tokens (`products`: the experts';
    `compute`: all of a block's)."""
    forward: Column = 0.0
    backward: Column = 0.0
    for flow in flows:
        each = _seconds(_dispatched(flow, shape, layout, system, profile), system)
        forward, backward = forward + flow.count("F") * each, backward + flow.count("B") * each
    if np.any(profile.overlaps_experts):
        # Another micro-batch's products run meanwhile; what they do not cover is exposed, and they are slowed.
        slowed = profile.contention - 1
        forward = np.maximum(forward - compute.forward, 0) + slowed * np.minimum(forward, compute.forward)
        backward = np.maximum(backward - compute.backward, 0) + slowed * np.minimum(backward, compute.backward)
    rows = routed_rows(shape, layout, np.maximum(shape.experts, 1)) * shape.hidden
    fixed = profile.token_bytes * rows / (system.memory_bytes_per_s * system.memory) + profile.router_s
    shown, waits = 1 - profile.ep_overlap, np.where(np.asarray(layout.ep) > 1, profile.imbalance, 0.0)
    return Passes(
        forward * shown + fixed + waits * products.forward, backward * shown + fixed + waits * products.backward
    )


def _dispatched(flow: Flow, shape: Shape, layout: Layout, system: System, profile: Profile) -> Flow:
    """Return the operation that carries tokens to their experts, or back, where it is not an all-to-all of a copy
    for each expert: one copy for each node, or rank of a node, that has one of them (DeepEP; of `k` experts drawn
    from `n` nodes, n (1 - (1 - 1/n)^k) are distinct); or all tokens for every rank."""
    if flow.op != "all_to_all" or flow.axis != "ep":
        return flow
    k = np.maximum(shape.top_k, 1)
    if np.any(profile.sends_once):
        node = system.tiers[0].ranks
        places = np.where(layout.ep * layout.etp > node, np.ceil(layout.ep * layout.etp / node), layout.ep)
        distinct = places * (1 - (1 - 1 / places) ** k) / k
        flow = replace(flow, bytes=flow.bytes * np.where(profile.sends_once > 0, np.minimum(distinct, 1.0), 1.0))
    if np.any(profile.gathers_tokens):
        return replace(flow, op="all_gather", bytes=flow.bytes / k * layout.ep)
    return flow


_NONE = Passes(0.0, 0.0)


def _block(flows: _Flows, shape: Shape, layout: Layout, timer: _Timer, profile: Profile, moe: bool) -> _Block:
    """Return the seconds of one block, with experts (`moe`) or a dense MLP. `flows`: what it sends."""
    by_axis: dict[str, list[Flow]] = {}
    for flow in flows:
        by_axis.setdefault({"ring": "cp", "ulysses": "cp", "tp": "tp"}.get(flow.axis, "ep"), []).append(flow)
    system = timer.system
    rate = kernels.rate_of(layout, system, profile)
    core = kernels.attention(shape, layout, system, profile)
    inside = layout.tp * layout.tp_stride <= system.tiers[0].ranks
    parts = np.where((profile.tp_split > 0) & inside, layout.tp, 1)
    by = kernels.Products(system, rate, layout.activation_bytes, layout.frozen, parts)
    around = kernels.projections(shape, layout, by)
    if moe:
        inner = kernels.experts(shape, layout, replace(by, rate=rate * profile.grouped, parts=1.0))
        compute = Passes(
            around.forward + core.forward + inner.forward, around.backward + core.backward + inner.backward
        )
        ep = _expert_parallel(by_axis.get("ep", ()), shape, layout, system, profile, inner, compute)
        shared = kernels.mlp(shape, layout, np.maximum(shape.shared_ffn, 1), by)
        has = shape.shared_ffn > 0
        inner = Passes(
            inner.forward + np.where(has, shared.forward, 0), inner.backward + np.where(has, shared.backward, 0)
        )
        width = shape.top_k * shape.expert_ffn + shape.shared_ffn
    else:
        inner, width, ep = kernels.mlp(shape, layout, shape.ffn, by), shape.ffn, _NONE
    products = Passes(around.forward + inner.forward, around.backward + inner.backward)
    again: Column = 0.0
    if layout.modules.any:
        again = _modules_again(shape, layout, system, profile, by, moe, inner, ep)
    return _Block(
        matmul=products,
        attention=core,
        memory=kernels.traffic(shape, layout, width, system, profile),
        tp=_tensor_parallel(by_axis.get("tp", ()), layout, timer, profile, products),
        cp=_context_parallel(by_axis.get("cp", ()), layout, system, profile, core),
        ep=ep,
        again=again,
    )


def _modules_again(
    shape: Shape,
    layout: Layout,
    system: System,
    profile: Profile,
    by: kernels.Products,
    moe: bool,
    inner: Passes,
    ep: Passes,
) -> Column:
    """Return the forward seconds of the modules that run again: their products, and passes over what memory-bound
    kernels read and write. `inner`: of the MLP or of all experts; `ep`: of what the experts' exchange takes."""
    m = layout.modules
    rate = system.memory_bytes_per_s * system.memory
    ways = np.where(layout.sp > 0, layout.tp, 1)
    element = layout.tokens * layout.activation_bytes / rate
    norms = 2 * 2 * element * shape.hidden / ways  # two norms read and write
    up = kernels.up_projections(shape, layout, by)
    seconds = m.layernorm * norms + m.mla_up_proj * up.forward
    if not moe:
        return seconds + m.mlp * (inner.forward + 3 * element * shape.ffn / layout.tp)
    width = shape.top_k * shape.expert_ffn
    act = shape.mlp_matrices * element * width / layout.tp  # the activation reads one or two and writes one
    shared = kernels.mlp(shape, layout, np.maximum(shape.shared_ffn, 1), by).forward * (shape.shared_ffn > 0)
    whole = inner.forward + ep.forward + act
    return seconds + np.where(m.moe > 0, whole, m.moe_act * act + m.shared_experts * shared)


_UNEVEN = 0.5
"""By how much the GPU is ahead of its launches, or behind, from one moment to the next: at most this share of the
slower one's time. At equal rates a pass takes an eighth longer than either."""


def _slower(gpu: Column, cpu: Column) -> Column:
    """Return the seconds of a pass of which the GPU needs `gpu` and its launches `cpu`: those of the slower one, and
    more where both are nearly as fast, since kernels and launches last unequally long and each waits where the other
    is behind. With a difference d of both that varies evenly by u either way, E max = max + (u - d)^2 / (4 u)."""
    most = np.maximum(gpu, cpu)
    near = np.maximum(np.minimum(gpu, cpu) / np.maximum(most, 1e-30) - (1 - _UNEVEN), 0.0)
    return most * (1 + near**2 / (4 * _UNEVEN))


def step(shape: Shape, layout: Layout, system: System, profile: Profile) -> Step:
    """Return the terms of one step."""
    layout = layout.on_nodes(system.tiers[0].ranks)
    out = Step()
    terms = out.terms
    by_unit: dict[str, list[Flow]] = {}
    for flow in layer_flows(shape, layout, profile.policy):
        by_unit.setdefault(flow.unit, []).append(flow)
    timer = _Timer(system)
    dense = _block(by_unit.get("dense", ()), shape, layout, timer, profile, False)
    kinds = [(dense, shape.layers - shape.moe_layers)]
    if np.any(shape.moe_layers):
        kinds.append((_block(by_unit.get("experts", ()), shape, layout, timer, profile, True), shape.moe_layers))

    parts = stages(shape, layout, profile.balanced)
    blocks = parts.most
    m, full = layout.micro_batches, layout.full
    sync_factor = 1 + profile.launch_sync * (np.minimum(layout.tp, 8) - 1) / 7
    of_block = profile.launches * profile.launch_s * sync_factor
    listed = np.where(layout.tp > 1, profile.listed * layout.tp * profile.list_s * system.held_up, 0.0)
    every_second = kernels.every_second(shape)
    forward: Column = 0.0
    backward: Column = 0.0
    for place, (block, count) in enumerate(kinds):
        share = count / shape.layers * blocks  # blocks of this kind on a rank
        core_again = block.attention.forward + block.cp.forward
        selected = np.where(profile.per_op > 0, every_second * block.matmul.forward, core_again)
        launched = of_block * (1 + profile.expert_launches / np.maximum(profile.launches, 1) * (place > 0))
        repeated = full * block.forward + layout.selective * selected + (1 - full) * block.again
        repeated = (
            repeated
            + _adapters(shape, layout, system, profile)
            + _offloaded(shape, layout, system, profile, block, blocks)
        )
        f = _slower(block.forward, launched + listed)
        b = _slower(block.backward + repeated, launched * (profile.launch_backward + full) + listed * (1 + full))
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
        # Within 15 % of each other, the variation from block to block decides who is ahead.
        cpu = launched * (1 + profile.launch_backward + full) + listed * (2 + full)
        keeps_ahead = np.clip((1.15 - cpu / (block.forward + block.backward + repeated)) / 0.3, 0.0, 1.0)
        out.ahead = np.where(np.asarray(count) > 0, keeps_ahead, out.ahead)
        forward = forward + share * f
        backward = backward + share * b

    products, loss = kernels.head(shape, layout, system, profile)
    heads = 1 + shape.depths
    out.head = Passes(heads * (products.forward + loss / 2), heads * (products.backward + loss / 2))
    if np.any(np.asarray(layout.tp) > 1):
        of_head = _tensor_parallel(by_unit.get("head", ()), layout, timer, profile, products)
        # A rank that has the embedding too, without a pipeline, pays for both.
        of_embedding = _tensor_parallel(by_unit.get("embed", ()), layout, timer, profile, _NONE)
        both = 1.0 * (np.asarray(layout.pp) == 1)
        out.head = Passes(
            out.head.forward + of_head.forward + both * of_embedding.forward,
            out.head.backward + of_head.backward + both * of_embedding.backward,
        )
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
    """Add the messages of a pipeline. Where each tp rank sends its part of an unsplit stream, the receivers gather it
    within their node (scatter/gather, Narayanan et al. 2021, section 4.1)."""
    message = messages(shape, layout, profile.policy, 1.0)
    sent = _seconds(message, system) + profile.stalled_s * system.cut_off
    whole = stream_bytes(shape, layout)
    gather = collective_s("all_gather", whole, layout.tp, layout.tp_stride, system)
    gathered = np.where(
        (np.asarray(layout.sp) == 0) & (np.asarray(profile.policy.scatters_messages) > 0), gather, 0.0
    )
    steady = 2 * layout.micro_batches * layout.virtual
    # Where a rank has several chunks, the messages of one overlap the compute of the next.
    overlap = np.where(layout.virtual > 1, profile.pp_overlap, 0.0)
    times = steady * (1 - overlap) + 2 * (layout.pp - 1)
    factors = {"messages": steady, "bytes": message.bytes, "message_s": sent, "gathered_s": gathered}
    out.of["transfers"] = factors | {"overlap": overlap, "pp": layout.pp}
    out.terms["transfers"] = np.where(layout.pp > 1, times * (sent + gathered), 0.0)


def bucket_bytes(layout: Layout, profile: Profile) -> Column:
    """Return the bytes of gradients that a stack reduces together."""
    return np.maximum(profile.bucket_bytes, profile.rank_bucket_bytes * layout.dp * layout.cp)


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
    how = sharding(layout, profile.policy)
    moe_share = shape.moe_layers / shape.layers
    one_rank = 1.0 * (np.asarray(layout.pp) == 1)
    held = Held(blocks * (1 - moe_share), blocks * moe_share, 1.0, one_rank)
    params = parameters_of(shape, layout, held)
    dense_params, expert_params = params.dense, params.experts
    shards, replicas = how.shards, how.replicas
    grad, param = profile.gradient_bytes, profile.parameter_bytes
    cut = bucket_bytes(layout, profile)
    m = layout.micro_batches
    totals = {"reduce_scatter": 0.0 * m, "all_reduce": 0.0 * m, "all_gather": 0.0 * m}
    for flow in gradient_flows(shape, layout, how, Types(grad, param, grad), held, stride, cut):
        totals[flow.op] = totals[flow.op] + flow.count() * _seconds(flow, system)
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
    every = (how.reduces_each > 0) | (replicates > 0)
    out.terms["dp"] = np.where(ranks > 1, np.where(every, each, once), 0.0) * (1 - layout.frozen)
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
    expert_shards = np.where(how.level >= 1, expert_ranks_, 1)
    updated_params = dense_params / shards + expert_params / expert_shards
    here = profile.optimizer_bytes / (system.memory_bytes_per_s * system.memory)
    # On the host: gradients down, the update there, parameters up, one after another.
    there = (profile.accumulated_bytes + param) / system.host_bytes_per_s
    there = there + profile.optimizer_bytes / system.host_memory_bytes_per_s
    each_s = (1 - profile.on_host) * here + profile.on_host * there
    if np.any(profile.orthogonal):
        each_s = each_s + profile.orthogonal * _orthogonal_s(shape, system)
    out.terms["optimizer"] = (1 - layout.frozen) * each_s * updated_params


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


def _adapters(shape: Shape, layout: Layout, system: System, profile: Profile) -> Column:
    """Return seconds of a block's adapters in both passes: three times their forward FLOPs."""
    if not np.any(shape.adapters):
        return 0.0
    return (
        6
        * layout.tokens
        * shape.adapters
        / layout.tp
        / (system.peak(layout.activation_bytes) * system.gemm * profile.gemm)
    )


def _offloaded(
    shape: Shape, layout: Layout, system: System, profile: Profile, block: _Block, blocks: Column
) -> Column:
    """Return exposed seconds per block of what goes to the host in the forward pass and comes back in the backward
    pass, beside the block's compute."""
    if not np.any(profile.offloaded_blocks):
        return 0.0
    travel = live_bytes(shape, layout, profile).stored / system.host_bytes_per_s
    exposed = np.maximum(travel - block.forward, 0.0) + np.maximum(travel - block.backward, 0.0)
    return np.minimum(profile.offloaded_blocks, blocks) / blocks * exposed
