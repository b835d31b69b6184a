"""Options that the commands of serving share."""

from __future__ import annotations

from typing import Annotated

import typer

from phalanx.cli import options

Model = Annotated[
    str,
    typer.Option(
        "--model",
        metavar="NAME|config.json",
        help="Model: a preset or a Hugging Face config.json.",
        autocompletion=options.complete_model,
    ),
]
Cluster = Annotated[
    str,
    typer.Option(
        "--cluster",
        metavar="NAME|FILE.toml",
        help="Cluster: a preset (`phalanx presets clusters`) or a TOML file.",
        autocompletion=options.complete_cluster,
    ),
]
