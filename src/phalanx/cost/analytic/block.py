"""Seconds of one block and micro-batch on a rank, by cause: matrix products, attention, memory-bound kernels, and
exposed traffic of tensor, context and expert parallelism; head and loss too. Parts independent of the spread of
experts are priced once for all rows that agree in them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from phalanx.cost.analytic import kernels
from phalanx.cost.analytic.alike import IRRELEVANT_TO_EXPERTS, WITHOUT_EXPERTS, price_distinct_rows
from phalanx.cost.analytic.expert_parallel import expert_parallel, permutation_s, repeated_experts
from phalanx.cost.analytic.flow_times import FlowTimer, seconds_of
from phalanx.cost.analytic.kernels import Passes
from phalanx.cost.analytic.profile import Profile
from phalanx.cost.hardware.columns import Column
from phalanx.cost.hardware.system import System
from phalanx.cost.ledger.flow import Flow, Unit
from phalanx.cost.ledger.kind import BlockKind
from phalanx.cost.ledger.layer_flows import expert_flows, flows_without_routing, routed_rows
from phalanx.cost.ledger.model_shape import Shape
from phalanx.cost.ledger.rank_layout import FORMATS, LayoutColumns


@dataclass(frozen=True)
class BlockSeconds:
    """Seconds of one block and micro-batch, forward and backward, by cause; `again`: forward seconds of the modules
    that are recomputed; `by_operation`: those that recomputation by operation repeats; `unread`: forward seconds of
    products that recomputation of the whole block leaves out."""

    matmul: Passes
    attention: Passes
    memory: Passes
    tp: Passes
    cp: Passes
    ep: Passes
    recurrence: Passes | None = None
    """None if the model has no linear recurrence."""
    again: Column = 0.0
    by_operation: Column = 0.0
    unread: Column = 0.0

    @property
    def parts(self) -> dict[str, Passes]:
        """The passes by term."""
        recurrence = {} if self.recurrence is None else {"recurrence": self.recurrence}
        after = {"memory": self.memory, "tp": self.tp, "cp": self.cp, "ep": self.ep}
        return {"matmul": self.matmul, "attention": self.attention, **recurrence, **after}

    @property
    def forward(self) -> Column:
        """Seconds of the forward pass."""
        return sum(p.forward for p in self.parts.values())

    @property
    def backward(self) -> Column:
        """Seconds of the backward pass."""
        return sum(p.backward for p in self.parts.values())


@dataclass(frozen=True)
class _Sent:
    """Seconds of a block's collectives over tp, forward and backward; `weight_gathers`: seconds of the backward
    pass's collectives that only weight gradients wait for."""

    forward: Column
    backward: Column
    weight_gathers: Column


def _gathered_bytes(layout: LayoutColumns, profile: Profile) -> Column:
    """Return the bytes of tokens that tensor parallelism gathers, relative to activations' bytes."""
    narrow = (np.asarray(profile.tp_narrow) > 0) & np.choose(np.asarray(layout.format, dtype=int), _GATHERED)
    return np.where(narrow, 1 / layout.activation_bytes, 1.0)


def _sent(flows: Sequence[Flow], layout: LayoutColumns, timer: FlowTimer, profile: Profile) -> _Sent:
    """Return the seconds of tensor parallelism's collectives."""
    forward: Column = 0.0
    backward: Column = 0.0
    weight_gathers: Column = 0.0
    for flow in flows:
        each = timer.one(flow) + profile.joined * profile.list_s * (np.asarray(flow.ranks) > 1)
        if flow.op == "all_gather":
            narrow = _gathered_bytes(layout, profile)
            if np.any(narrow < 1):
                each = seconds_of(replace(flow, bytes=flow.bytes * narrow), timer.system)
        forward = forward + flow.count("F") * each
        backward = backward + (flow.count("B") - flow.weight_gathers) * each
        weight_gathers = weight_gathers + flow.weight_gathers * each
    return _Sent(forward, backward, weight_gathers)


def _exposed(sent: _Sent, layout: LayoutColumns, system: System, profile: Profile, products: Passes) -> Passes:
    """Return exposed seconds of tensor parallelism in one block. Within a node collectives overlap the neighbouring
    products, half of a block's; between nodes they wait for their hops and overlap nothing. Gathers read only by
    weight gradients overlap with the backward pass's products; of what is left of that pass, all-reduces are of
    inputs' gradients, and under sequence parallelism every second one, a reduce-scatter."""
    inside = np.where(layout.tp * layout.tp_stride <= system.tiers[0].ranks, 1.0, 0.0)
    share = inside * profile.tp_overlap
    asynchronous = inside * profile.tp_async * np.where(np.asarray(layout.sp) > 0, 0.5, 1.0)
    backward = np.where(np.asarray(profile.tp_overlap) > 0, share, asynchronous)
    return Passes(
        sent.forward - np.minimum(share * sent.forward, products.forward / 2),
        sent.backward
        - np.minimum(backward * sent.backward, products.backward / 2)
        + np.maximum(sent.weight_gathers - products.backward, 0.0),
    )


