"""Seconds of one block and micro-batch on a rank, by cause: matrix products, attention, memory-bound kernels, and
exposed traffic of tensor, context and expert parallelism; head and loss too. Parts independent of the spread of
experts are priced once for all rows that agree in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from phalanx.cost.analytic import kernels
from phalanx.cost.analytic.alike import OF_EXPERTS, WITHOUT_EXPERTS, once
from phalanx.cost.analytic.kernels import Passes
from phalanx.cost.analytic.profile import Profile
from phalanx.cost.collectives.nccl_model import collective_s, message_s
from phalanx.cost.hardware.columns import Column
from phalanx.cost.hardware.system import System
from phalanx.cost.ledger.flow import Flow
from phalanx.cost.ledger.layer_flows import expert_flows, flows_without_routing, routed_rows
from phalanx.cost.ledger.model_shape import Shape
from phalanx.cost.ledger.rank_layout import FORMATS, Layout


@dataclass(frozen=True)
class Block:
    """Seconds of one block and micro-batch, forward and backward, by cause; `again`: seconds of the modules
    recomputed in the backward pass."""

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
        if key not in self._known:  # keeps the flow alive, so that ids of its arrays are not reused
            self._known[key] = flow, seconds_of(flow, self.system)
        return self._known[key][1]


def seconds_of(flow: Flow, system: System) -> Column:
    """Return seconds of one of a flow's operations."""
    if flow.op == "send":
        return message_s(flow.bytes, flow.stride, system, flow.chain) * (np.asarray(flow.ranks) > 1)
    return collective_s(flow.op, flow.bytes, flow.ranks, flow.stride, system)


@dataclass(frozen=True)
class _Sent:
    """Seconds that the collectives of a block take over tp, forward and backward; `beside`: seconds of the backward
    pass's collectives that only weight gradients wait for."""

    forward: Column
    backward: Column
    beside: Column


def _sent(flows: _Flows, layout: Layout, timer: _Timer, profile: Profile) -> _Sent:
    """Return the seconds of tensor parallelism's collectives."""
    forward: Column = 0.0
    backward: Column = 0.0
    beside: Column = 0.0
    for flow in flows:
        each = timer.one(flow) + profile.joined * profile.join_s * (np.asarray(flow.ranks) > 1)
        if flow.op == "all_gather":
            narrow = np.where(
                (profile.tp_narrow > 0) & np.choose(np.asarray(layout.format, dtype=int), _GATHERED),
                1 / layout.activation_bytes,
                1.0,
            )
            if np.any(narrow < 1):
                each = seconds_of(replace(flow, bytes=flow.bytes * narrow), timer.system)
        forward = forward + flow.count("F") * each
        backward = backward + (flow.count("B") - flow.beside) * each
        beside = beside + flow.beside * each
    return _Sent(forward, backward, beside)


def _exposed(sent: _Sent, layout: Layout, system: System, profile: Profile, products: Passes) -> Passes:
    """Return exposed seconds of tensor parallelism in one block. Within a node collectives overlap the neighbouring
    products, half of a block's; between nodes they wait for their hops and overlap nothing. Gathers read only by
    weight gradients overlap with the backward pass's products."""
    inside = np.where(layout.tp * layout.tp_stride <= system.tiers[0].ranks, profile.tp_overlap, 0.0)
    return Passes(
        sent.forward - np.minimum(inside * sent.forward, products.forward / 2),
        sent.backward
        - np.minimum(inside * sent.backward, products.backward / 2)
        + np.maximum(sent.beside - products.backward, 0.0),
    )


_GATHERED = tuple(f.gathers for f in FORMATS)
"""By FORMATS: whether tokens can be gathered in it."""
_NOT_SENT = _Sent(0.0, 0.0, 0.0)

_COPIES = 3
"""Number of copies of tensors exchanged by Ulysses: heads are moved to the front, and on the receiving side two
copies restore the order of sequences (TransformerEngine, attention/dot_product_attention/context_parallel.py,
flash_attn_a2a_communicate)."""


