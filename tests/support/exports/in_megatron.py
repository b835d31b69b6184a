"""Runs in the environment of megatron-core: its own argument parser and validate_args on drawn command lines.

Reads JSON lines {"arguments": [...], "world": n, "environment": {...}}, prints one line each: "" or what is wrong.
A GPU and Transformer Engine are pretended: validate_args asks for their capability and version.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
from typing import Any

import torch


class _Properties:
    name, major, minor, total_memory, multi_processor_count = "NVIDIA H100", 9, 0, 80 * 2**30, 132


def main() -> None:
    torch.cuda.get_device_capability = lambda *_: (9, 0)  # type: ignore[assignment]
    torch.cuda.get_device_properties = lambda *_: _Properties  # type: ignore[assignment]
    out, sys.stdout = sys.stdout, sys.stderr  # imports print
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.transformer import transformer_config
    from megatron.training import arguments

    arguments.get_device_arch_version = lambda: 9  # type: ignore[attr-defined]
    for module in (arguments, transformer_config):  # as in NVIDIA's container
        module.is_te_min_version = lambda *_, **__: True  # type: ignore[attr-defined]
    rope_utils.fused_apply_rotary_pos_emb = print
    from megatron.core.transformer.moe import moe_utils

    for name in [n for n in vars(moe_utils) if n.startswith("fused_")]:
        setattr(moe_utils, name, print)
    for line in sys.stdin:
        case = json.loads(line)
        print(json.dumps(_wrong(arguments, case)), file=out, flush=True)


def _wrong(arguments: Any, case: dict[str, Any]) -> str:
    for name in ("CUDA_DEVICE_MAX_CONNECTIONS",):
        os.environ.pop(name, None)
    os.environ.update(case["environment"])
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            parser = argparse.ArgumentParser(allow_abbrev=False)
            arguments.add_megatron_arguments(parser)
            args = parser.parse_args(case["arguments"])
            args.world_size, args.rank, args.local_rank = case["world"], 0, 0
            arguments.validate_args(args)
            config = arguments.core_transformer_config_from_args(args)
            if config.pipeline_model_parallel_layout is not None:
                config.pipeline_model_parallel_layout.validate_layer_layout(args.num_layers, args.mtp_num_layers)
    except SystemExit:
        return said.getvalue().strip().splitlines()[-1]
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    expected = case["expected"]
    found = {name: getattr(args, name) for name in expected}
    differs = {n: (v, expected[n]) for n, v in found.items() if v != expected[n]}
    return f"derives {differs}" if differs else ""


if __name__ == "__main__":
    main()
