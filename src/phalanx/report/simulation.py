"""A step with slow ranks: how much longer it takes, and who waits where."""

from __future__ import annotations

from phalanx.answers.simulation import SimulatedStep
from phalanx.planning.tables.table import Sheet, columns
from phalanx.report.predict import heading
from phalanx.report.style import seconds
from phalanx.report.view import View


def view(a: SimulatedStep) -> View:
    """Show the step, the ranks that were named, and where GPU-seconds are lost."""
    delayed = f"{a.delayed_pipelines} of {a.pipelines} pipelines end later by themselves; all wait for the last"
    figures = [
        ("step without", seconds(a.undisturbed_s), "as predicted, all ranks equally fast"),
        ("step", seconds(a.step_time_s), f"{a.slowdown:.3f} times as long; {delayed}"),
        ("lost a step", f"{a.lost_gpu_s:,.3g} GPU-s", f"of {a.strategy.world * a.step_time_s:,.4g}"),
    ]
    if a.jitter:
        figures.append(("jitter", f"{a.jitter:.1%}", "of each rank's passes; the mean of eight drawn steps"))
    parts: list[str | Sheet] = [
        heading(a.question),
        Sheet(str(a.strategy), columns(" | | how it came about"), figures),
    ]
    if a.slow:
        rows = [(s.rank, s.factor, _place(s.coordinates), s.lockstep_ranks) for s in a.slow]
        heads = columns("rank [count] | times as long [number] | place | ranks at its pace [count]")
        parts.append(Sheet("slow ranks", heads, rows, charted=False))
    if a.lost_gpu_s:
        lost = [(w.where, w.gpu_s, w.share) for w in a.waits]
        parts.append(
            Sheet("who loses time", columns("where | GPU-seconds a step [number] | of it [share]"), lost, bars=True)
        )
    return View(parts, "simulate")


def _place(coordinates: dict[str, int]) -> str:
    return ", ".join(f"{axis} {i}" for axis, i in coordinates.items()) or "the only rank"