def _context_parallel(flows: _Flows, layout: Layout, system: System, profile: Profile, core: Passes) -> Passes:
    """Return exposed seconds of context parallelism in one block. Ring: keys and values travel while attention runs
    over the part received before; the rest is exposed, and so is the gradients' last hop, which no compute overlaps.
    Ulysses: exposed all-to-alls of queries, keys and values before attention and of its result after it."""
    if not flows:
        return _NONE
    exchanged: Column = 0.0
    moved: Column = 0.0
    ring: Column = 0.0
    for flow in flows:
        if flow.axis == "ring":
            ring = seconds_of(flow, system)
        else:
            exchanged = exchanged + flow.count("F") * seconds_of(flow, system)
            moved = moved + flow.count("F") * flow.bytes * (np.asarray(flow.ranks) > 1)
    exchanged = exchanged + 2 * _COPIES * moved / (system.memory_bytes_per_s * system.memory)
    degree = layout.cp / layout.ulysses
    hops, overlapping = np.maximum(degree - 1, 0), 1 - 1 / degree
    last = ring * (degree > 1)
    forward = np.maximum(hops * ring - core.forward * overlapping, 0) + exchanged
    backward = np.maximum(2 * hops * ring - last - core.backward * overlapping, 0) + last + exchanged
    if not np.any(profile.gathers_keys):
        return Passes(forward, backward)
    # Gathered before attention, again in the backward pass, and their gradients scattered after it: nothing of
    # attention runs meanwhile.
    around, gathers = hops * ring, np.asarray(profile.gathers_keys) > 0
    return Passes(np.where(gathers, around + exchanged, forward), np.where(gathers, 2 * around + exchanged, backward))


def _expert_parallel(
    flows: _Flows, shape: Shape, layout: Layout, system: System, profile: Profile, products: Passes, compute: Passes
) -> Passes:
    """Return exposed seconds of expert parallelism in one block: all-to-alls (dispatch and combine), permutation on
    both sides, the router, the overhead of each of a rank's experts, and waiting for the rank whose experts got the
    most tokens (`products`: the experts'; `compute`: all of a block's)."""
    forward: Column = 0.0
    backward: Column = 0.0
    for flow in flows:
        each = seconds_of(_dispatched(flow, shape, layout, system, profile), system)
        forward, backward = forward + flow.count("F") * each, backward + flow.count("B") * each
    if np.any(profile.overlaps_experts):
        # Another micro-batch's products run meanwhile; the uncovered part is exposed, and the products are slowed.
        slowed, overlaps = profile.contention - 1, np.asarray(profile.overlaps_experts) > 0
        forward, backward = (
            np.where(overlaps, np.maximum(sent - own, 0) + slowed * np.minimum(sent, own), sent)
            for sent, own in ((forward, compute.forward), (backward, compute.backward))
        )
    fixed = _permuted(routed_rows(shape, layout, np.maximum(shape.experts, 1)), shape, system, profile)
    each = profile.expert_s * np.maximum(shape.experts / layout.ep, 1)
    shown, waits = 1 - profile.ep_overlap, np.where(np.asarray(layout.ep) > 1, profile.imbalance, 0.0)
    return Passes(
        forward * shown + fixed + each + waits * products.forward,
        backward * shown + fixed + 2 * each + waits * products.backward,
    )


def _permuted(rows: Column, shape: Shape, system: System, profile: Profile) -> Column:
    """Return the seconds of the router, and of permuting these rows to their experts or back."""
    moved = profile.token_bytes * rows * shape.hidden
    return moved / (system.memory_bytes_per_s * system.memory) + profile.router_s


def _dispatched(flow: Flow, shape: Shape, layout: Layout, system: System, profile: Profile) -> Flow:
    """Return the operation that carries tokens to their experts, or back, if it is not an all-to-all with one copy
    per expert: one copy for each node, or rank of a node, that has one of them (DeepEP; of `k` experts drawn from `n`
    nodes, n (1 - (1 - 1/n)^k) are distinct); or all tokens for every rank."""
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


