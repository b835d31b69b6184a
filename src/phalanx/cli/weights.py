"""`phalanx weights import` and `phalanx weights export`: read and write Hugging Face weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.forms import Form, forms
from phalanx.cli.options import Json, Run
from phalanx.cli.terminal import announce, exit_on_error, print_json, require_torch

weights = forms(
    "Import Hugging Face weights as a run, or export a checkpoint for transformers.",
    {
        "import": Form(f"{__name__}:import_weights", "Import Hugging Face weights as a run."),
        "export": Form(f"{__name__}:export_weights", "Export a checkpoint for transformers."),
    },
)


def import_weights(
    source: Annotated[
        Path,
        typer.Argument(metavar="HF_DIR", help="Folder with a config.json and safetensors files.", show_default=False),
    ],
    name: Annotated[str, typer.Option(help="Name of the run; by default that of the folder.")] = "",
    as_json: Json = False,
) -> None:
    """Import Hugging Face weights as a run, for `generate`, `weights export` and train.weights."""
    with exit_on_error():
        require_torch()
        from phalanx.answers.weights import import_weights as run

        folder = run(source, name, announce)
        if as_json:
            print_json({"run": os.path.relpath(folder)})
        else:
            print(f"run: {os.path.relpath(folder)}/")


def export_weights(
    run: Run,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write; it must be empty or not exist yet.")],
    dtype: Annotated[
        str, typer.Option(help="Type of the weights: float32, bfloat16, float16 or float64; by default as stored.")
    ] = "",
    step: Annotated[int | None, typer.Option(help="Step of the checkpoint to export; by default the newest.")] = None,
    shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Largest size of one file.")] = "5GB",
    as_json: Json = False,
) -> None:
    """Export a checkpoint as a folder that Hugging Face's transformers loads."""
    with exit_on_error():
        require_torch()
        from phalanx.answers.weights import export_weights as write
        from phalanx.spec.byte_sizes import parse_bytes

        files = write(run, out, dtype, step, parse_bytes(shard_size, "--shard-size"), announce)
        if as_json:
            print_json({"folder": str(out), "files": [file.name for file in files]})
        else:
            print(
                f"{out}/: {', '.join(file.name for file in files[:3])}{' ...' if len(files) > 3 else ''}, config.json"
            )
