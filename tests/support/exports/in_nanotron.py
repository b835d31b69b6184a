# mypy: ignore-errors
"""Runs in the environment of nanotron (from its sources): get_config_from_file, which knows every key."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

from protocol import answer, fields_of


def _without_kernels() -> None:
    """Pretend the packages of compiled kernels and of data that reading a configuration does not need."""
    for name in PRETENDED:
        try:
            __import__(name)
        except ImportError:
            module = types.ModuleType(name)
            module.__getattr__ = lambda _, n=name: MagicMock(name=n)
            module.__path__ = []
            sys.modules[name] = module


def derive(case: dict[str, Any]) -> dict[str, Any]:
    """Read config.yaml with its blanks filled in."""
    from nanotron.config import get_config_from_file

    text = Path("config.yaml").read_text()
    for name, number in (("TRAIN_ITERS", "100"), ("MIN_LR", "1.0e-5"), ("LR", "1.0e-4")):
        text = text.replace(f"FILL-IN-{name}", number)
    Path("config.yaml").write_text(text)
    config = get_config_from_file("config.yaml")
    p, t = config.parallelism, config.tokens
    return {
        "world": p.dp * p.tp * p.pp * p.context_parallel_size,
        "dp": p.dp,
        "zero": config.optimizer.zero_stage,
        "micro_batch": t.micro_batch_size,
        "micro_batches": t.batch_accumulation_per_replica,
    }


PRETENDED = (
    *("flash_attn", "flash_attn.flash_attn_interface", "flash_attn.layers", "flash_attn.layers.rotary"),
    *("flash_attn.modules", "flash_attn.modules.mha", "flash_attn.ops", "flash_attn.ops.triton"),
    *("flash_attn.ops.triton.layer_norm", "flash_attn.bert_padding", "grouped_gemm", "grouped_gemm.ops"),
    *(
        "triton",
        "triton.language",
        "triton.language.math",
        "functorch",
        "functorch.dim",
        "datatrove",
        "datatrove.utils",
        "datatrove.utils.dataset",
        "dacite",
        "wandb",
    ),
)


def schema() -> dict[str, Any]:
    """Return the keys of all sections that exports have."""
    from nanotron.config import config as c
    from nanotron.config.models_config import LlamaConfig, Qwen2Config

    keys: list[str] = []
    for prefix, cls in (
        ("", c.Config),
        ("general.", c.GeneralArgs),
        ("parallelism.", c.ParallelismArgs),
        ("tokens.", c.TokensArgs),
        ("optimizer.", c.OptimizerArgs),
        ("optimizer.optimizer_factory.", c.AdamWOptimizerArgs),
        ("optimizer.learning_rate_scheduler.", c.LRSchedulerArgs),
        ("model.", c.ModelArgs),
        ("model.init_method.", c.RandomInit),
        ("model.model_config.", LlamaConfig),
        ("model.model_config.", Qwen2Config),
        ("tokenizer.", c.TokenizerArgs),
        ("checkpoints.", c.CheckpointsArgs),
    ):
        keys += fields_of(cls, prefix)[0]
    return {"version": "nanotron 0.4 (2411b02)", "flags": [], "keys": sorted(set(keys)), "choices": {}}


if __name__ == "__main__":
    _without_kernels()
    answer(derive, schema)
