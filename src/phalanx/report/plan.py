"""The result of a search as tables: the best strategies, the best of each family, the front, the rejected ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from phalanx.planning.budget import Goal, shortened
from phalanx.planning.explain import decision_tree
from phalanx.planning.search.fewer_gpus import Offer
from phalanx.planning.search.planner import Answer
from phalanx.planning.search.refine import RankedStrategy
from phalanx.report.style import between_fields, empty_table, seconds, size, table
from phalanx.spec.job import Job

if TYPE_CHECKING:  # printing a table does not load the pricing code
    from phalanx.planning.search.best_first import Candidate, SearchResult


def ranked(rows: Sequence[RankedStrategy], title: str, a: Answer) -> Table:
    """Tabulate strategies: step time, MFU, communication, bubble and memory.

    The row of the best one gets an arrow and the figures of the plan, which lists the blocks of its chunks."""
    table = Table(title=title, title_justify="left", header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    left = ("family", "strategy")
    for name in (*left, "step", "MFU", "comm.", "bubble", "memory"):
        table.add_column(name, justify="left" if name in left else "right", overflow="fold")
    for row in rows:
        chosen = row.strategy == a.best.strategy
        r = a.to_run if chosen else row
        bubble = r.run.bubble / r.seconds
        table.add_row(
            ("→ " if chosen else "") + row.family,
            between_fields(row.strategy),
            seconds(r.seconds),
            f"{r.mfu:.1%}",
            f"{r.priced.communication:.0%}",
            f"{bubble:.0%}",
            size(r.priced.bytes_),
        )
    return table


def number_types(a: Answer) -> Table:
    """Tabulate the sets of narrower number types that would be faster."""
    title = "narrower number types: faster, but other numbers; --where takes a line"
    grid = table(title, "--where", "strategy", "step", "saves", "memory", left=("--where", "strategy"))
    for o in a.types:
        grid.add_row(o.where, between_fields(o.strategy, 40), seconds(o.seconds), f"{o.gain:.1%}", size(o.bytes_))
    return grid


def rejected(a: Answer, most: int) -> Table:
    """Tabulate at most `most` rejected strategies with the reasons."""
    table = Table(title="why not", title_justify="left", header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("family", "strategy", "reason"):
        table.add_column(name, overflow="fold")
    for r in a.rejected[:most]:
        table.add_row(r.family, between_fields(r.priced.strategy, 40), r.reason)
    return table


def lines(a: Answer, goal: Goal | None = None) -> Iterable[str]:
    """Yield lines on the result, the question and the search."""
    p, best = a.pricing, a.to_run
    s, job, step = a.best.strategy, p.job, best.seconds
    rate, device, m = job.global_batch * job.seq / step, p.cluster.device, s.accumulation(job)
    yield (
        f"{s}: {rate:,.0f} tokens/s, {rate / s.world:,.0f} a GPU, MFU {best.mfu:.1%}; a step of {seconds(step)} in "
        f"{m:,} micro-batch{'es' * (m > 1)} of {s.micro_batch}"
    )
    if p.extra.changed():
        yield f"with options of the stack: {p.extra}"
    if a.lengths:
        chunks, against = a.lengths, "equal ones do not fit"
        if chunks.equal_seconds == step:
            against = "as equal as whole blocks allow"
        elif chunks.equal_seconds is not None:
            against = f"equal ones take {seconds(chunks.equal_seconds)}, {chunks.equal_seconds / step - 1:.1%} more"
        yield f"its chunks, in order: {chunks}, which the plan lists; {against}"
    free = f"{p.headroom:.0%} is left free (--headroom)"
    yield f"memory {size(best.priced.bytes_)} of {size(p.allocatable)}; {free}"
    if goal is None:
        yield f"10^12 tokens take {1e12 / rate / 86_400:,.1f} days (--tokens asks for others)"
    else:
        hours, money = goal.gpu_hours(job, step), goal.money(job, step)
        cost = "" if money is None else f", {money:,.0f} at {goal.price_per_gpu_hour:g} a GPU-hour"
        days = goal.days(job, step)
        steps = f"{shortened(goal.tokens)} tokens: {goal.steps(job):,.0f} steps"
        yield f"{steps}, {days:,.1f} days, {hours:,.0f} GPU-hours{cost}"
    yield (
        f"{p.model.family} decoder, {p.model.parameter_count:,} parameters, on {a.gpus} x {device.name} of "
        f"{p.cluster.name}; a step of {job.global_batch} x {job.seq} tokens"
    )
    asked = decision_tree.facts(p.model, p.cluster, a.gpus, job.global_batch, job.seq)
    yield f"the usual tree (learn cases --tree) says: {decision_tree.sentence(asked)}"
    yield f"{a.evaluated:,} legal strategies in {a.seconds:.2f} s: {a.examined:,} priced one by one, others bounded"
    if a.fewer:
        few, fewer_step = a.fewer.gpus, seconds(a.fewer.seconds)
        yield f"{few} GPUs would be as fast, with {a.fewer.strategy}: {fewer_step}; {a.gpus - few} could stay idle"


def days_against_money(offered: Sequence[Offer], goal: Goal, job: Job) -> Table:
    """Tabulate what fewer GPUs cost and how long they take; the number chosen gets an arrow."""
    grid = table("days against money", "", "GPUs", "strategy", "days", "GPU-hours", "cost", left=("", "strategy"))
    for o in offered:
        there = replace(goal, gpus=o.gpus)
        money = there.money(job, o.seconds)
        grid.add_row(
            "→" if o.gpus == goal.gpus else "",
            f"{o.gpus:,}",
            between_fields(o.strategy),
            f"{there.days(job, o.seconds):,.1f}",
            f"{there.gpu_hours(job, o.seconds):,.0f}",
            "" if money is None else f"{money:,.0f}",
        )
    grid.caption = "fewer GPUs wait less and take longer; --deadline DAYS sets a limit"
    return grid


def alternatives(candidates: Sequence[Candidate], chosen: Candidate, job: Job, rows: int) -> Table:
    """Tabulate the `rows` fastest candidates and the fastest of each set of axes; the chosen one is marked."""
    table = empty_table("strategies, predicted")
    for name in ("", "strategy", "accum.", "step", "tokens/s", "exposed", "memory"):
        table.add_column(name, justify="left" if name in ("", "strategy") else "right", no_wrap=True)
    pipelined = any(c.strategy.pp > 1 for c in candidates)
    if pipelined:
        table.add_column("bubble", justify="right", no_wrap=True)
    if any(c.reason for c in candidates):
        table.add_column("rejected")
    split = {id(c): tuple(getattr(c.strategy, axis) > 1 for axis in ("tp", "cp", "ep", "pp")) for c in candidates}
    fastest_of_split = {split[id(c)]: c for c in reversed(candidates)}
    shown = [c for i, c in enumerate(candidates) if i < rows or c is chosen or fastest_of_split[split[id(c)]] is c]
    for c in shown:
        p = c.prediction
        exposed = p.exposed_communication_s
        table.add_row(
            "→" if c is chosen else "",
            str(c.as_requested),
            str(c.strategy.accumulation(job)),
            seconds(p.step_time_s),
            f"{job.global_batch * job.seq / p.step_time_s:,.0f}",
            seconds(exposed) if exposed else "none",
            size(p.memory_bytes),
            *([f"{p.bubble_fraction:.0%}"] if pipelined else []),
            *([c.reason] if c.reason else []),
            style="bold" if c is chosen else ("dim" if c.reason else ""),
        )
    hidden = len(candidates) - len(shown)
    table.caption = "exposed: communication that nothing hides" + (f"; {hidden} more not shown" if hidden else "")
    table.caption_justify = "left"
    return table


def searched(result: SearchResult) -> str:
    """Say in one line what was searched."""
    *smaller, largest = result.worlds
    over = " or ".join(filter(None, [", ".join(map(str, smaller)), str(largest)])) + (
        " rank" if largest == 1 else " ranks"
    )
    others = (
        "no other promises to be faster" if result.exhaustive else "the others are slower, or do not fit, by estimate"
    )
    return f"{result.legal:,} legal strategies over {over}: {len(result.candidates)} priced one by one, {others}"
