"""Tables as pages: every table with its pictures."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.planning.tables.table import Sheet
from phalanx.report.html.page import Section, page
from phalanx.report.pictures.figure import Picture
from phalanx.report.plots import panels_of
from phalanx.report.sheets import written


def report(sheets: Sequence[Sheet], pictures: Sequence[Picture] = ()) -> str:
    """Return the page of tables, with pictures of their subject first."""
    titles = {sheet.title for sheet in sheets}
    drawn = [p for p in pictures if p.title not in titles]
    sections = [Section(p.title, f"{p.note} Source: {p.source}".strip(), panels=p.panels) for p in drawn]
    return page((sheets[0] if sheets else pictures[0]).title, "tables", [*sections, *map(_section, sheets)])


def _section(sheet: Sheet) -> Section:
    names = tuple(c.name for c in sheet.columns)
    rows = [tuple(written(value, c.unit) for value, c in zip(row, sheet.columns, strict=True)) for row in sheet.rows]
    return Section(sheet.title, sheet.note, columns=names, rows=rows, panels=tuple(panels_of(sheet)))
