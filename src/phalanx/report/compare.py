"""Plans and strategies beside each other: figures, time by term, memory by part, settings that differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rich.table import Table

from phalanx.report.style import seconds, size, table

_SMALL = 0.001
"""Terms below this share of every side are left out."""


class Compared(Protocol):
    """What a side of a comparison has (answers/compare.py)."""

    @property
    def name(self) -> str: ...
    @property
    def seconds(self) -> float: ...
    @property
    def terms(self) -> dict[str, float]: ...
    @property
    def bytes_(self) -> float: ...
    @property
    def usable(self) -> float: ...
    @property
    def memory_terms(self) -> dict[str, float]: ...
    @property
    def tokens(self) -> int: ...
    @property
    def gpus(self) -> int: ...
    @property
    def stack(self) -> str: ...


LETTERS = "ABC"


def legend(sides: Sequence[Compared]) -> list[str]:
    """Say which letter is what."""
    return [f"{letter}: {side.name} ({side.stack})" for letter, side in zip(LETTERS, sides, strict=False)]


def figures(sides: Sequence[Compared]) -> Table:
    """Tabulate GPUs, tokens/s and whether it fits."""
    grid = table("figures", "", *LETTERS[: len(sides)], left=("",))
    grid.add_row("GPUs", *(f"{s.gpus:,}" for s in sides))
    grid.add_row("tokens/s", *(f"{s.tokens / s.seconds:,.0f}" for s in sides))
    grid.add_row("tokens/s per GPU", *(f"{s.tokens / s.seconds / s.gpus:,.0f}" for s in sides))
    grid.add_row("fits", *("yes" if s.bytes_ <= s.usable else "no" for s in sides))
    return grid


def time(sides: Sequence[Compared]) -> Table:
    """Tabulate the step by term, with each side's difference from A."""
    return _terms("time by term", [s.terms for s in sides], [s.seconds for s in sides], "step", seconds)


def memory(sides: Sequence[Compared]) -> Table:
    """Tabulate the fullest rank's memory by part, with each side's difference from A."""
    return _terms("memory by part", [s.memory_terms for s in sides], [s.bytes_ for s in sides], "in all", size)


def _terms(title: str, terms: list[dict[str, float]], totals: list[float], name: str, write: object) -> Table:
    assert callable(write)
    letters = LETTERS[: len(terms)]
    grid = table(title, "", "A", *(c for x in letters[1:] for c in (x, f"{x} - A")), left=("",))

    def row(what: str, values: list[float]) -> None:
        cells = [write(values[0])]
        for value in values[1:]:
            change = value - values[0]
            same = abs(change) <= 1e-9 * max(value, values[0])
            cells += [write(value), "" if same else f"{'+' if change > 0 else '-'}{write(abs(change))}"]
        grid.add_row(what, *cells)

    for term in dict.fromkeys(t for side in terms for t in side):
        values = [side.get(term, 0.0) for side in terms]
        if any(v > _SMALL * total for v, total in zip(values, totals, strict=True)):
            row(term, values)
    row(name, totals)
    return grid


def settings(rows: Sequence[tuple[str, list[str]]], count: int) -> Table:
    """Tabulate settings that differ; - where a side has none."""
    grid = table("settings that differ", "", *LETTERS[:count], left=("", *LETTERS[:count]))
    for name, values in rows:
        grid.add_row(name, *(v or "-" for v in values))
    return grid
