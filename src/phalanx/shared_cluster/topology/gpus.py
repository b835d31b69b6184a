"""The GPUs and NICs of a host as its tools list them, and the tiers of links between them.

    X    the GPU itself         NV#   # NVLinks (XGMI counts as one)
    PIX  one PCIe switch        PXB   several PCIe switches              PHB   the host bridge of PCIe
    NODE several host bridges of a NUMA node                             SYS   the link between NUMA nodes

The largest cliques of GPUs that reach each other by NVLink are a tier: the host, halves or pairs. Where NVLinks
connect all GPUs without a clique of all, as in the cube mesh of DGX-1, all of them are a second tier. Above cliques
smaller than the host, GPUs of one NUMA node reach each other by PCIe, and all of the host over the link between
sockets.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from phalanx.spec.cluster.chips import BRIDGE_LINK, CHIPS
from phalanx.spec.cluster.presets import chip_of, of_datasheet
from phalanx.spec.cluster.spec import ClusterSpec, Origin, Tier
from phalanx.spec.errors import InputError, nearest

KINDS = ("PIX", "PXB", "PHB", "NODE", "SYS")
"""Kinds of PCIe paths, the shortest first."""
_PCIE, _SOCKETS = 25e9, 25e9
"""Bytes/s in one direction, as in the presets of PCIe nodes."""


@dataclass(frozen=True)
class GpuTopology:
    """The paths between the GPUs and NICs of a host, in the words above."""

    links: tuple[tuple[str, ...], ...]
    """`links[i][j]`: the path from GPU i to GPU j."""
    near: tuple[tuple[str, ...], ...] = ()
    """`near[n][i]`: the path from NIC n to GPU i."""
    nic_names: tuple[str, ...] = ()
    port_gbit: float | None = None
    """Gb/s of a NIC; None: not in the file."""
    device: str = ""
    """The chip; empty: not in the file."""
    link: str = "nvlink"
    """Kind of the direct links between GPUs: nvlink or xgmi."""
    lists_nics: bool = True
    """Whether the tool lists NICs at all."""

    @property
    def nics(self) -> int:
        """NICs of the host."""
        return len(self.near)

    @property
    def nvlink(self) -> bool:
        """Whether every GPU reaches every other by NVLink."""
        return all(link.startswith("NV") for i, row in enumerate(self.links) for j, link in enumerate(row) if i != j)

    @property
    def fabric(self) -> tuple[int, ...]:
        """Numbers of the NICs of the fabric: the NICs below a PCIe switch with a GPU; if there are none, in the NUMA
        node of a GPU; else all."""
        for kinds in (("PIX", "PXB"), ("PHB", "NODE")):
            if nics := tuple(n for n, row in enumerate(self.near) if set(row) & set(kinds)):
                return nics
        return tuple(range(self.nics))

    def own_nic(self, gpu: int) -> int | None:
        """Return the number of the fabric's NIC below a GPU's own PCIe switch; None: there is none."""
        return next((n for n in self.fabric if self.near[n][gpu] in ("PIX", "PXB")), None)


def nic_lines(t: GpuTopology) -> Iterator[str]:
    """Yield lines on where the NICs are."""
    if not t.lists_nics:
        return
    names = t.nic_names or tuple(f"NIC{n}" for n in range(t.nics))
    fabric = t.fabric
    away = [names[n] for n in range(t.nics) if n not in fabric]
    counted = f"{len(fabric)} of {t.nics} NICs are the fabric's" if away else f"{t.nics} NIC{'s' * (t.nics != 1)}"
    left = f": {', '.join(away)} {'are' if len(away) > 1 else 'is'} near no GPU, and not counted"
    yield counted + (left if away else "")
    own = [gpu for gpu in range(len(t.links)) if t.own_nic(gpu) is not None]
    others = [str(gpu) for gpu in range(len(t.links)) if gpu not in own]
    if own and others:
        yield f"GPUs {', '.join(others)} have no NIC at their PCIe switch: they reach one through a neighbour"
    elif fabric and others:
        yield "no GPU has a NIC at its own PCIe switch: all reach them through the host"


def tier_lines(t: GpuTopology, device: str | None) -> Iterator[str]:
    """Yield a line on each tier of links between a host's GPUs: its blocks of GPUs, its rate and the rate's origin.
    Raises InputError for a device that is not a known chip."""
    chip = _chip_of(device or t.device) if device or t.device else None
    for tier in _host_tiers(t, chip):
        blocks = _blocks(len(t.links), tier.ranks)
        shown = ", ".join(f"{b[0]}-{b[-1]}" if len(b) > 1 else f"{b[0]}" for b in blocks[:_SHOWN])
        more = f" and {len(blocks) - _SHOWN} more" if len(blocks) > _SHOWN else ""
        if chip is None and tier.name.startswith(t.link):
            at = "--device says at which rate"
        else:
            rate = tier.bandwidth_bytes_per_s_per_gpu_per_direction
            origin = "assumed" if tier.origin == "estimated" else tier.origin
            at = f"{rate / 1e9:g} GB/s a GPU, {origin}: {tier.source.partition('; ')[2] or tier.source}"
        yield f"{tier.name}: {'GPUs' if len(t.links) > 1 else 'GPU'} {shown}{more}: {at}"


def apart_lines(t: GpuTopology) -> Iterator[str]:
    """Yield a line on NVLinks that no tier has, because the GPUs that they join are no equal, consecutive groups; and
    on GPUs without NVLinks on a host of NVSwitches."""
    joined = [[j for j, link in enumerate(row) if link.startswith("NV")] for row in t.links]
    if not any(joined) or any(tier.name.startswith(t.link) for tier in _host_tiers(t, None)):
        return
    groups = sorted({tuple(sorted({i, *others})) for i, others in enumerate(joined) if others})
    alone = [i for i, others in enumerate(joined) if not others]
    shown = "; ".join(_gpus_named(group) for group in groups[:_SHOWN])
    name = "XGMI" if t.link == "xgmi" else "NVLink"
    yield f"left out: {name} of {shown}: only equal groups of GPUs that follow one another make a tier"
    if alone and len(groups) == 1 and len(groups[0]) > 2:
        yield (
            f"{_gpus_named(alone)} without {name}, which joins all others: on a host of NVSwitches its fabric is "
            "down: nvidia-smi -q says its Fabric State, nvidia-smi nvlink --status its links"
        )


def _gpus_named(numbers: Sequence[int]) -> str:
    return f"GPU{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


_SHOWN = 8
"""The most blocks of GPUs that a line names."""
_RACKS = {"GB200": 72, "GB300": 72}
"""Chip -> GPUs joined by the NVLink switches of a rack: trays of 4, all 18 links to the switches (GB200 NVL72)."""
_TRAY = 4


def gpus_of_host(cluster: ClusterSpec) -> int:
    """Return the GPUs of a host of a cluster: of one whose nodes are racks, of a tray."""
    return (
        _TRAY if cluster.ranks_per_node == _RACKS.get(chip_of(cluster.device.name) or "") else cluster.ranks_per_node
    )


def assumptions(t: GpuTopology, device: str | None, nodes: int) -> Iterator[str]:
    """Yield lines on what a cluster of `nodes` such hosts assumes. Raises InputError as `cluster` does."""
    if nodes > 1 and not t.nics:
        taken = "one is taken for the host" if t.lists_nics else "one is taken for each GPU"
        yield f"no NIC is listed: {taken}"
    if rack := _rack(t, device or t.device, nodes):
        hosts = rack // len(t.links)
        yield f"the NVLink switches of a rack join {rack} GPUs: {hosts} of these hosts are a node of the cluster"


def _rack(t: GpuTopology, device: str, nodes: int) -> int:
    """Return the GPUs of a rack that `nodes` hosts share; 0: they share no rack. Raises InputError for a number of
    hosts that is not one of whole racks."""
    count, most = len(t.links), _RACKS.get(device, 0)
    whole = {link for row in t.links for link in row} == {"X", "NV18"}
    if nodes == 1 or not most or not whole or most % count:
        return 0
    trays = most // count
    if nodes > trays and nodes % trays:
        reason = f"is no number of whole racks of {trays} such hosts"
        raise InputError("nodes", nodes, reason, f"use a multiple of {trays}, or up to {trays}")
    return min(nodes, trays) * count


def cluster(topology: GpuTopology, device: str | None, nodes: int, port_gbit: float | None, name: str) -> ClusterSpec:
    """Return the cluster of `nodes` such hosts. `port_gbit`: of a NIC; None: as in the file. Raises InputError."""
    device = device or topology.device
    if not device:
        raise InputError("device", None, "is missing: the matrix does not say which GPUs", "e.g. --device H100")
    chip = _chip_of(device)
    port_gbit, count = port_gbit or topology.port_gbit, len(topology.links)
    nics = len(topology.fabric) or (1 if topology.lists_nics else count)
    rack = _rack(topology, chip, nodes)
    if rack:
        nics, nodes, count = nics * rack // count, nodes * count // rack, rack
    if nodes > 1 and port_gbit is None:
        raise InputError("port_gbit", None, "is needed for several nodes", "say the Gb/s of a NIC, such as 400")
    if port_gbit is not None and not 0 < port_gbit <= 1e6:
        raise InputError("port_gbit", port_gbit, "is not the Gb/s of a NIC", "such as 400")
    tiers = _host_tiers(topology, chip)
    tiers = [replace(tiers[0], ranks=rack)] if rack else tiers
    if nodes > 1 and port_gbit is not None:
        host = nics * port_gbit * 1e9 / 8
        each = min(port_gbit * 1e9 / 8, host / count) if nics >= count else min(port_gbit * 1e9 / 8, host)
        what = f"{nics} NICs of {port_gbit:g} Gb/s for {count} GPUs, one direction"
        shared = host if nics < count else None
        tiers.append(Tier("network", count * nodes, 15e-6, each, "estimated", what, shared))
    return of_datasheet(name, CHIPS[chip].as_device(), count, nodes, tuple(tiers))


def _chip_of(device: str) -> str:
    """Return the chip of a device's name. Raises InputError for an unknown one."""
    if (known := chip_of(device)) is None:
        raise InputError("device", device, "is not a chip that Phalanx knows", nearest(device, CHIPS))
    return known


