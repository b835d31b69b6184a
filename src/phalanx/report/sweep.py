"""A sweep as a table and a picture: of every strategy the predicted and the measured step, and its memory."""

from __future__ import annotations

from phalanx.answers.sweep import SweptRun, TrainingSweep
from phalanx.planning.tables.table import Sheet
from phalanx.report.pictures.figure import Bar, Bars, Picture
from phalanx.report.style import BYTES, largest_unit, seconds, size
from phalanx.report.view import View


def view(swept: TrainingSweep, table: Sheet) -> View:
    """Return how people see a sweep; `table`: its runs."""
    return View([table], "sweep", lambda: [picture(swept.runs, table)])


def picture(runs: tuple[SweptRun, ...], table: Sheet) -> Picture:
    """Draw two bars for each strategy, predicted and measured, of time and of memory, each kind on one scale."""
    unit, scale = largest_unit(float(max(r.measured_bytes for r in runs)), BYTES)
    times, sizes = [], []
    for run in runs:
        low, high = run.spread_s
        spread = f"{seconds(run.measured_s)}, half of its steps {seconds(low)} to {seconds(high)}"
        strategy = str(run.strategy)
        predicted = [("predicted", 1e3 * run.predicted_s)]
        times.append(Bar("predicted", predicted, seconds(run.predicted_s), heading=strategy))
        measured = [("measured, to the first quartile", 1e3 * low), ("to the third quartile", 1e3 * (high - low))]
        times.append(Bar("measured", measured, spread))
        # Bytes agree within a few: the two are worth a bar each where one can see that.
        takes = [("predicted", run.predicted_bytes / scale)]
        sizes.append(Bar("predicted", takes, size(run.predicted_bytes), heading=strategy))
        held = [("measured", run.measured_bytes / scale)]
        sizes.append(Bar("measured", held, size(run.measured_bytes)))
    panels = (Bars("ms", tuple(times), head="time of a step"), Bars(unit, tuple(sizes), head="peak memory"))
    return Picture(table.title, panels, "the runs of `phalanx train sweep`", table.note)
