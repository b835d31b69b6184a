"""A recipe's YAML of torchtune, with the overrides of `tune run` (recipes/configs/, recipes/*_distributed.py)."""

import re
from pathlib import Path
from typing import Any

from phalanx.frameworks.configuration import Config, Configuration, Keys, Partial, StatedLayout
from phalanx.frameworks.keys import key_table
from phalanx.frameworks.values import divided, product
from phalanx.spec.files.job_file import make_model
from phalanx.spec.model import presets
from phalanx.spec.model.spec import ModelSpec

_WHOLE, _SHARE = 1, -1
_HALVES = {"bf16": "bfloat16", "fp16": "float16"}
_SPOKEN = {"llama": "Llama-", "qwen": "Qwen", "gemma": "gemma-", "mistral": "Mistral-", "phi": "phi-"}
"""Families -> how the names of their models begin on Hugging Face."""


def read(config: Config, world: int | None = None) -> Configuration:
    """Read a recipe's tables. A shard degree of -1 takes the ranks that the other degrees leave."""
    keys = Keys(config, key_table("torchtune"))

    def degree(name: str, by_default: int | None) -> int | None:
        return keys.count(f"{name}_dim", "strategy", by_default)

    tp, cp = degree("tensor_parallel", _WHOLE), degree("context_parallel", _WHOLE)
    keys.take("tensor_parallel_plan", "strategy.tp")
    replicas, shards = degree("data_parallel_replicate", _WHOLE), degree("data_parallel_shard", _SHARE)
    if shards is None and world:
        shards = divided(world, product(tp, cp, replicas))
    dp = product(replicas, shards)
    reshards = keys.truth("fsdp_reshard_after_forward", "strategy.zero", True)
    micro = keys.count("batch_size", "strategy.micro_batch")
    steps = keys.count("gradient_accumulation_steps", "accumulation", 1)
    again = keys.truth("enable_activation_checkpointing", "strategy.recompute", False)
    interval = None
    if keys.take("ac_mode", "strategy.recompute") == "selective":
        interval = keys.count("ac_option", "strategy.recompute")
    on_host = keys.truth("fsdp_cpu_offload", "offload")
    type_ = str(keys.take("dtype", "job.precision") or "")
    layout = StatedLayout(
        world=world,
        dp=dp,
        tp=tp,
        cp=cp,
        pp=None if isinstance(config, Partial) else 1,
        zero=2 if reshards is False else None if reshards is None else 3,
        shard=shards,
        micro_batch=micro,
        accumulation=steps,
        global_batch=product(micro, steps, dp),
        seq=keys.count(("tokenizer.max_seq_len", "dataset.max_seq_len"), "job.seq"),
        precision=type_ if type_ in ("bf16", "fp16", "fp32") else None,
        recompute=None if again is None and interval is None else "full" if again or interval else "none",
        offload={"param": "cpu", "optimizer": "cpu"} if on_host else None,
    )
    component = str(keys.take("model._component_", "model", "") or "")
    options, notes = _adapters(keys, component)
    if on_host:
        options |= {"parameter_offload": True, "optimizer_offload": 1.0}
    loss = str(keys.take("loss._component_", "options.cross_entropy"))
    if "Linear" in loss:
        options["cross_entropy"] = "linear"
    elif loss.endswith("CEWithChunkedOutputLoss") and config.get("compile"):
        # Compiled, a chunk is cast to fp32 inside its kernel (modules/loss/ce_chunked_output_loss.py:25).
        options["cross_entropy"] = "fused"
    return keys.configuration(
        "torchtune",
        "torchtune",
        layout,
        model_name=component,
        spec=model_of(component),
        options=options,
        fields={"recompute": f"every:{interval}"} if interval and interval > 1 else {},
        job=_job(keys, type_, whole="lora" not in options),
        notes=notes,
    )


def _adapters(keys: Keys, component: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the options of adapters, and what is assumed of them. `component`: the model's builder."""
    builder = component.rpartition(".")[2]
    rank = keys.count("model.lora_rank", "options.lora")
    if not re.match(r"q?lora_|q?dora_", builder) and rank is None:
        return {}, ()
    mlp = keys.truth("model.apply_lora_to_mlp", "options.lora_targets")
    targets = keys.take("model.lora_attn_modules", "options.lora_targets")
    options: dict[str, Any] = {"lora": rank or 8, "lora_targets": "linear" if mlp else "attention"}
    if builder.startswith(("qlora_", "qdora_")) or keys.truth("model.quantize_base", "options.base"):
        options["base"] = "nf4-double"
    some = isinstance(targets, list) and len({"q_proj", "k_proj", "v_proj", "output_proj"} - set(targets)) > 0
    if re.match("q?dora_", builder) or keys.truth("model.use_dora", "options.dora"):
        options["dora"] = "on"  # whose frozen product is done once with dropout too
    return options, ("adapters are priced at every product of the layers that have some",) if some else ()


def _job(keys: Keys, type_: str, whole: bool) -> dict[str, Any]:
    """Return optimizer, clipping and types. `whole`: whether the whole model trains; it then has no copies in
    fp32."""

    def of(name: str, default: float) -> float:
        return keys.number(f"optimizer.{name}", "job.optimizer", default)

    keys.take("optimizer._component_", "job.optimizer")
    job: dict[str, Any] = {
        "optimizer": {
            "betas": keys.betas("optimizer.betas", (0.9, 0.999)),
            "eps": of("eps", 1e-8),
            "weight_decay": of("weight_decay", 0.01),
        },
        "clip": keys.number("clip_grad_norm", "job.clip", 0.0),
        "compute": type_ or None,
    }
    if whole and (half := _HALVES.get(type_)):
        job["types"] = {"reduce": half, "accumulate": half, "master": half}
    return job


def model_of(component: str) -> ModelSpec | None:
    """Return the published model of a builder, such as `torchtune.models.llama3_1.lora_llama3_1_8b`; None for an
    unknown one."""
    builder = re.sub(r"^(q?lora|q?dora)_", "", component.rpartition(".")[2])
    match = re.fullmatch(r"([a-z]+)(\d*(?:_\d+)?)_([\d_]+[bm])(?:_base|_instruct)?", builder)
    if not match:
        return None
    family, release, size = match[1], match[2].replace("_", "."), match[3].replace("_", ".").upper()
    names = (f"{_SPOKEN.get(family, family)}{release}-{size}", f"Meta-Llama-{release}-{size}")
    known = next(filter(None, map(presets.published, names)), None)
    return make_model({"preset": known}, Path())[0] if known else None
