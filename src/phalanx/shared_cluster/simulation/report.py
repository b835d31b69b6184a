"""Simulations of a shared cluster: their distributions side by side, and pictures of nodes over time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table

from phalanx.report.pictures.figure import Heat, Picture
from phalanx.report.style import table
from phalanx.shared_cluster.simulation.history import JobHistory
from phalanx.shared_cluster.simulation.outcome import Distribution, PolicyOutcome, outcome, use_over_time

ROWS = 24
"""Lines of a simulation in the terminal."""
_COLUMNS = 400


def span(seconds: float) -> str:
    """Write a time of scheduling: 45 s, 12 min, 3.4 h, 2.1 d."""
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def tables(outcomes: Sequence[PolicyOutcome]) -> Iterator[Table]:
    """Yield the figures of policies side by side: times, then use and losses."""
    names = ("mean", "median", "90 %", "99 %", "most")
    for title, of in (("queue time", _queue), ("completion time, from the submission", _completion)):
        grid = table(title, "policy", *names, left=("policy",))
        for o in outcomes:
            d = of(o)
            grid.add_row(o.policy, span(d.mean), *map(span, d.quantiles))
        yield grid
    resized = ("resized",) if any(o.resizes for o in outcomes) else ()
    losses = ("fragmented", "placement", "stopped", *resized, "tokens/s")
    grid = table("", "policy", "makespan", "GPU use", *losses, left=("policy",))
    grid.title = None
    for o in outcomes:
        grid.add_row(
            o.policy,
            span(o.makespan),
            f"{o.gpu_use:.1%}",
            _gpu_hours(o.fragmented),
            _gpu_hours(o.placement),
            f"{o.preemptions:,}",
            *([f"{o.resizes:,}"] if resized else []),
            f"{o.tokens_per_s:,.0f}" if o.tokens_per_s else "",
        )
    grid.caption = (
        "fragmented: GPUs free in number, not in the shape that the first waiting job needs; "
        "placement: what jobs took longer than placed best"
    )
    grid.caption_justify = "left"
    yield grid


def _gpu_hours(gpu_seconds: float) -> str:
    hours = gpu_seconds / 3600
    return f"{hours:,.0f} GPU-h" if hours >= 100 else f"{hours:.1f} GPU-h"


def _queue(o: PolicyOutcome) -> Distribution:
    return o.queue


def _completion(o: PolicyOutcome) -> Distribution:
    return o.completion


def picture(histories: Sequence[JobHistory], cluster: str) -> Picture:
    """Draw the share of GPUs held over time under each policy, a line for each node, or for some nodes together."""
    panels = []
    for history in histories:
        o = outcome(history)
        head = f"{o.policy}: {o.jobs:,} jobs, mean queue time {span(o.queue.mean)}, GPU use {o.gpu_use:.0%}"
        panels.append(use(history, _COLUMNS, 64, head))
    source = "the simulation of `phalanx cluster simulate`"
    return Picture(f"{cluster}: GPUs held, a line for each node", tuple(panels), source)


def use(history: JobHistory, columns: int, rows: int, head: str = "") -> Heat:
    """Return the share of GPUs held over time, in at most `rows` lines of `columns` times."""
    count = len(history.nodes.sizes)
    together = -(-count // rows)
    shares = use_over_time(history, columns)
    lines = []
    for start in range(0, count, together):
        last = min(start + together, count) - 1
        name = f"node {start}" if last == start else f"nodes {start}-{last}"
        lines.append((name, shares[start : last + 1].mean(axis=0).tolist()))
    return Heat(lines, f"0 to {span(history.makespan)}", head)
