"""A table of raw numbers with units: drawn on a terminal, or written as JSON or CSV, from the same rows."""

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

Unit = Literal[
    "", "strategy", "bytes", "GB", "s", "share", "change", "count", "number", "rate", "signed_s", "signed_bytes"
]


@dataclass(frozen=True)
class Column:
    """A column's heading and the unit of its numbers."""

    name: str
    unit: Unit = ""
    """bytes, GB (1e9 bytes), s, share (of one), change (a share with its sign), count, number (of any size), rate
    (bytes/s), signed_s and signed_bytes (differences); "" for words, strategy for the line of one."""

    @property
    def key(self) -> str:
        """The column's key in JSON and CSV."""
        word = self.name.lower().replace(" ", "_").replace("/", "_per_").replace("-", "_").replace(",", "")
        unit = self.unit.removeprefix("signed_")
        return f"{word}_{unit}" if unit in ("bytes", "GB", "s") else word


@dataclass(frozen=True)
class Sheet:
    """A table with a title."""

    title: str
    columns: tuple[Column, ...]
    rows: Sequence[tuple[Any, ...]]
    """A number, a word or None for each column."""
    note: str = ""
    """Conventions and sources."""
    stacked: tuple[str, ...] = ()
    """Columns whose numbers add up, which a page draws as one bar a row."""
    stacked_unit: str = ""
    """Unit of the stacked columns, if the columns have none."""
    charted: bool = True
    """Whether the table is drawn as a plot."""
    marked: int | None = None
    """Index of the answer's row, which a terminal marks with an arrow."""
    bars: bool = False
    """Whether a terminal draws the last column, a share, as bars."""
    keys: int = 1
    """Number of columns that identify a row: repeated when a table too wide for its terminal is cut in two."""

    def records(self) -> list[dict[str, Any]]:
        """Return each row as a dict by column key, as in JSON."""
        return [{c.key: value for c, value in zip(self.columns, row, strict=True)} for row in self.rows]

    def as_csv(self) -> str:
        """Return the table as CSV, with a header line of column keys."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow([c.key for c in self.columns])
        writer.writerows([["" if value is None else value for value in row] for row in self.rows])
        return out.getvalue()


_HEADING = re.compile(r"(?P<name>.*?) ?(?:\[(?P<unit>\w+)\])?")


def columns(*headings: str) -> tuple[Column, ...]:
    """Build columns from headings separated by |, with the unit of numbers in brackets: "axis | sent [bytes]". Raises
    ValueError for an unknown unit."""
    words = [_HEADING.fullmatch(word.strip()) for heading in headings for word in heading.split("|")]
    units = [(word["name"], word["unit"] or "") for word in words if word]
    for _, unit in units:
        if unit not in get_args(Unit):
            raise ValueError(f"no unit of columns: {unit}")
    return tuple(Column(name, cast(Unit, unit)) for name, unit in units)
