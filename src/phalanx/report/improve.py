"""Settings to change, each with what it brings, in a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from rich.table import Table

from phalanx.report.style import seconds, size, table


class Priced(Protocol):
    """A strategy with its price (answers/file_settings.py)."""

    @property
    def strategy(self) -> object: ...
    @property
    def seconds(self) -> float: ...
    @property
    def bytes_(self) -> float: ...
    @property
    def fits(self) -> bool: ...
    @property
    def mfu(self) -> float: ...


class Setting(Protocol):
    """A setting to change."""

    @property
    def key(self) -> str: ...
    @property
    def old(self) -> str: ...
    @property
    def new(self) -> str: ...


class Changed(Protocol):
    """Settings that change together."""

    @property
    def fields(self) -> Mapping[str, tuple[str, str]]: ...
    @property
    def edits(self) -> Sequence[Setting]: ...
    @property
    def alone(self) -> Priced | None: ...
    @property
    def reason(self) -> str: ...
    @property
    def together(self) -> Priced: ...


_LONG = 40


def state(title: str, s: Priced) -> str:
    """Say what a step takes."""
    room = "" if s.fits else ", which does not fit"
    return f"{title}: {s.strategy}: {seconds(s.seconds)} a step, MFU {s.mfu:.1%}, {size(s.bytes_)} a GPU{room}"


def changes(now: Priced, changed: Sequence[Changed]) -> Table:
    """Tabulate settings, old and new, with what each change brings to step and memory alone and together."""
    grid = table(
        "what to change", "", "setting", "now", "better", "alone", "together", left=("setting", "now", "better")
    )
    for number, c in enumerate(changed, 1):
        alone = _against(now, c.alone) if c.alone is not None else "not alone"
        rows = c.edits or [_Field(*item) for item in _fields(c.fields)]
        for i, e in enumerate(rows):
            first = i == 0
            grid.add_row(
                str(number) if first else "",
                e.key,
                _short(e.old) or "not set",
                _short(e.new) or "leave out",
                alone if first else "",
                _against(now, c.together) if first else "",
                end_section=i == len(rows) - 1,
            )
    return grid


def reasons(changed: Sequence[Changed]) -> list[str]:
    """Say why changes cannot be made alone."""
    return [f"{number} alone: {c.reason}" for number, c in enumerate(changed, 1) if c.alone is None]


class _Field:
    """A field of the strategy in place of a setting."""

    def __init__(self, key: str, old: str, new: str) -> None:
        self.key, self.old, self.new = key, old, new


def _fields(changed: Mapping[str, tuple[str, str]]) -> list[tuple[str, str, str]]:
    return [(name, old, new) for name, (old, new) in changed.items()]


def _short(text: str) -> str:
    return text if len(text) <= _LONG else text[: _LONG - 3] + "..."


def _against(now: Priced, s: Priced) -> str:
    """Write step and memory against those of the file."""
    more = s.bytes_ - now.bytes_
    sign = "-" if more < 0 else "+"
    room = "" if s.fits else "\ndoes not fit"
    return f"{s.seconds / now.seconds - 1:+.1%}\n{sign}{size(abs(more))}{room}"
