"""The hardware of a row: one description per system, from what its source says of it."""

from __future__ import annotations

from functools import cache

from phalanx.cost.stack.hardware import CHIPS, GENERATIONS, Generation, system
from phalanx.cost.stack.system import System
from phalanx.validate.models import Unspecified
from phalanx.validate.records import Row

# GPUs as the rows name them; the longest beginning that fits.
_GPUS = {
    "V100": "V100",
    "A100-SXM-40GB": "A100-40GB",
    "A100": "A100",
    "H100-96GB-HBM2e-500W": "H100-500W",
    "H100": "H100",
    "H800": "H800",
    "H200": "H200",
    "B200": "B200",
    "GB200": "GB200",
    "B300": "B300",
    "GB300": "GB300",
}
_NICS = {
    # by what the source says of links between nodes: bytes/s of one GPU's part, in one direction
    "4x Omni-Path": 6.25e9,
    "Omni-Path 100 (4 links/node)": 12.5e9,
    "Omni-Path": 12.5e9,
    "1600 Gbps/node": 25e9,
    "800 Gb/s per node": 12.5e9,
    "400G": 50e9,
    "400Gb/s": 50e9,
    "8x HDR": 25e9,
    "NVLink + EFA/IB": 50e9,
}
_BY_CHIP = {"V100": 12.5e9, "A100-40GB": 25e9, "A100": 25e9}
_RACK = 72


def chip_name(row: Row) -> str:
    """Raises Unspecified for hardware that is not modelled."""
    found = [known for known in _GPUS if row["gpu"].startswith(known)]
    if not found:
        raise Unspecified(f"hardware {row['gpu'] or 'not stated'} is not modelled")
    return _GPUS[max(found, key=len)]


def system_of_row(row: Row, generations: dict[str, Generation] = GENERATIONS) -> System:
    """Raises Unspecified."""
    chip = chip_name(row)
    stated = [rate for words, rate in _NICS.items() if words in row["interconnect"]]
    nic = stated[0] if stated else _BY_CHIP.get(chip, 50e9)
    node = row.count("gpus_per_node", 8) or 8
    if chip.startswith("GB"):
        node = _RACK
    return _system(chip, node, nic, tuple(generations.items()))


@cache
def _system(chip: str, node: int, nic: float, generations: tuple[tuple[str, Generation], ...]) -> System:
    return system(CHIPS[chip], node, nic, dict(generations))
