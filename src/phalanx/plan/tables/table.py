"""A table of raw numbers with units: drawn on a terminal, or written as JSON or CSV, from the same rows."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Unit = Literal["", "bytes", "GB", "s", "share", "count", "rate"]


@dataclass(frozen=True)
class Column:
    """`unit` of its numbers: bytes, GB (1e9 bytes), s, share (of one), count, rate (bytes/s); "" for words."""

    name: str
    unit: Unit = ""

    @property
    def key(self) -> str:
        """In JSON and CSV."""
        word = self.name.lower().replace(" ", "_").replace("/", "_per_").replace("-", "_").replace(",", "")
        return f"{word}_{self.unit}" if self.unit in ("bytes", "GB", "s") else word


@dataclass(frozen=True)
class Sheet:
    """`rows` hold a number or a word for each column, or None; `note` names conventions and sources."""

    title: str
    columns: tuple[Column, ...]
    rows: Sequence[tuple[Any, ...]]
    note: str = ""

    def records(self) -> list[dict[str, Any]]:
        return [{c.key: value for c, value in zip(self.columns, row, strict=True)} for row in self.rows]

    def as_csv(self) -> str:
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow([c.key for c in self.columns])
        writer.writerows([["" if value is None else value for value in row] for row in self.rows])
        return out.getvalue()


def columns(*given: tuple[str, Unit] | str) -> tuple[Column, ...]:
    return tuple(Column(g) if isinstance(g, str) else Column(*g) for g in given)
