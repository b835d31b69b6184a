"""A plan's answer: the best strategies as a table, the best of each family, the front, and what was rejected."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.table import Table

from phalanx.plan.budget import Goal
from phalanx.plan.search.planner import Answer
from phalanx.plan.search.refine import Ranked
from phalanx.report.tables import seconds, size


def ranked(rows: Sequence[Ranked], title: str, marked: Ranked | None = None) -> Table:
    """One line per strategy: step, tokens per second, MFU, and what keeps it from more."""
    table = Table(title=title, title_justify="left", header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    left = ("", "family", "strategy")
    for name in (*left, "step", "MFU", "comm.", "bubble", "memory"):
        table.add_column(name, justify="left" if name in left else "right", overflow="fold")
    for r in rows:
        bubble = r.run.bubble / r.seconds
        table.add_row(
            "→" if marked is not None and r.strategy == marked.strategy else "",
            r.family,
            str(r.strategy),
            seconds(r.seconds),
            f"{r.mfu:.1%}",
            f"{r.priced.communication:.0%}",
            f"{bubble:.0%}",
            size(r.priced.bytes_),
        )
    return table


def rejected(a: Answer, most: int) -> Table:
    """Why not."""
    table = Table(title="why not", title_justify="left", header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("family", "strategy", "reason"):
        table.add_column(name, overflow="fold")
    for r in a.rejected[:most]:
        table.add_row(r.family, str(r.priced.strategy), r.reason)
    return table


def training(a: Answer, goal: Goal) -> str:
    """What the best one means for a number of tokens."""
    job, step = a.pricing.job, a.ranked[0].seconds
    hours, money = goal.gpu_hours(job, step), goal.money(job, step)
    cost = "" if money is None else f", {money:,.0f} at {goal.price_per_gpu_hour:g} a GPU-hour"
    days = goal.days(job, step)
    return f"{goal.tokens:.3g} tokens: {goal.steps(job):,.0f} steps, {days:,.1f} days, {hours:,.0f} GPU-hours{cost}"


def lines(a: Answer) -> Iterable[str]:
    """What was asked, and how it was answered."""
    p = a.pricing
    yield (
        f"{p.model.family} decoder, {p.model.parameter_count:,} parameters, on {a.gpus} x {p.cluster.device.name} of "
        f"{p.cluster.name}; a step of {p.job.global_batch} x {p.job.seq} tokens; stack {p.stack}"
    )
    yield f"{a.evaluated:,} legal strategies in {a.seconds:.2f} s: {a.examined:,} priced one by one, others bounded"
    if a.fewer:
        few, step = a.fewer.gpus, seconds(a.fewer.seconds)
        yield f"{few} GPUs would be as fast, with {a.fewer.strategy}: {step}; {a.gpus - few} might stand idle"