@dataclass(frozen=True)
class Common:
    """Seconds that do not depend on the spread of experts: of a block with a dense MLP, of head and loss, and of the
    embedding's collectives; and of a block with experts, `around`: the products around attention; `shared`: products
    of shared experts; `memory`: memory-bound kernels; `sent`: collectives over tp; `again`: see _again."""

    dense: Block
    head: Passes
    embedding: Passes
    around: Passes
    shared: Passes
    memory: Passes
    sent: _Sent
    again: Column


def _products(layout: Layout, system: System, profile: Profile) -> kernels.Products:
    """Return the Products of a rank outside of its experts."""
    inside = layout.tp * layout.tp_stride <= system.tiers[0].ranks
    parts = np.where((profile.tp_split > 0) & inside, layout.tp, 1)
    rate = kernels.rate_of(layout, system, profile)
    return kernels.Products(system, rate, layout.activation_bytes, layout.frozen, parts)


def block_kinds(
    shape: Shape, layout: Layout, system: System, profile: Profile, common: Common | None = None
) -> list[tuple[Block, Column]]:
    """Return each kind of block with how many the model has, those with a plain MLP first. `common`: the parts
    independent of the spread of experts, if already computed."""
    common = common or common_parts(shape, layout, system, profile)
    kinds = [(common.dense, shape.layers - shape.moe_layers)]
    if np.any(shape.moe_layers):
        kinds.append((experts_block(common, shape, layout, system, profile), shape.moe_layers))
    return kinds


def least_block_kinds(shape: Shape, layout: Layout, system: System, profile: Profile) -> list[tuple[Block, Column]]:
    """Return the kinds of blocks with a lower bound over all spreads of experts: each rank has one expert, with all
    FLOPs of its products at full tensor-core rate, and no tokens travel."""
    common = common_parts(shape, layout, system, profile)
    kinds = [(common.dense, shape.layers - shape.moe_layers)]
    if np.any(shape.moe_layers):
        rows = routed_rows(shape, layout, np.maximum(shape.experts, 1))
        by = _products(layout, system, profile)
        forward = 2 * rows * shape.hidden * shape.mlp_matrices * shape.expert_ffn / (by.rate * profile.grouped)
        routed = Passes(forward, forward * (2 - layout.frozen))
        around, shared = common.around, common.shared
        products = Passes(
            around.forward + shared.forward + routed.forward, around.backward + shared.backward + routed.backward
        )
        each, fixed = profile.expert_s, _permuted(rows, shape, system, profile)
        block = Block(
            matmul=products,
            attention=common.dense.attention,
            memory=common.memory,
            tp=_exposed(common.sent, layout, system, profile, products),
            cp=common.dense.cp,
            ep=Passes(fixed + each, fixed + 2 * each),
            again=0.0,
        )
        kinds.append((block, shape.moe_layers))
    return kinds


def common_parts(shape: Shape, layout: Layout, system: System, profile: Profile) -> Common:
    """Return the seconds that do not depend on the spread of experts."""
    return once(lambda some: _common(shape, some, system, profile), layout, WITHOUT_EXPERTS, shape, system, profile)


