"""Options of `accelerate launch` over its file, as the file would have them (accelerate/commands/launch.py:
`_validate_launch_command`: a flag that is given wins)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phalanx.frameworks.configuration import Partial
from phalanx.frameworks.tables import overlaid

_ENGINES = {
    "use_deepspeed": "DEEPSPEED",
    "use_fsdp": "FSDP",
    "use_megatron_lm": "MEGATRON_LM",
    "multi_gpu": "MULTI_GPU",
}
_DEEPSPEED = (
    "zero_stage", "offload_optimizer_device", "offload_param_device", "offload_optimizer_nvme_path",
    "gradient_clipping",
    "offload_param_nvme_path", "gradient_accumulation_steps", "zero3_init_flag", "zero3_save_16bit_model",
    "deepspeed_hostfile", "deepspeed_multinode_launcher", "deepspeed_config_file", "deepspeed_moe_layer_cls_names",
)  # fmt: skip
"""Options that stand under deepspeed_config in the file."""


def tables(file: Mapping[str, Any], options: Mapping[str, Any], missing: bool = False) -> dict[str, Any]:
    """Return accelerate's file with the options of its command line laid over it. `missing`: the file is not here."""
    over: dict[str, Any] = {}
    for name, value in options.items():
        if name in _ENGINES:
            over["distributed_type"] = _ENGINES[name]
        elif name in _DEEPSPEED:
            over.setdefault("deepspeed_config", {})[name] = value
        elif name.startswith("fsdp_"):
            over.setdefault("fsdp_config", {})[name] = value
        elif name.startswith("parallelism_config_"):
            over.setdefault("parallelism_config", {})[name] = value
        elif name in ("num_processes", "num_machines", "mixed_precision", "gradient_accumulation_steps"):
            over[name] = value
    return (Partial if missing else dict)(overlaid(file, over))
