"""`phalanx plan --model`: search all legal strategies of a model on a cluster, under one stack or under each of them;
write the best as a plan and show the rest."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.cli.answer_json import answer_json, conditions_json
from phalanx.cli.show import show_notes
from phalanx.cli.terminal import announce, console, print_json, require_writable

if TYPE_CHECKING:
    from phalanx.answers.question import Question
    from phalanx.planning.budget import Goal
    from phalanx.planning.search.column_pricing import Pricing
    from phalanx.planning.search.condition_cost import ConditionCost
    from phalanx.planning.search.fewer_gpus import Offer
    from phalanx.planning.search.planner import Answer
    from phalanx.spec.job import Job


def plan_model(
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
    from phalanx.planning.budget import Goal
    from phalanx.planning.budget import tokens as token_count
    from phalanx.planning.search.fewer_gpus import offers
    from phalanx.planning.search.planner import COST_OBJECTIVES, OBJECTIVES, answer
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

    from phalanx.answers.export import why_not_exported
    from phalanx.answers.priced_plan import plan_of
    from phalanx.spec.files import plan as plans

    best = result.to_run
    written = plan_of(result.pricing, best.priced, best.run, best.mfu, cluster, asked.precision)
    plans.write(written, out)
    announce(f"plan: {out}")
    if refused := why_not_exported(written, asked.stack):
        announce(f"phalanx export would not write it: {refused}")
    if report is not None:
        from phalanx.planning.explain.analytic import AnalyticSubject
        from phalanx.report.html.plan import report as page_of

        report.write_text(page_of(result, goal, AnalyticSubject(pricing, result.best.strategy, gpus, headroom)))
        announce(f"report: {report}")
    whole: ConditionCost | None = None
    each: tuple[ConditionCost, ...] = ()
    if result.pricing.wanted:
        from phalanx.planning.search.condition_cost import condition_costs

        whole, each = condition_costs(pricing, gpus, result.best.seconds)
    if as_json:
        print_json(
            {"question": asked.as_json(), **answer_json(result, goal, offered), **conditions_json(whole, each)}
        )
    else:
        console().print(asked.heading, highlight=False, soft_wrap=True)
        if whole is not None:
            from phalanx.report.stacks import costs

            for line in costs(whole, each):
                console().print(line, highlight=False, soft_wrap=True)
        _show(result, goal, offered)


def compare_stacks(asked: Question, headroom: float, as_json: bool) -> str:
    """Price a question under every stack and print them; return the fastest. Raises InputError if none has an
    answer."""
    from phalanx.planning.search.compare_stacks import compare
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
