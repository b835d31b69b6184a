"""Options of `accelerate launch` merged into its file: a flag overrides the file (accelerate/commands/launch.py:
`_validate_launch_command`)."""

import re
from collections.abc import Mapping
from typing import Any

from phalanx.frameworks.configuration import Partial
from phalanx.frameworks.tables import merge_tables

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
"""Options that are keys of deepspeed_config in the file."""
_TRAINERS = ("fsdp_config", "fsdp_min_num_params", "fsdp_transformer_layer_cls_to_wrap")
"""Arguments of a Trainer that begin like options of the launcher."""
_PROCESS_KEYS = (
    "num_processes",
    "num_machines",
    "machine_rank",
    "main_process_ip",
    "main_process_port",
    "mixed_precision",
)
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
REVISION = "huggingface/trl f2cd5771"
"""Whose files they are: trl/accelerate_configs and examples/accelerate_configs, all in bf16 and of 8 processes. What
huggingface/open-r1 1416fa0 has under recipes/accelerate_configs is the same."""
_EXAMPLE = re.compile(r"(?:.*/)?(?:examples|trl|recipes)/accelerate_configs/(?:deepspeed_)?(\w+)\.ya?ml")


def shipped(name: str) -> dict[str, Any] | None:
    """Return the tables of a file that TRL ships, by its name or its path in the repository; None for others."""
    by_class = {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    file = _SHIPPED.get(match[1] if (match := _EXAMPLE.fullmatch(name)) else name)
    if file is None:
        return None
    file = {"num_processes": 8, "mixed_precision": "bf16", **file}
    return file | ({"fsdp_config": by_class | file["fsdp_config"]} if "fsdp_config" in file else {})


def split_arguments(args: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Split the arguments of a TRL command into the Trainer's, the launcher's options, and the name of the launcher's
    file. TRL hands the launcher what its own parser does not know (trl/cli/commands/training.py)."""
    rest: dict[str, Any] = {}
    options: dict[str, Any] = {}
    for name, value in args.items():
        plain = name.replace("-", "_")
        own = plain in (*_PROCESS_KEYS, *_ENGINES, *_DEEPSPEED) and plain != "gradient_accumulation_steps"
        own = own or (plain.startswith(("fsdp_", "parallelism_config_")) and plain not in _TRAINERS)
        (options if own else rest)[plain if own else name] = value
    return rest, options, str(rest.pop("accelerate_config", "") or "")


def tables(file: Mapping[str, Any], options: Mapping[str, Any], missing: bool = False) -> dict[str, Any]:
    """Return accelerate's file with options of the command line in place of its values. `missing`: the file was not
    given, so the result is Partial."""
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
    return (Partial if missing else dict)(merge_tables(file, over))