def _copied(kind: BlockKind, layout: LayoutColumns, system: System, profile: Profile) -> Passes:
    """Return the seconds of copies around tensor parallelism's gathers and reduce-scatters of a stream that is split
    by its tokens: each copies the whole stream once per sublayer and pass (torch 2.13,
    torch/distributed/_functional_collectives.py:223, 284), unless the micro-batch is a single sequence, whose parts
    are in order already. The backward pass also sums the gradients of an input that several products read, before it
    scatters them (`hidden_bytes` has a rank's part of that)."""
    if not np.any(profile.tp_copies):
        return _NONE
    split = (np.asarray(layout.sp) > 0) & (np.asarray(layout.tp) > 1) & (np.asarray(profile.tp_overlap) == 0)
    rate = system.memory_bytes_per_s * system.memory
    stream = profile.tp_copies * split * layout.tokens * kind.hidden * layout.activation_bytes / rate
    each = 2 * kind.sublayers * stream * (np.asarray(layout.micro_batch) > 1)
    sums = 2 * kind.attends + np.maximum(kind.mlp_matrices - 2, 0)
    return Passes(
        each * (1 + _gathered_bytes(layout, profile)),
        2 * each + 3 * sums * stream * (1 - 1 / np.maximum(layout.tp, 1)),
    )


_GATHERED = tuple(f.gathers for f in FORMATS)
"""By FORMATS: whether tokens can be gathered in it."""

_COPIES = 3
"""Number of copies of the tensors that Ulysses exchanges: heads are moved to the front, and on the receiving side two
copies restore the order of sequences (TransformerEngine, attention/dot_product_attention/context_parallel.py,
flash_attn_a2a_communicate)."""


def _context_parallel(
    flows: Sequence[Flow], layout: LayoutColumns, system: System, profile: Profile, core: Passes
) -> Passes:
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


_NONE = Passes(0.0, 0.0)


@dataclass(frozen=True)
class KindParts:
    """Seconds of a kind of block that do not depend on the spread of experts. `core`: attention's core; `cp`: exposed
    context parallelism; `around`: products around the mixer; `inner`: products of an MLP and of shared experts;
    `memory`: memory-bound kernels; `sent`: collectives over tp; `again`, `unread`: as in BlockSeconds."""

    core: Passes
    cp: Passes
    recurrence: Passes | None
    around: Passes
    inner: Passes
    memory: Passes
    sent: _Sent
    again: Column
    unread: Column


@dataclass(frozen=True)
class Common:
    """Seconds that do not depend on the spread of experts: of each kind of block, of head and loss, and of the
    embedding's collectives."""

    kinds: tuple[KindParts, ...]
    head: Passes
    embedding: Passes


def _products(layout: LayoutColumns, system: System, profile: Profile) -> kernels.Products:
    """Return the Products of a rank outside of its experts."""
    inside = layout.tp * layout.tp_stride <= system.tiers[0].ranks
    parts = np.where((profile.tp_split > 0) & inside, layout.tp, 1)
    rate = kernels.rate_of(layout, system, profile)
    return kernels.Products(system, rate, layout.activation_bytes, layout.frozen, parts)


def block_kinds(
    shape: Shape, layout: LayoutColumns, system: System, profile: Profile, common: Common | None = None
) -> list[tuple[BlockSeconds, Column]]:
    """Return (a block, the number of them in the model) for each kind, in the order of Shape.kinds. `common`: the
    parts independent of the spread of experts, if already computed."""
    common = common or common_parts(shape, layout, system, profile)
    blocks = []
    for place, (kind, parts) in enumerate(zip(shape.kinds, common.kinds, strict=True)):
        if np.any(kind.experts):
            blocks.append((experts_block(parts, kind, place, layout, system, profile), kind.count))
        else:
            blocks.append(
                (_whole_block(parts, kind, layout, system, profile, parts.inner, _NONE, parts.again), kind.count)
            )
    return blocks


