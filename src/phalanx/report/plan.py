"""A plan's answer: the best strategies as a table, the best of each family, the front, and what was rejected."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from phalanx.plan.budget import Goal
from phalanx.plan.search.planner import Answer
from phalanx.plan.search.refine import Ranked
from phalanx.report.style import _table, seconds, size
from phalanx.spec.job import Job

if TYPE_CHECKING:  # a table needs none of what prices a strategy
    from phalanx.plan.search.best_first import Candidate, Searched


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


def alternatives(found: Sequence[Candidate], chosen: Candidate, job: Job, rows: int) -> Table:
    """The fastest candidates, the chosen one marked, and the first that splits anything else."""
    table = _table("strategies, predicted")
    for name in ("", "strategy", "accum.", "step", "tokens/s", "exposed", "memory"):
        table.add_column(name, justify="left" if name in ("", "strategy") else "right", no_wrap=True)
    piped = any(c.strategy.pp > 1 for c in found)
    if piped:
        table.add_column("bubble", justify="right", no_wrap=True)
    if any(c.reason for c in found):
        table.add_column("rejected")
    split = {id(c): tuple(getattr(c.strategy, axis) > 1 for axis in ("tp", "cp", "ep", "pp")) for c in found}
    first = {split[id(c)]: c for c in reversed(found)}
    shown = [c for i, c in enumerate(found) if i < rows or c is chosen or first[split[id(c)]] is c]
    for c in shown:
        p = c.prediction
        exposed = p.exposed_communication_s
        table.add_row(
            "→" if c is chosen else "",
            str(c.asked),
            str(c.strategy.accumulation(job)),
            seconds(p.step_time_s),
            f"{job.global_batch * job.seq / p.step_time_s:,.0f}",
            seconds(exposed) if exposed else "none",
            size(p.memory_bytes),
            *([f"{p.bubble_fraction:.0%}"] if piped else []),
            *([c.reason] if c.reason else []),
            style="bold" if c is chosen else ("dim" if c.reason else ""),
        )
    left = len(found) - len(shown)
    table.caption = "exposed: communication that nothing hides" + (f"; {left} more not shown" if left else "")
    table.caption_justify = "left"
    return table


def searched(found: Searched) -> str:
    """One line on what was chosen from."""
    *some, most = found.worlds
    over = " or ".join(filter(None, [", ".join(map(str, some)), str(most)])) + (" rank" if most == 1 else " ranks")
    others = (
        "no other promises to be faster" if found.settled else "the others are slower, or do not fit, by estimate"
    )
    return f"{found.legal:,} legal strategies over {over}: {len(found.candidates)} priced one by one, {others}"
