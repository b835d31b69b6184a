"""The tables of `rocm-smi --showtopo`: the kind of link between any two GPUs, and their NUMA nodes
(ROCm/rocm_smi_lib, python_smi_tools/rocm_smi.py: showHwTopology)."""

from __future__ import annotations

import re

from phalanx.shared_cluster.topology.gpus import GpuTopology
from phalanx.spec.errors import InputError

_TYPES = re.compile(r"Link Type between two GPUs.*?\n(.*?)(?=\n=|\Z)", re.S | re.I)
_NUMA = re.compile(r"GPU\[(\d+)\]\s*:\s*\(Topology\) Numa Node:\s*(-?\d+)")
_MOST = 256


def read_tables(text: str, file: str) -> GpuTopology:
    """Read the output of `rocm-smi --showtopo`; XGMI is a link like one NVLink. Raises InputError."""
    table = _TYPES.search(text)
    lines = [line.split() for line in (table[1] if table else "").splitlines()]
    rows = {words[0]: words[1:] for words in lines if len(words) > 1 and re.fullmatch(r"GPU\d+", words[0])}
    rows = {name: cells for name, cells in rows.items() if not re.fullmatch(r"GPU\d+", cells[0])}
    if not rows or len(rows) > _MOST:
        raise InputError(file, None, "has no table of link types", "write it with: rocm-smi --showtopo > FILE")
    numa = {int(gpu): node for gpu, node in _NUMA.findall(text)}
    links: list[tuple[str, ...]] = []
    for i, (name, cells) in enumerate(rows.items()):
        if len(cells) != len(rows):
            raise InputError(
                file, name, f"has {len(cells)} links, and there are {len(rows)} GPUs", "is it cut short?"
            )
        links.append(tuple(_kind(cell, i, j, numa, file) for j, cell in enumerate(cells)))
    return GpuTopology(tuple(links), link="xgmi", lists_nics=False)


def _kind(cell: str, i: int, j: int, numa: dict[int, str], file: str) -> str:
    if i == j:
        return "X"
    if cell == "XGMI":
        return "NV1"
    if cell != "PCIE":
        raise InputError(file, cell, "is not a kind of link", "XGMI and PCIE are")
    return "NODE" if numa.get(i) == numa.get(j) else "SYS"
