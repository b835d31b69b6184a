"""Clusters that Phalanx knows by name, from what their vendors publish.

Datasheets quote large numbers: FLOP/s with sparsity, links in both directions at once, memory in various units. Here
FLOP/s are dense, links count one direction, and memory is what the driver reports. Where a datasheet has no figure
for a number type, the device has none either, and a job of that type is refused. `phalanx measure` on the machine
itself is better than any of this.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from phalanx.spec.cluster.chips import CHIPS
from phalanx.spec.cluster.spec import ClusterSpec, Device, KernelRates, Origin, Rates, Tier
from phalanx.spec.errors import InputError, nearest
from phalanx.spec.job import DType


def _rates(device: Device, dtype: DType) -> KernelRates:
    """Estimate compute rates from a datasheet with coarse efficiencies, until `phalanx measure` has run there.

    Matrix products reach about 0.7 of dense peak, memory-bound work about 0.8 of bandwidth, and kernels follow each
    other after about 1.5 microseconds. Attention, counted over the full square of which causal kernels compute half,
    reaches 0.8 of peak forward and 0.55 backward where flash attention runs (16-bit floats since Ampere; on an H100
    0.84 and 0.55, docs/gpu.md), and 0.35 elsewhere.
    """
    peak = device.dense_flops_per_s[dtype]
    bandwidth = device.memory_bandwidth_bytes_per_s
    narrow = {name: 1 / (0.7 * rate) for name, rate in device.narrow_flops_per_s.items()}
    flash = dtype in ("float16", "bfloat16") and "bfloat16" in device.dense_flops_per_s
    forward, backward = (
        Rates(1 / (0.7 * peak), 1 / (share * peak), 1 / (0.8 * bandwidth), 1.5e-6, narrow, fused_norms=True)
        for share in ((0.8, 0.55) if flash else (0.35, 0.35))
    )
    return KernelRates(dtype, 1, 1, forward, backward, 1 / (0.8 * bandwidth), 1.0, peak, 0.0, "estimated")


@dataclass(frozen=True)
class _Links:
    """The links of one rank: bytes/s in one direction, and the uplink that the ranks of a block share, if any."""

    name: str
    latency_s: float
    rate: float
    source: str
    uplink: float | None = None
    origin: Origin = "published"

    def among(self, ranks: int) -> Tier:
        """The tier that connects `ranks` neighbouring ranks by these links."""
        return Tier(self.name, ranks, self.latency_s, self.rate, self.origin, self.source, self.uplink)


def _nvlink(rate: float, generation: int) -> _Links:
    how = "through NVSwitch, one direction: half of the headline figure"
    return _Links("nvlink", 5e-6, rate, f"NVLink {generation} {how}")


def _cube_mesh(name: str, device: Device, nodes: int) -> ClusterSpec:
    """DGX-1 with V100: no switch, but six NVLinks of 25 GB/s from each GPU to four others (NVIDIA WP-08437, figure 4;
    `nvidia-smi topo -m`: 0-1, 0-2 one, 0-3, 0-4 two, 1-2, 1-5 two, ...). The more GPUs a group has, the more of
    them it uses: a pair has one or two, four lie on two rings that share no link, eight on three, each both ways.
    """
    one, how = 25e9, "NVLink 2 without a switch, one direction"

    def links(name: str, count: int, what: str, uplink: float | None = None) -> _Links:
        origin: Origin = "published" if uplink is None else "estimated"  # the number of rings is our own count
        return _Links(f"nvlink {name}", 5e-6, count * one, f"{how}: {what}", uplink, origin)

    tiers = (
        links("pair", 1, "the one link that GPUs 0 and 1 have, and 4 and 5; two join 2 and 3, 6 and 7").among(2),
        links("quad", 4, "two rings of four, both ways; six links leave a pair", 6 * one).among(4),
        links("mesh", 6, "three rings of eight, both ways; six links leave a quad", 6 * one).among(8),
        _EDR_4.among(8 * nodes),
    )
    return of_datasheet(name, device, 8, nodes, tiers)


def _infiniband(rate: float, what: str, uplink: float | None = None) -> _Links:
    return _Links("infiniband", 15e-6, rate, f"{what}, one direction", uplink)


def _ethernet(port: float, what: str, host: float) -> _Links:
    return _Links("ethernet", 30e-6, port, f"{what}, one direction", host)


def _boxes(name: str, device: Device, size: int, inside: _Links, between: _Links, nodes: int) -> ClusterSpec:
    """Nodes of `size` ranks, with one kind of links inside a node and one between nodes."""
    return of_datasheet(name, device, size, nodes, (inside.among(size), between.among(size * nodes)))


def of_datasheet(name: str, device: Device, size: int, nodes: int, tiers: tuple[Tier, ...]) -> ClusterSpec:
    """Return a cluster of nodes of `size` devices, with rates of computation estimated from the datasheet."""
    return ClusterSpec(name, device, size, nodes, tiers, tuple(_rates(device, d) for d in device.dense_flops_per_s))


_HDR = _infiniband(25e9, "a 200 Gb/s port per GPU (HDR)")
_NDR = _infiniband(50e9, "a 400 Gb/s port per GPU (NDR)")
_EDR_4 = _infiniband(12.5e9, "four 100 Gb/s ports per node (EDR), which 8 GPUs share", 50e9)
_EDR_8 = _infiniband(12.5e9, "eight 100 Gb/s ports per node (EDR), which 16 GPUs share", 100e9)
_SITE = 16  # nodes
_WAN = _Links(
    "wan", 5e-3, 50e9, "sites about 1000 km apart, 400 Gb/s from each, one direction: an example", 50e9, "estimated"
)


def dgx_a100(nodes: int) -> ClusterSpec:
    """DGX A100 nodes: 8 GPUs of 80 GB behind NVSwitch, an HDR InfiniBand port per GPU."""
    return _boxes("dgx-a100", CHIPS["A100"].as_device(), 8, _nvlink(300e9, 3), _HDR, nodes)


def dgx_h100(nodes: int) -> ClusterSpec:
    """DGX H100 nodes: 8 GPUs of 80 GB behind NVSwitch, an NDR InfiniBand port per GPU."""
    return _boxes("dgx-h100", CHIPS["H100"].as_device(), 8, _nvlink(450e9, 4), _NDR, nodes)


def _sites(nodes: int) -> ClusterSpec:
    """DGX H100 at sites of 16 nodes; the last one may be smaller."""
    local = min(nodes, _SITE) * 8
    tiers: tuple[Tier, ...] = (_nvlink(450e9, 4).among(8), _NDR.among(local))
    if nodes > _SITE:
        tiers += (_WAN.among(nodes * 8),)
    return of_datasheet("sites-h100", CHIPS["H100"].as_device(), 8, nodes, tiers)


def _pcie(name: str, device: Device, rate: float, network: float, nodes: int) -> ClusterSpec:
    """Nodes of 8 PCIe cards, 4 on each socket's host bridge; traffic between the bridges shares one link."""
    inside = _Links("pcie", 1e-5, rate, "PCIe 4.0 x16, one direction, as copies reach it", origin="estimated")
    across = _Links("sockets", 1.5e-5, rate, "between the host bridges of two sockets", 25e9, "estimated")
    what = f"{network * 8e-9:g} Gb/s per host, which 8 GPUs share"
    tiers = (inside.among(4), across.among(8), _ethernet(min(rate, network), what, network).among(8 * nodes))
    return of_datasheet(name, device, 8, nodes, tiers)


