"""A training step of a stack on a system: terms along its critical path, which sum to the time of the step.

    T = M t + fill + transfers + exposed communication + optimizer

t: one micro-batch through the slowest pipeline rank, M of them; fill: a micro-batch through the other ranks, over
the chunks of a rank (Narayanan et al. 2021, section 2.2).
"""

import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from phalanx.cost.analytic import kernels
from phalanx.cost.analytic.block import BlockSeconds, Common, block_kinds, common_parts
from phalanx.cost.analytic.flow_times import seconds_of
from phalanx.cost.analytic.kernels import Passes
from phalanx.cost.analytic.profile import Profile
from phalanx.cost.analytic.update import outer_synchronisation, reduction, update
from phalanx.cost.collectives.nccl_model import collective_s
from phalanx.cost.hardware.columns import Column
from phalanx.cost.hardware.system import System
from phalanx.cost.ledger.kind import BlockKind
from phalanx.cost.ledger.layer_flows import carried_bytes, messages
from phalanx.cost.ledger.live_bytes import live_bytes
from phalanx.cost.ledger.model_shape import Shape, padded_shape
from phalanx.cost.ledger.rank_layout import LayoutColumns, Stages, stages
from phalanx.spec.strategy.zero_levels import level_columns


@dataclass
class Step:
    """Seconds by term along the critical path of the slowest rank. `of`: by term, the values of the symbols in its
    formula (FORMULAS), for printing."""

    terms: dict[str, Column] = field(default_factory=dict)
    of: dict[str, dict[str, Column]] = field(default_factory=dict)
    blocks: list[tuple[Column, Passes]] = field(default_factory=list)
    """(number of blocks, a micro-batch's passes of one) for each of Shape.kinds."""
    head: Passes = field(default_factory=lambda: Passes(0.0, 0.0))
    """A micro-batch's passes of the head and the loss."""
    ahead: Column = 1.0
    """1 if the CPU launches ahead of the GPU, 0 if the GPU waits for the CPU, in between if they are about as
    fast."""

    @property
    def seconds(self) -> Column:
        """Seconds of the step: the sum of its terms."""
        return sum(self.terms.values())


_TERMS = tomllib.loads(Path(__file__).with_name("terms.toml").read_text())
FORMULAS: dict[str, str] = {name: row["formula"] for name, row in _TERMS.items() if "formula" in row}
TERM_NAMES: dict[str, str] = {name: row["title"] for name, row in _TERMS.items() if "title" in row}
"""Titles of terms for people."""


_UNEVEN = 0.5
"""Most by which the difference of GPU and CPU time varies within a pass, as a share of the longer one. If both are
equal, a pass takes an eighth longer than either."""


def _slower(gpu: Column, cpu: Column) -> Column:
    """Return the seconds of a pass whose kernels take `gpu` and whose launches take `cpu`: the longer of the two, and
    more if both are nearly equal, since durations vary and each waits while the other is behind. If the difference d
    varies uniformly by u either way, E max = max + (u - d)^2 / (4 u)."""
    most = np.maximum(gpu, cpu)
    near = np.maximum(np.minimum(gpu, cpu) / np.maximum(most, 1e-30) - (1 - _UNEVEN), 0.0)
    return most * (1 + near**2 / (4 * _UNEVEN))


def step(shape: Shape, layout: LayoutColumns, system: System, profile: Profile, replicas: bool = True) -> Step:
    """Return the terms of one step; without `replicas`, omit `dp` and `coding`, the exchange between replicas."""
    shape, layout = padded_shape(shape, layout.tp, profile.vocab_multiple), layout.on_nodes(system.tiers[0].ranks)
    out = Step()
    common = common_parts(shape, layout, system, profile)
    kinds = block_kinds(shape, layout, system, profile, common)
    parts = stages(shape, layout, profile.balanced)
    blocks, m = parts.most, layout.micro_batches
    # The blocks of the slowest rank, a micro-batch.
    forward: Column = 0.0
    backward: Column = 0.0
    for kind, (block, count) in zip(shape.kinds, kinds, strict=True):
        passes = _add_kind(out, kind, block, count, blocks, shape, layout, system, profile)
        out.blocks.append((count, passes))
        share = count / shape.layers * blocks
        forward, backward = forward + share * passes.forward, backward + share * passes.backward
    # What comes before and after them, and what a pipeline adds.
    slowest = _add_ends(out, Passes(forward, backward), parts, common, shape, layout, profile)
    _add_transfers(out, shape, layout, system, profile)
    once_a_step = [update(shape, layout, system, profile, blocks)]
    if replicas:
        once_a_step.insert(0, reduction(shape, layout, system, profile, blocks, Passes(forward, backward)))
        once_a_step.append(outer_synchronisation(shape, layout, system, profile, blocks, m * (forward + backward)))
    for more in once_a_step:
        out.terms |= more.seconds
        out.of |= more.of
    out.terms["other"] = profile.step_s + profile.jitter * np.log2(np.maximum(layout.world / 8, 1)) * m * slowest
    return out


