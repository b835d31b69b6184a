# mypy: ignore-errors
"""Runs in the environment of torchtitan: its ConfigManager, as `torchtitan.train` starts."""

from __future__ import annotations

import importlib
import math
import sys
from pathlib import Path
from typing import Any

from protocol import answer, fields_of


def derive(case: dict[str, Any]) -> dict[str, Any]:
    """Load the module; return what its trainer derives of the mesh and the batch."""
    from torchtitan.config import ConfigManager
    from torchtitan.distributed.pipeline_parallel import get_schedule_class

    for module in list(sys.modules.values()):  # a GPU of the newest generation is pretended
        if hasattr(module, "has_cuda_capability"):
            module.has_cuda_capability = lambda *_: True
    sys.modules.pop("phalanx_plan", None)
    importlib.invalidate_caches()
    sys.path.insert(0, folder := str(Path.cwd()))
    try:
        c = ConfigManager().parse_args(["--module", "phalanx_plan", "--config", "plan"])
    finally:
        sys.path.remove(folder)
    p, t = c.parallelism, c.training
    dp = p.data_parallel_replicate_degree * p.data_parallel_shard_degree
    parts = p.module_fqns_per_model_part or [[]]
    if p.pipeline_parallel_degree > 1:
        get_schedule_class(p.pipeline_parallel_schedule)
        layers = len(c.model_spec.model.layers)
        held = [name for part in parts for name in part if name.startswith("layers.")]
        if held != [f"layers.{i}" for i in range(layers)]:
            raise ValueError(f"{len(held)} layers of {layers} are on a stage")
    micro = p.pipeline_parallel_microbatch_size if p.pipeline_parallel_degree > 1 else t.local_batch_size
    degrees = (dp, p.tensor_parallel_degree, p.pipeline_parallel_degree, p.context_parallel_degree)
    return {
        "world": math.prod(degrees),
        "dp": dp,
        "virtual": len(parts) // p.pipeline_parallel_degree if p.pipeline_parallel_degree > 1 else 1,
        "micro_batch": micro,
        "micro_batches": t.global_batch_size // (micro * dp),
    }


def schema() -> dict[str, Any]:
    """Return the keys of the sections that exports have."""
    from importlib.metadata import version

    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig

    keys: list[str] = []
    choices: dict[str, list[Any]] = {}
    for prefix, cls in (
        ("parallelism.", ParallelismConfig),
        ("training.", TrainingConfig),
        ("compile.", CompileConfig),
    ):
        more, some = fields_of(cls, prefix)
        keys += more
        choices |= some
    return {"version": f"torchtitan {version('torchtitan')}", "flags": [], "keys": sorted(keys), "choices": choices}


if __name__ == "__main__":
    answer(derive, schema)
