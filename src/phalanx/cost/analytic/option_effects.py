"""Effects of a stack's options (spec/strategy/stack_options.py), and of a job's number types and optimizer, on the
stack's constants and on the sizes of a model. Constants are for AdamW in mixed precision.

Each option is one or a few lines here; the terms that read the changed constants are in memory.py, step.py and
kernels.py. Bytes per parameter under Adam: moments 4 + 4, master 4, accumulated gradient 4 or 2, parameter 2; traffic
of an update: the gradient read, master and moments read and written, the parameter written.

A parameter has a weight of w bytes, a gradient of a when accumulated and r when reduced (kept separately where they
differ), a master of o where it is not the weight itself, and k moments of o: two of AdamW, one of SGD with momentum.
Muon differs only for matrices, as does its stack option.

    level 0   w + o + k o + a + r      1   w + a + r kept, o + k o sharded      3   (o + k o + a) / shards

An update reads the gradient, reads and writes master and moments, and writes the weight: a + 2 o (1 + k) + w.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from phalanx.cost.analytic.profile import FIELDS, Profile, profile
from phalanx.cost.hardware.columns import Column
from phalanx.cost.ledger.kind import BlockKind
from phalanx.cost.ledger.magnitudes import AdaptedWeights, Magnitudes
from phalanx.cost.ledger.model_shape import Shape
from phalanx.cost.ledger.rank_layout import FORMAT_INDEX, LayoutColumns
from phalanx.cost.ledger.units import units
from phalanx.frameworks.registry import DOCUMENTED
from phalanx.spec.errors import InputError
from phalanx.spec.job import DTYPE_BYTES, Job, Precision
from phalanx.spec.number_formats import NUMBER_FORMATS
from phalanx.spec.optimizers import Optimizer
from phalanx.spec.strategy.stack_options import AS_RELEASED, StackOptions


@dataclass(frozen=True)
class PerParameter:
    """Bytes of one parameter: `weight`, accumulated `gradient`; `reduced`: the buffer for reducing it in another
    type; `master`, with the optimizer's `moments`; `sent`: a gradient in transit."""

    weight: float
    gradient: float
    reduced: float
    master: float
    moments: float
    sent: float

    @property
    def update(self) -> float:
        """Bytes read and written by an update."""
        return self.gradient + 2 * (self.master + self.moments) + self.weight * (self.master != self.weight)


def per_parameter(p: Precision, optimizer: Optimizer, options: StackOptions = AS_RELEASED) -> PerParameter:
    """Return the bytes of a parameter under number types and an optimizer. Moments are of the master's type, or of
    32 bits where `options` name theirs, which count from there."""
    weight, gradient, sent, master = (
        float(DTYPE_BYTES[t]) for t in (p.compute, p.accumulate_dtype, p.reduce_dtype, p.master_dtype)
    )
    moments = len(optimizer.row.others.held(optimizer.first_decay))
    named = options.first_moment != "auto" or options.second_moment != "auto"
    held = moments * (BYTES["auto"] if named else master)
    return PerParameter(weight, gradient, sent * (p.reduce_dtype != p.accumulate_dtype), master, held, sent)


BYTES = {"auto": 4.0, **{f.name: f.bits / 8 for f in NUMBER_FORMATS.values()}}
"""Bytes of a parameter's state by its type; auto: float32."""


MIXED = per_parameter(Precision("bfloat16"), Optimizer())


def with_number_types(by: Profile, job: Job, options: StackOptions = AS_RELEASED) -> Profile:
    """Return a stack's constants under the number types and the optimizer of a job: every count of bytes shifted by
    its difference from AdamW in mixed precision."""
    sizes, usual = per_parameter(job.precision, job.optimizer, options), MIXED
    if sizes == usual:
        return by
    # A master of the weight's own type is the weight, except at level 3, where the shards are the masters.
    apart = job.precision.master_dtype != job.precision.compute
    state = sizes.master * apart + sizes.moments
    more_state = state - (usual.master + usual.moments)
    more_weight, more_gradient = sizes.weight - usual.weight, sizes.gradient + sizes.reduced - usual.gradient
    return replace(
        by,
        whole_bytes=by.whole_bytes + more_weight + more_gradient + more_state,
        kept_bytes=by.kept_bytes + more_weight + more_gradient,
        kept_casts=by.kept_casts * apart,
        accumulated_bytes=by.accumulated_bytes + sizes.gradient - usual.gradient,
        reduced_bytes=sizes.reduced,
        shard_bytes=by.shard_bytes + more_state,
        full_shard_bytes=by.full_shard_bytes
        + (sizes.master + sizes.moments + sizes.gradient)
        - (usual.master + usual.moments + usual.gradient),
        gradient_bytes=by.gradient_bytes + sizes.sent - usual.sent,
        parameter_bytes=by.parameter_bytes + more_weight,
        optimizer_bytes=by.optimizer_bytes + sizes.update - usual.update,
    )