def _add_kind(
    out: Step,
    kind: BlockKind,
    block: BlockSeconds,
    count: Column,
    blocks: Column,
    shape: Shape,
    layout: LayoutColumns,
    system: System,
    profile: Profile,
) -> Passes:
    """Add the terms of a kind of block, of which the model has `count`, and the slowest rank its part of `blocks`.
    Return the passes of one: as long as its kernels or their launches, whichever is slower."""
    m, full, terms = layout.micro_batches, layout.full, out.terms
    share = count / shape.layers * blocks
    # The GPU's seconds.
    core_again = kind.attends * (block.attention.forward + block.cp.forward)
    selected = np.where(profile.per_op > 0, block.by_operation, core_again)
    repeated = full * (block.forward - block.unread) + layout.selective * selected + (1 - full) * block.again
    repeated = repeated + _offloaded(shape, layout, system, profile, block, blocks)
    adapted = _adapters(shape, layout, system, profile) + _dequantised(shape, layout, system, profile)
    work = block.backward + repeated + adapted
    # The host's.
    launched = _launched(kind, shape, layout, system, profile)
    listed, surely = _listed(layout, system, profile)
    passes = Passes(
        _slower(block.forward, launched.forward + listed),
        _slower(work, launched.backward + listed * (1 + full)),
    )
    # The terms, and the factors of their formulas.
    for name, part in block.parts.items():
        terms[name] = terms.get(name, 0) + m * share * (part.forward + part.backward)
        factors = {"micro_batches": m, "blocks": share, "forward_s": part.forward, "backward_s": part.backward}
        out.of[name if kind is shape.kinds[-1] else f"{name}, {_blocks_of(shape, kind)}"] = factors
    out.of["recompute"] = {"micro_batches": m, "blocks": share, "repeated_s": repeated}
    out.of["launch"] = {"micro_batches": m, "blocks": share, "forward_s": launched.forward + listed}
    terms["recompute"] = terms.get("recompute", 0) + m * share * repeated
    if np.any(shape.adapters):
        out.of["adapters"] = {"micro_batches": m, "blocks": share, "both_passes_s": adapted}
        terms["adapters"] = terms.get("adapters", 0) + m * share * adapted
    idle = (passes.forward - block.forward) + (passes.backward - work)
    terms["launch"] = terms.get("launch", 0) + m * share * idle
    # Within 15 % of each other, the variation from block to block decides who is ahead.
    cpu = launched.forward + launched.backward + surely * (2 + full)
    keeps_ahead = np.clip((1.15 - cpu / (block.forward + work)) / 0.3, 0.0, 1.0)
    out.ahead = np.where(np.asarray(count) > 0, keeps_ahead, out.ahead)
    return passes


def _launched(kind: BlockKind, shape: Shape, layout: LayoutColumns, system: System, profile: Profile) -> Passes:
    """Return the host's seconds of launching the kernels of a block, and of hooks around its modules."""
    sync_factor = 1 + profile.launch_sync * (np.minimum(layout.tp, 8) - 1) / 7
    launch_s = profile.launch_s * system.host * sync_factor
    number = profile.launches * kind.sublayers / 2
    number = number + profile.unfused_launches * kernels.unfused(kind, layout, profile)
    number = number + profile.packed_launches * kind.attends * (np.asarray(layout.document) > 0)
    if np.any(shape.adapters):
        fused = 2 * kind.attends + 2 * (np.asarray(kind.ffn) > 0)
        number = number + _ADAPTER_LAUNCHES * fused * (np.asarray(shape.adapters) > 0)
    captured = np.asarray(profile.captured) * (1 - np.asarray(kind.routes))
    number = np.where(captured > 0, np.minimum(number, kind.sublayers), number)
    number = number + profile.expert_launches * kind.routes
    once = number * (profile.launches > 0) * launch_s
    hooked = _hooked(kind, shape, layout, profile) * system.host
    again = (1 - layout.full) * (1 - captured) * _launched_again(kind, layout, profile) * launch_s
    return Passes(once + hooked, once * (profile.launch_backward + layout.full) + hooked * (1 + layout.full) + again)


def _listed(layout: LayoutColumns, system: System, profile: Profile) -> tuple[Column, Column]:
    """Return the host's seconds per pass of listing tensors for collectives over tp: as the time of a step takes
    them, and as its reserved memory does. An unobserved job may be delayed by its CPUs; its reserved memory assumes
    that it is not, which reserves more."""
    delay = np.where(layout.tp > 1, profile.listed * layout.tp * profile.list_s, 0.0)
    several = np.asarray(layout.world) > system.tiers[0].ranks
    surely = system.held_up * delay
    return np.where(np.asarray(system.observed) > 0, surely, profile.held_up * several * delay), surely


