"""The matrix of `nvidia-smi topo -m`: how each GPU of a host reaches each other one, and the NICs.

    X self   NV# that many NVLinks   PIX one PCIe switch   PXB several   PHB the host bridge   NODE several host
    bridges of a NUMA node   SYS between NUMA nodes

GPUs that reach each other by NVLink are one tier; where only some do, but NVLinks connect all, as in the cube mesh of
DGX-1, a second tier is all of them. Else the tiers are those of PCIe: GPUs below one host bridge, then all of the
host over the link between sockets.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from phalanx.spec.cluster.chips import CHIPS
from phalanx.spec.cluster.presets import of_datasheet
from phalanx.spec.cluster.spec import ClusterSpec, Tier
from phalanx.spec.errors import InputError, nearest

_CLOSE = ("PIX", "PXB", "PHB")
_MOST = 256  # GPUs of a host
_PCIE, _SOCKETS = 25e9, 25e9  # bytes/s, as the presets of PCIe nodes have it


@dataclass(frozen=True)
class GpuTopology:
    """A host's GPUs: `links[i][j]` is how GPU i reaches GPU j; `nics` is the number of NICs."""

    links: tuple[tuple[str, ...], ...]
    nics: int

    @property
    def nvlink(self) -> bool:
        """Whether every GPU reaches every other by NVLink."""
        return all(link.startswith("NV") for i, row in enumerate(self.links) for j, link in enumerate(row) if i != j)


def read_matrix(text: str, file: str) -> GpuTopology:
    """Read the output of `nvidia-smi topo -m`; `file` names it in messages. Raises InputError."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in text.splitlines()]
    head = next(
        (i for i, line in enumerate(lines) if re.match(r"\s*GPU0\b", line) and " X " not in f" {line} "), None
    )
    if head is None:
        raise InputError(file, None, "has no line of GPU names", "write it with: nvidia-smi topo -m > FILE")
    names = re.findall(r"\b(?:GPU\d+|NIC\d+|mlx\w+)\b", lines[head])
    gpus = [name for name in names if name.startswith("GPU")]
    if len(gpus) > _MOST:
        raise InputError(file, len(gpus), "is more GPUs than a host has", f"at most {_MOST} are read")
    by_name: dict[str, list[str]] = {}
    for line in lines[head + 1 :]:
        if words := line.split(maxsplit=len(gpus) + 1):
            by_name.setdefault(words[0], words)
    rows: list[tuple[str, ...]] = []
    for i, name in enumerate(gpus):
        cells = by_name.get(name, [])[1 : 1 + len(gpus)]
        wrong = next((c for c in cells if not re.fullmatch(r"X|NV\d+|PIX|PXB|PHB|NODE|SYS", c)), None)
        if len(cells) < len(gpus) or wrong is not None or cells[i] != "X":
            raise InputError(
                file, name, "has no complete row" if wrong is None else f"{wrong!r} is not a kind of link"
            )
        rows.append(tuple(cells))
    if any(rows[i][j] != rows[j][i] for i in range(len(rows)) for j in range(i)):
        raise InputError(file, None, "is not symmetric: two GPUs reach each other in different ways")
    return GpuTopology(tuple(rows), len(names) - len(gpus))


def cluster(topology: GpuTopology, device: str, nodes: int, port_gbit: float | None, name: str) -> ClusterSpec:
    """Return a cluster of `nodes` such hosts, whose NICs have `port_gbit` Gb/s each. Raises InputError."""
    if device not in CHIPS:
        raise InputError("device", device, "is not a chip that Phalanx knows", nearest(device, CHIPS))
    if nodes > 1 and port_gbit is None:
        raise InputError("port_gbit", None, "is needed for several nodes", "say the Gb/s of a NIC, such as 400")
    if port_gbit is not None and not 0 < port_gbit <= 1e6:
        raise InputError("port_gbit", port_gbit, "is not the Gb/s of a NIC", "such as 400")
    chip, count = CHIPS[device], len(topology.links)
    said = "nvidia-smi topo -m; rate"
    tiers = _nvlink_tiers(topology, chip.link_bytes_per_s, f"{said} of {device}'s datasheet, one direction")
    if not tiers:
        below = _bridge(topology)
        tiers = [Tier("pcie", below, 1e-5, _PCIE, "estimated", f"{said} of PCIe 4.0 x16, one direction")]
        if below < count:
            between = f"{said} between the host bridges of two sockets"
            tiers.append(Tier("sockets", count, 1.5e-5, _PCIE, "estimated", between, _SOCKETS))
    if nodes > 1 and port_gbit is not None:
        nics = max(topology.nics, 1)
        host = nics * port_gbit * 1e9 / 8
        each = min(port_gbit * 1e9 / 8, host / count) if nics >= count else min(port_gbit * 1e9 / 8, host)
        what = f"{nics} NICs of {port_gbit:g} Gb/s for {count} GPUs, one direction"
        shared = host if nics < count else None
        tiers.append(Tier("network", count * nodes, 15e-6, each, "estimated", what, shared))
    return of_datasheet(name, chip.as_device(), count, nodes, tuple(tiers))


def _nvlink_tiers(topology: GpuTopology, rate: float, source: str) -> list[Tier]:
    """Return the tiers of NVLinks, of which a GPU with all of its links has `rate`: GPUs that all reach each other,
    then all GPUs of the host; none if NVLinks do not connect them all."""
    count = len(topology.links)
    links = np.array([[int(link[2:]) if link.startswith("NV") else 0 for link in row] for row in topology.links])
    reached = np.linalg.matrix_power((links > 0) + np.eye(count), count) > 0
    if count < 2 or not reached.all():
        return []
    each = rate / links.sum(axis=1).max()

    def blocks(size: int) -> list[slice]:
        return [slice(start, start + size) for start in range(0, count, size)]

    inner = next(
        size
        for size in range(count, 0, -1)
        if count % size == 0 and all(np.sum(links[b, b] > 0) == size * (size - 1) for b in blocks(size))
    )
    inside = min(float(links[b, b].sum(axis=1).min()) for b in blocks(inner)) * each
    tiers = [Tier("nvlink", inner, 5e-6, inside, "published", source)] if inner > 1 else []
    if inner < count:
        leaving = min(float(links[b].sum() - links[b, b].sum()) for b in blocks(inner)) * each
        every = float(links.sum(axis=1).min()) * each
        tiers.append(Tier("nvlink mesh", count, 5e-6, every, "estimated", source, max(leaving, every)))
    return tiers


def _bridge(topology: GpuTopology) -> int:
    """Return the largest number of consecutive GPUs under each host bridge, equal for all bridges."""
    count = len(topology.links)
    for size in (n for n in range(count, 0, -1) if count % n == 0):
        blocks = [range(start, start + size) for start in range(0, count, size)]
        if all(topology.links[i][j] in _CLOSE or i == j for block in blocks for i in block for j in block):
            return size
    return 1
