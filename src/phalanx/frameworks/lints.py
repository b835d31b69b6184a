"""Mistakes in configurations that their own loaders accept, each from an issue of that framework or its users.

A lint sees the file's tables and what was read from them, and yields (key, problem, mend). `LINTS` has the issue of
each; a corrected twin of every case yields nothing (tests/frameworks/test_read.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher

from phalanx.frameworks.configuration import Config, Configuration, Keys, count, product, truth
from phalanx.frameworks.megatron import lints as megatron
from phalanx.frameworks.megatron.lints import Found, arg, arguments

_BLOCKS = {
    "GPT2Block": "gpt2",
    "LlamaDecoderLayer": "llama",
    "MistralDecoderLayer": "mistral",
    "MixtralDecoderLayer": "mixtral",
    "Qwen2DecoderLayer": "qwen",
    "GemmaDecoderLayer": "gemma",
    "BertLayer": "bert",
    "T5Block": "t5",
    "BloomBlock": "bloom",
    "FalconDecoderLayer": "falcon",
    "GPTNeoXLayer": "neox",
    "OPTDecoderLayer": "opt",
    "PhiDecoderLayer": "phi",
}
"""Classes that FSDP wraps, and what the names of their models have in them."""

_AXES = 16
"""More than any mesh has: a product of more sizes is none."""
_ALIKE = 0.82
"""How alike a name has to be to one that exists to be a slip of it."""


@dataclass(frozen=True)
class Mistake:
    """A mistake in a configuration."""

    name: str
    key: str
    problem: str
    mend: str
    source: str


def _deepspeed_batch(c: Config, x: Configuration) -> Found:
    micro, steps, whole = (
        c.get(k) for k in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
    )
    micro, steps, whole = count(micro), count(steps), count(whole)
    if x.kind != "deepspeed" or not whole or not micro:
        return
    replicas = x.layout.dp
    if replicas and steps and micro * steps * replicas != whole:
        yield (
            "train_batch_size",
            f"{whole} is not micro-batch {micro} x accumulation {steps} x {replicas} ranks",
            f"train_batch_size {micro * steps * replicas}, or leave one of the three out",
        )
    elif replicas and not steps and whole % (micro * replicas):
        yield "train_batch_size", f"{whole} is no multiple of micro-batch {micro} x {replicas} ranks", "one that is"
    elif not replicas and steps and whole % (micro * steps):
        yield (
            "train_batch_size",
            f"{whole} is no multiple of micro-batch {micro} x accumulation {steps}",
            "one that is",
        )


def _zero_in_pipeline(c: Config, x: Configuration) -> Found:
    pipelined = (x.layout.pp or 1) > 1 or c.get("_engine") == "PipelineModule"
    scatters = x.layout.level is not None and x.layout.level.gradients
    if x.kind in ("deepspeed", "megatron") and x.stack != "megatron-fsdp" and pipelined and scatters:
        yield (
            "stage",
            f"ZeRO {x.layout.zero} shards gradients that a pipeline accumulates: DeepSpeed refuses it",
            "stage 1",
        )


def _typo(c: Config, x: Configuration) -> Found:
    """Other dialects with the same tables (GPT-NeoX, axolotl) have keys of their own."""
    dialect = {"base_model", "deepspeed", "fsdp"} & set(c) or x.layout.pp is not None
    if x.kind not in ("deepspeed", "accelerate") or dialect:
        return
    for key, near in x.unknown.items():
        name = key.rpartition(".")[2]
        if not near or key.startswith("_"):
            continue
        shortened = set(name.split("_")) < set(near.split("_")) and len(name.split("_")) > 2
        if shortened or SequenceMatcher(None, name, near).ratio() > _ALIKE:
            yield key, "is no key of the framework, which ignores it", f"did you mean {near}"


def _mesh(c: Config, x: Configuration) -> Found:
    s, world = x.layout, x.layout.world
    degrees = {name: getattr(s, name) for name in ("tp", "pp", "cp")}
    inner = product(*(n or 1 for n in degrees.values())) or 1
    shown = " x ".join(f"{name} {n}" for name, n in degrees.items() if n and n > 1) or "1"
    if not world:
        return
    if x.kind in ("megatron", "nemo") and world % inner:
        yield "tensor-model-parallel-size", f"{shown} = {inner} does not divide the {world} ranks", "smaller degrees"
    if x.kind == "nanotron" and s.dp and s.dp * inner != world:
        yield "parallelism", f"dp {s.dp} x {shown} = {s.dp * inner}, and there are {world} ranks", "dp to fill them"
    if x.kind == "torchtitan" and s.dp and s.dp * inner != world:
        yield (
            "parallelism",
            f"data parallel {s.dp} x {shown} = {s.dp * inner}, and there are {world} ranks",
            "shard degree -1",
        )
    mesh = c.get("parallelism_config")
    if x.kind == "accelerate" and isinstance(mesh, Mapping):
        sizes = [count(v) or 1 for k, v in mesh.items() if str(k).endswith("_size")][:_AXES]
        if math.prod(sizes) != world:
            yield (
                "parallelism_config",
                f"its sizes make {math.prod(sizes)}, and there are {world} processes",
                "sizes that fill them",
            )


def _expert_mesh(c: Config, x: Configuration) -> Found:
    s = x.layout
    if x.kind == "torchtitan" and s.ep and s.shard:
        whole = s.shard * (s.cp or 1) * (s.tp or 1)
        if whole % s.ep:
            yield "expert_parallel_degree", f"{s.ep} does not divide dp_shard x cp x tp = {whole}", "a divisor of it"


def _few_micro_batches(c: Config, x: Configuration) -> Found:
    pp = x.layout.pp or 1
    if x.kind == "nanotron" and x.layout.accumulation and x.layout.accumulation < pp - 1:
        key, n = "tokens.batch_accumulation_per_replica", x.layout.accumulation
        yield key, f"{n} micro-batches, and 1F1B of {pp} stages needs at least {pp - 1}", f"at least {pp}"
    if x.kind == "torchtitan":
        few = count(
            Keys(c).first(
                ("parallelism.pipeline_parallel_microbatches", "experimental.pipeline_parallel_microbatches"), ""
            )
        )
        if few and few < pp:
            yield (
                "pipeline_parallel_microbatches",
                f"{few}, fewer than the {pp} stages: the schedule hangs",
                f"at least {pp}",
            )


def _no_axis_to_shard(c: Config, x: Configuration) -> Found:
    mesh = c.get("parallelism_config")
    if x.kind == "accelerate" and str(c.get("distributed_type")).upper() == "FSDP" and isinstance(mesh, Mapping):
        sharded = [count(v) or 1 for k, v in mesh.items() if "dp_shard" in k or "_cp_" in k][:_AXES]
        if math.prod(sharded) == 1 and (x.layout.tp or 1) > 1:
            yield (
                "parallelism_config",
                "FSDP is on, and tp takes every process: there is no axis to shard over",
                "dp_shard_size over 1",
            )


def _wrapped_class(c: Config, x: Configuration) -> Found:
    table = c.get("fsdp_config")
    name = str(c.get("_model") or x.model_name or "").lower()
    if not isinstance(table, Mapping) or not name:
        return
    wrapped = str(
        Keys(table).first(("fsdp_transformer_layer_cls_to_wrap", "transformer_layer_cls_to_wrap"), "") or ""
    )
    family = _BLOCKS.get(wrapped)
    if name.rpartition("/")[2].startswith(("falcon-e", "falcon3")):  # Llamas by their blocks
        name = "llama"
    if family and family not in name.replace("-", ""):
        yield (
            "fsdp_transformer_layer_cls_to_wrap",
            f"{wrapped} is a block of {family} models, the model is {name}",
            "its own block's class",
        )


def _text_for_truth(c: Config, x: Configuration) -> Found:
    env = c.get("env")
    for key, value in env.items() if isinstance(env, Mapping) else ():
        if str(key).startswith(("FSDP_", "ACCELERATE_")) and str(value).lower() == "false":
            yield f"env.{key}", 'the text "false" was read as true by releases before 0.22', "leave it out"


def _recomputes_gathers(c: Config, x: Configuration) -> Found:
    args, words = arguments(c), str(arg(c, "fsdp") or "")
    if "full_shard" in words and truth(args.get("gradient_checkpointing")):
        yield (
            "gradient_checkpointing",
            "under full_shard the recomputed forward gathers parameters once more",
            "fsdp_config.activation_checkpointing",
        )


def _types_disagree(c: Config, x: Configuration) -> Found:
    inner = c.get("deepspeed_json")
    if not isinstance(inner, Mapping):
        return
    for name in ("fp16", "bf16"):
        table, own = inner.get(name), truth(arg(c, name))
        enabled = truth(table.get("enabled")) if isinstance(table, Mapping) else None
        if own is not None and enabled is not None and own != enabled:
            yield f"deepspeed.{name}.enabled", f"is {enabled}, and TrainingArguments have {name}={own}", '"auto"'


def _batches_disagree(c: Config, x: Configuration) -> Found:
    inner = c.get("deepspeed_json")
    if isinstance(inner, Mapping):
        for theirs, ours in (
            ("train_micro_batch_size_per_gpu", "per_device_train_batch_size"),
            ("gradient_accumulation_steps", "gradient_accumulation_steps"),
        ):
            a, b = count(inner.get(theirs)), count(arg(c, ours))
            if a and b and a != b:
                yield f"deepspeed.{theirs}", f"is {a}, and TrainingArguments have {b}", '"auto"'
    if x.kind == "nemo":
        sizes = {p: count(Keys(c).take(f"{p}.micro_batch_size", "")) for p in ("train", "dataset", "data", "model")}
        known = {p: n for p, n in sizes.items() if n}
        if len(set(known.values())) > 1:
            said = ", ".join(f"{p}: {n}" for p, n in known.items())
            yield "micro_batch_size", f"is stated twice ({said})", "one number for both"


def _both_engines(c: Config, x: Configuration) -> Found:
    if c.get("fsdp") and c.get("deepspeed"):
        yield "fsdp", "is asked for beside deepspeed, and only one of them can shard", "one of the two"


def _global_batch(c: Config, x: Configuration) -> Found:
    s = x.layout
    each = product(s.micro_batch, s.dp)
    if x.kind in ("nemo", "megatron") and s.global_batch and each and s.global_batch % each:
        yield (
            "global_batch_size",
            f"{s.global_batch} is no multiple of micro-batch {s.micro_batch} x {s.dp} replicas",
            "one that is",
        )


def _both_halves(c: Config, x: Configuration) -> Found:
    on = [truth(arg(c, n)) for n in ("bf16", "fp16")]
    for table in (c, c.get("deepspeed_json")):
        if isinstance(table, Mapping) and all(
            isinstance(table.get(n), Mapping) and truth(table[n].get("enabled")) for n in ("fp16", "bf16")
        ):
            on = [True, True]
    if all(on):
        yield "bf16", "and fp16 are both on", "one of the two"


def _offload_without_shards(c: Config, x: Configuration) -> Found:
    where, level = x.layout.offload or {}, x.layout.level
    if x.kind != "deepspeed" or level is None:
        return
    if where.get("param") not in (None, "none") and not level.parameters:
        yield (
            "offload_param",
            f"has no effect at stage {x.layout.zero}: only stage 3 shards parameters",
            "stage 3, or leave it out",
        )
    if where.get("optimizer") not in (None, "none") and not level.state:
        yield "offload_optimizer", "has no effect at stage 0", "stage 1 or more"


def _older_sharding(c: Config, x: Configuration) -> Found:
    table = c.get("fsdp_config")
    if isinstance(table, Mapping) and count(Keys(table).first(("fsdp_version", "version"), "")) == 2:
        said = Keys(table).first(("fsdp_reshard_after_forward", "reshard_after_forward"), "") is not None
        for name in ("fsdp_sharding_strategy", "sharding_strategy"):
            if name in table and not said:
                yield name, "is of FSDP1, and FSDP2 does not read it", "fsdp_reshard_after_forward: true or false"


def _quoted_truth(c: Config, x: Configuration) -> Found:
    """A text that is not empty is true: "false" enables."""
    for base, table in (("", c), ("deepspeed.", c.get("deepspeed_json"))):
        for name in ("fp16", "bf16", "bfloat16"):
            inner = table.get(name) if isinstance(table, Mapping) else None
            enabled = inner.get("enabled") if isinstance(inner, Mapping) else None
            if isinstance(enabled, str) and enabled.lower() in ("true", "false"):
                plain = enabled.lower()
                yield f"{base}{name}.enabled", f'is the text "{enabled}", which is true', f"{plain} without quotes"


LINTS: dict[str, tuple[Callable[[Config, Configuration], Found], str]] = {
    "batch-arithmetic": (_deepspeed_batch, "deepspeedai/DeepSpeed#6914"),
    "global-batch": (_global_batch, "NVIDIA/cloudai#415"),
    "zero-with-pipeline": (_zero_in_pipeline, "deepspeedai/DeepSpeed#3589"),
    "silent-typo": (_typo, "deepspeedai/DeepSpeed#653, #1103"),
    "unknown-flag": (megatron.unknown_flag, "NVIDIA/Megatron-LM#394"),
    "mesh-vs-world": (_mesh, "huggingface/nanotron#250, pytorch/torchtitan#1184, deepspeedai/DeepSpeed#2925"),
    "expert-mesh": (_expert_mesh, "pytorch/torchtitan#4258"),
    "micro-batches-vs-pipeline": (_few_micro_batches, "huggingface/nanotron#347, pytorch/torchtitan#775"),
    "no-axis-to-shard": (_no_axis_to_shard, "huggingface/accelerate#3798"),
    "wrapped-class": (_wrapped_class, "hiyouga/ChatGLM-Efficient-Tuning#231"),
    "text-for-truth": (_text_for_truth, "huggingface/accelerate#1794"),
    "gathers-again": (_recomputes_gathers, "huggingface/transformers#30404"),
    "types-disagree": (_types_disagree, "shibing624/MedicalGPT#191"),
    "batches-disagree": (_batches_disagree, "huggingface/transformers#27830, NVIDIA-NeMo/Megatron-Bridge#5386"),
    "two-engines": (_both_engines, "axolotl-ai-cloud/axolotl#1388"),
    "sp-without-tp": (megatron.sp_alone, "NVIDIA/Megatron-LM#5768"),
    "connections-with-fsdp": (megatron.connections, "ROCm/Megatron-LM#91"),
    "connections-for-tp": (megatron.connections_for_tp, "NVIDIA/Megatron-LM#533"),
    "both-halves": (_both_halves, "Snowflake-AI-Research/Arctic-Platform#78"),
    "offload-without-shards": (_offload_without_shards, "deepspeedai/DeepSpeed#1403"),
    "uneven-stages": (megatron.stages_of_layers, "NVIDIA/Megatron-LM#1304, #468"),
    "uneven-heads": (megatron.heads, "NVIDIA/Megatron-LM#5755, modelscope/ms-swift#8219"),
    "uneven-experts": (megatron.experts, "pytorch/torchtitan#4258"),
    "experts-without-sp": (megatron.experts_without_sp, "NVIDIA/Megatron-LM#1587"),
    "recompute-halves": (megatron.recompute_halves, "NVIDIA/Megatron-LM#1487"),
    "groups-alone": (megatron.groups_alone, "NVIDIA/Megatron-LM#1401"),
    "expert-ranks": (megatron.expert_mesh, "NVIDIA-NeMo/Megatron-Bridge#546, NVIDIA-NeMo/Speech#14838"),
    "one-queue-idle": (megatron.one_queue_idle, "NVIDIA/Megatron-LM#1468"),
    "gather-without-reduce": (megatron.gather_without_reduce, "NVIDIA/Megatron-LM#646"),
    "interleaved-on-two": (megatron.interleaved_on_two, "NVIDIA/Megatron-LM#750"),
    "ends-without-pipeline": (megatron.ends_without_pipeline, "NVIDIA/Megatron-LM#1778"),
    "experts-on-one-queue": (megatron.experts_on_one_queue, "NVIDIA/Megatron-LM#2180"),
    "older-sharding": (_older_sharding, "huggingface/accelerate#3394"),
    "quoted-truth": (_quoted_truth, "hiyouga/LlamaFactory#3493"),
}
"""Name -> (lint, its issue)."""


def lint(config: Config, read: Configuration) -> list[Mistake]:
    """Return the mistakes of a configuration, in the order of LINTS."""
    return [
        Mistake(name, key, problem, mend, source)
        for name, (examine, source) in LINTS.items()
        for key, problem, mend in examine(config, read)
    ]