def _host_tiers(topology: GpuTopology, chip: str | None) -> list[Tier]:
    """Return the tiers of links between a host's GPUs. `chip` None: the rate of NVLinks is arbitrary."""
    said = f"the host's topology; rate of {chip}'s datasheet"
    rate, links = (CHIPS[chip].link_bytes_per_s, CHIPS[chip].links) if chip else (1e12, 0)
    tiers = _nvlink_tiers(topology, rate, links, said)
    return tiers + _pcie_tiers(topology, tiers[-1].ranks if tiers else 1)


def _blocks(count: int, size: int) -> list[range]:
    return [range(start, start + size) for start in range(0, count, size)]


def _nvlink_tiers(topology: GpuTopology, rate: float, whole: int, source: str) -> list[Tier]:
    """Return the tiers of NVLinks: the largest cliques, then the host if NVLinks connect all of it. `rate`: bytes/s
    of a GPU with all of its links; `whole`: how many these are, 0: as many as the topology has. By switches
    all of them reach each other GPU."""
    count = len(topology.links)
    links = np.array([[int(link[2:]) if link.startswith("NV") else 0 for link in row] for row in topology.links])
    inner = next(
        size
        for size in range(count, 0, -1)
        if count % size == 0
        and all(np.sum(links[b, b] > 0) == size * (size - 1) for b in map(_slice, _blocks(count, size)))
    )
    if count < 2 or not links.any():
        return []
    reached = np.linalg.matrix_power((links > 0) + np.eye(count), count) > 0
    connected = bool(reached.all())
    # Datasheet rows of cards with bridges have the rate of PCIe as their link's.
    bridged = not connected and rate <= 64e9
    own = links.sum(axis=1).max() if bridged or not whole or links.max() > whole else whole
    each = BRIDGE_LINK if bridged else rate / own
    parts = [_slice(b) for b in _blocks(count, inner)]
    inside = min(float(own), *(float(links[b, b].sum(axis=1).min()) for b in parts))
    part = "" if bridged or inside == own else f", {inside:g} of {own:g} links"
    origin: Origin = "estimated" if bridged else "published"
    said = f"{source}{part}, one direction"
    tiers = [Tier(topology.link, inner, 5e-6, inside * each, origin, said)] if inner > 1 else []
    if inner < count and connected:
        leaving = min(float(links[b].sum() - links[b, b].sum()) for b in parts) * each
        every = float(links.sum(axis=1).min()) * each
        said = f"{source}, one direction"
        tiers.append(Tier(f"{topology.link} mesh", count, 5e-6, every, "estimated", said, max(leaving, every)))
    return tiers


