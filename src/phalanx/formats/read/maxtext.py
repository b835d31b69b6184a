"""MaxText's YAML or its overrides on a command line (maxtext/configs/types.py): a degree per axis, inside a slice
(ici) and between slices (dcn); -1 takes what the others leave of the devices.

A batch is counted per device there: of a replica's micro-batch each of its tp x cp x pp devices has a part.
"""

from __future__ import annotations

import math
from typing import Any

from phalanx.formats.read.configuration import (
    Config,
    Configuration,
    Keys,
    Layout,
    count,
    divided,
    number,
    product,
    truth,
)

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
_PRODUCTS = {
    "fp8": "float8-delayed", "fp8_full": "float8-delayed", "te_fp8_delayedscaling": "float8-delayed",
    "te_fp8_currentscaling": "float8", "fp8_gpu": "float8", "nanoo_fp8": "float8", "te_mxfp8": "float8-mx",
}  # fmt: skip
"""`quantization` -> products; others are of integers, or of weights alone."""


def read(config: Config, world: int | None = None) -> Configuration:
    """Read the degrees: an axis that is not named has 1."""
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
    open_ = [axis for axis, degree in degrees.items() if degree is None]
    if world and len(open_) == 1 and open_[0] in ("fsdp", "data"):
        degrees[open_[0]] = divided(world, product(*(d for a, d in degrees.items() if a != open_[0])))
    each = number(keys.take("per_device_batch_size", "strategy.micro_batch"), 0.0)
    steps = count(keys.take("gradient_accumulation_steps", "accumulation"))
    remat = keys.take("remat_policy", "strategy.recompute")
    fsdp, data = degrees["fsdp"], degrees["data"]
    dp = fsdp * data if fsdp is not None and data is not None and world else None
    of_replica = each * world / dp if world and dp else 0.0
    micro = int(of_replica) if of_replica and of_replica.is_integer() else count(each) if not dp else None
    layout = Layout(
        world=world,
        dp=dp,
        tp=degrees["tp"],
        pp=degrees["pp"],
        cp=degrees["cp"],
        ep=degrees["ep"],
        zero=0 if fsdp == 1 and dp else None,
        shard=fsdp if data and data > 1 and fsdp and fsdp > 1 else None,
        schedule="gpipe" if (degrees["pp"] or 1) > 1 else None,
        micro_batch=micro,
        accumulation=steps,
        global_batch=product(micro, steps or 1, dp),
        seq=count(keys.take("max_target_length", "job.seq")),
        precision=_TYPES.get(str(keys.take("dtype", "job.precision"))),
        recompute=str(remat) if remat is not None else None,
    )
    name = str(keys.take("model_name", "model", "") or "")
    options = _options(keys, degrees["cp"])
    quiet, unmodelled, unknown = keys.rest("maxtext")
    return Configuration(
        "maxtext", "maxtext", layout, keys.understood, quiet, unmodelled, unknown, {}, name, options=options
    )


def _options(keys: Keys, cp: int | None) -> dict[str, Any]:
    """Return what is beyond the strategy."""
    options: dict[str, Any] = {
        "products": _PRODUCTS.get(str(keys.take("quantization", "options.products", ""))),
        "first_moment": {"bfloat16": "bfloat16"}.get(str(keys.take("mu_dtype", "options.first_moment", ""))),
        "mtp": count(keys.take("mtp_num_layers", "options.mtp")),
    }
    if truth(keys.take("optimizer_memory_host_offload", "options.optimizer_offload")):
        options["optimizer_offload"] = 1.0
    if truth(keys.take("parameter_memory_host_offload", "options.parameter_offload")):
        options["parameter_offload"] = True
    if cp and cp > 1 and keys.take("context_parallel_strategy", "options.context") == "all_gather":
        options["context"] = "all_gather"
    return {name: value for name, value in options.items() if value}