_PRESCRIBED_BLOCKS = ("first_blocks", "most_blocks", "last_blocks", "most_place")
"""Fields of a layout with prescribed blocks."""
_PARTS = 8
"""Parts of the tokens in which a fused linear loss computes its logits."""
_FUSED_KEPT, _FUSED_TRAFFIC = 4.0, 8.0
"""Bytes per logit that a fused loss keeps (logits and gradient in 16 bits) and moves (both read and written)."""
_NATIVE_KEPT = 6.0
"""Bytes per logit of Megatron's own fusion: the softmax in fp32 and its gradient in 16 bits (NVIDIA/Megatron-LM
d98e8a64 megatron/core/fusions/fused_cross_entropy.py:82, `grad_input.to(torch.bfloat16)`, and :119, what it saves).
Most published recipes that the stack's traffic was fitted on use it."""
_FOREACH = 4.0
"""Bytes per updated element of torch's AdamW without a fused kernel, which makes the roots of all fp32 moments at
once (torch 2.13, torch/optim/adam.py:645, `exp_avg_sq_sqrt = torch._foreach_sqrt(device_exp_avg_sqs)`)."""
_TABLE_LOOKUPS = 4.0
"""Time to convert nf4 to 16 bits over the time of the bytes it moves: bitsandbytes looks each weight up. QLoRA in
place of LoRA lengthens a sample of 7.7 billion parameters by 0.18 s and of 14.2 billion by 0.35 s in three passes on
an A100 (modelscope/ms-swift 4692215, docs/source_en/LLM/Benchmark.md), 6 times the bytes' time; 7 billion on two RTX
4090 by 0.2 s (AnswerDotAI/fsdp_qlora 05ed9f2, benchmarks_03_2024.md), 4 times."""
_UNPACKED = 16.5
"""Bytes that GPTQ's layer moves for a weight in 4 bits, by separate torch operations, if it multiplies 128 tokens or
more (AutoGPTQ c80855e, auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py, QuantLinear.forward): shifted to 32 bits
(4.5), cast to 8 (5), masked (2), less its zero (2), times its scale (3)."""
_BYTEWISE = 1.9
"""Time of these operations over the time of their bytes: most operations are on single bytes, which use little of the
memory's rate. 18 published steps of 7.7 to 72 billion parameters imply 1.8 to 2.0: they last longer than with frozen
weights in 16 bits by the same seconds at 2,048, 4,096 and 8,192 tokens (QwenLM/Qwen 2df8e8a, README.md)."""
BASE_BYTES = {
    "auto": 2.0,
    "nf4": (4 + 32 / 64) / 8,
    "nf4-double": (4 + 8 / 64 + 32 / (64 * 256)) / 8,
    "int8": 1.0,
    "gptq": (4 + (16 + 4) / 128) / 8,
    "float8": 1.0,
}
"""Bytes of a frozen weight of a block, with its share of the scales."""
_EXPERT_LAUNCHES = 110.0
"""Kernels that a block with experts launches beyond an MLP's if no graph captures its router and permutation.
Megatron-Bridge's constants are from recipes that capture them. Eleven published steps of 2,048 to 4,096 tokens a rank
without graphs, which wait for launches, imply 60 to 162 kernels, and one 350; the median is 114."""
SPREAD = 1.0
"""Relative standard deviation of an expert's tokens under a learned router: with it the median error of 16
pretraining steps published with their real router is 18 % (24 % without), most of them still predicted too short.
Public logs of loads are rare, so it is one number for all models."""
_SCALED_BY_TENSOR = ("float8", "float8-delayed")
"""Formats of products that read a weight in either order: others scale blocks along a row or along a column."""
_SCORED = {"none": 0.0, "copy": 1.0, "base": 1.0, "copy-kl": 3.0, "base-kl": 3.0}
"""Additional forward passes per sequence, by the reference that scores it: KTO's reference scores the sequence and
one of another prompt, which the model scores too, without gradients (huggingface/trl trl/trainer/kto_trainer.py:
get_batch_loss_metrics)."""
_BUFFERS = {"none": 0.0, "one": 1.0, "two": 2.0}
"""Profile.bucket_buffers by the option of that name."""
_PORTABLE = {"flash2": 2.0, "flash3": 0.0, "flex": 3.0}
"""Profile.portable by the kernel of attention."""
_OVERLAPPED_STACK = "nemo-24.11"
"""The stack whose fitted overlap represents userbuffers and async tensor parallelism: NVIDIA's recipes use them."""


