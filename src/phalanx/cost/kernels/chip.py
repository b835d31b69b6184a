"""A chip's datasheet for kernels, and the constants of the rates that they achieve.

A constant is common to all chips, times a factor of the chip's generation; a library's constants are common to all
chips. They are fitted on kernels measured in isolation (`python -m calibration.kernels`), in logarithms, with priors
that pull factors to 1: a chip of an unmeasured generation gets the common constants. The kernels' files document
each.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

from phalanx.cost.hardware.columns import Column
from phalanx.spec.cluster.chips import CHIPS
from phalanx.spec.errors import InputError, nearest

FILE = Path(__file__).with_name("fitted.json")
COMMON = "common"
"""Key of the constants for chips of an unmeasured generation."""
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


T = TypeVar("T")
_SAME = {"blackwell-ultra": "blackwell", "rubin": "blackwell"}
_CACHE_BYTES = {
    "volta": 6e6,
    "ampere": 40e6,
    "ampere-gddr": 6e6,
    "hopper": 50e6,
    "ada": 72e6,
    "blackwell": 126e6,
    "blackwell-ultra": 126e6,
    "blackwell-gddr": 128e6,
}
"""Level-2 cache assumed in the fit of the constants, by generation (NVIDIA's architecture whitepapers); other chips
have their datasheet's."""


@dataclass(frozen=True)
class KernelChip:
    """A chip's datasheet for kernels: rates in FLOP/s and bytes/s."""

    half: Column
    fp8: Column
    fp4: Column
    memory_bytes_per_s: Column
    processors: Column
    """Streaming multiprocessors."""
    cache_bytes: Column
    """Bytes of the level-2 cache."""
    link_bytes_per_s: Column
    """Bytes/s of NVLink in one direction, or of PCIe."""


def kernel_chip(name: str) -> KernelChip:
    """Return a chip's datasheet for kernels. Raises InputError for an unknown name."""
    if name not in CHIPS:
        raise InputError("chip", name, "is not a chip that Phalanx knows", nearest(name, CHIPS))
    x = CHIPS[name]
    cache_bytes = _CACHE_BYTES.get(x.generation, x.l2_bytes)
    rates = (x.half, x.fp8, x.fp4, x.bandwidth_bytes_per_s)
    return KernelChip(*rates, float(x.processors), cache_bytes, x.link_bytes_per_s)


def generation_of(name: str) -> str:
    """Return the generation whose constants apply to a chip: its own, or one with the same kernels."""
    generation = CHIPS[name].generation
    return _SAME.get(generation, generation)


def constants(kind: type[T], kernel: str, generation: str) -> T:
    """Return the constants of a kernel, such as `product`, on a generation of chips."""
    rows = kernel_constants().chips[kernel]
    return kind(**rows.get(generation, rows[COMMON]))


def library(kind: type[T], kernel: str, name: str) -> T:
    """Return the constants of a library's kernel. Raises InputError if it was not measured."""
    rows = kernel_constants().libraries[kernel]
    if name not in rows:
        raise InputError("library", name, f"has no measured kernels of kind {kernel}", nearest(name, rows))
    return kind(**rows[name])
