"""`phalanx parity`: compare a strategy with one process, in losses and gradients."""

from __future__ import annotations

from typing import Annotated

import typer

from phalanx.cli.command import command
from phalanx.cli.options import Job, Set, StrategyLine
from phalanx.cli.output import Display, show_notes
from phalanx.cli.terminal import FAILED, announce, require_torch


@command
def parity(
    job: Job,
    output: Annotated[Display, "json"],
    strategy: StrategyLine = None,
    steps: Annotated[int, typer.Option(help="Number of steps to compare.")] = 10,
    dtype: Annotated[str, typer.Option(help="Type to compute in: float64 or float32.")] = "float64",
    overrides: Set = None,
) -> None:
    """Compare losses, gradients and gradient norms of a strategy with one process, under SGD and AdamW."""
    require_torch()
    from phalanx.answers.parity import parity as compare
    from phalanx.answers.plan import with_strategy
    from phalanx.spec.files import job_file

    file = with_strategy(job_file.load(job, overrides or ()), strategy)
    show_notes(file.notes)
    result = compare(file, steps, dtype, announce)
    output.show(result)
    if not result.passed:
        raise typer.Exit(FAILED)