def _slice(block: range) -> slice:
    return slice(block.start, block.stop)


def _pcie_tiers(topology: GpuTopology, below: int) -> list[Tier]:
    """Return the tiers of PCIe above cliques of `below` GPUs: a socket's, then the host's."""
    count = len(topology.links)
    if below >= count > 1 or count == 1:
        return [] if count > 1 else [Tier("pcie", 1, 1e-5, _PCIE, "estimated", "a single GPU")]
    near = [
        size
        for size in range(count, below - 1, -1)
        if count % size == 0 and size % below == 0 and _is_within_sockets(topology, size)
    ]
    socket = near[0] if near else below
    said = "the host's topology; rate"
    tiers = []
    if socket > below or (socket == below == 1):
        tiers.append(Tier("pcie", socket, 1e-5, _PCIE, "estimated", f"{said} of PCIe 4.0 x16, one direction"))
    if socket < count:
        between = f"{said} between the host bridges of two sockets"
        tiers.append(Tier("sockets", count, 1.5e-5, _PCIE, "estimated", between, _SOCKETS))
    return tiers


def _is_within_sockets(topology: GpuTopology, size: int) -> bool:
    """Whether, in consecutive blocks of `size` GPUs, all reach each other without the link between sockets."""
    return all(topology.links[i][j] != "SYS" for b in _blocks(len(topology.links), size) for i in b for j in b)
