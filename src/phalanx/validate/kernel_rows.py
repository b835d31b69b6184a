"""Kernels measured in isolation, as columns by kind, from the CSV file that ships or a user's with the same columns.

A row of a user's file that cannot be predicted is left out, and the reason names its column, the cell, and what is
needed there.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.spec.cluster.chips import CHIPS
from phalanx.spec.documents import csv_of, read_packed
from phalanx.spec.errors import InputError
from phalanx.spec.number_formats import NUMBER_FORMATS
from phalanx.validate.records import FOLDER

KERNELS = FOLDER / "kernels.csv.xz"
Floats = npt.NDArray[np.float64]
_CHIP_OF = {"A100-SXM": "A100", "H100-SXM": "H100"}
BYTES = {
    **{"fp8": 1.0, "fp8_block": 1.0, "int4_wo": NUMBER_FORMATS["int4"].bytes_per_value},
    **{name: float(NUMBER_FORMATS[name].bytes_per_value) for name in ("bfloat16", "nvfp4")},
    **dict.fromkeys(("w4a16_mxfp4", "w4a8_mxfp4_mxfp8"), NUMBER_FORMATS["mxfp4"].bytes_per_value),
}
SKEW = {"balanced": 0.0, "power_law_1.01": 1.01, "power_law_1.2": 1.2}
_PRODUCTS = ("bfloat16", "fp8", "fp8_block", "nvfp4")
_ATTENTION = ("batch", "seq", "past", "heads")
_KINDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "gemm": ("product", ("m", "n", "k")),
    "attn_context": ("prompt attention", (*_ATTENTION, "kv_heads", "head_dim")),
    "attn_generation": ("decode attention", (*_ATTENTION, "kv_heads", "head_dim")),
    "mla_context": ("mla prompt", _ATTENTION),
    "mla_generation": ("mla decode", _ATTENTION),
    "moe": ("experts", ("tokens", "hidden", "inter", "topk", "experts", "moe_tp", "moe_ep")),
    "all_reduce": ("all-reduce", ("m", "batch")),
}
"""By the file's name of a kind: its name here, and the columns whose numbers it needs."""
_MAY_BE_ZERO = ("past",)
_WORDS = ("gpu", "kind", "framework", "dtype", "kv_dtype", "kernel", "distribution")
"""Columns of words; all others hold numbers."""
_NUMBERS = ("m", "n", "k", *_ATTENTION, "kv_heads", "head_dim", "window", *_KINDS["moe"][1], "time_us")
_OTHER_TYPES = ("half", "float16", "int8")
"""Number types of 16 bits, and int8 that is sent, beyond BYTES."""


@dataclass(frozen=True)
class MeasuredKernels:
    """Measured kernels of one kind as columns."""

    kind: str
    cells: Mapping[str, npt.NDArray[Any]]
    """Columns of the file; numeric ones as arrays of numbers."""

    def __len__(self) -> int:
        return len(self.seconds)

    @property
    def seconds(self) -> Floats:
        """Measured seconds of each row."""
        return np.asarray(self.cells["time_us"], float) * 1e-6

    @property
    def gpus(self) -> npt.NDArray[Any]:
        """Chips by name, of each row."""
        return self.cells["gpu"]

    def only(self, keep: npt.NDArray[Any]) -> MeasuredKernels:
        """Return the rows selected by a mask or by indices."""
        return MeasuredKernels(self.kind, {name: column[keep] for name, column in self.cells.items()})

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        return self.cells[name]


@dataclass(frozen=True)
class KernelRows:
    """A file's measurements."""

    by_kind: Mapping[str, MeasuredKernels]
    other_rows: int
    """Rows of products in types that are not modelled."""
    refused: Mapping[str, int]
    """Rows that are left out, by reason."""


def chip_of(gpu: str) -> str:
    """Return the name of a chip in the chips' table."""
    return _CHIP_OF.get(gpu, gpu)


@cache
def shipped_rows() -> KernelRows:
    """Return the shipped measurements."""
    return rows_of(KERNELS)


def rows_of(path: Path) -> KernelRows:
    """Read a file of measurements, .csv or .csv.xz. Raises InputError if it is not one."""
    with csv_of(path, "kernels"):
        reader = csv.DictReader(StringIO(read_packed(path, "kernels"), newline=""))
        names = reader.fieldnames or []
        if missing := [name for name in (*_WORDS, *_NUMBERS) if name not in names]:
            raise InputError("kernels", str(path), f"has no column {missing[0]}", f"columns: {FOLDER / 'README.md'}")
        rows = list(reader)
    if not rows:
        raise InputError("kernels", str(path), "has no rows below its header")
    text = {name: np.array([(row[name] or "").strip() for row in rows]) for name in _WORDS}
    cells = text | {name: np.array([_number(row[name]) for row in rows]) for name in _NUMBERS}
    reasons: dict[int, tuple[str, str]] = {}
    for at, column, needed in _refusals(cells):
        reasons.setdefault(at, (column, needed))
    whole = np.array([n not in reasons for n in range(len(rows))])
    out, other_rows = {}, 0
    for name, (kind, _) in _KINDS.items():
        keep = whole & (cells["kind"] == name)
        if kind == "product":
            modelled = np.isin(cells["dtype"], _PRODUCTS)
            other_rows = int((keep & ~modelled).sum())
            keep &= modelled
        if keep.any():
            out[kind] = MeasuredKernels(kind, {column: values[keep] for column, values in cells.items()})
    refused = {}
    for (column, needed), count in Counter(reasons.values()).most_common():
        first = next(at for at, reason in sorted(reasons.items()) if reason == (column, needed))
        refused[f"{column} = {(rows[first][column] or '')[:30]!r} (row {first + 1}): needs {needed}"] = count
    return KernelRows(out, other_rows, refused)


def _number(text: str | None) -> float:
    try:
        value = float(text or "nan")
    except ValueError:
        return np.nan
    return value if 0 <= value < np.inf else np.nan


def _refusals(cells: Mapping[str, npt.NDArray[Any]]) -> Iterator[tuple[int, str, str]]:
    """Yield (row's index, column, what is needed there) for each reason why a row cannot be predicted."""

    def where(bad: npt.NDArray[Any], column: str, wanted: str) -> Iterator[tuple[int, str, str]]:
        return ((at, column, wanted) for at in np.flatnonzero(bad).tolist())

    known = [name for name in np.unique(cells["gpu"]) if chip_of(str(name)) in CHIPS]
    yield from where(~np.isin(cells["gpu"], known), "gpu", "a chip that Phalanx knows (phalanx tables clusters)")
    yield from where(~np.isin(cells["kind"], list(_KINDS)), "kind", f"one of {', '.join(_KINDS)}")
    yield from where(~(cells["time_us"] > 0), "time_us", "microseconds above 0")
    for name, (kind, needed) in _KINDS.items():
        mine = cells["kind"] == name
        for column in needed:
            least = cells[column] >= 0 if column in _MAY_BE_ZERO else cells[column] > 0
            yield from where(mine & ~least, column, f"a number for {name}")
        if kind == "experts":
            skewed = np.isin(cells["distribution"], list(SKEW))
            yield from where(mine & ~skewed, "distribution", f"one of {', '.join(SKEW)}")
        if kind != "product":
            types = (*BYTES, *_OTHER_TYPES)
            yield from where(mine & ~np.isin(cells["dtype"], types), "dtype", f"one of {', '.join(types)}")
