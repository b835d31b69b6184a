"""Options of `accelerate launch` over its file, as the file would have them (accelerate/commands/launch.py:
`_validate_launch_command`: a flag that is given wins)."""

import re
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
_TRAINERS = ("fsdp_config", "fsdp_min_num_params", "fsdp_transformer_layer_cls_to_wrap")
"""Arguments of a Trainer that begin as options do."""
_OWN = ("num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port", "mixed_precision")
_NONE = {"offload_optimizer_device": "none", "offload_param_device": "none"}
_SHIPPED: dict[str, dict[str, Any]] = {
    "single_gpu": {"distributed_type": "NO", "num_processes": 1},
    "multi_gpu": {"distributed_type": "MULTI_GPU"},
    "fsdp1": {"distributed_type": "FSDP", "fsdp_config": {"fsdp_reshard_after_forward": "FULL_SHARD"}},
    "fsdp2": {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": True}},
    **{
        f"zero{stage}": {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": stage, **_NONE}}
        for stage in (1, 2, 3)
    },
}
BY = "huggingface/trl f2cd5771"
"""Whose files they are: trl/accelerate_configs and examples/accelerate_configs, all in bf16 and of 8 processes. What
huggingface/open-r1 1416fa0 has under recipes/accelerate_configs is the same."""
_EXAMPLE = re.compile(r"(?:.*/)?(?:examples|trl|recipes)/accelerate_configs/(?:deepspeed_)?(\w+)\.ya?ml")


def shipped(name: str) -> dict[str, Any] | None:
    """Return the file that TRL ships under a name, or at a path of its repository; None for another."""
    by_class = {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    file = _SHIPPED.get(match[1] if (match := _EXAMPLE.fullmatch(name)) else name)
    if file is None:
        return None
    file = {"num_processes": 8, "mixed_precision": "bf16", **file}
    return file | ({"fsdp_config": by_class | file["fsdp_config"]} if "fsdp_config" in file else {})


def taken(args: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Return arguments of a Trainer, the options of this launcher among them, and the name of its file, as TRL parts
    them: what its parser does not know is the launcher's (trl/cli/commands/training.py)."""
    rest: dict[str, Any] = {}
    options: dict[str, Any] = {}
    for name, value in args.items():
        plain = name.replace("-", "_")
        own = plain in (*_OWN, *_ENGINES, *_DEEPSPEED) and plain != "gradient_accumulation_steps"
        own = own or (plain.startswith(("fsdp_", "parallelism_config_")) and plain not in _TRAINERS)
        (options if own else rest)[plain if own else name] = value
    return rest, options, str(rest.pop("accelerate_config", "") or "")


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