def _common(shape: Shape, layout: Layout, system: System, profile: Profile) -> Common:
    by_unit: dict[str, list[Flow]] = {}
    for flow in flows_without_routing(shape, layout, profile.policy):
        by_unit.setdefault(flow.unit, []).append(flow)
    timer, by = _Timer(system), _products(layout, system, profile)

    def sent(unit: str) -> _Sent:
        return _sent([flow for flow in by_unit.get(unit, ()) if flow.axis == "tp"], layout, timer, profile)

    # A block with a dense MLP.
    core, around = kernels.attention(shape, layout, system, profile), kernels.projections(shape, layout, by)
    inner, up = kernels.mlp(shape, layout, shape.ffn, by), kernels.up_projections(shape, layout, by)
    products = Passes(around.forward + inner.forward, around.backward + inner.backward)
    of_ring = [flow for flow in by_unit.get("dense", ()) if flow.axis in ("ring", "ulysses")]
    again = _again(shape, layout, system, up)
    dense = Block(
        matmul=products,
        attention=core,
        memory=kernels.traffic(shape, layout, shape.ffn, system, profile),
        tp=_exposed(sent("dense"), layout, system, profile, products),
        cp=_context_parallel(of_ring, layout, system, profile, core),
        ep=_NONE,
        again=again + layout.modules.mlp * (inner.forward + 3 * _element(layout, system) * shape.ffn / layout.tp),
    )
    # Parts of a block with experts that do not depend on their spread.
    shared, memory, of_experts = _NONE, _NONE, _NOT_SENT
    if np.any(shape.moe_layers):
        memory = kernels.traffic(shape, layout, shape.top_k * shape.expert_ffn + shape.shared_ffn, system, profile)
        of_experts = sent("experts")
    if np.any(shape.shared_ffn):
        has, passes = shape.shared_ffn > 0, kernels.mlp(shape, layout, np.maximum(shape.shared_ffn, 1), by)
        shared = Passes(np.where(has, passes.forward, 0), np.where(has, passes.backward, 0))
    # Head and loss, once for each depth of multi-token prediction.
    products, loss = kernels.head(shape, layout, system, profile)
    of_head, heads = _exposed(sent("head"), layout, system, profile, products), 1 + shape.depths
    return Common(
        dense,
        head=Passes(
            heads * (products.forward + loss / 2) + of_head.forward,
            heads * (products.backward + loss / 2) + of_head.backward,
        ),
        embedding=_exposed(sent("embed"), layout, system, profile, _NONE),
        around=around,
        shared=shared,
        memory=memory,
        sent=of_experts,
        again=again,
    )


def experts_block(common: Common, shape: Shape, layout: Layout, system: System, profile: Profile) -> Block:
    """Return the seconds of one block with experts."""

    def of_experts(layout: Layout) -> Passes:
        by = _products(layout, system, profile)
        return kernels.experts(shape, layout, replace(by, rate=by.rate * profile.grouped, parts=1.0))

    routed = once(of_experts, layout, OF_EXPERTS, shape, system, profile)
    core, around, shared = common.dense.attention, common.around, common.shared
    compute = Passes(
        around.forward + core.forward + routed.forward, around.backward + core.backward + routed.backward
    )
    flows = expert_flows(shape, layout, profile.policy)
    ep = _expert_parallel(flows, shape, layout, system, profile, routed, compute)
    inner = Passes(routed.forward + shared.forward, routed.backward + shared.backward)
    products = Passes(around.forward + inner.forward, around.backward + inner.backward)
    again: Column = 0.0
    if layout.modules.any:
        m, width = layout.modules, shape.top_k * shape.expert_ffn
        # The activation reads one or two and writes one.
        act = shape.mlp_matrices * _element(layout, system) * width / layout.tp
        whole = inner.forward + ep.forward + act
        again = common.again + np.where(m.moe > 0, whole, m.moe_act * act + m.shared_experts * shared.forward)
    return Block(
        matmul=products,
        attention=core,
        memory=common.memory,
        tp=_exposed(common.sent, layout, system, profile, products),
        cp=common.dense.cp,
        ep=ep,
        again=again,
    )


def _element(layout: Layout, system: System) -> Column:
    """Return the seconds for a rank to read or write one activation of each of its tokens."""
    return layout.tokens * layout.activation_bytes / (system.memory_bytes_per_s * system.memory)


def _again(shape: Shape, layout: Layout, system: System, up: Passes) -> Column:
    """Return the forward seconds of the recomputed modules of a block, except its MLP: norms, and the products `up`
    that expand latents."""
    if not layout.modules.any:
        return 0.0
    ways = np.where(layout.sp > 0, layout.tp, 1)
    norms = 2 * 2 * _element(layout, system) * shape.hidden / ways  # two norms read and write
    return layout.modules.layernorm * norms + layout.modules.mla_up_proj * up.forward
