"""The command line: parses, calls session, renders. Nothing heavy is imported before a command runs.

Exit codes: 0 done; 1 a check or a rank failed; 2 the input was wrong; 130 interrupted, state saved.
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from phalanx.cli_clusters import clusters
from phalanx.cli_collectives import collectives
from phalanx.cli_experts import experts
from phalanx.cli_explain import explain, lint
from phalanx.cli_lab import lab
from phalanx.cli_measure import measure
from phalanx.cli_models import models
from phalanx.cli_pipeline import pipeline
from phalanx.cli_predict import predict
from phalanx.cli_sheets import cases, comm, memory, roofline, scaling
from phalanx.cli_shown import (
    decision_json,
    outcome_json,
    show_batch,
    show_choices,
    show_decision,
    show_notes,
    show_outcome,
    show_parity,
)
from phalanx.cli_validate import validate
from phalanx.cli_verify import verify
from phalanx.cli_weights import export_weights, import_weights
from phalanx.terminal import (
    DONE,
    FAILED,
    INTERRUPTED,
    Json,
    announce,
    mistakes,
    print_json,
    require_torch,
    require_writable,
)

if TYPE_CHECKING:
    from phalanx.commands.plan import Decision

app = typer.Typer(
    help="Plan, prove, run and measure the parallel training of large models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Job = Annotated[Path, typer.Argument(metavar="JOB.toml", help="The job file.", show_default=False)]
OptionalJob = Annotated[Path | None, typer.Argument(metavar="JOB.toml", help="The job file.", show_default=False)]
JobOrPlan = Annotated[
    Path | None, typer.Argument(metavar="JOB.toml|plan.json", help="A job, or a plan of one.", show_default=False)
]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="TABLE.FIELD=VALUE", help="Override a field; may be repeated.")
]
StrategyLine = Annotated[
    str | None, typer.Option("--strategy", metavar="LINE", help="A strategy such as dp=2,micro_batch=4.")
]

app.add_typer(collectives, name="collectives")
app.add_typer(pipeline, name="pipeline")
app.add_typer(experts, name="experts")
app.add_typer(lab, name="lab")
app.command()(models)
app.command()(clusters)
app.command()(predict)
app.command()(validate)
app.command()(explain)
app.command()(lint)
for _sheets in (scaling, memory, comm, roofline, cases):
    app.command()(_sheets)
app.command()(verify)
app.command()(measure)
app.command("import")(import_weights)
app.command("export-weights")(export_weights)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        from phalanx import __version__

        print(f"phalanx {__version__}")
        raise typer.Exit


def plan(
    job: OptionalJob = None,
    strategy: StrategyLine = None,
    overrides: Set = None,
    choices: Annotated[bool, typer.Option("--choices", help="Say which transport serves which collective.")] = False,
    model: Annotated[
        str | None, typer.Option("--model", metavar="NAME|config.json", help="Instead of a job: search for a model,")
    ] = None,
    cluster: Annotated[str | None, typer.Option("--cluster", metavar="NAME|FILE.toml", help="on a cluster,")] = None,
    gpus: Annotated[int | None, typer.Option("--gpus", help="over so many of its GPUs,")] = None,
    batch: Annotated[int | None, typer.Option("--batch", help="with so many sequences in a step")] = None,
    seq: Annotated[int | None, typer.Option("--seq", help="of so many tokens.")] = None,
    tokens: Annotated[
        str | None, typer.Option("--tokens", metavar="300B|optimal", help="What the whole training takes.")
    ] = None,
    price: Annotated[float | None, typer.Option("--price", help="Of a GPU-hour, for --tokens.")] = None,
    objective: Annotated[
        str,
        typer.Option(
            "--objective",
            help="throughput, days; gpu-hours, money: over as many GPUs or half, a quarter ...; "
            "memory: the most of it left, within 10 % of the fastest.",
        ),
    ] = "throughput",
    profile: Annotated[str, typer.Option("--profile", metavar="STACK", help="The software stack.")] = "megatron-core",
    front: Annotated[
        bool, typer.Option("--front", help="All of the front of time and memory, up to 1.5 times the shortest step.")
    ] = False,
    out: Annotated[Path, typer.Option("--out", help="Where the plan goes.")] = Path("plan.json"),
    as_json: Json = False,
) -> None:
    """Price the strategies of a job on its cluster; or find the best of all legal ones for a model on a cluster."""
    with mistakes():
        if model is not None:
            from phalanx.cli_plan import ask

            ask(model, cluster, gpus, batch, seq, tokens, price, objective, profile, front, out, as_json)
            return

        from phalanx.commands.plan import decide, with_overrides
        from phalanx.spec.errors import InputError
        from phalanx.spec.files import job_file
        from phalanx.spec.files import plan as plans

        if job is None:
            raise InputError("JOB.toml", None, "is missing", "name a job file, or --model, --cluster, --gpus, ...")
        require_writable("--out", out)
        file = with_overrides(job_file.load(job, overrides or ()), strategy)
        show_notes(file.notes)
        decision = decide(file, announce=announce)
        if not decision.chosen.reason:
            plans.write(decision.plan, out)
            announce(f"plan: {out}")
        if as_json:
            print_json(decision_json(decision))
        else:
            show_decision(decision, rows=10)
            if choices:
                show_choices(decision)


def train(
    job: JobOrPlan = None,
    strategy: StrategyLine = None,
    overrides: Set = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the newest checkpoint of the run.")] = False,
    max_restarts: Annotated[
        int,
        typer.Option("--max-restarts", metavar="N", help="After a failure start the ranks again, N times at most."),
    ] = 0,
    as_json: Json = False,
) -> None:
    """Plan a job, or take a plan, train it, and hold the run against it. --resume alone: the run active last."""
    from phalanx.commands import train
    from phalanx.spec.errors import InputError
    from phalanx.spec.files import plan as plans

    with mistakes():
        overrides = list(overrides or ()) + ([f"strategy={strategy}"] if strategy else [])
        require_torch()
        from phalanx.runs.resume import resumed
        from phalanx.runtime.process import world as worlds

        world = worlds.external()
        if max_restarts < 0:
            raise InputError("--max-restarts", max_restarts, "must not be negative", "0 starts nothing again")
        if max_restarts and world is not None:
            raise InputError(
                "--max-restarts", max_restarts, "is for ranks that are started here", "give it to torchrun"
            )
        if resume:
            file = resumed(job, overrides)
        elif job is None:
            raise InputError("JOB.toml", None, "is missing", "name a job file or a plan, or give --resume")
        else:
            file = plans.job_of(job, overrides)
        if world is not None and world.rank:
            train.train(file, resume, world, lambda _: None, lambda _: None)
            _end(DONE)
        show_notes(file.notes)

        def show(decision: Decision) -> None:
            if not as_json:
                show_decision(decision, rows=10)
                show_batch(decision)

        outcome = train.train(file, resume, world, show, announce, max_restarts)
        assert outcome is not None
        interrupted = outcome.recorded["interrupted"]
        sample = ""
        if not as_json:
            show_outcome(outcome)
        if not interrupted:
            try:
                sample = train.sample(outcome.folder)
            except InputError as error:
                announce(f"note: no sample of text, {error}")
        if as_json:
            print_json(outcome_json(outcome, sample))
        elif sample:
            print(f"\n{sample}\n")
        code = FAILED if outcome.differences else DONE
        if interrupted:
            step = outcome.recorded["last_step"]
            announce(f"interrupted after step {step}, state saved; continue with: phalanx train --resume")
            code = INTERRUPTED
        if world is not None:
            _end(code)
        raise typer.Exit(code)


def _end(code: int) -> NoReturn:
    """End a rank that torchrun or srun started without torch's teardown, which now and then aborts."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def generate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, such as runs/quickstart.")],
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "It is a truth",
    tokens: Annotated[int, typer.Option(help="How many tokens to add.")] = 80,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token each time.")] = 0.8,
    top_k: Annotated[int, typer.Option(help="Draw from the k likeliest tokens; 0: from all.")] = 50,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    tp: Annotated[int, typer.Option(help="Local ranks that split every layer.")] = 1,
    as_json: Json = False,
) -> None:
    """Continue a text with the newest checkpoint of a run."""
    with mistakes():
        require_torch()
        from phalanx.commands.this_machine import require_local
        from phalanx.infer.generate import Sampling
        from phalanx.infer.generate import generate as alone
        from phalanx.infer.worker import over_ranks

        require_local(tp, "--tp")
        how = Sampling(tokens, temperature, top_k, seed)
        text = alone(run, prompt, how) if tp == 1 else over_ranks(run, prompt, how, tp)
        if as_json:
            print_json({"prompt": prompt, "text": text})
        else:
            print(text)


def parity(
    job: Job,
    strategy: StrategyLine = None,
    steps: Annotated[int, typer.Option(help="Steps to compare.")] = 10,
    dtype: Annotated[str, typer.Option(help="float64 or float32.")] = "float64",
    overrides: Set = None,
    as_json: Json = False,
) -> None:
    """Hold a strategy against one process: losses, gradients and gradient norms, under SGD and AdamW."""
    from phalanx.commands import parity
    from phalanx.commands.plan import with_overrides
    from phalanx.spec.files import job_file

    with mistakes():
        require_torch()
        file = with_overrides(job_file.load(job, overrides or ()), strategy)
        show_notes(file.notes)
        result = parity.parity(file, steps, dtype, announce)
        if as_json:
            print_json(result)
        else:
            show_parity(result)
        if not result["passed"]:
            raise typer.Exit(FAILED)


for _command in (plan, train, generate, parity):
    app.command()(_command)


def main() -> None:
    # What is imported lives to the end: to look through it time and again takes a fifth of a quick command.
    gc.set_threshold(50_000)
    app()
