"""`phalanx train`, `generate` and `runs`: training, and the uses of its runs."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from phalanx.cli.command import command, command_with_progress
from phalanx.cli.forms import forms
from phalanx.cli.output import Printed, Saved, show_notes, show_view
from phalanx.cli.terminal import DONE, FAILED, INTERRUPTED, WRONG_INPUT, announce, require_torch, require_writable
from phalanx.infer.sampling import Sampling
from phalanx.schedule.generation import BatchingPolicy

if TYPE_CHECKING:
    from phalanx.answers.plan import Decision


@command_with_progress
def of_job(
    output: Printed,
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
    from phalanx.answers.runs.train import run_training
    from phalanx.answers.runs.train import sample as write_sample
    from phalanx.report.measured.runs import batch_line
    from phalanx.report.plan import job_plan as plan_view
    from phalanx.report.view import View
    from phalanx.spec.errors import InputError
    from phalanx.spec.files import plan as plans

    overrides = list(overrides or ()) + ([f"strategy={strategy}"] if strategy else [])
    require_torch()
    from phalanx.runs.folder import RUNS
    from phalanx.runs.resume import resumed_job
    from phalanx.runtime.process.environment import external_world

    world = external_world()
    if max_restarts < 0:
        raise InputError("--max-restarts", max_restarts, "must not be negative", "0 never restarts")
    if max_restarts and world is not None:
        reason, remedy = "is for ranks that Phalanx starts", "give torchrun its own --max-restarts"
        raise InputError("--max-restarts", max_restarts, reason, remedy)
    if resume:
        file = resumed_job(job, overrides)
    elif job is None:
        raise InputError("JOB.toml", None, "is missing", "name a job file or a plan, or give --resume")
    else:
        file = plans.job_of(job, overrides)
    if world is not None and world.rank:
        try:
            run_training(file, resume, world, lambda _: None, lambda _: None)
        except InputError:
            if not world.local_rank:  # the first of another host
                raise
            _end(WRONG_INPUT)
        _end(DONE)
    show_notes(file.notes)

    def show(decision: Decision) -> None:
        if not output.json:
            show_view(View([*plan_view(job_plan(decision)).parts, batch_line(decision.plan)]))
            sys.stdout.flush()

    began = time.time()
    try:
        outcome = run_training(file, resume, world, show, announce, max_restarts)
    except RuntimeError:  # a rank failed
        _report_failed_run(RUNS / file.train.name, began)
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


def _report_failed_run(folder: Path, began: float) -> None:
    """Write the page of the steps until a rank failed, if the run took any since it began; say what is saved."""
    from phalanx.runtime.checkpoint.store import intact_steps as steps_saved

    if (steps := folder / "metrics.jsonl").exists() and steps.stat().st_mtime >= began:
        _write_report(folder)
        if saved := steps_saved(folder / "checkpoint"):
            announce(f"saved at step {max(saved)}; continue with: phalanx train --resume")


def _write_report(folder: Path) -> None:
    """Write the run's page into its folder; if that fails, a note says why."""
    from phalanx.report.measured.run_page import NAME, of_run
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


@command_with_progress
def sweep(job: Path, output: Saved, steps: int = 20, overrides: list[str] | None = None) -> None:
    """Train a job for some steps under one strategy of every family, and compare each run with its plan.

    The job's own strategy is not used. Ctrl-C ends it with what was measured.

    --steps: Steps of each run.
    """
    require_torch()
    from phalanx.answers.machine.this_machine import require_this_machine
    from phalanx.answers.runs.sweep import sheet
    from phalanx.answers.runs.sweep import sweep as run
    from phalanx.report.style import count_words
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
        from phalanx.answers.answer import plain
        from phalanx.answers.tables import Tables
        from phalanx.report.measured.runs import sweep as view

        table = sheet(swept, steps)
        output.put(lambda: view(swept, table), lambda: plain(Tables(None, (table,))))
    if swept.interrupted:
        announce(f"interrupted after {count_words(len(swept.runs), 'run')}")
        raise typer.Exit(INTERRUPTED)
    if any(r.differs for r in swept.runs):
        raise typer.Exit(FAILED)


