"""An explanation as tables: time and memory with their shares, figures against targets, rooflines, levers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from rich.table import Table

from phalanx.planning.explain import explanation, operators
from phalanx.planning.explain.analytic import AnalyticSubject
from phalanx.planning.explain.exact import ExactExplanation
from phalanx.planning.search.why_not import TERM_NAMES
from phalanx.report.style import seconds, size, table


def tables(x: AnalyticSubject) -> Iterable[Table]:
    """Yield all tables, the most asked-for first."""
    yield _shares("where the time goes", "of the step", x.priced.terms, seconds, TERM_NAMES)
    reserved = max(x.priced.bytes_ - sum(x.priced.memory_terms.values()), 0.0)
    yield _shares(
        f"where the memory goes: {size(x.priced.bytes_)} of {size(x.memory[1])}, the fullest rank",
        "of it",
        {**x.priced.memory_terms, "reserved by the allocator beyond these": reserved},
        size,
        {},
    )
    yield _marks(x)
    yield _axes(x)
    yield operator_table(
        "operators of a block, forward, on the compute roofline", operators.training(x.pricing, x.strategy)
    )
    yield _levers(x)
    yield _neighbours(x)


def exact_tables(x: ExactExplanation) -> Iterable[Table]:
    """Yield the tables of a job's plan on a measured machine, priced exactly."""
    yield _shares("where the time goes", "of the step", x.terms, seconds, {})
    need = float(x.chosen.prediction.memory_bytes)
    yield _shares(f"where the memory goes: {size(need)} of {size(x.usable)}", "of the peak", x.memory_terms, size, {})
    if not x.neighbours:
        return
    grid = table("its neighbours", "change", "strategy", "step", "", "memory", left=("change", "strategy"))
    for what, c in x.neighbours:
        change = c.reason or f"{c.seconds / x.chosen.seconds - 1:+.1%}"
        grid.add_row(what, str(c.as_requested), seconds(c.seconds), change, size(c.prediction.memory_bytes))
    yield grid


def _shares(
    title: str, share: str, parts: Mapping[str, float], write: Callable[[float], str], names: Mapping[str, str]
) -> Table:
    grid = table(title, "", "takes", share, left=("",))
    total = sum(parts.values())
    for name, value in sorted(parts.items(), key=lambda item: -item[1]):
        if value > 0.001 * total:
            grid.add_row(names.get(name, name), write(value), f"{value / total:.1%}")
    return grid


def _marks(x: AnalyticSubject) -> Table:
    grid = table(
        "figures against targets", "figure", "here", "good", "excellent", "", "source", left=("figure", "", "source")
    )
    for target, value in x.marks:
        grid.add_row(
            target.name,
            f"{value:.1%}",
            f"{target.good:.0%}",
            f"{target.excellent:.0%}",
            target.mark(value),
            target.source,
        )
    return grid


def _axes(x: AnalyticSubject) -> Table:
    grid = table(
        "on the communication roofline, per rank and step",
        "axis",
        "links",
        "sent",
        "FLOP/byte",
        "ridge",
        "regime",
        "exposed",
        "critical batch",
        left=("axis", "links", "regime"),
    )
    for a in explanation.axes(x):
        grid.add_row(
            a.axis,
            a.tier,
            size(a.sent),
            f"{a.intensity:,.0f}",
            f"{a.ridge:,.0f}",
            a.regime,
            seconds(a.exposed_s) if a.exposed_s else "0",
            "" if a.critical_batch is None else f"{a.critical_batch:,.0f}",
        )
    grid.caption = (
        "critical batch: sequences in a step from which data-parallel communication takes less than compute"
    )
    return grid


def operator_table(title: str, rows: Iterable[operators.Operator]) -> Table:
    """Tabulate operators on the compute roofline."""
    grid = table(
        title, "operator", "size", "FLOP", "bytes", "FLOP/byte", "bound by", "time", left=("operator", "size")
    )
    ridge = 0.0
    for o in rows:
        ridge = o.ridge
        grid.add_row(
            o.name, o.shape, f"{o.flops:.3g}", size(o.bytes_), f"{o.intensity:,.1f}", o.bound, seconds(o.seconds)
        )
    grid.caption = f"the chip's ridge: {ridge:,.0f} FLOP per byte of memory"
    return grid


def _levers(x: AnalyticSubject) -> Table:
    grid = table(
        "what to change first",
        "loss",
        "takes",
        "gain at most",
        "best single change",
        "step then",
        left=("loss", "best single change"),
    )
    for lever in explanation.levers(x):
        grid.add_row(
            lever.name,
            seconds(lever.seconds),
            f"{lever.at_most:.1%}",
            lever.change or "none that fits is faster",
            seconds(lever.priced.seconds) if lever.priced else "",
        )
    order = explanation.order_costs(x)
    if order:
        grid.caption = f"order of the mesh, {order}"
    return grid


def _neighbours(x: AnalyticSubject) -> Table:
    grid = table("why not its neighbours", "change", "step", "memory", "why not", left=("change", "why not"))
    for what, p, reason in explanation.why_not(x):
        grid.add_row(what, seconds(p.seconds), size(p.bytes_), reason)
    return grid
