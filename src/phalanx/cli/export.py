"""`phalanx export`: a plan as the configuration of another framework, with what starts it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from phalanx.cli.command import command
from phalanx.cli.output import Display


@command
def export(plan: Path, to: str, output: Annotated[Display, "json"], out: Path, launcher: str = "torchrun") -> None:
    """Write a plan as another framework's configuration, ready to run once its blanks are filled in.

    What the framework cannot express is an error that names the field; nothing is left out.

    plan PLAN.json: A plan, or a run's folder.
    --to FRAMEWORK: Framework, such as megatron or torchtitan; another word lists all that plans are written for.
    --out DIR: Folder to write; empty, or not there yet.
    --launcher NAME: What starts the nodes: torchrun, slurm, pytorchjob, trainjob, jobset or skypilot.
    """
    from phalanx.answers.export import export as run

    output.show(run(plan, to, launcher, out))
