"""Simulations of a shared cluster: their distributions side by side, and pictures of nodes over time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from xml.sax.saxutils import escape

import numpy as np
from rich.table import Table
from rich.text import Text

from phalanx.report.pictures.scene import framed
from phalanx.report.style import table
from phalanx.shared_cluster.simulation.history import JobHistory
from phalanx.shared_cluster.simulation.outcome import Distribution, PolicyOutcome, outcome, use_over_time

_ROWS, _LEVELS = 24, " ▁▂▃▄▅▆▇█"
_WIDE, _HIGH, _COLUMNS = 1000, 6, 400


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


def drawn(history: JobHistory, width: int) -> Text:
    """Draw the share of GPUs held over time, a line for each node, or for some nodes together."""
    count = len(history.nodes.sizes)
    together = -(-count // _ROWS)
    label = len(f"nodes {count}-{count} ")
    columns = max(10, width - label - 2)
    use = use_over_time(history, columns)
    text = Text(no_wrap=True)
    for start in range(0, count, together):
        last = min(start + together, count) - 1
        name = f"node {start}" if last == start else f"nodes {start}-{last}"
        level = np.clip(np.round(use[start : last + 1].mean(axis=0) * 8), 0, 8).astype(int)
        text.append(name.ljust(label))
        text.append("".join(_LEVELS[i] for i in level), "cyan")
        text.append("\n")
    text.append(" " * label + f"0 to {span(history.makespan)}; full height: all GPUs held", "dim")
    return text


def svg(histories: Sequence[JobHistory], cluster: str) -> str:
    """Draw the nodes of each policy over time: darker where more GPUs are held."""
    body: list[str] = []
    top = 40
    for history in histories:
        o = outcome(history)
        title = f"{o.policy}: {o.jobs:,} jobs, mean queue time {span(o.queue.mean)}, GPU use {o.gpu_use:.0%}"
        body.append(f'<text x="10" y="{top}" class="t">{escape(title)}</text>')
        top += 8
        use = use_over_time(history, _COLUMNS)
        together = -(-len(use) // 64)
        step = _WIDE / _COLUMNS
        for start in range(0, len(use), together):
            line = np.clip(use[start : start + together].mean(axis=0), 0, 1)
            level = np.round(line * 10).astype(int)
            edges = np.flatnonzero(np.diff(level, prepend=-1, append=-1))
            for a, b in pairwise(edges.tolist()):
                if level[a]:
                    body.append(
                        f'<rect x="{10 + a * step:.1f}" y="{top}" width="{(b - a) * step:.1f}" height="{_HIGH - 1}" '
                        f'class="f0" fill-opacity="{level[a] / 10}"/>'
                    )
            top += _HIGH
        body.append(f'<text x="10" y="{top + 14}" class="m">0 to {span(o.makespan)}</text>')
        top += 40
    title = f"{cluster}: GPUs held, a line for each node"
    source = "the simulation of `phalanx cluster simulate`"
    head = f'<text x="10" y="18" font-size="13" class="t">{escape(title)}</text>'
    foot = f'<text x="10" y="{top}" class="m">Source: {source}</text>'
    group = ['<g font-size="12">', head, *body, foot, "</g>"]
    return framed(_WIDE + 20, top + 12, title, f"Source: {source}", group)
