"""`phalanx plan`: the fastest strategy of a job on its cluster, or of all legal ones for a model on any cluster.

phalanx plan JOB.toml                                                  priced exactly, for our own runtime
phalanx plan --model M --cluster C --gpus N --batch B --seq S          estimated, for any stack
phalanx plan --from run.sh --cluster C                                 what to change in a configuration (improve.py)
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
from phalanx.cli.terminal import announce, console, exit_on_error, print_json, require_writable
from phalanx.cli.unread import require_only
from phalanx.plan.search import HEADROOM

if TYPE_CHECKING:
    from phalanx.commands.question import Question
    from phalanx.plan.budget import Goal
    from phalanx.plan.search.column_pricing import Pricing
    from phalanx.plan.search.condition_cost import ConditionCost
    from phalanx.plan.search.fewer_gpus import Offer
    from phalanx.plan.search.planner import Answer
    from phalanx.plan.search.refine import RankedStrategy
    from phalanx.spec.job import Job


def _plan_model(
    asked: Question,
    cluster: str,
    tokens: str | None,
    price: float | None,
    objective: str,
    headroom: float,
    deadline: float | None,
    front: bool,
    out: Path,
    report: Path | None,
    as_json: bool,
) -> None:
    """Search all legal strategies for a model on a cluster, write and show the best. Raises InputError."""
    from phalanx.plan.budget import Goal
    from phalanx.plan.budget import tokens as token_count
    from phalanx.plan.search.fewer_gpus import offers
    from phalanx.plan.search.planner import COST_OBJECTIVES, OBJECTIVES, answer
    from phalanx.spec.errors import InputError, nearest

    if objective not in (*OBJECTIVES, *COST_OBJECTIVES, "days"):
        raise InputError(
            "--objective",
            objective,
            "is not an objective",
            nearest(objective, (*OBJECTIVES, *COST_OBJECTIVES, "days")),
        )
    if objective in (*COST_OBJECTIVES, "days") and not tokens:
        raise InputError(
            "--tokens", None, f"is missing: --objective {objective} is about a whole training", "e.g. 300B"
        )
    if objective == "money" and price is None:
        raise InputError("--price", None, "is missing", "say what a GPU-hour costs, e.g. 2.5")
    if price is not None and not 0 <= price < float("inf"):
        raise InputError("--price", price, "is not a price", "say what a GPU-hour costs, e.g. 2.5")
    if price is not None and not tokens:
        raise InputError(
            "--price", price, "is for the cost of a whole training", "say how long it is, e.g. --tokens 300B"
        )
    if not 0 <= headroom < 1:
        raise InputError("--headroom", headroom, "is not a share of the memory", "write 0.05 to leave 5 % free")
    if deadline is not None and not 0 < deadline < float("inf"):
        raise InputError("--deadline", deadline, "is not a number of days", "write 30")
    if deadline is not None and not tokens:
        raise InputError("--tokens", None, "is missing: --deadline is about a whole training", "e.g. 300B")
    require_writable("--out", out)
    require_writable("--report", report)
    show_notes(asked.notes)

    def pricing(count: int) -> Pricing:
        return replace(asked.pricing_on(count), headroom=headroom)

    gpus, goal, offered = asked.gpus, None, []
    if tokens:
        goal = Goal(token_count(tokens, asked.pricing.model), gpus, price)
        if objective in COST_OBJECTIVES:
            offered = offers(pricing, gpus)
            if offered:
                cheapest = _cheapest(offered, goal, asked.pricing.job, deadline)
                gpus, days = cheapest.gpus, goal.days(asked.pricing.job, cheapest.seconds)
                what = f"of {asked.gpus} and its halves" + ("" if deadline is None else f" in {deadline:g} days")
                announce(f"{gpus} GPUs take the fewest GPU-hours, {what}: {days:,.0f} days")
        goal = replace(goal, gpus=gpus)
    result = answer(pricing, gpus, "memory" if objective == "memory" else "throughput", whole_front=front)

    if goal is not None and deadline is not None:
        _require_in_time(goal, result, deadline)

    from phalanx.commands.export import why_not_exported
    from phalanx.commands.priced_plan import plan_of
    from phalanx.spec.files import plan as plans

    best = result.to_run
    written = plan_of(result.pricing, best.priced, best.run, best.mfu, cluster, asked.precision)
    plans.write(written, out)
    announce(f"plan: {out}")
    if refused := why_not_exported(written, asked.stack):
        announce(f"phalanx export would not write it: {refused}")
    if report is not None:
        from phalanx.plan.explain.analytic import AnalyticSubject
        from phalanx.report.html.plan import report as page_of

        report.write_text(page_of(result, goal, AnalyticSubject(pricing, result.best.strategy, gpus, headroom)))
        announce(f"report: {report}")
    whole: ConditionCost | None = None
    each: tuple[ConditionCost, ...] = ()
    if result.pricing.wanted:
        from phalanx.plan.search.condition_cost import condition_costs

        whole, each = condition_costs(pricing, gpus, result.best.seconds)
    if as_json:
        print_json({"question": asked.as_json(), **_as_json(result, goal, offered), **_costs_json(whole, each)})
    else:
        console().print(asked.heading, highlight=False, soft_wrap=True)
        if whole is not None:
            from phalanx.report.stacks import costs

            for line in costs(whole, each):
                console().print(line, highlight=False, soft_wrap=True)
        _show(result, goal, offered)


def _costs_json(whole: ConditionCost | None, each: tuple[ConditionCost, ...]) -> dict[str, Any]:
    """Return the key `conditions`: what they cost together, and each on top of the others."""
    if whole is None:
        return {}

    def one(c: ConditionCost) -> dict[str, Any]:
        best = None if c.without is None else str(c.without)
        return {"condition": c.text, "cost": c.share, "without": best, "step_time_s": c.seconds}

    return {"conditions": {**one(whole), "each": [one(c) for c in each]}}


def _compare_stacks(asked: Question, headroom: float, as_json: bool) -> str:
    """Price a question under every stack and print them; return the fastest. Raises InputError if none has an
    answer."""
    from phalanx.plan.search.compare_stacks import compare
    from phalanx.spec.errors import InputError

    base = replace(asked.pricing, headroom=headroom)
    answers = compare(lambda name: replace(base, stack=name), asked.gpus)
    if answers[0].best is None:
        raise InputError("--stack", "all", f"no stack has an answer: {answers[0].row.name} {answers[0].reason}")
    if as_json:
        rows = [
            {
                "stack": f.row.name,
                "title": f.row.title,
                "strategy": None if f.best is None else str(f.best.strategy),
                "step_time_s": None if f.best is None else f.seconds,
                "mfu": None if f.best is None else f.mfu,
                "memory_bytes": None if f.best is None else int(f.best.bytes_),
                "reason": f.reason,
            }
            for f in answers
        ]
        print_json({"question": asked.as_json() | {"stack": "all"}, "stacks": rows})
    else:
        from phalanx.report.stacks import stacks

        console().print(stacks(answers))
    return answers[0].row.name


def _cheapest(offered: list[Offer], goal: Goal, job: Job, deadline: float | None) -> Offer:
    """Return the offer with the fewest GPU-hours, of those in time; the fastest where none is."""
    in_time = [o for o in offered if deadline is None or goal.days(job, o.seconds) <= deadline]
    return min(in_time or offered[:1], key=lambda o: o.gpu_seconds)


def _require_in_time(goal: Goal, a: Answer, deadline: float) -> None:
    """Require that a training ends in time. Raises InputError."""
    from phalanx.spec.errors import InputError

    days = goal.days(a.pricing.job, a.ranked[0].seconds)
    if days > deadline:
        reason = f"{goal.gpus} GPUs take {days:,.1f} days with {a.ranked[0].strategy}, the fastest"
        raise InputError("--deadline", deadline, reason, f"about {goal.gpus * days / deadline:,.0f} GPUs would do")


def _show(a: Answer, goal: Goal | None, offered: list[Offer]) -> None:
    from phalanx.report.plan import days_against_money, lines, number_types, ranked, rejected

    screen = console()
    for line in lines(a, goal):
        screen.print(line, highlight=False, soft_wrap=True)
    screen.print(ranked(a.ranked[:5], "the best", a))
    screen.print(ranked(a.families, "the best of each family", a))
    screen.print(ranked(a.front, "time against memory", a))
    if a.types:
        screen.print(number_types(a))
    screen.print(rejected(a, 24))
    if goal and offered:
        screen.print(days_against_money(offered, goal, a.pricing.job))


def _as_json(a: Answer, goal: Goal | None, offered: list[Offer]) -> dict[str, Any]:
    p = a.pricing
    return {
        "model": {"family": p.model.family, "parameters": p.model.parameter_count},
        "cluster": p.cluster.name,
        "device": p.cluster.device.name,
        "gpus": a.gpus,
        "global_batch": p.job.global_batch,
        "seq": p.job.seq,
        "stack": p.stack,
        "options": p.extra.changed(),
        "strategies_evaluated": a.evaluated,
        "strategies_priced_one_by_one": a.examined,
        "seconds": a.seconds,
        "best": _one(a.to_run, a, goal),
        "alternatives": [_one(r, a, goal) for r in a.ranked[1:]],
        "chunks": {
            "blocks": list(a.lengths.blocks),
            "equal_step_time_s": a.lengths.equal_seconds,
        }
        if a.lengths
        else None,
        "number_types": [
            {
                "where": o.where,
                "options": o.types,
                "strategy": str(o.strategy),
                "step_time_s": o.seconds,
                "gain": o.gain,
                "memory_bytes": int(o.bytes_),
            }
            for o in a.types
        ],
        "fewer_gpus": {"gpus": a.fewer.gpus, "strategy": str(a.fewer.strategy), "step_time_s": a.fewer.seconds}
        if a.fewer
        else None,
        "headroom": p.headroom,
        "days_against_money": [
            {
                "gpus": o.gpus,
                "strategy": str(o.strategy),
                "step_time_s": o.seconds,
                "days": goal.days(p.job, o.seconds),
                "gpu_hours": replace(goal, gpus=o.gpus).gpu_hours(p.job, o.seconds),
                "cost": replace(goal, gpus=o.gpus).money(p.job, o.seconds),
            }
            for o in offered
            if goal is not None
        ],
        "families": {r.family: _one(r, a, goal) for r in a.families},
        "front": [_one(r, a, None) for r in a.front],
        "rejected": [
            {
                "strategy": str(r.priced.strategy),
                "family": r.family,
                "reason": r.reason,
                "fits": r.priced.fits,
                "memory_bytes": int(r.priced.bytes_),
                "step_time_s": r.priced.seconds,
            }
            for r in a.rejected
        ],
    }


def _one(r: RankedStrategy, a: Answer, goal: Goal | None) -> dict[str, Any]:
    job = a.pricing.job
    row: dict[str, Any] = {
        "strategy": str(r.strategy),
        "family": r.family,
        "step_time_s": r.seconds,
        "tokens_per_s": job.global_batch * job.seq / r.seconds,
        "tokens_per_s_per_gpu": job.global_batch * job.seq / r.seconds / r.strategy.world,
        "micro_batches": r.strategy.accumulation(job),
        "mfu": r.mfu,
        "memory_bytes": int(r.priced.bytes_),
        "usable_bytes": a.pricing.allocatable,
        "communication_share": r.priced.communication,
        "bubble_share": r.run.bubble / r.seconds,
        "imbalance": r.run.imbalance,
        "terms_s": r.priced.terms,
        "memory_terms": r.priced.memory_terms,
        "origin": "estimated: formulas with constants fitted on published runs",
    }
    if goal:
        row["training"] = {
            "tokens": goal.tokens,
            "steps": goal.steps(job),
            "days": goal.days(job, r.seconds),
            "gpu_hours": goal.gpu_hours(job, r.seconds),
            "cost": goal.money(job, r.seconds),
        }
    return row


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
            from phalanx.commands.question import Asked, fixed, read

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
            asked = read(replace(about, setting=options), True)
            if compared:
                of_all = ("model", "cluster", "gpus", "batch", "seq", "strategy", "stack", "precision", "where")
                remedy = "name it with --stack, or leave this out"
                require_only(line, *of_all, "headroom", reason="is about one stack", remedy=remedy)
                fastest = _compare_stacks(asked, headroom, as_json)
                announce(f"no plan is written; --stack {fastest} writes the fastest")
                return
            _plan_model(
                asked, str(cluster), tokens, price, objective, headroom, deadline, front, out, report, as_json
            )
            return
        remedy = "leave it out; --set changes fields of a job" if job else "name a --model"
        of_a_job = ("job", "strategy", "overrides", "choices", "out")
        require_only(line, *of_a_job, reason="belongs to a plan of a --model", remedy=remedy)

        from phalanx.commands.plan import decide, with_strategy
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
