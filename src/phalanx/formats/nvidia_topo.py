"""The matrix of `nvidia-smi topo -m`: how each GPU of a host reaches each other one, and the NICs.

    X self   NV# that many NVLinks   PIX one PCIe switch   PXB several   PHB the host bridge   NODE several host
    bridges of a NUMA node   SYS between NUMA nodes

GPUs that reach each other by NVLink are one tier. Else the tiers are those of PCIe: GPUs below one host bridge,
then all of the host over the link between sockets.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

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


def read_matrix(text: str, where: str) -> GpuTopology:
    """Read the output of `nvidia-smi topo -m`; `where` names it in messages. Raises InputError."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in text.splitlines()]
    head = next(
        (i for i, line in enumerate(lines) if re.match(r"\s*GPU0\b", line) and " X " not in f" {line} "), None
    )
    if head is None:
        raise InputError(where, None, "has no line of GPU names", "write it with: nvidia-smi topo -m > FILE")
    names = re.findall(r"\b(?:GPU\d+|NIC\d+|mlx\w+)\b", lines[head])
    gpus = [name for name in names if name.startswith("GPU")]
    if len(gpus) > _MOST:
        raise InputError(where, len(gpus), "is more GPUs than a host has", f"at most {_MOST} are read")
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
                where, name, "has no complete row" if wrong is None else f"{wrong!r} is not a kind of link"
            )
        rows.append(tuple(cells))
    if any(rows[i][j] != rows[j][i] for i in range(len(rows)) for j in range(i)):
        raise InputError(where, None, "is not symmetric: two GPUs reach each other in different ways")
    return GpuTopology(tuple(rows), len(names) - len(gpus))


def cluster(topology: GpuTopology, device: str, nodes: int, port_gbit: float | None, name: str) -> ClusterSpec:
    """Return a cluster of `nodes` such hosts, whose NICs have `port_gbit` Gb/s each. Raises InputError."""
    if device not in CHIPS:
        raise InputError("--device", device, "is not a chip that Phalanx knows", nearest(device, CHIPS))
    if nodes > 1 and port_gbit is None:
        raise InputError("--port-gbit", None, "is needed for several nodes", "say the Gb/s of a NIC, such as 400")
    if port_gbit is not None and not 0 < port_gbit <= 1e6:
        raise InputError("--port-gbit", port_gbit, "is not the Gb/s of a NIC", "such as 400")
    chip, count = CHIPS[device], len(topology.links)
    said = "nvidia-smi topo -m; rate"
    if topology.nvlink and count > 1:
        source = f"{said} of {device}'s datasheet, one direction"
        tiers = [Tier("nvlink", count, 5e-6, chip.link_bytes_per_s, "published", source)]
    else:
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


def _bridge(topology: GpuTopology) -> int:
    """The largest number of GPUs in a row that are below one host bridge each, equal for all bridges."""
    count = len(topology.links)
    for size in (n for n in range(count, 0, -1) if count % n == 0):
        blocks = [range(start, start + size) for start in range(0, count, size)]
        if all(topology.links[i][j] in _CLOSE or i == j for block in blocks for i in block for j in block):
            return size
    return 1
