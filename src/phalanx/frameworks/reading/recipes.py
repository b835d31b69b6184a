"""Recipes that a framework ships and a launch line or a program names: their layout as tables.

A row of a folder's recipes.toml has the model's name, degrees, tokens of a sequence, sequences of a step and of a
micro-batch. `llama3_70b(num_nodes=2)` is a recipe with arguments."""

import re
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from phalanx.frameworks.tables import merge_tables
from phalanx.spec.model.presets import PRESETS

MODEL, RECIPE = "_model", "_recipe"
"""Keys of tables: the name of a recipe's model, and the name of a recipe that is not known."""
_DEGREES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "sp": "sequence_parallel",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}
_ARGUMENTS = {
    "num_nodes": "num_nodes",
    "num_gpus_per_node": "devices",
    **{f"{name.removesuffix('_model_parallel_size')}_parallelism": name for name in _DEGREES.values()},
}
"""Arguments of NeMo's recipes -> keys of its trainer and strategy."""
_TAKEN_AT_ONE = ("tp", "pp", "cp", "ep")


@cache
def _rows(folder: str) -> dict[str, dict[str, dict[str, Any]]]:
    path = Path(__file__).parents[1] / folder / "recipes.toml"
    return tomllib.loads(path.read_text()) if path.is_file() else {}


def recipe(folder: str, name: str, *words: str) -> tuple[dict[str, Any], str] | None:
    """Return the tables of a recipe with its source; None for an unknown name. `words`: words of the command before
    it, which choose between recipes of one name (`llama3_8b` with `sft` is `llama3_8b_sft_config`); NeMo's rows are
    recipes of pre-training."""
    called = re.fullmatch(r"([\w.]+)(?:\((.*)\))?", name.strip(), re.S)
    last = called[1].rpartition(".")[2] if called else ""
    for dialect, rows in _rows(folder).items():
        if (dialect == "nemo" and "pretrain" not in words) or (dialect != "nemo" and "llm" in words):  # of `nemo llm`
            continue
        row = next(filter(None, map(rows.get, (last, *(f"{last}_{word}_config" for word in words)))), None)
        if called and row is not None:
            own = _of_nemo(row) if dialect == "nemo" else _of_bridge(row)
            given = dict(re.findall(r"(\w+)\s*=\s*([\w.-]+)", called[2] or ""))
            return merge_tables(own, arguments(given)), str(row["source"])
    return None


def model_of(folder: str, name: str) -> str:
    """Return the model of the recipes whose names begin with `name`, else the model of that name; "": neither."""
    every = [pair for rows in _rows(folder).values() for pair in rows.items()]
    called = next((str(row["model"]) for title, row in every if f"{title}_".startswith(f"{name}_")), "")
    dashed = name.replace("_", "-")
    return called or (dashed if every and dashed in PRESETS else "")


def arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a recipe of NeMo's as tables."""
    trainer: dict[str, Any] = {}
    for name, value in given.items():
        if (key := _ARGUMENTS.get(name)) is not None:
            at = trainer if key in ("num_nodes", "devices") else trainer.setdefault("strategy", {})
            at[key] = int(value) if isinstance(value, str) and value.isdigit() else value
    return {"trainer": trainer} if trainer else {}


def _degrees(row: Mapping[str, Any]) -> dict[str, Any]:
    stated = dict.fromkeys(_TAKEN_AT_ONE, 1) | {"sp": False} | dict(row)
    return {key: stated[name] for name, key in _DEGREES.items() if name in stated}


def _of_nemo(row: Mapping[str, Any]) -> dict[str, Any]:
    """NeMo 2: trainer.strategy has the degrees, data the batch (nemo/collections/llm/recipes)."""
    trainer = {
        "num_nodes": row["nodes"],
        "devices": row["gpus"],
        "precision": "bf16-mixed",
        "strategy": _degrees(row),
    }
    data = {"seq_length": row["seq"], "global_batch_size": row["gbs"], "micro_batch_size": row["mbs"]}
    return {MODEL: row["model"], "trainer": trainer, "data": data}


def _of_bridge(row: Mapping[str, Any]) -> dict[str, Any]:
    """Megatron-Bridge: a ConfigContainer (src/megatron/bridge/recipes/common.py: _pretrain_common; fine-tuning takes
    micro-batches of one sequence, _sft_common:184)."""
    model = {**_degrees(row), "seq_length": row["seq"], "recompute_granularity": row.get("recompute")}
    model |= {"recompute_modules": row["modules"]} if "modules" in row else {}
    return {
        MODEL: row["model"],
        "model": model,
        "train": {"global_batch_size": row["gbs"], "micro_batch_size": row.get("mbs", 1)},
        "ddp": {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True},
        "mixed_precision": {"bf16": True, "grad_reduce_in_fp32": True},
    }
