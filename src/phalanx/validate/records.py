"""Rows of published runs, as they stand in their files."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from phalanx.spec.errors import InputError

FOLDER = Path(__file__).parent / "data"
RUNS = FOLDER / "training_runs.csv"
COLLECTIVES = FOLDER / "collectives.csv"
SMALL_RUNS = FOLDER / "megatron_ci_memory.csv"
GIB = 2**30


@dataclass(frozen=True)
class Row:
    """One row. What is blank reads as an empty string, or as None where a number is asked for."""

    cells: Mapping[str, str]

    def __getitem__(self, column: str) -> str:
        return (self.cells.get(column) or "").strip()

    def number(self, column: str) -> float | None:
        """A number, or None where the cell holds none."""
        try:
            found = float(self[column])
        except ValueError:
            return None
        return found if found == found and abs(found) != float("inf") else None

    def count(self, column: str, default: int | None = None) -> int | None:
        found = self.number(column)
        return default if found is None else int(found)

    @property
    def name(self) -> str:
        return self["row_id"] or self["id"]

    @property
    def family(self) -> str:
        return self["source_family"]

    @property
    def group(self) -> str:
        return self["source_group"]

    @property
    def moe(self) -> bool:
        return bool(self.count("experts")) or self["arch"].startswith("moe")

    def step_s(self, ranks: int) -> float | None:
        """Seconds of the measured step: published, else from published tokens per second."""
        found = self.number("step_time_s")
        if found:
            return found
        rate, batch, seq = (self.number(c) for c in ("tokens_per_s_per_gpu", "gbs", "seq_len"))
        if rate and batch and seq:
            return batch * seq / (rate * ranks)
        return self.number("step_time_s_derived") or None


def load(path: Path, needed: tuple[str, ...] = ("source_family", "gpu", "gpus", "model")) -> list[Row]:
    """All rows of a file. Raises InputError where it has none of the columns, or cannot be read."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            rows = [Row(cells) for cells in reader]
            columns = reader.fieldnames or []
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError("--runs", str(path), f"cannot be read ({error})") from None
    missing = [c for c in needed if c not in columns]
    if missing:
        raise InputError("--runs", str(path), f"has no column {missing[0]}", "see the files that ship with phalanx")
    return rows
