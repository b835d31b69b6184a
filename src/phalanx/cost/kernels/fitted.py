"""Constants of kernels, as `python -m calibration.kernels` fitted them. What each is: the kernels' files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FILE = Path(__file__).with_name("fitted.json")
COMMON = "common"
"""The row of a chip whose generation was not measured."""
Rows = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class KernelConstants:
    """Constants by kernel and row. Raises ValueError for a constant that is not a positive number."""

    chips: Mapping[str, Rows]
    """By kernel, such as `product`, then by generation of chips."""
    libraries: Mapping[str, Rows]
    """By kernel, then by library."""

    def __post_init__(self) -> None:
        for kernel, rows in (*self.chips.items(), *self.libraries.items()):
            for row, constants in rows.items():
                for name, value in constants.items():
                    if not isinstance(value, float) or not 0 < value < float("inf"):
                        raise ValueError(f"constant {name} of {kernel}, {row}, is {value!r}, not a positive number")


@cache
def kernel_constants() -> KernelConstants:
    """Return the constants that ship, read once."""
    return KernelConstants(**json.loads(FILE.read_text()))
