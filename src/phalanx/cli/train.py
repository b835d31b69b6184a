"""`phalanx train`: plan a job, train it, and compare the run with its plan.

phalanx train JOB.toml          the job's strategy, or the best one
phalanx train sweep JOB.toml    some steps under one strategy of every family
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from phalanx.cli.command import command_with_progress
from phalanx.cli.forms import Form, forms
from phalanx.cli.output import Display, show_notes, show_view
from phalanx.cli.terminal import DONE, FAILED, INTERRUPTED, announce, require_torch

if TYPE_CHECKING:
    from phalanx.answers.plan import Decision


train = forms(
    "Train a job, or a plan of one, and compare the run with what the plan predicted.",
    {
        "job": Form(f"{__name__}:of_job", "A job, or a plan of one, to its last step."),
        "sweep": Form("phalanx.cli.sweep:sweep", "A few steps under one strategy of every family."),
    },
    lambda _: "job",
    default="job",
)


@command_with_progress
def of_job(
    output: Annotated[Display, "json"],
    job: Path | None = None,
    strategy: str | None = None,
    overrides: list[str] | None = None,
    resume: bool = False,
    max_restarts: int = 0,
) -> None:
    """Train a job, or a plan of one, and compare the run with what the plan predicted.

    job JOB.toml|plan.json: A job file, or a plan of one.
    --resume: Continue from the newest checkpoint; without a job file, of the run that was active last.
    --max-restarts N: Restart the ranks after a failure, at most N times.
    """
    from phalanx.answers.plan import job_plan
    from phalanx.answers.train import run_training
    from phalanx.answers.train import sample as write_sample
    from phalanx.report.plan import job_plan as plan_view
    from phalanx.report.train import batch_line
    from phalanx.report.view import View
    from phalanx.spec.errors import InputError
    from phalanx.spec.files import plan as plans

    overrides = list(overrides or ()) + ([f"strategy={strategy}"] if strategy else [])
    require_torch()
    from phalanx.runs.folder import RUNS
    from phalanx.runs.resume import resumed
    from phalanx.runtime.process.environment import external

    world = external()
    if max_restarts < 0:
        raise InputError("--max-restarts", max_restarts, "must not be negative", "0 never restarts")
    if max_restarts and world is not None:
        raise InputError(
            "--max-restarts", max_restarts, "is for ranks that Phalanx starts", "give torchrun its own --max-restarts"
        )
    if resume:
        file = resumed(job, overrides)
    elif job is None:
        raise InputError("JOB.toml", None, "is missing", "name a job file or a plan, or give --resume")
    else:
        file = plans.job_of(job, overrides)
    if world is not None and world.rank:
        run_training(file, resume, world, lambda _: None, lambda _: None)
        _end(DONE)
    show_notes(file.notes)

    def show(decision: Decision) -> None:
        if not output.json:
            show_view(View([*plan_view(job_plan(decision), rows=10).parts, batch_line(decision.plan)]))
            sys.stdout.flush()

    began = time.time()
    try:
        outcome = run_training(file, resume, world, show, announce, max_restarts)
    except RuntimeError:  # a rank failed: the page shows the steps until then
        folder = RUNS / file.train.name
        if (steps := folder / "metrics.jsonl").exists() and steps.stat().st_mtime >= began:
            _write_report(folder)
        raise
    assert outcome is not None
    if not output.json:
        output.show(outcome)
    _write_report(outcome.folder)
    if not outcome.interrupted:
        try:
            outcome = replace(outcome, sample=write_sample(outcome.folder))
        except InputError as error:
            announce(f"note: no sample of text, {error}")
    if output.json:
        output.show(outcome)
    elif outcome.sample:
        print(f"\n{outcome.sample}\n")
    code = FAILED if outcome.differences else DONE
    if outcome.interrupted:
        announce(f"interrupted after step {outcome.last_step}, state saved; continue with: phalanx train --resume")
        code = INTERRUPTED
    if world is not None:
        _end(code)
    raise typer.Exit(code)


def _write_report(folder: Path) -> None:
    """Write the run's page into its folder; what keeps it from being written ends no run."""
    from phalanx.report.run_page import NAME, of_run
    from phalanx.spec.errors import InputError
    from phalanx.spec.files.plan import write_text

    try:
        write_text(folder / NAME, of_run(folder))
        announce(f"report: {os.path.relpath(folder / NAME)}")
    except (InputError, OSError) as error:
        announce(f"note: no report, {error}")


def _end(code: int) -> NoReturn:
    """End a rank that torchrun or srun started, skipping torch's teardown, which sometimes aborts."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
