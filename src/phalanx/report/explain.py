"""An explanation as tables: time and memory with their shares, figures beside their targets, rooflines, levers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rich.table import Table

from phalanx.plan.explain import explanation, operators
from phalanx.plan.explain.analytic import Subject
from phalanx.plan.explain.exact import Own
from phalanx.plan.search.why_not import TERM_NAMES
from phalanx.report.style import seconds, size, table


def tables(x: Subject) -> Iterable[Table]:
    """In the order in which one asks."""
    yield _shares("where the time goes", "of the step", x.priced.terms, seconds, TERM_NAMES)
    yield _shares(
        f"where the memory goes: {size(x.priced.bytes_)} of {size(x.priced.usable)}, the fullest rank",
        "of the peak",
        x.priced.held,
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


def of_our_own(x: Own) -> Iterable[Table]:
    """Of a plan that was made of a job, on a measured machine."""
    yield _shares("where the time goes", "of the step", x.terms, seconds, {})
    need = float(x.chosen.prediction.memory_bytes)
    yield _shares(f"where the memory goes: {size(need)} of {size(x.usable)}", "of the peak", x.held, size, {})
    made = table("its neighbours", "change", "strategy", "step", "", "memory", left=("change", "strategy"))
    for what, c in x.neighbours:
        change = c.reason or f"{c.seconds / x.chosen.seconds - 1:+.1%}"
        made.add_row(what, str(c.asked), seconds(c.seconds), change, size(c.prediction.memory_bytes))
    yield made


def _shares(title: str, share: str, parts: Mapping[str, float], written: object, names: Mapping[str, str]) -> Table:
    made = table(title, "", "takes", share, left=("",))
    whole = sum(parts.values())
    for name, value in sorted(parts.items(), key=lambda item: -item[1]):
        if value > 0.001 * whole:
            made.add_row(names.get(name, name), written(value), f"{value / whole:.1%}")  # type: ignore[operator]
    return made


def _marks(x: Subject) -> Table:
    made = table(
        "beside what is good", "figure", "here", "good", "excellent", "", "source", left=("figure", "", "source")
    )
    for target, value in x.marks:
        made.add_row(
            target.name,
            f"{value:.1%}",
            f"{target.good:.0%}",
            f"{target.excellent:.0%}",
            target.mark(value),
            target.source,
        )
    return made


def _axes(x: Subject) -> Table:
    made = table(
        "on the communication roofline, per rank and step",
        "axis",
        "links",
        "sent",
        "FLOP/byte",
        "ridge",
        "regime",
        "seen",
        "critical batch",
        left=("axis", "links", "regime"),
    )
    for a in explanation.axes(x):
        made.add_row(
            a.axis,
            a.tier,
            size(a.sent),
            f"{a.intensity:,.0f}",
            f"{a.ridge:,.0f}",
            a.regime,
            seconds(a.exposed_s) if a.exposed_s else "0",
            "" if a.critical_batch is None else f"{a.critical_batch:,.0f}",
        )
    made.caption = "critical batch: sequences in a step from which gradients and parameters take less than compute"
    return made


def operator_table(title: str, found: Iterable[operators.Operator]) -> Table:
    made = table(
        title, "operator", "size", "FLOP", "bytes", "FLOP/byte", "bound by", "time", left=("operator", "size")
    )
    ridge = 0.0
    for o in found:
        ridge = o.ridge
        made.add_row(
            o.name, o.shape, f"{o.flops:.3g}", size(o.bytes_), f"{o.intensity:,.1f}", o.bound, seconds(o.seconds)
        )
    made.caption = f"the chip's ridge: {ridge:,.0f} FLOP per byte of memory"
    return made


def _levers(x: Subject) -> Table:
    made = table(
        "what to change first",
        "loss",
        "takes",
        "gain at most",
        "best single change",
        "then",
        left=("loss", "best single change"),
    )
    for lever in explanation.levers(x):
        made.add_row(
            lever.what,
            seconds(lever.seconds),
            f"{lever.at_most:.1%}",
            lever.change or "none that fits is faster",
            seconds(lever.priced.seconds) if lever.priced else "",
        )
    order = explanation.order_costs(x)
    if order:
        made.caption = f"order of the mesh, {order}"
    return made


def _neighbours(x: Subject) -> Table:
    made = table("why not its neighbours", "change", "step", "memory", "why not", left=("change", "why not"))
    for what, p, reason in explanation.why_not(x):
        made.add_row(what, seconds(p.seconds), size(p.bytes_), reason)
    return made