@command_with_progress
def generate(
    output: Printed,
    run: Path,
    sampling: Sampling,
    policy: Annotated[BatchingPolicy, "slots", "chunk", "page", "pages"],
    prompt: list[str] | None = None,
    prompts: Path | None = None,
    strategy: str | None = None,
    precision: str | None = None,
) -> None:
    """Continue texts with the newest checkpoint of a run, or with Hugging Face weights.

    run RUN|HF_DIR: A run's folder, such as runs/quickstart, or a folder of Hugging Face weights.
    --prompt: Text to continue; may be repeated. Without one: It is a truth.
    --prompts FILE: A file with a prompt on each line.
    --tokens: Number of tokens to add at most; without it 80, or as many as the context has room for.
    --temperature: Sampling temperature; 0 takes the most likely token each time.
    --top-k: Sample from the k most likely tokens; 0 samples from all.
    --top-p: Sample from the fewest likely tokens with this probability; 1 samples from all.
    --seed: Seed of the sampling.
    --past-end: Go on after the model's end-of-text token.
    --strategy LINE: How the model is split over local ranks: tp, pp, ep and etp; dp divides the prompts. Such as
        tp=2.
    --precision float64|float32|bfloat16|float16: Type to compute in; without it, that of the weights.
    --slots: Prompts that a replica continues at once.
    --chunk: Tokens that a replica computes in a step at most: longer prompts go in chunks.
    --page: Tokens of a page of the KV cache.
    --pages: Pages of a replica's KV cache; without it, enough for all slots.
    """
    require_torch()
    from phalanx.answers.runs.generate import generate as continue_texts
    from phalanx.runtime.process.environment import external_world
    from phalanx.spec.errors import InputError

    world, stream = external_world(), not output.json
    try:
        answer = continue_texts(run, prompt or [], prompts, sampling, policy, strategy, precision, stream, world)
    except InputError:
        if world is not None and world.rank:  # rank 0 says the same
            raise typer.Exit(2) from None
        raise
    if output.json and (world is None or world.rank == 0):  # as text they were printed as they came
        output.show(answer)


@command
def of_run(run: Path, out: Path | None = None) -> None:
    """Write a run's report: loss, throughput, and the measured step under the predicted one; one HTML file.

    A run that still trains can be looked at, too.

    run RUN: The folder of a run, such as runs/quickstart.
    --out FILE.html: Where to write it; by default in the run's folder.
    """
    from phalanx.report.measured.run_page import NAME
    from phalanx.report.measured.run_page import of_run as page
    from phalanx.spec.files.plan import write_text

    require_writable("--out", out)
    text = page(run)
    file = out or run / NAME
    require_writable("RUN", file)
    write_text(file, text)
    announce(f"report: {file}")


@command
def of_experts(run: Path, output: Saved) -> None:
    """Show the busiest expert's load over the mean, layer by layer, in the course of a run."""
    from phalanx.answers.runs.experts import expert_balance

    output.show(expert_balance(run))


@command
def import_weights(output: Printed, source: Path, name: str = "") -> None:
    """Import Hugging Face weights as a run, for `generate`, `runs export` and train.weights.

    source HF_DIR: Folder with a config.json and safetensors files.
    --name: Name of the run; by default that of the folder.
    """
    require_torch()
    from phalanx.answers.runs.weights import import_weights as run

    output.show(run(source, name, announce))


@command
def export_weights(
    output: Printed, run: Path, out: Path, dtype: str = "", step: int | None = None, shard_size: str = "5GB"
) -> None:
    """Export a checkpoint as a folder that Hugging Face's transformers loads.

    --out DIR: Folder to write; it must be empty or not exist yet.
    --dtype: Type of the weights: float32, bfloat16, float16 or float64; by default as stored.
    --step: Step of the checkpoint to export; by default the newest.
    --shard-size SIZE: Largest size of one file.
    """
    require_torch()
    from phalanx.answers.runs.weights import export_weights as write
    from phalanx.spec.byte_sizes import parse_bytes

    output.show(write(run, out, dtype, step, parse_bytes(shard_size, "--shard-size"), announce))


train = forms(
    "Train a job, or a plan of one, and compare the run with what the plan predicted.",
    lambda _: "job",
    default="job",
    job=of_job,
    sweep=sweep,
)
runs = forms(
    "Write a run's report or its experts' load; import Hugging Face weights as a run, or export a run's.",
    report=of_run,
    experts=of_experts,
    import_=import_weights,
    export=export_weights,
)
