"""`phalanx train sweep`: every family of strategies trained for some steps, predicted and measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.command import command_with_progress
from phalanx.cli.output import Display, show_notes
from phalanx.cli.terminal import FAILED, INTERRUPTED, announce, require_torch


@command_with_progress
def sweep(
    job: Path, output: Annotated[Display, "json", "save"], steps: int = 20, overrides: list[str] | None = None
) -> None:
    """Train a job for some steps under one strategy of every family, and compare each run with its plan.

    The job's own strategy is not used. Ctrl-C ends it with what was measured.

    --steps: Steps of each run.
    """
    require_torch()
    from phalanx.answers.sweep import sheet
    from phalanx.answers.sweep import sweep as run
    from phalanx.answers.this_machine import require_this_machine
    from phalanx.report.style import counted
    from phalanx.spec.errors import InputError
    from phalanx.spec.files import job_file

    if steps < 3:
        raise InputError("--steps", steps, "is too few for a median without the first ones", "use at least 3")
    file = job_file.load(Path(job), overrides or ())
    show_notes(file.notes)
    require_this_machine(file)
    swept = run(file, steps, announce)
    for line, reason in swept.refused:
        announce(f"left out: {line}: {reason}")
    if swept.runs:
        from phalanx.answers.encode import plain
        from phalanx.answers.tables import Tables
        from phalanx.report.sweep import view

        table = sheet(swept, steps)
        output.put(lambda: view(swept, table), lambda: plain(Tables(None, (table,))))
    if swept.interrupted:
        announce(f"interrupted after {counted(len(swept.runs), 'run')}")
        raise typer.Exit(INTERRUPTED)
    if any(r.differs for r in swept.runs):
        raise typer.Exit(FAILED)
