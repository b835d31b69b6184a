"""How evenly tokens were spread over experts during a run: a row per layer, a column per stretch of steps."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.answers.experts import ExpertBalance, Stretch
from phalanx.planning.tables.table import Sheet, columns
from phalanx.report.pictures.figure import Bar, Bars, Lines, Picture, PlotAxis, Series
from phalanx.report.view import View

_LEVELS = "▁▂▃▄▅▆▇█"
_WIDE = 32
"""The most experts whose loads are drawn."""


def view(a: ExpertBalance) -> View:
    """Show the load of the busiest expert by layer."""
    return View([balance(a.stretches)], "experts", lambda: [picture(a.stretches, a.run)])


def picture(parts: Sequence[Stretch], run: str) -> Picture:
    """Draw the busiest expert's load over the mean in the course of a run, and the last stretch's loads by block."""
    blocks = list(parts[0].chosen)[:_DRAWN]
    curves = [Series(f"block {b}", [(float(p.last_step), p.busiest[b]) for p in parts], dots=True) for b in blocks]
    course = Lines(
        PlotAxis("step", "count"),
        PlotAxis("busiest expert's tokens over the mean; 1: even", "count", low=0.0),
        tuple(curves),
    )
    last = parts[-1].chosen
    bars = [
        Bar(f"block {b}", [(f"expert {e}", 100 * n / max(1, sum(last[b]))) for e, n in enumerate(last[b])], said)
        for b in blocks
        for said in [f"{parts[-1].busiest[b]:.2f} x the mean"]
        if len(last[b]) <= _DRAWN
    ]
    steps = f"steps {parts[-1].first_step} to {parts[-1].last_step}"
    panels = (course, Bars("% of the tokens", tuple(bars), head=f"Loads of experts, {steps}")) if bars else (course,)
    more = f"; the first {len(blocks)} of {len(last)} blocks" if len(last) > len(blocks) else ""
    return Picture(f"Balance of experts in {run}", panels, f"`phalanx report experts {run}`{more}")


_DRAWN = 8
"""The most blocks that are drawn, and experts of a bar."""


def balance(parts: Sequence[Stretch]) -> Sheet:
    """Tabulate the busiest expert's load over the mean, by layer and stretch; bars show the last stretch's loads."""
    last = parts[-1].chosen
    shown = len(next(iter(last.values()))) <= _WIDE
    rows = [
        (f"block {b}", *(f"{p.busiest[b]:.2f}" for p in parts), *([_bars(last[b])] if shown else [])) for b in last
    ]
    if any(part.dropped for part in parts):
        rows.append(("dropped", *(f"{part.dropped:.1%}" for part in parts), *([""] if shown else [])))
    steps = (f"{part.first_step}-{part.last_step}" for part in parts)
    names = columns("busiest / mean", *steps, *(["loads in the last"] if shown else []))
    note = "1 is even" + ("; a bar per expert, the highest is the busiest" if shown else "")
    return Sheet("", names, rows, note, charted=False)


def _bars(chosen: Sequence[int]) -> str:
    most = max(1, max(chosen))
    return "".join(_LEVELS[min(7, 8 * n // (most + 1))] if n else "·" for n in chosen)
