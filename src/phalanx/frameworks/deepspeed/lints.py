"""Mistakes in DeepSpeed's tables that it accepts, or refuses late."""

from __future__ import annotations

from collections.abc import Mapping

from phalanx.frameworks.configuration import Config, Configuration, count
from phalanx.frameworks.mistakes import Found, Lint


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


def _quoted_truth(c: Config, x: Configuration) -> Found:
    """A text that is not empty is true: "false" enables."""
    for base, table in (("", c), ("deepspeed.", c.get("deepspeed_json"))):
        for name in ("fp16", "bf16", "bfloat16"):
            inner = table.get(name) if isinstance(table, Mapping) else None
            enabled = inner.get("enabled") if isinstance(inner, Mapping) else None
            if isinstance(enabled, str) and enabled.lower() in ("true", "false"):
                plain = enabled.lower()
                yield f"{base}{name}.enabled", f'is the text "{enabled}", which is true', f"{plain} without quotes"


LINTS = (
    Lint("batch-arithmetic", "deepspeedai/DeepSpeed#6914", _deepspeed_batch),
    Lint("zero-with-pipeline", "deepspeedai/DeepSpeed#3589", _zero_in_pipeline),
    Lint("offload-without-shards", "deepspeedai/DeepSpeed#1403", _offload_without_shards),
    Lint("quoted-truth", "hiyouga/LlamaFactory#3493", _quoted_truth),
)
