"""Sheets as a picture: the columns of a table over its first one, if that holds numbers. Columns of one unit share a
panel; each column of counts has its own."""

from __future__ import annotations

from collections.abc import Iterable

from phalanx.plan.tables.table import Column, Sheet
from phalanx.report.pictures.figure import Axis, Lines, Picture, Series, Unit
from phalanx.spec.errors import InputError

_UNITS: dict[str, tuple[str, Unit]] = {
    "bytes": ("bytes", "bytes"),
    "GB": ("GB", "GB"),
    "s": ("seconds", "s"),
    "share": ("share", "share"),
    "rate": ("bytes/s", "B/s"),
    "count": ("", "count"),
}
"""The name of an axis and how its numbers are written, by a column's unit."""


def picture(sheets: Iterable[Sheet], command: str) -> Picture:
    """Return all panels as one picture; `command`: what prints the tables, without `phalanx`. Raises InputError if no
    table can be plotted."""
    drawn = [sheet for sheet in sheets if sheet.charted]
    panels = [panel for sheet in drawn for panel in _panels(sheet)]
    if not panels:
        raise InputError("--plot", None, "has nothing to draw: these tables have words in their first column")
    notes = "; ".join(dict.fromkeys(sheet.note for sheet in drawn if sheet.note))
    return Picture(f"phalanx {command}", tuple(panels), f"the tables of `phalanx {command}`", notes)


def _panels(sheet: Sheet) -> Iterable[Lines]:
    first, *others = sheet.columns
    over = [row[0] for row in sheet.rows]
    if not all(isinstance(x, int | float) and x > 0 for x in over) or len(set(over)) < 2:
        return
    for kind in dict.fromkeys(map(_kind, others)):
        series = []
        for place, column in enumerate(sheet.columns):
            if place and column.unit and _kind(column) == kind:
                points = [(float(row[0]), float(row[place])) for row in sheet.rows if row[place] and row[place] > 0]
                if len(points) > 1:
                    series.append(Series(column.name, points, dots=True))
        if series:
            name, unit = _UNITS[kind[0]]
            low, high = min(over), max(over)
            x = Axis(first.name, "count", log=True, base=2 if high / low <= 4096 else 10, low=low, high=high)
            linear = unit == "share"
            y = Axis(name or series[0].name, unit, log=not linear, low=0.0 if linear else None)
            yield Lines(x, y, tuple(series), head=sheet.title, height=220)


def _kind(column: Column) -> tuple[str, str]:
    """A key that columns share if they may share an axis."""
    return (column.unit, column.name if column.unit == "count" else "")