def least_block_kinds(
    shape: Shape, layout: LayoutColumns, system: System, profile: Profile
) -> list[tuple[BlockSeconds, Column]]:
    """Return (a block, the number of them) for each kind, with lower bounds over all spreads of experts: each rank
    has one expert, with all FLOPs of its products at full tensor-core rate, and no tokens travel."""
    common = common_parts(shape, layout, system, profile)
    blocks = []
    for kind, parts in zip(shape.kinds, common.kinds, strict=True):
        inner, ep, again, unsaved = parts.inner, _NONE, parts.again, 0.0
        if np.any(kind.experts):
            rows = routed_rows(kind, layout, np.maximum(kind.experts, 1))
            by = _products(layout, system, profile)
            forward = 2 * rows * kind.expert_dim * kind.mlp_matrices * kind.expert_ffn / (by.rate * profile.grouped)
            routed = _routed(kind, Passes(forward, forward * (2 - layout.frozen)))
            inner = _sum(inner, routed)
            each, fixed = profile.expert_s, permutation_s(rows, kind, system, profile)
            ep = _routed(kind, Passes(fixed + each, fixed + 2 * each))
            again = np.where(np.asarray(kind.experts) > 0, 0.0, again)
            unsaved = routed.forward + fixed * (np.asarray(kind.experts) > 0)
        blocks.append((_whole_block(parts, kind, layout, system, profile, inner, ep, again, unsaved), kind.count))
    return blocks


def _sum(one: Passes, other: Passes) -> Passes:
    """Return the sum of two passes."""
    return Passes(one.forward + other.forward, one.backward + other.backward)


def _routed(kind: BlockKind, passes: Passes) -> Passes:
    """Return passes where a kind has experts, else zero."""
    if np.all(kind.experts):
        return passes
    has = np.asarray(kind.experts) > 0
    return Passes(np.where(has, passes.forward, 0.0), np.where(has, passes.backward, 0.0))


def _whole_block(
    parts: KindParts,
    kind: BlockKind,
    layout: LayoutColumns,
    system: System,
    profile: Profile,
    inner: Passes,
    ep: Passes,
    again: Column,
    unsaved: Column = 0.0,
) -> BlockSeconds:
    """Return a block with these products of its MLP or experts (`inner`), expert parallelism and recomputation.
    `unsaved`: forward seconds of experts of which recomputation by operation saves nothing."""
    products = _sum(parts.around, inner)
    by_operation: Column = 0.0
    if np.any(profile.per_op):
        by_operation = kernels.every_second(kind) * (parts.around.forward + parts.inner.forward) + unsaved
    return BlockSeconds(
        matmul=products,
        attention=parts.core,
        memory=parts.memory,
        tp=_exposed(parts.sent, layout, system, profile, products),
        cp=parts.cp,
        ep=ep,
        recurrence=parts.recurrence,
        again=again,
        by_operation=by_operation,
        unread=parts.unread,
    )


def common_parts(shape: Shape, layout: LayoutColumns, system: System, profile: Profile) -> Common:
    """Return the seconds that do not depend on the spread of experts."""
    return price_distinct_rows(
        lambda some: _common(shape, some, system, profile), layout, WITHOUT_EXPERTS, shape, system, profile
    )


def _common(shape: Shape, layout: LayoutColumns, system: System, profile: Profile) -> Common:
    by_unit: dict[Unit, list[Flow]] = {}
    for flow in flows_without_routing(shape, layout, profile.policy):
        by_unit.setdefault(flow.unit, []).append(flow)
    timer, by = FlowTimer(system), _products(layout, system, profile)

    def sent(unit: Unit) -> _Sent:
        return _sent([flow for flow in by_unit.get(unit, ()) if flow.axis == "tp"], layout, timer, profile)

    # Blocks of each kind; kinds with the same attention share its price.
    recurs = any(np.any(kind.mixed) for kind in shape.kinds)
    known: dict[tuple[float, ...], _Mixer] = {}
    kinds = []
    for place, kind in enumerate(shape.kinds):
        own = tuple(getattr(kind, name) for name in _MIXER_COLUMNS)
        alike = own if all(isinstance(number, (int, float)) for number in own) else (float(place),)
        if alike not in known:
            core = kernels.attention(kind, layout, system, profile)
            of_cp = [flow for flow in by_unit.get(place, ()) if flow.axis in ("ring", "ulysses", "cp")]
            known[alike] = (
                core,
                _context_parallel(of_cp, layout, system, profile, core),
                kernels.recurrence(kind, layout, system, profile) if recurs else None,
                kernels.projections(kind, layout, by),
                kernels.up_projections(kind, layout, by),
            )
        core, cp, recurrence, around, up = known[alike]
        dense, shared = kernels.mlp(kind, layout, kind.ffn, by), kernels.mlp(kind, layout, kind.shared_ffn, by)
        width = kind.ffn + kind.top_k * kind.expert_ffn + kind.shared_ffn
        again = _again(kind, layout, system, up)
        m, act = layout.modules, kind.mlp_matrices * _element(layout, system) * kind.ffn / layout.tp
        unread: Column = 0.0
        unread_inside: Column = 0.0
        if np.any(profile.policy.repeats_last == 0):
            left_out = 1 - np.asarray(profile.policy.repeats_last)
            unread_inside, after_mixer = kernels.last_products(kind, layout, by)
            unread_inside = left_out * unread_inside
            unread = unread_inside + left_out * after_mixer
        of_mlp = dense.forward - unread_inside + 3 * _element(layout, system) * kind.ffn / layout.tp
        again = again + np.where(m.mlp > 0, of_mlp, m.mlp_act * act) * (np.asarray(kind.ffn) > 0)
        memory = kernels.traffic(kind, layout, width, system, profile)
        memory = _sum(memory, _copied(kind, layout, system, profile))
        inner = _sum(dense, shared)
        kinds.append(KindParts(core, cp, recurrence, around, inner, memory, sent(place), again, unread))
    # Head and loss, once for each depth of multi-token prediction.
    products, loss = kernels.head(shape, layout, system, profile)
    of_head, heads = _exposed(sent("head"), layout, system, profile, products), 1 + shape.depths
    return Common(
        tuple(kinds),
        head=Passes(
            heads * (products.forward + loss / 2) + of_head.forward,
            heads * (products.backward + loss / 2) + of_head.backward,
        ),
        embedding=_exposed(sent("embed"), layout, system, profile, _NONE),
    )


