"""The hardware of a row: one description per system, from what its source says of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from phalanx.cost.constants import CONSTANTS
from phalanx.cost.stack.hardware import CHIPS, system
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


def system_of_row(row: Row, constants: Mapping[str, float] = CONSTANTS) -> System:
    """Raises Unspecified."""
    chip = chip_name(row)
    stated = [rate for words, rate in _NICS.items() if words in row["interconnect"]]
    nic = stated[0] if stated else _BY_CHIP.get(chip, 50e9)
    node = row.count("gpus_per_node", 8) or 8
    if chip.startswith("GB"):
        node = _RACK
    return _measured(system(CHIPS[chip], node, nic, constants), row)


_BENCHED = 1.5e9
"""Bytes of the collectives that a row's bus bandwidths were measured with, about: at this size they agree with the
time of tensor-parallel collectives over the same nodes."""


def _measured(known: System, row: Row) -> System:
    """With the bus bandwidths that a row's own job has measured. They fall with the number of nodes by a time per
    hop, p-1 of them: n/busbw - n/busbw inside of a node = hops x latency, of bulk messages."""
    inside = {op: row.number(f"busbw_{op}_intra_gbs") for op in ("ar", "ag")}
    over = {op: row.number(f"busbw_{op}_gbs") for op in ("ar", "ag")}
    ranks = row.count("gpus") or 1
    inner, outer = known.tiers
    if not inside["ag"] or not inside["ar"] or not over["ag"] or not over["ar"]:
        return known
    inner = replace(inner, bytes_per_s_per_gpu_per_direction=inside["ag"] * 1e9)
    if ranks > inner.ranks:
        blocks = ranks / inner.ranks
        hops = {"ag": ranks - 1, "ar": 2 * min(ranks - 1, inner.ranks - 1 + 2 * np.log2(blocks))}
        hop = {
            op: max(passes * _BENCHED * (1 / over[op] - 1 / inside[op]) * 1e-9 / hops[op], outer.hop_s)
            for op, passes in (("ag", 1), ("ar", 2))
        }
        outer = replace(outer, bulk_reduce_hop_s=hop["ar"])
        known = replace(known, rank_s=hop["ag"])
    return replace(known, tiers=(inner, outer), reduce_gain=inside["ar"] / inside["ag"])
