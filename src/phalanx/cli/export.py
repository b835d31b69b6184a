"""`phalanx export`: a plan as the configuration of another framework, with what starts it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.command import command
from phalanx.cli.output import Display


@command
def export(
    plan: Annotated[Path, typer.Argument(metavar="PLAN.json", help="A plan, or a run's folder.", show_default=False)],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="FRAMEWORK",
            help="Framework, such as megatron or torchtitan; another word lists all that plans are written for.",
        ),
    ],
    output: Annotated[Display, "json"],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder to write; empty, or not there yet.")],
    launcher: Annotated[
        str,
        typer.Option(
            "--launcher",
            metavar="NAME",
            help="What starts the nodes: torchrun, slurm, pytorchjob, trainjob, jobset or skypilot.",
        ),
    ] = "torchrun",
) -> None:
    """Write a plan as another framework's configuration, ready to run once its blanks are filled in.

    What the framework cannot express is an error that names the field; nothing is left out.
    """
    from phalanx.answers.export import export as run

    output.show(run(plan, to, launcher, out))
