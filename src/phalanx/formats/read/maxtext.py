"""MaxText's YAML or its overrides on a command line (maxtext/configs/types.py): a degree per axis, inside a slice
(ici) and between slices (dcn)."""

from __future__ import annotations

import math

from phalanx.formats.read.configuration import Config, Configuration, Keys, Layout, count

_TYPES = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}
_AXES = {
    "tp": ("tensor", "tensor_transpose", "tensor_sequence"),
    "pp": ("pipeline",),
    "cp": ("context", "context_autoregressive"),
    "ep": ("expert",),
    "fsdp": ("fsdp", "fsdp_transpose"),
    "data": ("data",),
    "sequence": ("sequence",),
    "autoregressive": ("autoregressive",),
}


def read(config: Config, world: int | None = None) -> Configuration:
    """Read the degrees: an axis that is not named has 1; -1 takes what the others leave of the devices."""
    keys = Keys(config)
    degrees: dict[str, int | None] = {}
    for axis, names in _AXES.items():
        factors = [
            keys.take(f"{where}_{name}_parallelism", f"strategy.{axis}", 1)
            for where in ("ici", "dcn")
            for name in names
        ]
        counted = [count(f) for f in factors]
        degrees[axis] = None if None in counted else math.prod(c for c in counted if c is not None)
    micro = keys.take("per_device_batch_size", "strategy.micro_batch")
    remat = keys.take("remat_policy", "strategy.recompute")
    fsdp, data = degrees["fsdp"], degrees["data"]
    dp = fsdp * data if fsdp is not None and data is not None and world else None
    layout = Layout(
        world=world,
        dp=dp,
        tp=degrees["tp"],
        pp=degrees["pp"],
        cp=degrees["cp"],
        ep=degrees["ep"],
        zero=None,
        micro_batch=count(micro),
        accumulation=count(keys.take("gradient_accumulation_steps", "accumulation")),
        seq=count(keys.take("max_target_length", "job.seq")),
        precision=_TYPES.get(str(keys.take("dtype", "job.precision"))),
        recompute=str(remat) if remat is not None else None,
    )
    name = str(keys.take("model_name", "model", "") or "")
    quiet, open_, unknown = keys.rest("maxtext")
    return Configuration("maxtext", "maxtext", layout, keys.understood, quiet, open_, unknown, {}, name)
