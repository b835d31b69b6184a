# mypy: ignore-errors
"""Runs beside the sources of Megatron-Bridge and of the Megatron-LM that it pins: the exported pretrain_plan.py
builds its ConfigContainer, which validates itself. Transformer Engine and what else needs a GPU is pretended."""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, get_args, get_origin, get_type_hints

from protocol import answer, pretend

pretend("transformer_engine", "transformer_engine_torch", "nvidia_resiliency_ext", "modelopt", "wandb", "datasets")
pretend("megatron.energon", "nltk", "timm", "open_clip", "mlflow", "PIL", "tensorboard", "google")


def derive(case: dict[str, Any]) -> dict[str, Any]:
    """Build and validate; return what Megatron derives."""
    _a_gpu()
    Path("PRETRAINED").mkdir()  # an adapter's checkpoint has to be there
    os.environ |= {"WORLD_SIZE": str(case["world"]), "RANK": "0", "LOCAL_RANK": "0"}
    sys.modules.pop("pretrain_plan", None)
    importlib.invalidate_caches()
    sys.path.insert(0, folder := str(Path.cwd()))
    try:
        c = importlib.import_module("pretrain_plan").configuration()
    finally:
        sys.path.remove(folder)
    c.mixed_precision.finalize()
    c.mixed_precision.setup(c.model, c.optimizer, c.ddp)
    c.comm_overlap.finalize()
    c.validate()
    _scheduler(c)
    m, dp = c.model, c.data_parallel_size
    degrees = (m.tensor_model_parallel_size, m.pipeline_model_parallel_size, m.context_parallel_size)
    return {
        **dict(zip(("tp", "pp", "cp"), degrees, strict=True)),
        "dp": dp,
        "virtual": m.virtual_pipeline_model_parallel_size or 1,
        "micro_batch": c.train.micro_batch_size,
        "micro_batches": c.train.global_batch_size // (c.train.micro_batch_size * dp),
        "zero": int(c.ddp.use_distributed_optimizer),
    }


def _scheduler(c: Any) -> None:
    """Build what sets the learning rate, as training does after the model; it does not check before."""
    from megatron.bridge.training.optim import _get_scheduler

    group = {"lr": 0.0, "wd_mult": 1.0, "lr_mult": 1.0, "weight_decay": 0.0}
    _get_scheduler(c.optimizer, c.scheduler, SimpleNamespace(param_groups=[group]))


def _a_gpu() -> None:
    """Pretend a GPU that has every dispatcher, and the optimizer of Transformer Engine with its narrow state."""
    import torch
    import transformer_engine.pytorch.optimizers as optimizers

    def adam(master_weight_dtype, exp_avg_dtype, exp_avg_sq_dtype, use_decoupled_grad, store_param_remainders):
        raise NotImplementedError

    optimizers.FusedAdam = adam
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(major=9, minor=0, name="NVIDIA H100")


def schema() -> dict[str, Any]:
    """Return the keys of every part, and the words of those that have a list of them."""
    sys.path.insert(0, str(Path.cwd()))
    from megatron.bridge.models import GPTModelProvider
    from megatron.bridge.models.mla_provider import MLAModelProvider
    from megatron.bridge.peft.lora import LoRA
    from megatron.bridge.training import config as parts
    from megatron.bridge.training.comm_overlap import CommOverlapConfig
    from megatron.bridge.training.mixed_precision import MixedPrecisionConfig
    from megatron.bridge.training.tokenizers.config import TokenizerConfig

    keys: set[str] = set()
    choices: dict[str, list[Any]] = {}
    for section, cls in (
        ("model", GPTModelProvider),
        ("model", MLAModelProvider),
        ("train", parts.TrainingConfig),
        ("validation", parts.ValidationConfig),
        ("optimizer", parts.OptimizerConfig),
        ("scheduler", parts.SchedulerConfig),
        ("ddp", parts.DistributedDataParallelConfig),
        ("dist", parts.DistributedInitConfig),
        ("dataset", parts.GPTDatasetConfig),
        ("logger", parts.LoggerConfig),
        ("tokenizer", TokenizerConfig),
        ("checkpoint", parts.CheckpointConfig),
        ("mixed_precision", MixedPrecisionConfig),
        ("comm_overlap", CommOverlapConfig),
        ("peft", LoRA),
    ):
        hints = get_type_hints(cls)
        for f in fields(cls):
            if f.name.startswith("_"):
                continue
            keys.add(f"{section}.{f.name}")
            kinds = [k for k in (hints[f.name], *get_args(hints[f.name])) if get_origin(k) is Literal]
            if kinds and "list" not in str(hints[f.name]).lower():
                choices[f"{section}.{f.name}"] = [str(v) for k in kinds for v in get_args(k)]
    return {"version": "Megatron-Bridge 51885cf", "flags": [], "keys": sorted(keys), "choices": choices}


if __name__ == "__main__":
    answer(derive, schema)
