"""Constants of kernels, as fitted by `python -m calibration.kernels`. The kernels' files document each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FILE = Path(__file__).with_name("fitted.json")
COMMON = "common"
"""Row of chips of an unmeasured generation."""
Rows = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class KernelConstants:
    """Constants by kernel and row. Raises ValueError for a constant that is not a positive number."""

    chips: Mapping[str, Rows]
    """Constants by kernel, such as `product`, then by generation of chips."""
    libraries: Mapping[str, Rows]
    """Constants by kernel, then by library."""

    def __post_init__(self) -> None:
        for kernel, rows in (*self.chips.items(), *self.libraries.items()):
            for row, constants in rows.items():
                for name, value in constants.items():
                    if not isinstance(value, float) or not 0 < value < float("inf"):
                        raise ValueError(f"constant {name} of {kernel}, {row}, is {value!r}, not a positive number")


@cache
def kernel_constants() -> KernelConstants:
    """Return the shipped constants, read once."""
    return KernelConstants(**json.loads(FILE.read_text()))
