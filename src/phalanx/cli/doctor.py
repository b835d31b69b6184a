"""`phalanx doctor`: what this machine has, what is missing, and how to get it."""

from __future__ import annotations

from typing import Annotated

import typer

from phalanx.cli.command import command
from phalanx.cli.output import Display
from phalanx.cli.terminal import FAILED


@command
def doctor(output: Annotated[Display, "json"]) -> None:
    """Say what this machine has, what is missing and how to get it; exit code 1 if something needed is missing."""
    from phalanx.answers.doctor import look_around

    machine = look_around()
    output.show(machine)
    if not machine.good:
        raise typer.Exit(FAILED)
