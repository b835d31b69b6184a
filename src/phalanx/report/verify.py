"""The result of a verification as tables: predicted beside recorded, and the first difference in its context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich import box
from rich.table import Table

from phalanx.report.style import size


def columns_of(*names: str) -> Table:
    """Return an empty table with these columns, numbers to the right of the first."""
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for i, name in enumerate(names):
        table.add_column(name, justify="right" if i else "left", no_wrap=True)
    return table


def traffic(totals: Mapping[tuple[str, str], tuple[int, int]]) -> Table:
    """Tabulate a step's collectives on one rank, given as (operation, axis) -> (number, bytes)."""
    table = columns_of("collectives of a step, predicted", "number", "bytes")
    for (op, axis), (count, total) in totals.items():
        table.add_row(f"{op} over {axis}", f"{count:,}", f"{total:,}")
    return table


def memory(rows: Sequence[tuple[str, int, int | None, int | None]], measured: bool) -> Table:
    """Tabulate live bytes from rows (name, predicted, recorded without content, measured or None)."""
    table = columns_of("live bytes", "predicted", "recorded", *(["measured"] if measured else []))
    for name, *values in rows:
        table.add_row(name, *(_bytes(v) for v in (values if measured else values[:2])))
    return table


def context(around: Sequence[tuple[int, str, str]], number: int) -> Table:
    """Tabulate (number, predicted, recorded) events around a difference, with event `number` marked."""
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    table.add_column("predicted")
    table.add_column("recorded")
    for i, ours, theirs in around:
        mark = "→" if i == number else ""
        table.add_row(f"{mark}{i}", ours, theirs, style="bold" if mark else "")
    return table


def _bytes(value: int | None) -> str:
    return "" if value is None else f"{size(value)} ({value:,} B)"
