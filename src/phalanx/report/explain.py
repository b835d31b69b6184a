"""An explanation as tables: where time and memory go, figures against targets, rooflines, what to change first."""

from __future__ import annotations

from collections.abc import Iterable

from phalanx.answers.explanation import Explanation, OperatorIntensity
from phalanx.planning.tables.table import Sheet, columns
from phalanx.report import predict
from phalanx.report.style import seconds
from phalanx.report.view import View


def view(x: Explanation) -> View:
    """Show an explanation, the most asked-for tables first."""
    p = x.prediction
    mfu = "" if p.mfu is None else f", MFU {p.mfu:.1%}"
    lines = (predict.heading(p.question), f"{p.strategy}: {seconds(p.step_time_s)} a step{mfu}")
    sheets = [predict.time(p), predict.memory(p)]
    if p.engine == "formulas":
        sheets += [_targets(x), _axes(x), operator_table(_OPERATORS, x.operators, x.ridge), _losses(x)]
    return View([*lines, *sheets, _neighbours(x)], html=lambda: predict.view(p).page())


_OPERATORS = "operators of a block, forward, on the compute roofline"


def _targets(x: Explanation) -> Sheet:
    names = columns("figure", ("here", "share"), ("good", "share"), ("excellent", "share"), "", "source")
    rows = [(t.name, t.value, t.good, t.excellent, t.mark, t.source) for t in x.targets]
    return Sheet("figures against targets", names, rows)


def _axes(x: Explanation) -> Sheet:
    names = columns(
        "axis",
        "links",
        ("sent", "bytes"),
        ("FLOP/byte", "count"),
        ("ridge", "count"),
        "regime",
        ("exposed", "s"),
        ("critical batch", "count"),
    )
    rows = [
        (a.axis, a.tier, a.sent_bytes, a.flop_per_byte, a.ridge, a.regime, a.exposed_s, a.critical_batch)
        for a in x.communication
    ]
    note = "critical batch: sequences in a step from which data-parallel communication takes less than compute"
    return Sheet("on the communication roofline, per rank and step", names, rows, note)


def operator_table(title: str, rows: Iterable[OperatorIntensity], ridge: float | None) -> Sheet:
    """Tabulate operators on the compute roofline."""
    names = columns(
        "operator",
        "size",
        ("FLOP", "number"),
        ("bytes", "bytes"),
        ("FLOP/byte", "count"),
        "bound by",
        ("time", "s"),
    )
    cells = [(o.name, o.size, o.flops, o.bytes, o.intensity, o.bound, o.takes_s) for o in rows]
    return Sheet(title, names, cells, f"the chip's ridge: {ridge or 0.0:,.0f} FLOP per byte of memory")


def _losses(x: Explanation) -> Sheet:
    names = columns("loss", ("takes", "s"), ("gain at most", "share"), "best single change", ("step then", "s"))
    rows = [(a.name, a.takes_s, a.at_most, a.change or "none that fits is faster", a.step_time_s) for a in x.losses]
    return Sheet("what to change first", names, rows, f"order of the mesh, {x.order}" if x.order else "")


def _neighbours(x: Explanation) -> Sheet:
    step = x.prediction.step_time_s
    names = columns("change", "strategy", ("step", "s"), ("", "change"), ("memory", "bytes"), "why not")
    rows = [
        (n.change, n.strategy, n.step_time_s, n.step_time_s / step - 1, n.memory_bytes, n.reason)
        for n in x.neighbours
    ]
    return Sheet("why not its neighbours", names, rows)
