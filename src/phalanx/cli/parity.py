"""`phalanx parity`: compare a strategy with one process, in losses and gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.command import command
from phalanx.cli.output import Display, show_notes
from phalanx.cli.terminal import FAILED, announce, require_torch


@command
def parity(
    output: Annotated[Display, "json"],
    words: list[str] | None = None,
    strategy: str | None = None,
    steps: int = 10,
    dtype: str = "float64",
    overrides: list[str] | None = None,
    program: Path | None = None,
    ranks: int | None = None,
) -> None:
    """Compare losses, gradients and gradient norms of a strategy with one process, under SGD and AdamW.

    With --program the first step of your own module is compared, on your own batches: `phalanx parity --program
    train.py --ranks 2 -- ARGUMENTS`.

    words JOB.toml: The job file; with --program, the program's arguments.
    --steps: Number of steps to compare.
    --dtype: Type to compute in: float64 or float32.
    --program TRAIN.py: Run a program that trains by phalanx.parallelize, for one step.
    --ranks: Ranks of the program.
    """
    require_torch()
    if program is not None:
        _of_program(program, ranks, words or [], output, [strategy, *(overrides or ())])
        return
    job = _job(words, ranks)
    from phalanx.answers.parity import parity as compare
    from phalanx.answers.plan import with_strategy
    from phalanx.spec.files import job_file

    file = with_strategy(job_file.load(job, overrides or ()), strategy)
    show_notes(file.notes)
    result = compare(file, steps, dtype, announce)
    output.show(result)
    if not result.passed:
        raise typer.Exit(FAILED)


def _job(words: list[str] | None, ranks: int | None) -> Path:
    from phalanx.spec.errors import InputError

    if ranks is not None:
        raise InputError("--ranks", ranks, "is of --program: a job's strategy says how many there are")
    if not words or len(words) > 1:
        raise InputError("JOB.toml", " ".join(words) if words else None, "must be one file", "or say --program")
    return Path(words[0])


def _of_program(
    program: Path, ranks: int | None, arguments: list[str], output: Display, of_jobs: list[str | None]
) -> None:
    from phalanx.answers.parity import program_parity
    from phalanx.spec.errors import InputError

    for value in of_jobs:
        if value is not None:
            raise InputError("--program", str(program), f"has its own strategy and settings, not {value}")
    if ranks is None:
        raise InputError("--ranks", None, "is missing", "say as many as the program's strategy has, as --ranks 2")
    result = program_parity(program, ranks, arguments)
    output.show(result)
    if not result.passed:
        raise typer.Exit(FAILED)
