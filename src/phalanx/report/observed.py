"""An observed program's price on a cluster, its findings, what to change in it, and its differences from a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from phalanx.answers.observed import (
    ObservedFindings,
    ObservedImprovement,
    ObservedPrice,
    ObservedStep,
    PlanDifferences,
)
from phalanx.planning.tables.table import Sheet, columns
from phalanx.report.observed_rows import finding
from phalanx.report.style import counted, seconds, size
from phalanx.report.view import View

_BOUNDS = (
    "compute is matrix products and attention alone, so a lower bound. A recording does not show other kernels, the "
    "host's time for launches, or what the program's streams overlap: the step takes at least the larger of both "
    "columns, and nothing here says by how much more"
)


def view(answer: Any, collectives: bool = False) -> View:
    """Show an answer about an observed program; `collectives`: with each kind of them."""
    if isinstance(answer, ObservedPrice):
        flows = _flows(answer.ranks) if collectives else ()
        head = f"{answer.program}: {answer.world} ranks of {answer.cluster}"
        return View([head, _steps(answer.ranks), *flows, _BOUNDS])
    views: dict[type, Callable[[Any], View]] = {
        ObservedFindings: _findings,
        ObservedImprovement: _improvement,
        PlanDifferences: _differences,
    }
    return views[type(answer)](answer)


def _steps(ranks: Sequence[ObservedStep]) -> Sheet:
    names = columns(
        "rank [count] | compute [s] | communication [s] | all hidden [s] | none hidden [s] | peak [bytes] | fits"
    )
    rows = [
        (
            p.rank,
            p.compute_s,
            p.communication_s,
            p.all_hidden_s,
            p.none_hidden_s,
            p.peak_bytes,
            "yes" if p.fits else f"no: {size(p.usable_bytes)}",
        )
        for p in ranks
    ]
    return Sheet("a step, priced", names, rows)


def _flows(ranks: Sequence[ObservedStep]) -> Iterator[Sheet]:
    """Yield each kind of collective of every observed rank, the longest first."""
    names = columns("collective | over | ranks [count] | type | links | times [count] | bytes [count] | alone [s]")
    for p in ranks:
        rows = [
            (f.op, f.axis, f.ranks, f.dtype, f.links, f.count, f.bytes, f.seconds)
            for f in sorted(p.collectives, key=lambda f: -f.seconds)
        ]
        yield Sheet(f"rank {p.rank}", names, rows)


def _findings(answer: ObservedFindings) -> View:
    count = counted(len(answer.findings), "finding") if answer.findings else "nothing found"
    return View((*map(finding, answer.findings), f"{answer.program}: {count}"))


def _improvement(answer: ObservedImprovement) -> View:
    lines = [finding(f) for f in answer.findings] or ["nothing found in the program itself"]
    if answer.better is None:
        lines.append("with --model, --batch and --seq the strategies of its ranks are searched too")
    else:
        mesh = ", ".join(f"{axis}={n}" for axis, n in answer.axes.items()) or "no named axis"
        best = answer.better.best
        lines.append(
            f"the program's mesh: {mesh}; better under {answer.better.question.stack}: {best.strategy}: "
            f"{seconds(best.step_time_s)} a step, MFU {best.mfu:.1%}, {size(best.memory_bytes)} a GPU, "
            "by fitted formulas (the program's own figures above are bounds)"
        )
    return View([_steps(answer.now), *lines])


def _differences(answer: PlanDifferences) -> View:
    names = columns(
        "rank [count] | what | plan [count] | program [count] | plan, total [count] | program, total [count] | "
    )
    rows = []
    for d in answer.differences:
        counts = (d.plan_count, d.program_count) if d.plan_count or d.program_count else (None, None)
        verdict = "differs" if d.differs else "same"
        rows.append((d.rank, d.what, *counts, d.plan_total, d.program_total, verdict))
    return View([Sheet("plan against program", names, rows)])
