"""Views of runs: a training and its plan, a sweep, the load of experts, weights and texts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from phalanx.answers.runs.experts import ExpertBalance, MeasuredQuantity, Stretch
from phalanx.answers.runs.sweep import SweptRun, TrainingSweep
from phalanx.planning.tables.table import Sheet, columns
from phalanx.report.pictures.figure import Bar, Bars, Lines, Picture, PlotAxis, Series
from phalanx.report.style import BYTES, largest_unit, seconds, size
from phalanx.report.view import View, ViewPart
from phalanx.spec.files.plan import Plan

if TYPE_CHECKING:
    from phalanx.answers.runs.generate import Continuations
    from phalanx.answers.runs.train import Outcome
    from phalanx.answers.runs.weights import ExportedWeights, ImportedWeights


def outcome(o: Outcome) -> View:
    """Show how a run ended, and how it compares with its plan."""
    return View(list(_parts(o)))


def _parts(o: Outcome) -> Iterator[ViewPart]:
    if o.eval_loss is not None:
        yield (
            f"validation loss {o.eval_loss:.3f} nat per token; unigram entropy of the training tokens "
            f"{o.unigram_entropy:.3f} ({o.unigram_entropy - o.eval_loss:.3f} better)"
        )
    if not (count := len(o.recorded["events"])):
        yield "no step was recorded, so there is none to compare with the plan"
    else:
        yield comparison(o.comparison)
        yield from (f"recorded step differs from the plan: {line}" for line in o.differences)
    if count and not o.differences:
        routed = ", but for what the router decides: rows to experts, and their FLOPs" if o.routed else ""
        yield f"the recorded step equals the plan: {count} events, FLOPs of every unit{routed}"
    if o.timeline is not None:
        trace = os.path.relpath(o.folder / "trace.json") if o.timeline["traced_step"] else ""
        yield step_times(o.recorded["step_time_s"], o.timeline, trace)
    yield f"run: {o.run}/"


def batch_line(plan: Plan) -> str:
    """Write the global batch of a plan, factor by factor, and the peak learning rate."""
    s, job, train = plan.strategy, plan.job, plan.train
    return (
        f"effective batch {job.global_batch} = micro-batch {s.micro_batch} x accumulation {s.accumulation(job)}"
        f" x dp {s.dp} sequences of {job.seq} tokens; peak lr {train.scaled_lr(job.global_batch):g}"
        f" (lr_scaling = {train.lr_scaling})"
    )


def comparison(rows: Sequence[MeasuredQuantity]) -> Sheet:
    """Tabulate quantities, predicted against measured, with relative errors."""
    cells = []
    for row in rows:
        exact = row.text == "bytes" and row.error == 0
        error = "" if row.error is None else ("exact" if exact else f"{row.error:+.1%}")
        cells.append((row.name, quantity(row, row.predicted), quantity(row, row.measured), error))
    return Sheet("predicted against measured", columns(" | predicted | measured | error"), cells)


def quantity(q: MeasuredQuantity, value: float | None) -> str:
    """Write a value of a quantity with its unit."""
    if value is None:
        return "not measured"
    return {"s": seconds(value), "memory": size(value), "bytes": f"{value:,.0f} B"}[q.text]


def step_times(step_time_s: float, timeline: dict[str, Any], trace: str) -> str:
    """Return a line on how a step's time divides. `trace`: the file with the timeline, or ""."""
    exposed, hidden = timeline["exposed_communication_s"], timeline["hidden_communication_s"]
    line = f"a step of {seconds(step_time_s)}: "
    if exposed + hidden:
        line += f"compute {seconds(timeline['compute_s'])}, exposed communication {seconds(exposed)}, "
        line += f"hidden communication {seconds(hidden)} (overlap {timeline['overlap']:.0%})"
    else:
        line += "compute, no communication"
    return line + (f"; timeline in {trace}" if trace else "")


def sweep(swept: TrainingSweep, table: Sheet) -> View:
    """Show a sweep; `table`: its runs."""
    return View([table], "sweep", lambda: [sweep_picture(swept.runs, table)])


def sweep_picture(runs: tuple[SweptRun, ...], table: Sheet) -> Picture:
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
        takes = [("predicted", run.predicted_bytes / scale)]
        sizes.append(Bar("predicted", takes, size(run.predicted_bytes), heading=strategy))
        held = [("measured", run.measured_bytes / scale)]
        sizes.append(Bar("measured", held, size(run.measured_bytes)))
    panels = (Bars("ms", tuple(times), head="time of a step"), Bars(unit, tuple(sizes), head="peak memory"))
    return Picture(table.title, panels, "the runs of `phalanx train sweep`", table.note)


_LEVELS = "▁▂▃▄▅▆▇█"
_WIDE = 32
"""The most experts whose loads are drawn."""


def expert_balance(a: ExpertBalance) -> View:
    """Show the load of the busiest expert by layer."""
    return View([balance(a.stretches)], "experts", lambda: [balance_picture(a.stretches, a.run)])


def balance_picture(parts: Sequence[Stretch], run: str) -> Picture:
    """Draw the busiest expert's load over the mean in the course of a run, and the loads of its last stretch."""
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
    return Picture(f"Balance of experts in {run}", panels, f"`phalanx runs experts {run}`{more}")


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


def weights(a: ImportedWeights | ExportedWeights) -> View:
    """Name the run or the files that were written."""
    if hasattr(a, "run"):
        return View([f"run: {a.run}/"])
    return View([f"{a.folder}/: {', '.join(a.files[:3])}{' ...' if len(a.files) > 3 else ''}, config.json"])


def continuations(a: Continuations) -> View:
    """Show the texts."""
    return View([c.text for c in a.texts])
