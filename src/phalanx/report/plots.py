"""Sheets as plots: the columns of a table over its first one, if that holds numbers. Columns of one unit share a
panel; each column of counts has its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from phalanx.plan.tables.table import Column, Sheet
from phalanx.report.sheets import written
from phalanx.spec.errors import InputError

_WIDE, _HIGH, _EDGE, _TOP, _FOOT, _LEGEND = 460, 260, 70, 36, 40, 130
_COLOURS = ("#2266bb", "#bb3322", "#338833", "#aa7711", "#7744aa", "#118899")


@dataclass(frozen=True)
class _Panel:
    """One plot with its axes."""

    title: str
    across: str
    unit: str
    lines: dict[str, list[tuple[float, float]]]
    """Points by the name of their column."""


def svg(sheets: Iterable[Sheet]) -> str:
    """Return all panels as one SVG, two side by side. Raises InputError if no table can be plotted."""
    panels = [panel for sheet in sheets if sheet.charted for panel in _panels(sheet)]
    if not panels:
        raise InputError("--plot", None, "has nothing to draw: these tables have words in their first column")
    wide = _WIDE + _LEGEND
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * wide}" height="{-(-len(panels) // 2) * _HIGH}" '
        'font-family="sans-serif" font-size="10">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for i, panel in enumerate(panels):
        out += _draw(panel, i % 2 * wide + _EDGE, i // 2 * _HIGH + _TOP)
    return "\n".join([*out, "</svg>"]) + "\n"


def _panels(sheet: Sheet) -> Iterable[_Panel]:
    first, *others = sheet.columns
    over = [row[0] for row in sheet.rows]
    if not all(isinstance(x, int | float) and x > 0 for x in over) or len(set(over)) < 2:
        return
    for kind in dict.fromkeys(map(_kind, others)):
        lines = {}
        for place, column in enumerate(sheet.columns):
            if place and column.unit and _kind(column) == kind:
                points = [(float(row[0]), float(row[place])) for row in sheet.rows if row[place]]
                if len(points) > 1:
                    lines[column.name] = points
        if lines:
            yield _Panel(sheet.title, first.name, kind[0], lines)


def _kind(column: Column) -> tuple[str, str]:
    """A key that columns share if they may share an axis."""
    return (column.unit, column.name if column.unit == "count" else "")


def _draw(panel: _Panel, left: int, top: int) -> Iterable[str]:
    """Draw a panel with logarithmic axes; for shares the vertical axis is linear from 0."""
    w, h = _WIDE - _EDGE - 14, _HIGH - _TOP - _FOOT
    xs, ys = zip(*(point for line in panel.lines.values() for point in line), strict=True)
    x, y = _scale(xs), _scale(ys) if panel.unit != "share" else (lambda v: v / max(1.0, max(ys)))

    def place(point: tuple[float, float]) -> tuple[float, float]:
        return left + x(point[0]) * w, top + h - y(point[1]) * h

    yield f'<text x="{left}" y="{top - 12}">{escape(panel.title[:76])}</text>'
    yield f'<rect x="{left}" y="{top}" width="{w}" height="{h}" fill="none" stroke="#999"/>'
    for i, (name, points) in enumerate(panel.lines.items()):
        colour = _COLOURS[i % len(_COLOURS)]
        path = " ".join(f"{across:.1f},{up:.1f}" for across, up in map(place, points))
        yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
        for across, up in map(place, points):
            yield f'<circle cx="{across:.1f}" cy="{up:.1f}" r="2.5" fill="{colour}"/>'
        yield f'<text x="{left + w + 8}" y="{top + 10 + 14 * i}" fill="{colour}">{escape(name)}</text>'
    for value, at in ((min(xs), left), (max(xs), left + w)):
        yield f'<text x="{at}" y="{top + h + 14}" text-anchor="middle">{value:,g}</text>'
    yield f'<text x="{left + w / 2}" y="{top + h + 28}" text-anchor="middle">{escape(panel.across)}</text>'
    lowest = 0.0 if panel.unit == "share" else min(ys)
    highest = max(1.0, max(ys)) if panel.unit == "share" else max(ys)
    for value, at in ((lowest, top + h), (highest, top + 8)):
        yield f'<text x="{left - 4}" y="{at}" text-anchor="end">{_label(value, panel.unit)}</text>'


def _label(value: float, unit: str) -> str:
    return written(value, unit) + (" GB" if unit == "GB" else "")


def _scale(values: Sequence[float]) -> Callable[[float], float]:
    """Return a logarithmic map of the range of values to 0 ... 1."""
    low, high = math.log2(min(values)), math.log2(max(values))
    return lambda v: (math.log2(v) - low) / max(high - low, 1e-9)
