"""A plan as Megatron-Bridge's ConfigContainer: config.yaml, and pretrain_plan.py that builds and trains it.

The YAML has a section for each part of ConfigContainer, and in it the groups of a plan with their reasons. Blanks are
variables of the environment, which OmegaConf, on which Megatron-Bridge builds, fills in.
"""

import re
from collections.abc import Iterable

from phalanx.frameworks.megatron import write as megatron
from phalanx.frameworks.megatron import write_blocks
from phalanx.frameworks.megatron.read_blocks import zeros_and_ones
from phalanx.frameworks.megatron_bridge.flags import DTYPES, IMPLIED, INVERTED, KEYS, TARGETS
from phalanx.frameworks.writing.program import Blank, Group, Setting, TrainingProgram
from phalanx.frameworks.writing.script import TEMPLATES, TORCHRUN, comment
from phalanx.frameworks.writing.subject import Subject
from phalanx.frameworks.writing.yaml import scalar
from phalanx.spec.errors import InputError

_DTYPES = tuple(flag for flag in KEYS if flag.endswith("-dtype"))
_NUMBERS = ("LR", "MIN_LR", "TRAIN_ITERS")


def program(x: Subject) -> TrainingProgram:
    """Return a plan as config.yaml. Raises InputError for what Megatron-Bridge has no key for."""
    _require_expressible(x)
    parts = groups(x)
    head = f"{x.stack.title}: parts of a ConfigContainer, which pretrain_plan.py builds. train.sh sets the blanks."
    files = {
        "config.yaml": document(parts, head),
        "pretrain_plan.py": (TEMPLATES / "pretrain_plan.py.template").read_text(),
    }
    blanks = tuple(b for b in megatron.blanks(x) if b.name != "MEGATRON")
    if x.options.lora:
        blanks += (
            Blank("PRETRAINED", "A checkpoint of Megatron-Bridge whose weights the adapters leave unchanged."),
        )
    return TrainingProgram(
        x.stack.title, parts, f"exec {TORCHRUN} \\\n  pretrain_plan.py", megatron.variables(x), blanks, files
    )


def _require_expressible(x: Subject) -> None:
    o, m = x.options, x.model
    if o.document:
        reason = (
            "Megatron-Bridge packs data of fine-tuning, which no plan names; data of pretraining it does not pack"
        )
        raise InputError("options.document", o.document, reason, "leave it out")
    if m.position == "learned" and m.max_seq != x.job.seq:
        reason = f"has no key there: a table of learned positions is as long as a sequence, {x.job.seq}"
        raise InputError("model.max_seq", m.max_seq, reason, f"use seq={m.max_seq}")
    if m.latent is not None and write_blocks.blocks_of(m).symbols:
        reason = "its provider of hybrid models has no latent attention"  # models/hybrid/hybrid_provider.py:109
        raise InputError("model.latent", "set", reason, "use Megatron-LM's arguments")
    if o.base == "float8" and o.narrow_parameters != "on":
        raise InputError("options.base", "float8", "is of parameters kept in 8 bits", "add narrow_parameters=on")
    if o.lora and m.latent is not None:
        raise InputError("options.lora", o.lora, "adapters of latent attention are not exported", "leave it out")


def groups(x: Subject) -> tuple[Group, ...]:
    """Return all settings by dotted key, in the groups of Megatron-LM's arguments."""
    flags = {s.key for g in megatron.groups(x) for s in g.settings}
    result = []
    for g in megatron.groups(x):
        settings = [s for flag in g.settings for s in _keyed(flag)]
        extra = _GROUP_SETTINGS.get(g.title)
        result.append(Group(g.title, g.why, (*settings, *(extra(x, flags) if extra else ()))))
    return tuple(result)


def _keyed(flag: Setting) -> list[Setting]:
    """Return the settings of a ConfigContainer for a flag of Megatron-LM: one, several or none."""
    key, value = flag.key, flag.value
    if key in IMPLIED or key in _JOINT_FLAGS:
        return []
    if key == "--vocab-size":  # to be padded
        return [Setting(KEYS["--padded-vocab-size"], value), Setting("model.should_pad_vocab", True)]
    if key in INVERTED:
        return [Setting(INVERTED[key], False)]
    if key in _DTYPES:
        value = DTYPES[value]
    elif key in _BLOCK_FLAGS:
        value = 1 if value == "1" else zeros_and_ones(value)
    elif key == "--window-size":
        value = [int(n) for n in value.split(",")]
    elif key == "--recompute-modules":
        value = list(value)
    elif isinstance(value, str) and re.fullmatch(r"\$[A-Z_]+", value):
        blank = f"${{oc.env:{value[1:]}}}"
        value = f"${{oc.decode:{blank}}}" if value[1:] in _NUMBERS else blank
    settings = [Setting(KEYS[key], list(value) if isinstance(value, tuple) else value)]
    if key == "--seq-length":
        settings.append(Setting("dataset.seq_length", value))
    if key == "--use-distributed-optimizer":
        settings.append(Setting("optimizer.use_distributed_optimizer", value))
    if key == "--overlap-param-gather":
        settings.append(Setting("optimizer.overlap_param_gather", value))
    if key == "--cpu-offloading-num-layers":
        settings.append(Setting("model.cpu_offloading", True))
    return settings


