# mypy: ignore-errors
"""Runs in the environment of accelerate: its loader, its launcher's validation, ParallelismConfig, and
train.py with transformers' own arguments."""

from __future__ import annotations

from typing import Any

from protocol import answer, fields_of
from trainer_script import arguments_of


def derive(case: dict[str, Any]) -> dict[str, Any]:
    """Read accelerate.yaml as `accelerate launch` does, keys of its nested tables included."""
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import launch_command_parser
    from accelerate.parallelism_config import ParallelismConfig

    config = load_config_from_file("accelerate.yaml")
    options = {a.dest for a in launch_command_parser()._actions}
    for table in (config.fsdp_config, config.parallelism_config):
        unknown = [key for key in table if key not in options]
        if unknown:
            raise KeyError(f"accelerate launch would ignore {unknown}")
    mesh = {k.removeprefix("parallelism_config_"): v for k, v in config.parallelism_config.items()}
    mesh.pop("cp_comm_strategy", None)
    if mesh:
        parallel = ParallelismConfig(**mesh)
        if parallel.total_size != config.num_processes:
            raise ValueError(f"a mesh of {parallel.total_size} on {config.num_processes} processes")
    parsed = arguments_of(case["world"])
    return {
        "world": config.num_processes,
        "micro_batch": parsed.per_device_train_batch_size,
        "micro_batches": parsed.gradient_accumulation_steps,
    }


def schema() -> dict[str, Any]:
    """Return the keys of the file, and of its nested tables as options of the launcher."""
    import accelerate
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.launch import launch_command_parser

    keys, choices = fields_of(ClusterConfig, "")
    for a in launch_command_parser()._actions:
        for table, start in (("fsdp_config", "fsdp_"), ("parallelism_config", "parallelism_config_")):
            if a.dest.startswith(start):
                keys.append(f"{table}.{a.dest}")
                if a.choices:
                    choices[f"{table}.{a.dest}"] = list(a.choices)
    return {"version": f"accelerate {accelerate.__version__}", "flags": [], "keys": sorted(keys), "choices": choices}


if __name__ == "__main__":
    answer(derive, schema)
