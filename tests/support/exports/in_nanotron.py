# mypy: ignore-errors
"""Runs in the environment of nanotron (from its sources): get_config_from_file, which knows every key."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

from protocol import answer


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

    text = Path("config.yaml").read_text().replace("FILL-IN-TRAIN_ITERS", "100").replace("FILL-IN-LR", "1.0e-4")
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

if __name__ == "__main__":
    _without_kernels()
    answer(derive)
