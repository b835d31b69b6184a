"""How numbers and tables look in a terminal."""

from __future__ import annotations

from rich import box
from rich.table import Table

from phalanx.spec.cluster.spec import GIB


def seconds(value: float) -> str:
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.1f} ms" if value >= 1e-3 else f"{value * 1e6:.0f} µs"


def size(value: float) -> str:
    """Memory, in powers of 1024."""
    for unit, scale in (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= scale:
            return f"{value / scale:.1f} {unit}"
    return f"{value:.0f} B"


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)


def table(title: str, *columns: str, left: tuple[str, ...] = ()) -> Table:
    """In the style of all tables; columns are right-aligned unless named in `left`."""
    made = Table(title=title, title_justify="left", header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        made.add_column(name, justify="left" if name in left else "right", overflow="fold")
    return made
