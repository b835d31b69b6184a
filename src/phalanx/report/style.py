"""The look of numbers and of tables (Sheets, with their units) in a terminal.

Tables fit its width without breaking a word: columns are at least as wide as their longest word, and a table that is
too wide for that becomes several, each with the key columns, which name a row.
"""

import re
from collections.abc import Iterator, Mapping
from html import escape
from itertools import accumulate
from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.table import Column, Table

from phalanx.planning.tables.table import Sheet
from phalanx.spec.cluster.spec import GIB


def seconds(value: float) -> str:
    """Write a time with two digits after the point or fewer, in s, ms or µs."""
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.1f} ms" if value >= 1e-3 else f"{value * 1e6:.0f} µs"


BYTES = {"GiB": 2.0**30, "MiB": 2.0**20, "KiB": 2.0**10, "bytes": 1.0}
FLOP = {"TFLOP": 1e12, "GFLOP": 1e9, "MFLOP": 1e6, "FLOP": 1.0}


def largest_unit(largest: float, units: Mapping[str, float]) -> tuple[str, float]:
    """Return (unit, its size) for an axis that ends at `largest`. `units`: name -> size, from the largest down."""
    return next(((name, one) for name, one in units.items() if largest >= one), list(units.items())[-1])


def size(value: float) -> str:
    """Write a number of bytes in TiB, GiB, MiB, KiB or B."""
    for unit, scale in (("TiB", 2**40), ("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= scale:
            return f"{value / scale:.1f} {unit}"
    return f"{value:.0f} B"


_STRATEGY_COLUMNS = 56


def between_fields(strategy: object) -> str:
    """Write a strategy's line in lines of at most _STRATEGY_COLUMNS, broken between fields."""
    lines = [""]
    for field in str(strategy).split(","):
        if lines[-1] and len(lines[-1]) + 1 + len(field) > _STRATEGY_COLUMNS:
            lines[-1] += ","
            lines.append("")
        lines[-1] += f",{field}" if lines[-1] else field
    return "\n".join(lines)


def count_words(n: int, noun: str) -> str:
    """Write a number with its noun in the singular or the plural: 1 rank, 2,048 ranks, 3 batches."""
    return f"{n:,} {noun}" + ("" if n == 1 else "es" if noun.endswith("ch") else "s")


def empty_table(title: str) -> Table:
    """Return a table with a title and no columns, in the style of all tables."""
    return Table(title=title, title_justify="left", header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)


def table(title: str, *columns: str, left: tuple[str, ...] = ()) -> Table:
    """Return a table with columns, right-aligned unless named in `left`."""
    grid = empty_table(title)
    for name in columns:
        grid.add_column(name, justify="left" if name in left else "right", overflow="fold")
    return grid


_FOLD = 24
"""A comma-separated word longer than this, such as a strategy, may be broken after a comma."""
_LIST_GOES_ON = re.compile(r",\n(?=\w+=)")
_AFTER_SLASH = r"(?<=\d/)(?=\d)"
_GAP, _EDGES = 3, 2
"""Characters between the contents of two columns, and at the two edges of a table."""


def print_fitted(console: Console, table: Table) -> None:
    """Print a table within the console's width, without breaking words, its title above and its note below."""
    width = console.width
    if table.title:
        console.print(table.title, style="italic", highlight=False, soft_wrap=True)
    note, table.title, table.caption = table.caption, None, None
    for part in pieces(table, width, getattr(table, "keys", 1)):
        console.print(part)
    if note:
        console.print(note, style="dim italic", highlight=False)


def pieces(table: Table, width: int, keys: int) -> Iterator[RenderableType]:
    """Yield a table unchanged if it fits into `width`, else with narrower columns, else several tables that repeat
    the first `keys` columns."""
    if not all(isinstance(cell, str) for column in table.columns for cell in column.cells):
        yield table
        return
    least, most = zip(*map(_widths, table.columns), strict=True) if table.columns else ((), ())
    room = width - _EDGES + _GAP  # each column with a gap behind it
    if sum(most) + _GAP * len(most) <= room:
        yield table
        return
    wanted = [_natural_width(column) for column in table.columns]
    for columns in _groups(least, room, keys):
        yield _narrow(table, columns, [least[i] for i in columns], [wanted[i] for i in columns], room)


def _groups(least: tuple[int, ...], room: int, keys: int) -> list[list[int]]:
    """Return the columns of each table that a wide one is cut into: the keys, and as many others as fit."""
    first = list(range(min(keys, len(least))))
    while len(first) > 1 and sum(least[i] + _GAP for i in first) + max(least) + _GAP > room:
        first.pop()
    groups: list[list[int]] = []
    rest = list(range(len(first), len(least)))
    while rest or not groups:
        used = sum(least[i] + _GAP for i in first)
        ends = [used + n for n in accumulate(least[i] + _GAP for i in rest)]
        count = max(1, sum(end <= room for end in ends))
        groups.append([*first, *rest[:count]])
        rest = rest[count:]
    return groups


def _narrow(table: Table, columns: list[int], least: list[int], most: list[int], room: int) -> Table:
    """Return some columns of a table, with the room shared among the columns that have long lines."""
    grid = Table(header_style="bold", box=table.box, pad_edge=False)
    for i, size in zip(columns, _share_room(least, most, room - _GAP * len(columns)), strict=True):
        column = table.columns[i]
        grid.add_column(str(column.header), justify=column.justify, width=size, style=column.style, no_wrap=False)
    cells = [list(table.columns[i].cells) for i in columns]
    for row, texts in zip(table.rows, zip(*cells, strict=True), strict=True):
        wrapped = [_at_commas(str(text), grid.columns[i].width or 1) for i, text in enumerate(texts)]
        grid.add_row(*wrapped, style=row.style)
    return grid


def _share_room(least: list[int], most: list[int], room: int) -> list[int]:
    """Return the widths of columns: the room beyond their least widths is divided evenly, and columns that need
    little get all of it, so that a long sentence is broken before a short name."""
    sizes, free = list(least), max(0, room - sum(least))
    needy = sorted(range(len(least)), key=lambda i: most[i] - least[i])
    for place, i in enumerate(needy):
        more = min(most[i] - least[i], free // (len(needy) - place))
        sizes[i] += more
        free -= more
    return sizes


def _widths(column: Column) -> tuple[int, int]:
    """Return (the least width of a column: its longest word or number with unit; the width of its longest line)."""
    head, *cells = (str(part) for part in (column.header, *column.cells))
    lines = [line for text in (head, *cells) for line in text.splitlines()]
    # A number stays with its unit.
    whole = [line for text in cells for line in text.splitlines()] if column.justify == "right" else []
    texts = [head] if column.justify == "right" else [head, *cells]
    words = [part for text in texts for word in text.split() for part in _parts(word)] + whole
    return max(map(len, words), default=1), max(map(len, lines), default=1)


def _natural_width(column: Column) -> int:
    """Return the width at which no cell of a column is broken; its heading may be."""
    lines = [line for cell in column.cells for line in str(cell).splitlines()]
    return max(map(len, [*lines, *str(column.header).split()]), default=1)


def _parts(word: str) -> list[str]:
    """Return the parts of a word between which a line may end: a long list ends lines after its commas, and a long
    list of numbers in it, such as layers=5/6/6, after its slashes."""
    if len(word) <= _FOLD:
        return [word]
    parts = re.split(r"(?<=,)(?=.)", word)
    return [number for part in parts for number in (re.split(_AFTER_SLASH, part) if len(part) > _FOLD else [part])]


def _at_commas(text: str, width: int) -> str:
    """Return a text with its long lists broken after commas into lines of at most `width` characters; the breaks of
    a wider column are removed first."""
    lines = []
    for line in _LIST_GOES_ON.sub(",", text).split("\n"):
        words = []
        for word in line.split(" "):
            filled = [""]
            for part in _parts(word) if len(word) > width else [word]:
                if filled[-1] and len(filled[-1]) + len(part) > width:
                    filled.append("")
                filled[-1] += part
            words.append("\n".join(filled))
        lines.append(" ".join(words))
    return "\n".join(lines)


_BAR_COLUMNS = 40
"""Characters of a bar for a share of 1."""


class _KeyedTable(Table):
    """A table whose first `keys` columns name a row."""

    keys = 1


def terminal_table(sheet: Sheet) -> Table:
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
        cells = [cell_text(value, c.unit) for value, c in zip(row, sheet.columns, strict=True)]
        if place == sheet.marked:
            cells[0] = f"→ {cells[0]}"
        if sheet.bars:
            cells.append("█" * max(1, round(_BAR_COLUMNS * row[-1])))
        table.add_row(*cells, style="bold" if place == sheet.marked else "")
    table.caption, table.keys = sheet.note or None, sheet.keys
    return table


def cell_text(value: Any, unit: str) -> str:
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
        return f"{'+' if value > 0 else '-'}{cell_text(abs(value), unit.removeprefix('signed_'))}"
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
        + "".join(f"<td>{escape(cell_text(v, c.unit))}</td>" for v, c in zip(row, sheet.columns, strict=True))
        + "</tr>"
        for row in sheet.rows
    )
    caption = f"<caption>{escape(sheet.title)}</caption>"
    note = f"<p>{escape(sheet.note)}</p>" if sheet.note else ""
    return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{note}"