_JOINT_FLAGS = ("--swiglu", "--squared-relu", "--no-bias-gelu-fusion", "--grad-reduce-in-bf16", "--sft", "--seed")
"""Flags that have no setting of their own: the functions below write their meaning."""
_BLOCK_FLAGS = ("--moe-layer-freq", "--linear-attention-freq", "--window-attn-skip-freq", "--no-rope-freq")
"""Flags with a value for each block."""
_ACTIVATIONS = {"--swiglu": "torch.nn.functional.silu", "--squared-relu": "megatron.core.activations.squared_relu"}


def _model(x: Subject, flags: set[str]) -> Iterable[Setting]:
    activation = next((name for flag, name in _ACTIVATIONS.items() if flag in flags), "torch.nn.functional.gelu")
    yield Setting("model.gated_linear_unit", "--swiglu" in flags)
    yield Setting("model.activation_func", activation)
    yield Setting("model.bias_activation_fusion", not flags & {"--no-bias-gelu-fusion", "--squared-relu"})


def _pipeline(x: Subject, flags: set[str]) -> Iterable[Setting]:
    if "--pipeline-model-parallel-layout" in flags and x.s.virtual > 1:
        yield Setting("model.virtual_pipeline_model_parallel_size", x.s.virtual)


def _types(x: Subject, flags: set[str]) -> Iterable[Setting]:
    dtype = {"bf16": "torch.bfloat16", "fp16": "torch.float16", "fp32": "torch.float32"}[x.compute]
    if x.compute == "fp32":
        yield Setting("mixed_precision.fp32", True)
    yield Setting("mixed_precision.params_dtype", dtype)
    yield Setting("mixed_precision.pipeline_dtype", dtype)
    if "--accumulate-allreduce-grads-in-fp32" not in flags:
        yield Setting("mixed_precision.grad_reduce_in_fp32", False)
    if x.options.base == "float8":
        yield Setting("model.disable_parameter_transpose_cache", True)
    if "--fp8-param-gather" in flags and x.options.products == "mxfp8":
        yield Setting("mixed_precision.reuse_grad_buf_for_mxfp8_param_ag", True)
    if x.options.cross_entropy == "plain":
        yield Setting("model.cross_entropy_loss_fusion", False)


def _data(x: Subject, flags: set[str]) -> Iterable[Setting]:
    for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
        yield Setting(f"dataset.{name}", False)
    yield Setting("dataset.random_seed", x.training.seed or 0)
    if x.options.lora:
        yield Setting("peft.dim", x.options.lora)
        yield Setting("peft.target_modules", list(TARGETS[x.options.lora_targets]))
        if x.options.lora_targets == "experts":
            yield Setting("peft.share_expert_adapters", False)
        yield Setting("checkpoint.pretrained_checkpoint", "${oc.env:PRETRAINED}")


def _optimizer(x: Subject, flags: set[str]) -> Iterable[Setting]:
    for end in ("start", "end"):  # the scheduler of the learning rate sets the decay of weights too
        yield Setting(f"scheduler.{end}_weight_decay", x.job.optimizer.weight_decay)


_GROUP_SETTINGS = {
    "Model": _model,
    "Pipeline": _pipeline,
    "Number types": _types,
    "Optimizer": _optimizer,
    "Data and checkpoints": _data,
}
"""Settings that are not one flag each, by the group in which they stand."""


def document(groups: Iterable[Group], head: str) -> str:
    """Write groups as YAML, a section for each part of ConfigContainer: what a group has of it, and the reason."""
    sections: dict[str, list[str]] = {}
    for g in groups:
        sections_so_far = set[str]()
        for s in g.settings:
            section, _, name = s.key.partition(".")
            lines = sections.setdefault(section, [])
            if section not in sections_so_far:
                lines.append(comment(f"{g.title}. {g.why}" if section == "model" else f"{g.title}.", "  "))
                sections_so_far.add(section)
            lines.append(f"  {name}: {scalar(s.value)}\n")
    return comment(head) + "".join(f"\n{name}:\n{''.join(lines)}" for name, lines in sections.items())
