"""`phalanx import` and `phalanx export-weights`: Hugging Face weights, in and out."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.terminal import Json, announce, mistakes, print_json, require_torch


def import_weights(
    source: Annotated[
        Path, typer.Argument(metavar="HF_DIR", help="A folder with config.json and safetensors.", show_default=False)
    ],
    name: Annotated[str, typer.Option(help="Of the run; default the folder's own.")] = "",
    as_json: Json = False,
) -> None:
    """Bring Hugging Face weights into a run's folder: `generate`, `export-weights` and train.weights take it."""
    with mistakes():
        require_torch()
        from phalanx.commands import weights

        folder = weights.import_weights(source, name, announce)
        if as_json:
            print_json({"run": os.path.relpath(folder)})
        else:
            print(f"run: {os.path.relpath(folder)}/")


def export_weights(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, such as runs/quickstart.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder to write; it must not hold anything yet.")],
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16, float64; default as it is stored.")] = "",
    step: Annotated[int | None, typer.Option(help="Which checkpoint; default the newest.")] = None,
    shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Of one file at most.")] = "5GB",
    as_json: Json = False,
) -> None:
    """Write a checkpoint as a folder that Hugging Face's transformers loads."""
    with mistakes():
        require_torch()
        from phalanx.commands import weights
        from phalanx.spec.byte_sizes import parse_bytes

        files = weights.export_weights(run, out, dtype, step, parse_bytes(shard_size, "--shard-size"), announce)
        if as_json:
            print_json({"folder": str(out), "files": [file.name for file in files]})
        else:
            print(
                f"{out}/: {', '.join(file.name for file in files[:3])}{' ...' if len(files) > 3 else ''}, config.json"
            )