def constants(stack: str, job: Job, model: Shape, options: StackOptions) -> Profile:
    """Return a stack's constants under a job's number types and optimizer, and with its options. Raises InputError
    for an optimizer that the stack does not have."""
    under, row = options.under(job), DOCUMENTED.get(stack)
    entry = row.options.get("optimizer") if row else None
    if under is not options and row and not (entry and entry.allows(under.optimizer)):
        raise InputError("job.optimizer.name", job.optimizer.name, f"is not in {row.title}", "use adamw")
    by = with_options(with_number_types(profile(stack), job, under), model, under)
    if under.update != "foreach" or under.second_moment != "auto":
        return by
    return replace(by, update_bytes=by.update_bytes * DTYPE_BYTES[job.precision.master_dtype] / _FOREACH)


def with_options(by: Profile, model: Shape, options: StackOptions) -> Profile:
    """Return constants with the options of their stack."""
    if not options.changed():
        return by
    # Model state.
    new = _state(by, model, options)
    # The loss.
    if options.cross_entropy in ("fused", "linear"):
        new = replace(
            new,
            kept_logit=np.minimum(new.kept_logit, _FUSED_KEPT),
            logit_bytes=np.minimum(new.logit_bytes, _FUSED_TRAFFIC),
        )
    if options.cross_entropy == "native":
        new = replace(new, kept_logit=np.minimum(new.kept_logit, _NATIVE_KEPT))
    if options.cross_entropy == "linear":
        new = replace(new, kept_logit=new.kept_logit / _PARTS)
    if options.cross_entropy == "plain":
        new = replace(new, kept_logit=np.maximum(new.kept_logit, FIELDS["kept_logit"]))
    # Attention's core, number formats, overlap and dispatch.
    if options.attention != "auto":
        new = replace(new, flash=float(options.attention != "unfused"))
        new = replace(new, portable=_PORTABLE.get(options.attention, new.portable))
    if options.narrow_parameters != "auto":
        narrow = options.narrow_parameters == "on"
        new = replace(new, cast_parameters=float(narrow), parameter_bytes=1.0 if narrow else 2.0)
    if options.tp_overlap == "none":
        new = replace(new, tp_split=0.0, tp_overlap=0.0)
    elif options.tp_overlap != "auto" and new.tp_overlap < (most := profile(_OVERLAPPED_STACK).tp_overlap):
        new = replace(new, tp_split=1.0, tp_overlap=most)
    if options.dp_overlap != "auto":
        new = replace(new, gather_overlap=0.0, dp_overlap=new.dp_overlap * (options.dp_overlap == "reduce"))
    if options.bucket_elements:
        new = replace(new, bucket_bytes=options.bucket_elements * new.gradient_bytes)
    if options.bucket_buffers != "auto":
        new = replace(new, bucket_buffers=_BUFFERS[options.bucket_buffers])
    if options.accumulate == "sharded":
        new = replace(new, policy=replace(new.policy, zero2_reduces=1.0, zero3_reduces=1.0))
    if options.dispatch != "auto":
        once, gathers = options.dispatch in ("deepep", "hybridep"), options.dispatch == "all_gather"
        new = replace(new, sends_once=float(once), gathers_tokens=float(gathers))
    if options.graphs == "none":
        new = replace(new, expert_launches=np.maximum(new.expert_launches, _EXPERT_LAUNCHES))
    if options.graphs == "modules":
        new = replace(new, captured=1.0)
    if options.graphs == "full":
        new = replace(new, launch_s=0.0)
    return replace(
        new,
        gathers_keys=float(options.context == "all_gather"),
        offloaded_blocks=float(options.activation_offload),
        vocab_multiple=float(options.vocab_multiple),
        parameters_on_host=float(options.parameter_offload),
        scored=_SCORED[options.reference],
        overlaps_experts=float(options.overlap_experts == "on"),
        spread=SPREAD if options.routing == "learned" else 0.0,
    )


_WEIGHT = 2.0
"""Bytes of a weight that a rank computes with."""


def moment_bytes(model: Shape, o: StackOptions) -> Column:
    """Return bytes per parameter of the moments with these options: AdamW's two, or Muon's, one for matrices."""
    of_second = model.ends / model.params if o.optimizer == "muon" else 1.0
    return BYTES[o.first_moment] + BYTES[o.second_moment] * of_second


