# mypy: ignore-errors
"""Runs in the environment of megatron-core: its own argument parser and validate_args on drawn command lines.

A GPU and Transformer Engine are pretended: validate_args asks for their capability and version.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import Any

import torch
from protocol import answer


class _Properties:
    name, major, minor, total_memory, multi_processor_count = "NVIDIA H100", 9, 0, 80 * 2**30, 132


_KERNELS = ("permute", "permute_with_probs", "sort_chunks_by_index", "sort_chunks_by_index_with_probs", "unpermute")
_FUSED = tuple(f"fused_{name}" for name in _KERNELS)
"""What 0.14 imports only where Transformer Engine is installed."""


def _prepared() -> Any:
    """Import Megatron-LM's arguments as they are in NVIDIA's container."""
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.get_device_properties = lambda *_: _Properties
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.transformer import transformer_config
    from megatron.core.transformer.moe import moe_utils
    from megatron.training import arguments

    arguments.get_device_arch_version = lambda: 9
    for module in (arguments, transformer_config):
        module.is_te_min_version = lambda *_, **__: True
    rope_utils.fused_apply_rotary_pos_emb = print
    for name in {*_FUSED, *(n for n in vars(moe_utils) if n.startswith("fused_"))}:
        setattr(moe_utils, name, print)
    return arguments


def derive(case: dict[str, Any]) -> dict[str, Any]:
    """Parse and validate a command line; return what validate_args derives."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    ARGUMENTS.add_megatron_arguments(parser)
    args = parser.parse_args(case["arguments"])
    args.world_size, args.rank, args.local_rank = case["world"], 0, 0
    ARGUMENTS.validate_args(args)
    config = ARGUMENTS.core_transformer_config_from_args(args)
    if config.pipeline_model_parallel_layout is not None:
        config.pipeline_model_parallel_layout.validate_layer_layout(args.num_layers, args.mtp_num_layers)
    return {
        "dp": args.data_parallel_size,
        "virtual": args.virtual_pipeline_model_parallel_size or 1,
        "micro_batches": args.global_batch_size // (args.micro_batch_size * args.data_parallel_size),
    }


def schema() -> dict[str, Any]:
    """Return every argument of the parser."""
    from megatron.core.package_info import __version__

    parser = argparse.ArgumentParser(allow_abbrev=False)
    ARGUMENTS.add_megatron_arguments(parser)
    names = [(flag, a) for a in parser._actions for flag in a.option_strings if flag.startswith("--")]
    choices = {flag: list(a.choices) for flag, a in names if a.choices}
    return {
        "version": f"megatron-core {__version__}",
        "flags": sorted(flag for flag, a in names if a.nargs == 0),
        "keys": sorted(flag for flag, a in names if a.nargs != 0),
        "choices": {k: v for k, v in choices.items() if all(isinstance(x, str | int) for x in v)},
    }


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):  # imports print
        ARGUMENTS = _prepared()
    answer(derive, schema)
