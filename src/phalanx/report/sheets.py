"""Sheets as terminal tables, with the units of their numbers."""

from __future__ import annotations

from html import escape
from typing import Any

from rich import box
from rich.table import Table

from phalanx.planning.tables.table import Sheet
from phalanx.report.style import between_fields, seconds, size

_BAR_COLUMNS = 40
"""Characters of the bar of a whole."""


class _KeyedTable(Table):
    """A table whose first `keys` columns say what a row is about."""

    keys = 1


def drawn(sheet: Sheet) -> Table:
    """Return a sheet as a terminal table."""
    table = _KeyedTable(
        title=sheet.title, title_justify="left", header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False
    )
    for column in sheet.columns:
        name = f"{column.name} (GB)" if column.unit == "GB" else column.name
        table.add_column(
            name,
            justify="right" if column.unit not in ("", "strategy") else "left",
            overflow="fold",
            no_wrap=column.name in ("axis", "operation"),
        )
    if sheet.bars:
        table.add_column("")
    for place, row in enumerate(sheet.rows):
        cells = [written(value, c.unit) for value, c in zip(row, sheet.columns, strict=True)]
        if place == sheet.marked:
            cells[0] = f"→ {cells[0]}"
        if sheet.bars:
            cells.append("█" * max(1, round(_BAR_COLUMNS * row[-1])))
        table.add_row(*cells, style="bold" if place == sheet.marked else "")
    table.caption, table.keys = sheet.note or None, sheet.keys
    return table


def written(value: Any, unit: str) -> str:
    """Write a value of a column, with its unit unless the heading states it."""
    if value is None:
        return ""
    if unit == "bytes":
        return size(float(value))
    if unit == "s":
        return seconds(float(value)) if value else "0"
    if unit == "GB":
        return f"{value:,.3f}" if value < 100 else f"{value:,.1f}"
    if unit in ("signed_s", "signed_bytes"):
        return f"{'+' if value > 0 else '-'}{written(abs(value), unit.removeprefix('signed_'))}"
    if unit == "share":
        return f"{value:.1%}"
    if unit == "change":
        return f"{value:+.1%}"
    if unit == "number":
        return f"{value:,.4g}"
    if unit == "strategy":
        return between_fields(value)
    if unit == "rate":
        return f"{value / 1e9:,.1f} GB/s"
    if unit == "count":
        return f"{value:,.0f}" if value >= 100 or float(value).is_integer() else f"{value:,.2f}"
    return str(value)


def html_table(sheet: Sheet) -> str:
    """Return a sheet as an HTML table, for notebooks."""
    head = "".join(f"<th>{escape(column.name)}</th>" for column in sheet.columns)
    body = "".join(
        "<tr>"
        + "".join(f"<td>{escape(written(v, c.unit))}</td>" for v, c in zip(row, sheet.columns, strict=True))
        + "</tr>"
        for row in sheet.rows
    )
    caption = f"<caption>{escape(sheet.title)}</caption>"
    note = f"<p>{escape(sheet.note)}</p>" if sheet.note else ""
    return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{note}"