def _add_ends(
    out: Step, blocks: Passes, parts: Stages, common: Common, shape: Shape, layout: LayoutColumns, profile: Profile
) -> Column:
    """Add the head, the reference that scores a micro-batch and the bubble, given the passes of the slowest rank's
    blocks. Return the seconds of a micro-batch on the slowest rank."""
    m, most, slowest_blocks = layout.micro_batches, parts.most, blocks.forward + blocks.backward
    # A rank that has the embedding too, without a pipeline, pays for both.
    both = 1.0 * (np.asarray(layout.pp) == 1)
    out.head = Passes(
        common.head.forward + both * common.embedding.forward, common.head.backward + both * common.embedding.backward
    )
    top = out.head.forward + out.head.backward
    # The last rank has the head too; where blocks do not divide evenly, it has fewer blocks.
    slowest = np.maximum(slowest_blocks, parts.last * slowest_blocks / most + top)
    out.terms["head"] = m * (slowest - slowest_blocks)
    if np.any(profile.scored):
        # What scores a micro-batch fills a pipeline as its forward pass does.
        fill = layout.bubble * (shape.layers / most - 1) * blocks.forward / layout.virtual
        fill = np.where(layout.pp > 1, fill, 0.0)
        out.of["reference"] = {"micro_batches": m, "passes": profile.scored, "blocks_s": blocks.forward}
        out.of["reference"] |= {"head_s": out.head.forward, "fill_s": fill}
        out.terms["reference"] = profile.scored * (m * (blocks.forward + out.head.forward) + fill)
    through = shape.layers / most * slowest_blocks + top
    out.of["head"] = {"micro_batches": m, "slowest_s": slowest, "blocks_s": slowest_blocks, "head_s": top}
    out.of["bubble"] = {"through_s": through, "slowest_s": slowest, "virtual": layout.virtual, "pp": layout.pp}
    out.of["bubble"]["share"] = layout.bubble
    out.terms["bubble"] = np.where(layout.pp > 1, layout.bubble * (through - slowest) / layout.virtual, 0.0)
    return slowest


_ADAPTER_LAUNCHES = 4
"""Kernels of an adapter: two products, their scale, and the sum (peft, src/peft/tuners/lora/layer.py, Linear.forward;
Megatron-Bridge, src/megatron/bridge/peft/lora_layers.py)."""
_MODULES, _SUBLAYER_MODULES, _ADAPTER_MODULES = 1, 6, 4
"""Modules that run: a block; of attention or an MLP with its norm; and of an adapter, with the layer around it
(transformers' Llama; peft, src/peft/tuners/lora/layer.py)."""
_ALONE = 0.5
"""Time of a hook on a rank alone, which calls no collective for the parameters that it has (DeepSpeed edaa722,
deepspeed/runtime/zero/partition_parameters.py:893, `_no_gather_coalesced`), over that of one of several: 0.13 ms of
0.25, says a published run of 1.8 billion parameters (QwenLM/Qwen 2df8e8a, README.md)."""


def _hooked(kind: BlockKind, shape: Shape, layout: LayoutColumns, profile: Profile) -> Column:
    """Return the host's seconds in the hooks around a block's modules in a pass, if ZeRO-3 fetches by such hooks."""
    modules = _MODULES + _SUBLAYER_MODULES * kind.sublayers + _ADAPTER_MODULES * shape.adapted.number
    gathers = np.where(layout.dp * layout.cp > 1, 1.0, _ALONE)
    return profile.hook_s * gathers * modules * level_columns(np.asarray(layout.zero)).parameters


_CORE_LAUNCHES = 4
"""Number of kernels of attention's core that writes scores: two batched products, masked softmax, dropout."""
_MLP_LAUNCHES = 3
"""Kernels of an MLP, and of shared experts: two products and the activation."""
_UP_LAUNCHES = 2
"""Products that expand latents."""


