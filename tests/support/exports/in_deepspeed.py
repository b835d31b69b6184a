# mypy: ignore-errors
"""Runs in the environment of DeepSpeed and transformers: DeepSpeedConfig on drawn files, and train.py with
transformers' own arguments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from protocol import answer, fields_of
from trainer_script import arguments_of


class _World:
    """The data-parallel world, as a model-parallel unit tells it."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def get_data_parallel_world_size(self) -> int:
        return self.ranks


def derive(case: dict[str, Any]) -> dict[str, Any]:
    """Read ds_config.json as DeepSpeed does; refuse keys that it would ignore."""
    from deepspeed.runtime import config as configs

    configs.dist.get_rank = lambda: 0
    table = json.loads(Path("ds_config.json").read_text())
    unknown = set(table) - KNOWN
    if unknown:
        raise KeyError(f"DeepSpeed would ignore {sorted(unknown)}")
    config = configs.DeepSpeedConfig(table, mpu=_World(case["expected"]["dp"]))
    parsed = arguments_of(case["world"])
    if parsed.deepspeed != "ds_config.json":
        raise ValueError("another file")
    rate = parsed.hf_deepspeed_config.config["optimizer"]["params"]["lr"]
    if rate != parsed.learning_rate:
        raise ValueError(f"DeepSpeed's optimizer starts with a learning rate of {rate}, not {parsed.learning_rate}")
    return {
        "zero": config.zero_optimization_stage,
        "micro_batch": parsed.per_device_train_batch_size,
        "micro_batches": config.gradient_accumulation_steps,
    }


KNOWN = {
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
    *("zero_optimization", "bf16", "fp16", "data_types", "communication_data_type", "optimizer"),
    *("tensor_parallel", "sequence_parallel_size"),
}
"""The top-level keys that DeepSpeed 0.19 reads (deepspeed/runtime/constants.py) and an export may have."""


def schema() -> dict[str, Any]:
    """Return the keys of the tables that exports have."""
    import deepspeed
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )

    keys = [
        *KNOWN,
        "data_types.grad_accum_dtype",
        "optimizer.type",
        "optimizer.params",
        "tensor_parallel.autotp_size",
    ]
    for prefix, cls in (
        ("zero_optimization.", DeepSpeedZeroConfig),
        ("zero_optimization.offload_optimizer.", DeepSpeedZeroOffloadOptimizerConfig),
        ("zero_optimization.offload_param.", DeepSpeedZeroOffloadParamConfig),
        ("bf16.", DeepSpeedBF16Config),
        ("fp16.", DeepSpeedFP16Config),
    ):
        keys += fields_of(cls, prefix)[0]
    return {"version": f"deepspeed {deepspeed.__version__}", "flags": [], "keys": sorted(keys), "choices": {}}


if __name__ == "__main__":
    answer(derive, schema)