def _state(by: Profile, model: Shape, o: StackOptions) -> Profile:
    """Return the constants with the options about model state: number types, Muon, adapters, offloading."""
    moments, master = moment_bytes(model, o), BYTES[o.master]
    accumulated = by.accumulated_bytes if o.gradients == "auto" else BYTES[o.gradients]
    reduced = by.gradient_bytes if o.reduce == "auto" else BYTES[o.reduce]
    saved_state = 12.0 - (moments + master)
    saved_gradient = by.accumulated_bytes - accumulated
    on_host = o.optimizer_offload * (moments + master)  # at level 3 shards are the masters, of any type
    gradients_on_host = by.offloads_gradients * o.optimizer_offload
    unsharded = by.full_shard_bytes - saved_gradient - saved_state
    of_gradients = gradients_on_host * (unsharded - (moments + master) - _WEIGHT)
    of_shard = o.optimizer_offload * (by.shard_bytes - saved_state)  # no master apart from a weight in fp32
    new = replace(
        by,
        accumulated_bytes=accumulated,
        gradient_bytes=reduced,
        kept_bytes=by.kept_bytes - saved_gradient,
        shard_bytes=by.shard_bytes - saved_state - of_shard,
        whole_bytes=by.whole_bytes - saved_gradient - saved_state - of_shard,
        full_shard_bytes=unsharded - on_host - of_gradients,
        gradients_on_host=gradients_on_host,
        optimizer_bytes=by.optimizer_bytes - 2 * saved_state - saved_gradient,
        on_host=o.optimizer_offload,
        orthogonal=float(o.optimizer == "muon"),
    )
    if o.state_on_host:
        new = replace(new, policy=replace(by.policy, levels_alone=1.0))
    device_share = 1 - o.optimizer_offload
    each = _FOREACH if o.update == "foreach" else new.update_bytes
    new = replace(new, update_bytes=each * device_share)
    if o.parameter_offload:
        new = replace(new, full_shard_bytes=new.full_shard_bytes - _WEIGHT)
    if o.lora:
        # Frozen parameters have only a weight; embedding and head stay in 16 bits.
        base, ends = BASE_BYTES[o.base], model.ends / model.params
        weight = base * (1 - ends) + 2.0 * ends
        device_bytes = 0.0 if o.parameter_offload else weight
        new = replace(new, whole_bytes=weight, kept_bytes=weight, full_shard_bytes=device_bytes, replica_bytes=0.0)
        new = replace(new, shard_bytes=0.0, accumulated_bytes=0.0, idle_bytes=0.0)
        # A frozen norm does not keep what its weight multiplies.
        new = replace(new, kept_casts=0.0, kept_norm=by.kept_norm / 2)
        new = replace(new, adapter_state_bytes=moments + master)
        if o.base not in ("auto", "float8"):  # read, and written as 16 bits, each time that a product needs it
            slow = _TABLE_LOOKUPS if o.base.startswith("nf4") else 1.0
            moved = _BYTEWISE * _UNPACKED if o.base == "gptq" else slow * (base + 2.0)
            new = replace(new, dequantised_bytes=moved, kept_weights=2.0 * (o.base == "gptq"))
        if o.base != "auto":
            new = replace(new, parameter_bytes=weight)  # gathered as they are stored
    if o.reference.startswith("copy"):  # whole below level 3
        more = new.parameter_bytes
        device_bytes = 0.0 if o.parameter_offload else more
        new = replace(new, whole_bytes=new.whole_bytes + more, kept_bytes=new.kept_bytes + more)
        new = replace(new, full_shard_bytes=new.full_shard_bytes + device_bytes)
    return new


def _adapted(kind: BlockKind, o: StackOptions) -> list[tuple[Column, Column, Column]]:
    """Return (inputs, outputs, number) of a block's products that have adapters."""
    q, kv, h = kind.heads * kind.head_dim, kind.kv_heads * kind.head_dim, kind.hidden
    after = kind.attends * (o.lora_targets != "qkv")
    attention = [(h, q, kind.attends), (q, h, after), (h, kv, 2 * kind.attends)]
    mixed = kind.mixed + kind.mixed_shared + kind.mixed_whole
    mixer = [(h, mixed, kind.mixes), (kind.mixed_out, h, kind.mixes)]
    dense = kind.ffn > 0 if o.lora_targets in ("linear", "experts") else 0
    return [*attention, *mixer, (h, kind.ffn, dense * (kind.mlp_matrices - 1)), (kind.ffn, h, dense)]


def adapter_params(model: Shape, o: StackOptions) -> float:
    """Return the parameters of a block's adapters, averaged over blocks: r (inputs + outputs) for each product that
    has one, and its magnitudes; 0 without adapters."""
    dora = float(o.dora != "none")
    return float(model.mean(lambda k: sum(n * (o.lora * (x + y) + dora * y) for x, y, n in _adapted(k, o))))


