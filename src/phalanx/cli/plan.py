"""`phalanx plan`: the fastest strategy of a job on its cluster, or of all legal ones for a model on any cluster.

phalanx plan JOB.toml                                                  priced exactly, for our own runtime
phalanx plan --model M --cluster C --gpus N --batch B --seq S          estimated, for any stack (plan_model.py)
phalanx plan --from run.sh --cluster C                                 what to change in a configuration (improve.py)
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.options import (
    Batch,
    Cluster,
    Gpus,
    Json,
    Model,
    OptionalJob,
    OptionalStack,
    Precision,
    Report,
    Seq,
    Set,
    StackOptionsLine,
    StrategyLine,
)
from phalanx.cli.show import decision_json, show_choices, show_decision, show_notes
from phalanx.cli.terminal import announce, exit_on_error, print_json, require_writable
from phalanx.cli.unread import require_only
from phalanx.planning.search import HEADROOM


def plan(
    line: typer.Context,
    job: OptionalJob = None,
    strategy: StrategyLine = None,
    overrides: Set = None,
    choices: Annotated[
        bool, typer.Option("--choices", help="Show which transport and algorithm serve which collective.")
    ] = False,
    model: Model = None,
    cluster: Cluster = None,
    gpus: Gpus = None,
    batch: Batch = None,
    seq: Seq = None,
    tokens: Annotated[
        str | None,
        typer.Option(
            "--tokens",
            metavar="300B|2e12|optimal",
            help="Tokens of the whole training, to estimate days and GPU-hours; optimal: 20 per active parameter.",
        ),
    ] = None,
    price: Annotated[
        float | None, typer.Option("--price", help="Price of a GPU-hour, to estimate what --tokens cost.")
    ] = None,
    objective: Annotated[
        str,
        typer.Option(
            "--objective",
            help="What to optimise: throughput or days (the shortest step), gpu-hours or money (also on half of the "
            "GPUs, a quarter, ...), or memory (the most left free by strategies within 10 % of the fastest).",
        ),
    ] = "throughput",
    stack: OptionalStack = None,
    precision: Precision = None,
    options: StackOptionsLine = None,
    where: Annotated[
        str | None,
        typer.Option(
            "--where",
            metavar="CONDITIONS",
            help="Conditions on the strategies, such as 'tp<=8, zero=1, schedule in (1f1b, interleaved)', and "
            "options of the stack, such as 'first_moment=bfloat16'.",
        ),
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="FILE",
            help="Another framework's configuration (phalanx read): find what to change in it, and what each change "
            "brings; or an observed.json.",
        ),
    ] = None,
    headroom: Annotated[
        float, typer.Option("--headroom", help="Share of a device's memory that a strategy must leave free.")
    ] = HEADROOM,
    deadline: Annotated[
        float | None,
        typer.Option("--deadline", metavar="DAYS", help="Days that the --tokens may take at most."),
    ] = None,
    front: Annotated[
        bool,
        typer.Option(
            "--front", help="Find the whole Pareto front of time and memory, up to 1.5 times the shortest step."
        ),
    ] = False,
    out: Annotated[Path, typer.Option("--out", help="File to write the plan to.")] = Path("plan.json"),
    report: Report = None,
    as_json: Json = False,
) -> None:
    """Find the fastest strategy for a job on its cluster, or for a model on a cluster that need not exist here.

    Name a job file, or --model, --cluster, --gpus, --batch and --seq, or --from FILE and --cluster. The result is
    written as a plan.
    """
    with exit_on_error():
        from phalanx.spec.errors import InputError

        if source is not None:
            from phalanx.cli.improve import improve

            of_from = (
                "source",
                "model",
                "cluster",
                "gpus",
                "batch",
                "seq",
                "strategy",
                "stack",
                "precision",
                "where",
            )
            require_only(line, *of_from, "headroom", "out", reason="does not go with --from")
            improve(
                source,
                model,
                cluster,
                gpus,
                batch,
                seq,
                strategy,
                stack,
                precision,
                where,
                headroom,
                out,
                as_json,
            )
            return
        if model is not None:
            from phalanx.answers.question import Asked, as_given, fixed, read
            from phalanx.cli.plan_model import compare_stacks, plan_model

            if job is not None:
                raise InputError("--model", model, f"is that of {job}", "leave one of them out")
            for name, value in (("--set", ", ".join(overrides or ())), ("--choices", choices)):
                if value:
                    remedy = "leave it out, or name a job file"
                    raise InputError(name, None if value is True else value, "is about a job file", remedy)
            limits = ", ".join(filter(None, (fixed(strategy), where))) or None
            compared = stack == "all"
            named = None if compared else stack
            if compared and options:
                raise InputError("--options", options, "is about one stack", "name it with --stack, or use --where")
            about = Asked(None, model, cluster, gpus, batch, seq, None, named, precision, limits, compared)
            try:
                asked = read(replace(about, setting=options), True)
                if compared:
                    of_all = ("model", "cluster", "gpus", "batch", "seq", "strategy", "stack", "precision", "where")
                    remedy = "name it with --stack, or leave this out"
                    require_only(line, *of_all, "headroom", reason="is about one stack", remedy=remedy)
                    fastest = compare_stacks(asked, headroom, as_json)
                    announce(f"no plan is written; --stack {fastest} writes the fastest")
                    return
                plan_model(
                    asked, str(cluster), tokens, price, objective, headroom, deadline, front, out, report, as_json
                )
            except InputError as error:
                raise as_given(error, strategy, options) from None
            return
        remedy = "leave it out; --set changes fields of a job" if job else "name a --model"
        of_a_job = ("job", "strategy", "overrides", "choices", "out")
        require_only(line, *of_a_job, reason="belongs to a plan of a --model", remedy=remedy)

        from phalanx.answers.plan import decide, with_strategy
        from phalanx.spec.files import job_file
        from phalanx.spec.files import plan as plans

        if job is None:
            raise InputError("JOB.toml", None, "is missing", "name a job file, or --model, --cluster, --gpus, ...")
        require_writable("--out", out)
        file = with_strategy(job_file.load(job, overrides or ()), strategy)
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
