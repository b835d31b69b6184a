"""Views of a diagnosis: the step and its plan, the causes, and the sources of its numbers."""

from typing import Any

from phalanx.answers.diagnose.diagnosis import Diagnosis
from phalanx.answers.diagnose.flop_rate import FlopRate
from phalanx.planning.tables.table import Sheet, columns
from phalanx.report.style import size
from phalanx.report.view import View, ViewPart


def view(a: Diagnosis) -> View:
    """Show the gaps between a run and its plan, the largest first."""
    return View([*_step(a), *_links(a), *_memory(a), *a.cautions, *a.used], "diagnosis")


def _step(a: Diagnosis) -> list[ViewPart]:
    """Show the parts of a step and the causes of its gaps."""
    step, planned = a.step_s, a.planned_s
    rows: list[tuple[Any, ...]]
    if step is None:
        return []
    if planned is None:
        remedy = "name --plan, or --model, --cluster and the rest"
        first = f"a step of {step:.4g} s; it has no plan to compare with: {remedy}"
    else:
        gap = f"{step - planned:+.3g} s, {step / planned - 1:+.0%} of the plan"
        first = f"{a.about}: a step takes {step:.4g} s, {planned:.4g} s planned: {gap}"
    names = columns("part | planned [s] | measured [s] | gap [signed_s] | of the step [change]")
    rows = [(r.part, r.predicted_s, r.measured_s, r.gap_s, (r.gap_s or 0.0) / step) for r in a.parts]
    if planned is None:
        names = columns("part | measured [s] | of the step [share]")
        rows = [(r.part, r.measured_s, (r.measured_s or 0.0) / step) for r in a.parts]
    note = "over: communication that nothing hides; stragglers: waiting for the last rank" if a.ranks else ""
    whose = "" if a.rank is None else f"of rank {a.rank}, of {a.ranks} with a trace; "
    return [
        first,
        *(_rate(a.rate) if a.rate is not None else []),
        Sheet("where a step goes", names, rows, f"{whose}{note}", charted=False),
        *_findings(a),
        *([a.further] if a.further else []),
    ]


def _links(a: Diagnosis) -> list[ViewPart]:
    if not a.links:
        return []
    rows = []
    for gap in a.links:
        c, p = gap.collective, gap.planned_s
        off = None if p is None else c.seconds / p - 1
        rows.append((c.op, c.ranks, c.nodes, c.bytes, c.calls, c.seconds, p, off))
    names = columns(
        "collective | ranks [count] | nodes [count] | payload [bytes] | calls [count] | measured [s] "
        "| planned [s] | off [change]"
    )
    return [Sheet("collectives as NCCL timed them", names, rows, "seconds: the median of a call", charted=False)]


def _memory(a: Diagnosis) -> list[ViewPart]:
    if not a.memory:
        return []
    names = columns(
        "snapshot | allocated [bytes] | reserved [bytes] | most allocated [bytes] | most reserved [bytes]"
    )
    rows = [
        (u.file, u.allocated_bytes, u.reserved_bytes, u.peak_allocated_bytes, u.peak_reserved_bytes) for u in a.memory
    ]
    holders = "; ".join(f"{line}: {size(held)}" for u in a.memory[:1] for line, held in u.largest)
    planned = "" if a.planned_bytes is None else f"planned: {size(a.planned_bytes)} reserved on the fullest rank; "
    return [Sheet("memory", names, rows, f"{planned}held by {holders}", charted=False)]


def _findings(a: Diagnosis) -> list[str]:
    lines = []
    for number, f in enumerate(a.findings, 1):
        lines.append(f"{number}. {f.cause}: {f.seconds:.3g} s ({f.seconds / (a.step_s or 1.0):.0%}). {f.why}")
        lines.append(f"   {f.remedy}; without it a step takes {f.then_s:.3g} s")
    if not a.ranks and a.planned_s is not None:
        lines.append("a log does not say where the step goes: give a trace of torch.profiler too")
    elif not lines and a.planned_s is not None:
        lines.append("nothing takes longer than planned by more than 2 % of the step")
    return lines


def _rate(r: FlopRate) -> list[str]:
    """Return lines on a rate: the planned and published ones next to it, and how the log counts FLOPs."""
    lines = [f"{r.tflops:.0f} TFLOP/s per GPU, {r.mfu:.1%} MFU; planned: {r.planned_tflops:.0f}, {r.planned_mfu:.1%}"]
    if (p := r.published) is not None:
        place = "below" if r.mfu < p.low else "above" if r.mfu > p.high else "within"
        runs = f"{p.runs} published runs of similar models on this chip"
        lines.append(f"{place} {p.low:.0%} to {p.high:.0%} MFU, of {runs}")
    if r.stated_tflops is not None:
        lines.append(f"the {r.stated_tflops:.0f} TFLOP/s stated count {r.stated_count}")
    return lines
