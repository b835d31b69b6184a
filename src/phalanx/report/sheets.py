"""Sheets as terminal tables, with the units of their numbers."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.table import Table

from phalanx.planning.tables.table import Sheet
from phalanx.report.style import seconds, size


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
            justify="right" if column.unit else "left",
            overflow="fold",
            no_wrap=column.name in ("axis", "operation"),
        )
    for row in sheet.rows:
        table.add_row(*(written(value, c.unit) for value, c in zip(row, sheet.columns, strict=True)))
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
    if unit == "share":
        return f"{value:.1%}"
    if unit == "rate":
        return f"{value / 1e9:,.1f} GB/s"
    if unit == "count":
        return f"{value:,.0f}" if value >= 100 or float(value).is_integer() else f"{value:,.2f}"
    return str(value)
