"""Tables as pages: every table with its charts, one for each unit of its numbers, or stacked where they add up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from phalanx.planning.tables.table import Column, Sheet
from phalanx.report.html.page import Section, page
from phalanx.report.pictures.figure import Picture
from phalanx.report.pictures.files import svg
from phalanx.report.sheets import written

_WHAT = {"GB": "GB", "bytes": "GiB", "s": "seconds", "share": "share", "rate": "GB/s"}
_SCALE = {"bytes": 2.0**30, "rate": 1e9}


def report(sheets: Sequence[Sheet], pictures: Sequence[Picture] = ()) -> str:
    """Return the page of tables, with pictures of their subject first."""
    charted = {sheet.title for sheet in sheets}
    sections = [Section(p.title, "svg", svg=svg(p)) for p in pictures if p.title not in charted]
    sections += [section for sheet in sheets for section in _sections(sheet)]
    return page(sheets[0].title, "tables", sections)


def _sections(sheet: Sheet) -> Iterator[Section]:
    """Yield a table's section, then one for each chart of it."""
    names = tuple(c.name for c in sheet.columns)
    rows = [tuple(written(value, c.unit) for value, c in zip(row, sheet.columns, strict=True)) for row in sheet.rows]
    yield Section(sheet.title, "table", sheet.note, columns=names, rows=rows)
    if sheet.stacked:
        yield _stack(sheet)
    first, *others = sheet.columns
    if not sheet.charted or not all(isinstance(row[0], int | float) for row in sheet.rows) or len(sheet.rows) < 2:
        return
    for unit in dict.fromkeys(c.unit for c in others if c.unit in _WHAT and c.name not in sheet.stacked):
        series = [
            {"name": c.name, "points": points}
            for place, c in enumerate(sheet.columns)
            if place and c.unit == unit and c.name not in sheet.stacked
            if len(points := _points(sheet, place, c)) > 1
        ]
        if series:
            chart = {"x": first.name, "y": _WHAT[unit], "series": series, "log": unit != "share", "logX": True}
            yield Section(f"{sheet.title}: {_WHAT[unit]}", "lines", chart=chart)


def _points(sheet: Sheet, place: int, column: Column) -> list[tuple[float, float]]:
    """Return (first column, this column) of the rows that have a positive number, or any of a share."""
    scale = _SCALE.get(column.unit, 1.0)
    least = 0.0 if column.unit == "share" else 1e-300
    pairs = [(float(row[0]), row[place]) for row in sheet.rows if isinstance(row[place], int | float)]
    return [(x, float(y) / scale) for x, y in pairs if y >= least]


def _stack(sheet: Sheet) -> Section:
    """Draw the columns that add up as bars, a row of the table each."""
    places = [i for i, c in enumerate(sheet.columns) if c.name in sheet.stacked]
    unit = sheet.columns[places[0]].unit
    first = sheet.columns[0]
    bars = [
        {
            "bar": f"{written(row[0], first.unit)} {first.name}",
            "part": sheet.columns[i].name,
            "value": max(0.0, float(row[i])),
            "text": written(row[i], unit),
        }
        for row in sheet.rows
        for i in places
        if isinstance(row[i], int | float)
    ]
    return Section(
        f"{sheet.title}: what adds up", "stack", chart={"unit": _WHAT.get(unit, sheet.stacked_unit), "bars": bars}
    )
