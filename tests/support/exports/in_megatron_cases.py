# mypy: ignore-errors
"""Runs in the environment of megatron-core: what its validate_args derives of Megatron-LM's own argument sets.

    .stacks/megatron/bin/python tests/support/exports/in_megatron_cases.py > tests/frameworks/data/validate_args.json

Each set is given the first world of a list that it accepts; for a set that none suits, the reason is recorded."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import lzma
import os
import sys
from pathlib import Path
from typing import Any

with contextlib.redirect_stdout(sys.stderr):  # imports print
    import in_megatron

    ARGUMENTS = in_megatron._prepared()
DATA = Path(__file__).parents[2] / "frameworks/data/configurations.json.xz"
WORLDS = (8, 16, 32, 64, 128, 256, 512, 1024)


def words(args: dict[str, Any]) -> list[str]:
    """Return a set's flags as words; lists stand in one text there."""
    result = []
    for flag, value in args.items():
        if value is True:
            result.append(flag)
        elif value is not False and value is not None:
            text = str(value)
            several = flag == "--hierarchical-context-parallel-sizes" or (text[:1] == "[" and text[1:2].isalpha())
            result += [flag, *(text.strip("[]").split() if several else [text])]
    return result


def derive(args: dict[str, Any], world: int) -> dict[str, Any]:
    """Parse and validate a set; what its tests lack of a data set and a checkpoint's format is given."""
    sharded = "--use-megatron-fsdp" in args
    queues = "8" if sharded or "--use-torch-fsdp2" in args else "1"
    os.environ |= {"CUDA_DEVICE_MAX_CONNECTIONS": queues, "NVTE_CPU_OFFLOAD_V1": "1"}
    more = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "50000"]
    more += ["--ckpt-format", "fsdp_dtensor"] if sharded else []
    parser = argparse.ArgumentParser(allow_abbrev=False)
    ARGUMENTS.add_megatron_arguments(parser)
    a, _ = parser.parse_known_args(words(args) + more)  # flags of inference and export are other parsers'
    a.world_size, a.rank, a.local_rank = world, 0, 0
    ARGUMENTS.validate_args(a)
    return {
        "world": world,
        "dp": a.data_parallel_size,
        "tp": a.tensor_model_parallel_size,
        "pp": a.pipeline_model_parallel_size,
        "cp": a.context_parallel_size,
        "ep": a.expert_model_parallel_size,
        "etp": a.expert_tensor_parallel_size if a.num_experts else None,
        "virtual": a.virtual_pipeline_model_parallel_size or 1,
        "global_batch": a.global_batch_size,
        "accumulation": a.global_batch_size // (a.micro_batch_size * a.data_parallel_size),
        "sp": bool(a.sequence_parallel),
        "distributed_optimizer": bool(a.use_distributed_optimizer),
        "recompute": a.recompute_granularity or "none",
        "ffn": a.ffn_hidden_size,
    }


def main() -> None:
    """Print what follows from every set, by name."""
    result = {}
    for case in json.loads(lzma.decompress(DATA.read_bytes()))["megatron"]:
        axes = ("tensor-model", "pipeline-model", "context")
        inner = 1
        for axis in axes:
            inner *= case["args"].get(f"--{axis}-parallel-size", 1)
        reason = ""
        for world in (w for w in WORLDS if w % inner == 0):
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    result[case["name"]] = derive(case["args"], world)
                break
            except (Exception, SystemExit) as error:
                reason = reason or f"{type(error).__name__}: {error}"
        else:
            result[case["name"]] = {"refused": reason}
    print(json.dumps(result, separators=(",", ":")))


if __name__ == "__main__":
    main()