PRESETS: dict[str, Callable[[int], ClusterSpec]] = {
    "dgx-1v-16gb": lambda n: _cube_mesh("dgx-1v-16gb", CHIPS["V100-16GB"].as_device(), n),
    "dgx-1v": lambda n: _cube_mesh("dgx-1v", CHIPS["V100"].as_device(), n),
    "dgx-2": lambda n: _boxes("dgx-2", CHIPS["V100"].as_device("V100-SXM3-32GB"), 16, _nvlink(150e9, 2), _EDR_8, n),
    "dgx-a100-40gb": lambda n: _boxes("dgx-a100-40gb", CHIPS["A100-40GB"].as_device(), 8, _nvlink(300e9, 3), _HDR, n),
    "dgx-a100": dgx_a100,
    "dgx-h100": dgx_h100,
    "dgx-h800": lambda n: _boxes("dgx-h800", CHIPS["H800"].as_device(), 8, _nvlink(200e9, 4), _NDR, n),
    "dgx-h200": lambda n: _boxes("dgx-h200", CHIPS["H200"].as_device(), 8, _nvlink(450e9, 4), _NDR, n),
    "dgx-b200": lambda n: _boxes("dgx-b200", CHIPS["B200"].as_device(), 8, _nvlink(900e9, 5), _NDR, n),
    # A node is a rack: 18 trays of 4 GPUs in one NVLink domain.
    "gb200-nvl72": lambda n: _boxes("gb200-nvl72", CHIPS["GB200"].as_device(), 72, _nvlink(900e9, 5), _NDR, n),
    "ethernet-a100": lambda n: _boxes(
        "ethernet-a100",
        CHIPS["A100-40GB"].as_device(),
        8,
        _nvlink(300e9, 3),
        _ethernet(12.5e9, "400 Gb/s per host in four ports", 50e9),
        n,
    ),
    "ethernet-h100": lambda n: _boxes(
        "ethernet-h100",
        CHIPS["H100"].as_device(),
        8,
        _nvlink(450e9, 4),
        _ethernet(12.5e9, "one 100 Gb/s port per host", 12.5e9),
        n,
    ),
    "pcie-a100": lambda n: _pcie("pcie-a100", CHIPS["A100"].as_device("A100-PCIe-80GB", 1.935e12), 25e9, 12.5e9, n),
    "pcie-a10": lambda n: _pcie("pcie-a10", CHIPS["A10"].as_device(), 25e9, 12.5e9, n),
    "pcie-l4": lambda n: _pcie("pcie-l4", CHIPS["L4"].as_device(), 25e9, 12.5e9, n),
    # No peer-to-peer between these: every copy goes through the host's memory.
    "pcie-rtx4090": lambda n: _pcie("pcie-rtx4090", CHIPS["RTX-4090"].as_device(), 12.5e9, 1.25e9, n),
    "sites-h100": _sites,
}


def preset(name: str, nodes: int) -> ClusterSpec:
    """Return the cluster of this name with `nodes` nodes. Raises InputError for an unknown name or no nodes."""
    if name not in PRESETS:
        raise InputError(
            "cluster.preset", name, "is not a cluster that Phalanx knows", nearest(name, [*PRESETS, "local"])
        )
    if nodes < 1:
        raise InputError("cluster.nodes", nodes, "must be at least 1")
    return PRESETS[name](nodes)


def resized(cluster: ClusterSpec, nodes: int) -> ClusterSpec:
    """Return a cluster of `nodes` nodes like the nodes of `cluster`: a preset's tiers follow from its nodes, any
    other cluster's tiers stay, and the outermost joins all nodes."""
    if cluster.name in PRESETS and preset(cluster.name, cluster.nodes) == cluster:
        return preset(cluster.name, nodes)
    ranks = nodes * cluster.ranks_per_node
    outermost = replace(cluster.tiers[-1], ranks=max(ranks, 1))
    inner = tuple(tier for tier in cluster.tiers[:-1] if tier.ranks < ranks)
    return replace(cluster, nodes=nodes, tiers=(*inner, outermost))
