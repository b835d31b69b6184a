"""How numbers and tables look in a terminal."""

from __future__ import annotations

from collections.abc import Mapping

from rich import box
from rich.table import Table

from phalanx.spec.cluster.spec import GIB


def seconds(value: float) -> str:
    """Write a time with two digits after the point or fewer, in s, ms or µs."""
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.1f} ms" if value >= 1e-3 else f"{value * 1e6:.0f} µs"


BYTES = {"GiB": 2.0**30, "MiB": 2.0**20, "KiB": 2.0**10, "bytes": 1.0}
FLOP = {"TFLOP": 1e12, "GFLOP": 1e9, "MFLOP": 1e6, "FLOP": 1.0}


def largest_unit(largest: float, units: Mapping[str, float]) -> tuple[str, float]:
    """Return the unit of an axis that ends at `largest`, and its size. `units`: from the largest down."""
    return next(((name, one) for name, one in units.items() if largest >= one), list(units.items())[-1])


def size(value: float) -> str:
    """Write a number of bytes in TiB, GiB, MiB, KiB or B."""
    for unit, scale in (("TiB", 2**40), ("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= scale:
            return f"{value / scale:.1f} {unit}"
    return f"{value:.0f} B"


def between_fields(strategy: object, width: int = 56) -> str:
    """Write a strategy's line in lines of at most `width` columns, broken between fields."""
    lines = [""]
    for field in str(strategy).split(","):
        if lines[-1] and len(lines[-1]) + 1 + len(field) > width:
            lines[-1] += ","
            lines.append("")
        lines[-1] += f",{field}" if lines[-1] else field
    return "\n".join(lines)


def counted(n: int, noun: str) -> str:
    """Write a number with its noun in the singular or with an s: 1 rank, 2,048 ranks."""
    return f"{n:,} {noun}" + ("" if n == 1 else "s")


def empty_table(title: str) -> Table:
    """Return a table with a title and no columns, in the style of all tables."""
    return Table(title=title, title_justify="left", header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)


def table(title: str, *columns: str, left: tuple[str, ...] = ()) -> Table:
    """Return a table with columns, right-aligned unless named in `left`."""
    grid = empty_table(title)
    for name in columns:
        grid.add_column(name, justify="left" if name in left else "right", overflow="fold")
    return grid