_Mixer = tuple[Passes, Passes, Passes | None, Passes, Passes]
"""Seconds of a mixer: attention's core, context parallelism, recurrence, the products around it, and the products
among these that expand latents."""
_MIXER_COLUMNS = (
    *("heads", "kv_heads", "head_dim", "value_dim", "kv_width", "core_dim", "q_rank", "kv_rank", "rope_dim"),
    *("window_share", "window", "top", "ratio", "gate", "index", "index_pair", "result_low", "result_rank"),
    *("scan_heads", "scan_dim", "scan_state", "scan_groups", "scan_in", "scan_shared", "scan_chunk", "scan_pairs"),
    *("scan_flops", "conv_channels", "streams"),
    *("mixed", "mixed_shared", "mixed_whole", "mixed_low", "mixed_out"),
)
"""Columns of a BlockKind that the price of its mixer depends on."""


def experts_block(
    parts: KindParts, kind: BlockKind, place: int, layout: LayoutColumns, system: System, profile: Profile
) -> BlockSeconds:
    """Return the seconds of one block of a kind with experts, at its `place` among the model's."""

    def of_experts(layout: LayoutColumns) -> Passes:
        by = _products(layout, system, profile)
        return kernels.experts(kind, layout, replace(by, rate=by.rate * profile.grouped, parts=1.0))

    routed = _routed(kind, price_distinct_rows(of_experts, layout, IRRELEVANT_TO_EXPERTS, kind, system, profile))
    compute = _sum(_sum(parts.around, parts.core), routed)
    flows = expert_flows(kind, place, layout, profile.policy)
    ep = _routed(kind, expert_parallel(flows, kind, layout, system, profile, routed, compute))
    inner = _sum(routed, parts.inner)
    again: Column = 0.0
    if layout.modules.any:
        m, width = layout.modules, kind.top_k * kind.expert_ffn
        # The activation reads one or two and writes one.
        act = kind.mlp_matrices * _element(layout, system) * width / layout.tp
        whole = inner.forward + ep.forward + act
        of_modules = np.where(m.moe > 0, whole, m.moe_act * act + m.shared_experts * parts.inner.forward)
        again = parts.again + np.where(np.asarray(kind.experts) > 0, of_modules, 0.0)
    if np.any(profile.recasts):
        weights = (kind.expert_params - kind.expert_others) / (layout.ep * layout.etp)
        each = kernels.cast_s(kernels.recast(weights, profile), layout, system, profile)
        parts = replace(parts, memory=_sum(parts.memory, Passes(each, each)))
    repeated = repeated_experts(kind, layout, system, profile, routed.forward)
    unsaved = np.where(np.asarray(kind.experts) > 0, repeated, 0.0)
    return _whole_block(parts, kind, layout, system, profile, inner, ep, again, unsaved)


def _element(layout: LayoutColumns, system: System) -> Column:
    """Return the seconds for a rank to read or write one activation of each of its tokens."""
    return layout.tokens * layout.activation_bytes / (system.memory_bytes_per_s * system.memory)


def _again(kind: BlockKind, layout: LayoutColumns, system: System, up: Passes) -> Column:
    """Return the forward seconds of the recomputed modules of a block, except its MLP: norms, and the products `up`
    that expand latents."""
    if not layout.modules.any:
        return 0.0
    ways = np.where(layout.sp > 0, layout.tp, 1)
    norms = 2 * kind.norms * _element(layout, system) * kind.hidden / ways  # each reads and writes
    streams = 2 * kernels.mixed_traffic(kind) * kind.sublayers / 2 * _element(layout, system) * kind.hidden / ways
    m = layout.modules
    return m.layernorm * norms + m.mla_up_proj * up.forward + m.mhc * streams
