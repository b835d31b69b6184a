"""Rows of published runs, as the files in data/ hold them (data/README.md describes the columns)."""

import csv
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TypeVar

from phalanx.spec.documents import csv_of, read_packed
from phalanx.spec.errors import InputError

T = TypeVar("T")
FOLDER = Path(__file__).parent / "data"
RUNS = FOLDER / "training_runs.csv"
RUNS_2026 = FOLDER / "training_runs_2026.csv"
RUNS_OWN = FOLDER / "training_runs_own.csv"
"""Runs that people posted of their own machines and scripts; few are tuned."""
FIRST = FOLDER / "first_predictions.csv"
"""Runs with what was predicted of them before any run of their publication had been seen."""
COLLECTIVES = FOLDER / "collectives.csv"
SMALL_RUNS = FOLDER / "megatron_ci_memory.csv"
GIB = 2**30


@dataclass(frozen=True)
class Row:
    """One row. A blank cell reads as an empty string, or as None for a number."""

    cells: Mapping[str, str]

    def __getitem__(self, column: str) -> str:
        return (self.cells.get(column) or "").strip()

    def number(self, column: str) -> float | None:
        """Return the cell as a finite non-negative number, or None; 4,096 is read as 4096."""
        try:
            value = float(self[column].replace(",", ""))
        except ValueError:
            return None
        return value if 0 <= value < float("inf") else None

    def count(self, column: str, default: int | None = None) -> int | None:
        """Return the cell as an integer, rounded towards zero, or `default`."""
        value = self.number(column)
        return default if value is None else int(value)

    @property
    def name(self) -> str:
        """The row's identifier in its file."""
        return self["row_id"] or self["id"]

    @property
    def family(self) -> str:
        """The source, such as `vtrain`."""
        return self["source_family"]

    @property
    def group(self) -> str:
        """A part of the source, such as one of its tables."""
        return self["source_group"]

    @property
    def moe(self) -> bool:
        """Whether the model has experts."""
        return bool(self.count("experts")) or self["arch"].startswith("moe")

    @property
    def completed(self) -> bool:
        """Whether the run completed; runs that did not are out of memory."""
        return self["status"].lower() in ("", "ok")

    def step_s(self, ranks: int, batch: int) -> float | None:
        """Return the seconds of the measured step of `batch` sequences on `ranks` GPUs: published, else from
        published tokens/s, else as derived by the file's authors; None without any of these."""
        seconds = self.number("step_time_s")
        if seconds and self["gbs"]:
            return seconds
        rate, seq = (self.number(c) for c in ("tokens_per_s_per_gpu", "seq_len"))
        if rate and seq:
            return batch * seq / (rate * ranks)
        return self.number("step_time_s_derived") or None if self["gbs"] else None


def load(
    path: Path, needed: tuple[str, ...] = ("source_family", "gpu", "gpus", "model"), name: str = "runs"
) -> list[Row]:
    """Read all rows of a CSV file. Raises InputError if it cannot be read, or lacks one of the columns `needed`;
    `name`: the field in its errors."""
    with csv_of(path, name):
        reader = csv.DictReader(StringIO(read_packed(path, name), newline=""))
        rows = [Row(cells) for cells in reader]
        columns = reader.fieldnames or []
    missing = [c for c in needed if c not in columns]
    if missing:
        raise InputError(name, str(path), f"has no column {missing[0]}", f"columns: {FOLDER / 'README.md'}")
    if not rows:
        raise InputError(name, str(path), "has no rows below its header")
    return rows


def readable(
    rows: Iterable[Row], read: Callable[[Row], T], *refusals: type[Exception]
) -> tuple[list[T], list[tuple[Row, str]]]:
    """Return `read(row)` of each row, and the rows for which it raises one of `refusals`, with the reason."""
    usable, refused = [], []
    for row in rows:
        try:
            usable.append(read(row))
        except refusals as reason:
            refused.append((row, str(reason)))
    return usable, refused
