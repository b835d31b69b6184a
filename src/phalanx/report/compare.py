"""Plans and strategies side by side: figures, time by term, memory by part, settings that differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from phalanx.answers.compare import ComparedPlan, Comparison
from phalanx.planning.tables.table import Column, Sheet, Unit, columns
from phalanx.report.view import View

_SMALL = 0.001
"""Terms below this share of every side are left out."""
LETTERS = "ABC"


def view(c: Comparison) -> View:
    """Show two or three sides; each difference is from the first."""
    sheets = [
        _figures(c.sides),
        _terms("time by term", "s", [s.terms_s for s in c.sides], [s.step_time_s for s in c.sides], "step"),
        _terms(
            "memory by part", "bytes", [s.memory_terms for s in c.sides], [s.memory_bytes for s in c.sides], "in all"
        ),
    ]
    if c.settings_that_differ:
        letters = LETTERS[: len(c.sides)]
        rows = [(name, *(v or "-" for v in values)) for name, values in c.settings_that_differ.items()]
        sheets.append(Sheet("settings that differ", columns("", *letters), rows, charted=False))
    closing = [] if c.settings_that_differ else ["no setting differs"]
    return View([*legend(c.sides), *sheets, *closing], html=lambda: _page(c))


def legend(sides: Sequence[ComparedPlan]) -> list[str]:
    """Say which letter is what."""
    return [f"{letter}: {side.name} ({side.stack})" for letter, side in zip(LETTERS, sides, strict=False)]


def _figures(sides: Sequence[ComparedPlan]) -> Sheet:
    rows: list[tuple[str, ...]] = [
        ("GPUs", *(f"{s.gpus:,}" for s in sides)),
        ("tokens/s", *(f"{s.tokens / s.step_time_s:,.0f}" for s in sides)),
        ("tokens/s per GPU", *(f"{s.tokens / s.step_time_s / s.gpus:,.0f}" for s in sides)),
        ("fits", *("yes" if s.fits else "no" for s in sides)),
    ]
    return Sheet("figures", columns("", *LETTERS[: len(sides)]), rows, charted=False)


def _terms(title: str, unit: Unit, terms: Sequence[Mapping[str, float]], totals: Sequence[float], name: str) -> Sheet:
    """Tabulate terms of every side that matter on any, with the difference of each side from the first."""
    letters = LETTERS[: len(terms)]
    signed: Unit = "signed_s" if unit == "s" else "signed_bytes"
    names = [Column(""), Column("A", unit)]
    for letter in letters[1:]:
        names += [Column(letter, unit), Column(f"{letter} - A", signed)]

    def row(label: str, values: Sequence[float]) -> tuple[Any, ...]:
        cells: list[Any] = [values[0]]
        for value in values[1:]:
            same = abs(value - values[0]) <= 1e-9 * max(value, values[0])
            cells += [value, None if same else value - values[0]]
        return (label, *cells)

    rows = []
    for term in dict.fromkeys(t for side in terms for t in side):
        values = [side.get(term, 0.0) for side in terms]
        if any(v > _SMALL * total for v, total in zip(values, totals, strict=True)):
            rows.append(row(term, values))
    return Sheet(title, tuple(names), [*rows, row(name, totals)], charted=False)


def _page(c: Comparison) -> str:
    from phalanx.report.html.comparison import report

    return report(dict(zip(LETTERS, c.sides, strict=False)), legend(c.sides), c.settings_that_differ)
