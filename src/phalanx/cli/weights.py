"""`phalanx weights import` and `phalanx weights export`: read and write Hugging Face weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from phalanx.cli.command import command
from phalanx.cli.forms import Form, forms
from phalanx.cli.output import Display
from phalanx.cli.terminal import announce, require_torch

weights = forms(
    "Import Hugging Face weights as a run, or export a checkpoint for transformers.",
    {
        "import": Form(f"{__name__}:import_weights", "Import Hugging Face weights as a run."),
        "export": Form(f"{__name__}:export_weights", "Export a checkpoint for transformers."),
    },
)


@command
def import_weights(output: Annotated[Display, "json"], source: Path, name: str = "") -> None:
    """Import Hugging Face weights as a run, for `generate`, `weights export` and train.weights.

    source HF_DIR: Folder with a config.json and safetensors files.
    --name: Name of the run; by default that of the folder.
    """
    require_torch()
    from phalanx.answers.weights import import_weights as run

    output.show(run(source, name, announce))


@command
def export_weights(
    output: Annotated[Display, "json"],
    run: Path,
    out: Path,
    dtype: str = "",
    step: int | None = None,
    shard_size: str = "5GB",
) -> None:
    """Export a checkpoint as a folder that Hugging Face's transformers loads.

    --out DIR: Folder to write; it must be empty or not exist yet.
    --dtype: Type of the weights: float32, bfloat16, float16 or float64; by default as stored.
    --step: Step of the checkpoint to export; by default the newest.
    --shard-size SIZE: Largest size of one file.
    """
    require_torch()
    from phalanx.answers.weights import export_weights as write
    from phalanx.spec.byte_sizes import parse_bytes

    output.show(write(run, out, dtype, step, parse_bytes(shard_size, "--shard-size"), announce))
