"""The picture of sheets: columns over the first one, if that has numbers, else as bars. Columns of one unit share a
panel; each column of counts has its own."""

from collections.abc import Iterable, Iterator

from phalanx.planning.tables.table import Column, Sheet
from phalanx.report.pictures.figure import Bar, Bars, Lines, Panel, Picture, PlotAxis, Series, Unit
from phalanx.report.style import cell_text
from phalanx.spec.cluster.spec import GIB
from phalanx.spec.errors import InputError

_UNITS: dict[str, tuple[str, Unit]] = {
    "bytes": ("bytes", "bytes"),
    "GB": ("GB", "GB"),
    "s": ("seconds", "s"),
    "share": ("share", "share"),
    "rate": ("bytes/s", "B/s"),
    "count": ("", "count"),
}
"""Unit of a column -> (name of the axis, unit of its numbers)."""


def picture(sheets: Iterable[Sheet], command: str) -> Picture:
    """Return all panels as one picture; `command`: the command that prints the tables, without `phalanx`. Raises
    InputError if no table can be plotted."""
    drawn = [sheet for sheet in sheets if sheet.charted or sheet.stacked]
    panels: list[Panel] = [panel for sheet in drawn for panel in panels_of(sheet)]
    if not panels:
        raise InputError("save", None, "has nothing to draw: no table of these has numbers in two rows")
    notes = "; ".join(dict.fromkeys(sheet.note for sheet in drawn if sheet.note))
    return Picture(drawn[0].title, tuple(panels), f"the tables of `phalanx {command}`", notes)


def panels_of(sheet: Sheet) -> list[Panel]:
    """Return the panels of one table: columns that add up as bars, then the others."""
    stacked = [_stack(sheet)] if sheet.stacked else []
    return [*stacked, *(_curves(sheet) or ([] if stacked else _bars(sheet)))] if sheet.charted else [*stacked]


def _stack(sheet: Sheet) -> Panel:
    """Return the columns that add up, a bar for each row."""
    places = [i for i, c in enumerate(sheet.columns) if c.name in sheet.stacked]
    first, unit = sheet.columns[0], sheet.columns[places[0]].unit
    scaled, scale = _SCALED.get(unit, (sheet.stacked_unit, 1.0)) if unit != "bytes" else ("GiB", float(GIB))
    bars = []
    for row in sheet.rows:
        numbers = [(i, row[i]) for i in places if isinstance(row[i], int | float)]
        parts = [(sheet.columns[i].name, max(0.0, float(value)) / scale) for i, value in numbers]
        total = sum(value for _, value in parts) * scale
        keys = " ".join(map(str, row[: sheet.keys]))
        label = keys if sheet.keys > 1 else f"{cell_text(row[0], first.unit)} {first.name}"
        bars.append(Bar(label, parts, cell_text(total, unit)))
    return Bars(scaled, tuple(bars), head=f"{sheet.title}: what adds up" if len(places) > 1 else sheet.title)


def _curves(sheet: Sheet) -> list[Panel]:
    """Return a panel for each unit, over a first column of numbers; [] where that has words."""
    first, *others = sheet.columns
    over = [row[0] for row in sheet.rows]
    if not all(isinstance(x, int | float) and x > 0 for x in over) or len(set(over)) < 2:
        return []
    panels: list[Panel] = []
    for kind in dict.fromkeys(map(_kind, others)):
        series = []
        for place, column in enumerate(sheet.columns):
            if place and column.unit and _kind(column) == kind and column.name not in sheet.stacked:
                points = [(float(row[0]), float(row[place])) for row in sheet.rows if row[place] and row[place] > 0]
                if len(points) > 1:
                    series.append(Series(column.name, points, dots=True))
        if series:
            name, unit = _UNITS[kind[0]]
            low, high = min(over), max(over)
            x = PlotAxis(first.name, "count", log=True, base=2 if high / low <= 4096 else 10, low=low, high=high)
            linear = unit == "share"
            y = PlotAxis(name or series[0].name, unit, log=not linear, low=0.0 if linear else None)
            panels.append(Lines(x, y, tuple(series), head=sheet.title, height=220))
    return panels


def _bars(sheet: Sheet) -> Iterator[Panel]:
    """Yield a panel of bars for each column of numbers, a bar for each row that is named by words."""
    keys = sheet.keys
    names = [" ".join(map(str, row[:keys])) for row in sheet.rows]
    while len(set(names)) < len(names) and keys < len(sheet.columns) and not sheet.columns[keys].unit:
        keys += 1
        names = [" ".join(map(str, row[:keys])) for row in sheet.rows]
    if len(names) < 2 or len(names) > _MOST_BARS or max(map(len, names)) > _LONGEST:
        return
    for place, column in enumerate(sheet.columns):
        values = [row[place] for row in sheet.rows]
        if place < keys or not column.unit or not any(isinstance(v, int | float) and v > 0 for v in values):
            continue
        unit, scale = _SCALED.get(column.unit, (column.name, 1.0))
        if column.unit == "bytes":
            most = max(v for v in values if isinstance(v, int | float))
            unit, scale = next((u for u in _BINARY if most >= u[1]), _BINARY[-1])
        bars = [
            Bar(name, (("", value / scale if isinstance(value, int | float) and value > 0 else 0.0),), said)
            for name, value in zip(names, values, strict=True)
            for said in [cell_text(value, column.unit)]
        ]
        yield Bars(unit, tuple(bars), head=f"{sheet.title}: {column.name}")


_SCALED = {"GB": ("GB", 1.0), "s": ("ms", 1e-3), "share": ("%", 0.01), "rate": ("GB/s", 1e9)}
_BINARY = (("GiB", float(GIB)), ("MiB", 2.0**20), ("KiB", 2.0**10), ("bytes", 1.0))
_MOST_BARS, _LONGEST = 40, 40


def _kind(column: Column) -> tuple[str, str]:
    """Return a key that columns share if they can share an axis."""
    return (column.unit, column.name if column.unit == "count" else "")