def _launched_again(kind: BlockKind, layout: LayoutColumns, profile: Profile) -> Column:
    """Return the number of kernels that the backward pass of a block launches for recomputed parts. Recomputation by
    operation repeats all but the products and attention that it keeps."""
    core = np.where(profile.flash > 0, 1, _CORE_LAUNCHES)
    core = kind.attends * (core + profile.unfused_launches * kernels.unfused(kind, layout, profile))
    # Of two products of attention and two or three of the MLP one in two is kept, and attention.
    by_operation = np.maximum(profile.launches * kind.sublayers / 2 - (2 + kind.mlp_matrices) / 2 - 1, 0)
    by_operation = by_operation + profile.expert_launches * kind.routes
    again: Column = layout.selective * np.where(profile.per_op > 0, by_operation, core)
    m = layout.modules
    if not m.any:
        return again * (profile.launches > 0)
    inside: Column = np.where(m.mlp > 0, _MLP_LAUNCHES, m.mlp_act) * (np.asarray(kind.ffn) > 0)
    if np.any(kind.experts):
        whole = _MLP_LAUNCHES + profile.expert_launches
        shared = m.shared_experts * _MLP_LAUNCHES * (np.asarray(kind.shared_ffn) > 0)
        inside = inside + kind.routes * np.where(m.moe > 0, whole, m.moe_act + shared)
    up = m.mla_up_proj * _UP_LAUNCHES * kind.latent
    return (again + m.layernorm * kind.norms + up + inside) * (profile.launches > 0)


def _blocks_of(shape: Shape, kind: BlockKind) -> str:
    """Return the name of a kind of block in the factors of a step."""
    plain = all(np.all(k.heads) for k in shape.kinds) and len(shape.kinds) == 2
    return "dense blocks" if plain else kind.label


def _add_transfers(out: Step, shape: Shape, layout: LayoutColumns, system: System, profile: Profile) -> None:
    """Add the messages of a pipeline to a step. If each tp rank sends its part of an unsplit stream, the receivers
    gather it within their node (scatter/gather, Narayanan et al. 2021, section 4.1)."""
    message = messages(shape, layout, profile.policy, 1.0)
    sent = seconds_of(message, system) + profile.stalled_s * system.cut_off
    whole = carried_bytes(shape, layout)
    gather = collective_s("all_gather", whole, layout.tp, layout.tp_stride, system)
    gathered = np.where(
        (np.asarray(layout.sp) == 0) & (np.asarray(profile.policy.scatters_messages) > 0), gather, 0.0
    )
    steady = (2 + profile.scored) * layout.micro_batches * layout.virtual
    # Where a rank has several chunks, the messages of one overlap the compute of the next.
    overlap = np.where(layout.virtual > 1, profile.pp_overlap, 0.0)
    times = steady * (1 - overlap) + 2 * (layout.pp - 1)
    factors = {"messages": steady, "bytes": message.bytes, "message_s": sent, "gathered_s": gathered}
    out.of["transfers"] = factors | {"overlap": overlap, "pp": layout.pp}
    out.terms["transfers"] = np.where(layout.pp > 1, times * (sent + gathered), 0.0)


def _adapters(shape: Shape, layout: LayoutColumns, system: System, profile: Profile) -> Column:
    """Return seconds of a block's adapters in both passes: three times their forward FLOPs, and the bytes that they
    move; with magnitudes also the norms of each forward pass, the scales, and repeated products of frozen weights."""
    if not np.any(shape.adapters):
        return 0.0
    x, forwards, wide = shape.magnitudes, 1 + layout.full, profile.wide_adapters
    flops = 6 * layout.tokens * shape.adapters + forwards * x.norm_flops()
    flops = flops + x.again * (1 + forwards) * 2 * layout.tokens * x.weights
    scaled, back = x.scale_traffic(wide)
    traffic = forwards * (x.norm_traffic(wide) + profile.dequantised_bytes * x.weights)
    once, once_back = shape.adapted.traffic(wide)
    traffic = traffic + layout.tokens * (forwards * (once + scaled) + once_back + back)
    rate = system.peak(layout.activation_bytes) * system.gemm * profile.gemm
    return (flops / rate + traffic / (system.memory_bytes_per_s * system.memory)) / layout.tp


def _dequantised(shape: Shape, layout: LayoutColumns, system: System, profile: Profile) -> Column:
    """Return seconds of converting a block's frozen weights to 16 bits: for the forward pass, its recomputation, and
    the gradient of the input unless the converted weights were kept for it."""
    if not np.any(profile.dequantised_bytes):
        return 0.0
    times = 2 + layout.full - (np.asarray(profile.kept_weights) > 0)
    rate = system.memory_bytes_per_s * system.memory
    return times * shape.of_block / layout.tp * profile.dequantised_bytes / rate


def _offloaded(
    shape: Shape, layout: LayoutColumns, system: System, profile: Profile, block: BlockSeconds, blocks: Column
) -> Column:
    """Return exposed seconds per block of offloading activations to the host in the forward pass and back in the
    backward pass, overlapped with the block's compute."""
    if not np.any(profile.offloaded_blocks):
        return 0.0
    travel = live_bytes(shape, layout, profile).stored / system.host_bytes_per_s
    exposed = np.maximum(travel - block.forward, 0.0) + np.maximum(travel - block.backward, 0.0)
    return np.minimum(profile.offloaded_blocks, blocks) / blocks * exposed
