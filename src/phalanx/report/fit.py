"""Tables that fit a terminal without breaking a word: columns are as wide as their longest word at least, and a table
that is too wide for that becomes several, each with the columns that say what a row is about."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import accumulate

from rich.console import Console, RenderableType
from rich.table import Column, Table

_FOLD = 24
"""A comma-separated word longer than this, such as a strategy, may be broken after a comma."""
_LIST_GOES_ON = re.compile(r",\n(?=\w+=)")
_AFTER_SLASH = r"(?<=\d/)(?=\d)"
_GAP, _EDGES = 3, 2
"""Characters between the contents of two columns, and at the two edges of a table."""


def print_fitted(console: Console, table: Table) -> None:
    """Print a table within the console's width: its title and its note in lines of their own, no word broken."""
    width = console.width
    if table.title:
        console.print(table.title, style="italic", highlight=False, soft_wrap=True)
    note, table.title, table.caption = table.caption, None, None
    for part in pieces(table, width, getattr(table, "keys", 1)):
        console.print(part)
    if note:
        console.print(note, style="dim italic", highlight=False)


def pieces(table: Table, width: int, keys: int) -> Iterator[RenderableType]:
    """Yield a table as it is if it fits, else with narrower columns, else cut into several tables that repeat the
    first `keys` columns."""
    if not all(isinstance(cell, str) for column in table.columns for cell in column.cells):
        yield table
        return
    least, most = zip(*map(_widths, table.columns), strict=True) if table.columns else ((), ())
    room = width - _EDGES + _GAP  # each column with a gap behind it
    if sum(most) + _GAP * len(most) <= room:
        yield table
        return
    wanted = [_wanted(column) for column in table.columns]
    for columns in _groups(least, room, keys):
        yield _narrowed(table, columns, [least[i] for i in columns], [wanted[i] for i in columns], room)


def _groups(least: tuple[int, ...], room: int, keys: int) -> list[list[int]]:
    """Return which columns stand together: as many as fit beside the keys."""
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


def _narrowed(table: Table, columns: list[int], least: list[int], most: list[int], room: int) -> Table:
    """Return some columns of a table, what room there is shared among those that have long lines."""
    grid = Table(header_style="bold", box=table.box, pad_edge=False)
    for i, size in zip(columns, _shared(least, most, room - _GAP * len(columns)), strict=True):
        own = table.columns[i]
        grid.add_column(str(own.header), justify=own.justify, width=size, style=own.style, no_wrap=False)
    cells = [list(table.columns[i].cells) for i in columns]
    for row, texts in zip(table.rows, zip(*cells, strict=True), strict=True):
        wrapped = [_at_commas(str(text), grid.columns[i].width or 1) for i, text in enumerate(texts)]
        grid.add_row(*wrapped, style=row.style)
    return grid


def _shared(least: list[int], most: list[int], room: int) -> list[int]:
    """Return the widths of columns: what is left beside the least is dealt out evenly, to those that need little
    first, so that a long sentence is broken before a short name is."""
    sizes, free = list(least), max(0, room - sum(least))
    needy = sorted(range(len(least)), key=lambda i: most[i] - least[i])
    for place, i in enumerate(needy):
        more = min(most[i] - least[i], free // (len(needy) - place))
        sizes[i] += more
        free -= more
    return sizes


def _widths(column: Column) -> tuple[int, int]:
    """Return the least width of a column, its longest word or number with unit, and its longest line."""
    head, *cells = (str(part) for part in (column.header, *column.cells))
    lines = [line for text in (head, *cells) for line in text.splitlines()]
    # A number stays beside its unit.
    whole = [line for text in cells for line in text.splitlines()] if column.justify == "right" else []
    texts = [head] if column.justify == "right" else [head, *cells]
    words = [part for text in texts for word in text.split() for part in _parts(word)] + whole
    return max(map(len, words), default=1), max(map(len, lines), default=1)


def _wanted(column: Column) -> int:
    """Return the width at which no cell of a column is broken: its heading is, so that strategies are not."""
    lines = [line for cell in column.cells for line in str(cell).splitlines()]
    return max(map(len, [*lines, *str(column.header).split()]), default=1)


def _parts(word: str) -> list[str]:
    """Return the parts of a word between which a line may end: those of a long list, after its commas, and of a long
    list of numbers in it, such as layers=5/6/6, after its slashes."""
    if len(word) <= _FOLD:
        return [word]
    parts = re.split(r"(?<=,)(?=.)", word)
    return [number for part in parts for number in (re.split(_AFTER_SLASH, part) if len(part) > _FOLD else [part])]


def _at_commas(text: str, width: int) -> str:
    """Break the long lists of a text after commas, into lines of at most `width` characters; where they were broken
    for a wider column, they are broken anew."""
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
