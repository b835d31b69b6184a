"""The result of a training: predicted against measured, and where a step's time goes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from phalanx.answers.measured import MeasuredQuantity
from phalanx.planning.tables.table import Sheet, columns
from phalanx.report.measured import quantity, step_times
from phalanx.report.view import Part, View
from phalanx.spec.files.plan import Plan

if TYPE_CHECKING:
    from phalanx.answers.train import Outcome


def view(o: Outcome) -> View:
    """Show how a run ended, and how it compares with its plan."""
    return View(list(_parts(o)))


def _parts(o: Outcome) -> Iterator[Part]:
    if o.eval_loss is not None:
        yield (
            f"validation loss {o.eval_loss:.3f} nat per token; unigram entropy of the training tokens "
            f"{o.unigram_entropy:.3f} ({o.unigram_entropy - o.eval_loss:.3f} better)"
        )
    count = len(o.recorded["events"])
    if count:
        yield comparison(o.comparison)
    if not count:
        yield "no step was recorded, so there is none to compare with the plan"
    elif o.differences:
        yield from (f"recorded step differs from the plan: {line}" for line in o.differences)
    else:
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