def _expert_adapter_params(model: Shape, o: StackOptions) -> float:
    """Return the parameters of adapters on each product of each expert of a block."""
    if not o.lora or o.lora_targets != "experts":
        return 0.0
    each = o.lora
    return float(model.mean(lambda k: k.experts * k.mlp_matrices * each * (k.expert_dim + k.expert_ffn)))


def _adapted_weights(model: Shape, o: StackOptions) -> AdaptedWeights:
    """Return the sizes of adapted weights."""

    def mean(of: Callable[[Column, Column, Column], Column]) -> Column:
        return model.mean(lambda kind: sum(of(x, y, n) for x, y, n in _adapted(kind, o)))

    return AdaptedWeights(
        number=mean(lambda x, y, n: n),
        inputs=mean(lambda x, y, n: n * x),
        shared=mean(lambda x, y, n: np.maximum(n - 1, 0) * x)
        + model.mean(lambda kind: kind.attends * kind.hidden),  # of q
        results=model.mean(lambda kind: kind.attends * kind.heads * kind.head_dim) * (o.lora_targets != "qkv"),
        outputs=mean(lambda x, y, n: n * y),
    )


def _magnitudes(model: Shape, o: StackOptions) -> Magnitudes:
    """Return the sizes of adapted weights with magnitudes."""

    def mean(of: Callable[[Column, Column], Column]) -> Column:
        return model.mean(lambda kind: sum(n * of(x, y) for x, y, n in _adapted(kind, o)))

    def most(of: Callable[[Column, Column], Column]) -> Column:
        return model.most(lambda kind: max(float((n > 0) * of(x, y)) for x, y, n in _adapted(kind, o)))

    return Magnitudes(
        outputs=mean(lambda x, y: y),
        weights=mean(lambda x, y: x * y),
        squares=mean(lambda x, y: x * x),
        rank=float(o.lora),
        most_weights=most(lambda x, y: x * y),
        most_square=most(lambda x, y: x * x),
        again=float(o.dora == "dropout"),
    )


def extended_shape(model: Shape, o: StackOptions) -> Shape:
    """Return the sizes of a model with its further depths of multi-token prediction, its units and its adapters."""
    if o.mtp:
        # A depth is a block like the last ones, a product of two hidden states, and the head once more.
        model = replace(
            model,
            kinds=(*model.kinds[:-1], replace(model.kinds[-1], count=model.kinds[-1].count + o.mtp)),
            head_params=model.head_params + o.mtp * 2 * model.hidden**2,
            depths=float(o.mtp),
        )
    if o.units != "auto":
        of = units(model, o.units, o.unit_size)
        model = replace(model, root_params=of.root, unit_params=of.largest, unit_count=of.count)
    if o.lora and o.dora != "none":
        model = replace(model, magnitudes=_magnitudes(model, o))
    if not o.lora:
        return model
    return replace(
        model,
        adapters=adapter_params(model, o),
        expert_adapters=_expert_adapter_params(model, o),
        adapted=_adapted_weights(model, o),
    )


def layout_with_options(
    layout: LayoutColumns, o: StackOptions, blocks: Sequence[Column] | None = None
) -> LayoutColumns:
    """Return a layout with options for documents, adapters and products, and if given with `blocks`: the blocks of
    the first, the fullest and the last pipeline rank, and the place of the fullest."""
    changes: dict[str, Column] = {}
    if o.document:
        changes["document"] = float(o.document)
    if o.lora:
        changes["frozen"] = 1.0
    if o.products != "auto":
        changes["format"] = FORMAT_INDEX[o.products]
    if blocks is not None:
        changes |= dict(zip(_PRESCRIBED_BLOCKS, blocks, strict=True))
    return replace(layout, **changes) if changes else layout


def require_priced(o: StackOptions, kind: str, number_format: str) -> None:
    """Raise InputError if options need a link to the host that a device of this kind does not have, or products in
    another type than `number_format`."""
    products = number_format if o.products == "auto" else o.products
    if o.base == "float8" and products not in _SCALED_BY_TENSOR:
        reason = f"needs products in 8 bits with one scale per tensor, not {products}"
        raise InputError("options.base", "float8", reason, "add products=float8 (--precision fp8)")
    uses_host = o.optimizer_offload or o.parameter_offload or o.activation_offload
    if uses_host and kind != "cuda":
        raise InputError("options", str(o), f"a {kind} device has no link to a host", "leave offloading out")
