"""Clusters that Phalanx knows by name, from what their vendors publish, in the units of chips.py.

Where a datasheet has no figure for a number type, the device has none either, and a job of that type is refused.
`phalanx measure` on the machine itself is better than any of this.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from phalanx.spec.cluster.chips import CHIPS
from phalanx.spec.cluster.spec import GIB, ClusterSpec, Device, KernelRates, Origin, Rates, Tier
from phalanx.spec.errors import InputError, nearest
from phalanx.spec.job import DType
from phalanx.spec.ranges import Name, Range, Ranks, require_ranges
from phalanx.spec.rows import Rows, record


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


@dataclass(frozen=True)
class _Tier:
    """A link's name, and what it joins: `ranks` ranks of a node, `nodes` nodes, or all nodes if both are 0."""

    link: str
    ranks: int = 0
    nodes: int = 0


@dataclass(frozen=True)
class _Row:
    """A cluster: nodes of `size` chips, with tiers from the inside out."""

    chip: str
    size: int
    tiers: tuple[_Tier, ...]
    device: str | None = None
    """The name of a variant of the chip, and its memory bandwidth."""
    bandwidth_bytes_per_s: float | None = None


_FILE = Path(__file__).with_suffix(".toml")
_LINK = "link "
_LINKS = Rows(_FILE, record(_Links), lambda name: name.startswith(_LINK))
PRESETS: Mapping[str, _Row] = Rows(_FILE, record(_Row), lambda name: not name.startswith(_LINK))
"""Clusters by name."""


def of_datasheet(name: str, device: Device, size: int, nodes: int, tiers: tuple[Tier, ...]) -> ClusterSpec:
    """Return a cluster of nodes of `size` devices, with rates of computation estimated from the datasheet."""
    return ClusterSpec(name, device, size, nodes, tiers, tuple(_rates(device, d) for d in device.dense_flops_per_s))


def named(text: str) -> str | None:
    """Return the preset of a name in any spelling, or of a chip (h100, NVIDIA H200, rtx4090, a100-80gb, a100-pcie):
    of its vendor's own node first. None for any other text."""
    name = _plain(text)
    if name in PRESETS:
        return name
    card = re.fullmatch(r"(\w+)-(?:(\d+gb)-)?pcie(?:-(\d+gb))?", name)
    if card and (row := PRESETS.get(f"pcie-{card[1]}")):
        device = CHIPS[row.chip].as_device(row.device).name.lower()
        return f"pcie-{card[1]}" if device.endswith(card[2] or card[3] or "") else None
    having = [known for known, row in PRESETS.items() if _is_chip(name, row.chip)]
    return next((known for known in having if known == f"dgx-{name}"), having[0] if having else None)


def chip_of(text: str) -> str | None:
    """Return the chip that a text names, however a person or a driver writes it: a6000, NVIDIA A100-SXM4-80GB. None
    for any other text."""
    return next((known for known in CHIPS if _is_chip(_plain(text), known)), None)


def _plain(text: str) -> str:
    """Return a name in lower case with hyphens, without the vendor, its brand, the socket and the kind of memory."""
    name = re.sub(r"[\s_]+", "-", text.strip().lower())
    vendor = r"^(?:nvidia-|amd-|intel-|google-)?(?:geforce-|tesla-|jetson-(?:agx-)?)?"
    name = re.sub(rf"{vendor}|-sxm\d?(?=-|$)|-hbm\d\w?$|-generation$", "", name)
    name = re.sub(
        r"^(?:tpu-?)?(?:v?7x|ironwood)(?=-|$)", "tpu-v7", re.sub(r"^(?:tpu-)?trillium(?=-|$)", "tpu-v6e", name)
    )
    return re.sub(r"-(\d{2,3})g(?:ib)?(?=-|$)", r"-\1gb", name)


def _is_chip(name: str, chip: str) -> bool:
    """Whether a plain name is a chip's, with or without its memory, or that of its kind with its memory: an H20 of
    141 GB is the H20-3e."""
    short = re.sub(r"^(?:rtx|tpu)-?", "", name)
    bare = re.sub(r"^(?:rtx|tpu)-", "", chip.lower())
    memory = CHIPS[chip].device.rpartition("-")[2].lower()
    kind = next((known for known in CHIPS if chip.startswith(f"{known}-")), chip).lower()
    return short in (bare, f"{bare}-{memory}", f"{kind}-{memory}")


@dataclass(frozen=True)
class Counted:
    """A number of GPUs of a preset's kind. `per_node`: how many of them a node has, if that is said."""

    preset: str
    gpus: int
    per_node: int | None = None


_COUNTED = (
    re.compile(r"(?:(?P<nodes>\d{1,5})-?[x*]-?)?(?P<gpus>\d{1,6})(?:-?[x*]-?|-)(?P<kind>.+)"),
    re.compile(r"(?P<kind>.+?)(?:-?[x*]-?|:)(?P<gpus>\d{1,6})"),
)


def counted(text: str) -> Counted | None:
    """Return the GPUs that a text counts, as people and clouds write them: 8xH100, 2x8xH100 (nodes first), 4 A100,
    H100:8, and slices of TPUs such as v5p-128. None for any other text, and for the name of a preset."""
    if named(text) is not None:
        return None
    sliced = re.fullmatch(r"(?:tpu-?)?(v\d+[a-z]*)-(\d{1,6})", _plain(text).replace("litepod", "e"))
    if sliced and (kind := named(sliced[1])):
        return Counted(kind, int(sliced[2]) // (2 if sliced[1] in _CORE_COUNTED else 1))
    for pattern in _COUNTED:
        match = pattern.fullmatch(_plain(text))
        if match and (kind := named(match["kind"])):
            gpus, nodes = int(match["gpus"]), match.groupdict().get("nodes")
            return Counted(kind, gpus) if nodes is None else Counted(kind, int(nodes) * gpus, gpus)
    return None


_CORE_COUNTED = ("v2", "v3", "v4", "v5p", "v7")
"""Generations of TPUs whose slices are named by their TensorCores, two a chip (Google Cloud TPU documentation; of
tpu7x-512, 256 chips: AI-Hypercomputer/tpu-recipes 1c91283, training/ironwood/qwen3-235b-a22b)."""


def preset(name: str, nodes: int) -> ClusterSpec:
    """Return the cluster of this name with `nodes` nodes. Raises InputError for an unknown name or no nodes."""
    known = named(name)
    if (some := counted(name)) is not None:
        reason = f"counts {some.gpus} GPUs, and the number of nodes does too"
        raise InputError("cluster.preset", name, reason, f"use {some.preset}")
    card = re.fullmatch(r"(.+?)-?(?:(\d{2,3})g(?:i?b)?|nvl|pcie)", _plain(name))
    if known is None and card and (kind := named(card[1])):
        reason = f"is no card that Phalanx has: {PRESETS[kind].chip} is the {CHIPS[PRESETS[kind].chip].device}"
        memory = f"gpu_memory_gib = {card[2] or 'its GiB'}"
        remedy = f'a cluster\'s file with preset = "{kind}", {memory} is of its chip, at its bandwidth'
        raise InputError("cluster.preset", name, reason, remedy)
    if known is None:
        remedy = nearest(name, [*PRESETS, "local"])
        if remedy.startswith("known"):
            remedy += "; or describe it in a file, as docs/prediction.md does under Your own cluster"
        raise InputError("cluster.preset", name, "is not a cluster that Phalanx knows", remedy)
    if nodes < 1:
        raise InputError("cluster.nodes", nodes, "must be at least 1")
    row, tiers = PRESETS[known], []
    for tier in row.tiers:
        ranks = tier.ranks or row.size * min(nodes, tier.nodes or nodes)
        tiers.append(_LINKS[_LINK + tier.link].among(ranks))
        if tier.nodes >= nodes:
            break
    device = CHIPS[row.chip].as_device(row.device, row.bandwidth_bytes_per_s)
    return of_datasheet(known, device, row.size, nodes, tuple(tiers))


@dataclass(frozen=True)
class LikePreset:
    """Nodes like a preset's: how many, with how many of their GPUs, and what their links carry."""

    preset: Name
    nodes: Ranks = 1
    ranks_per_node: Ranks | None = None
    """GPUs of a node, the preset's or fewer; None: all."""
    gb_per_s: dict[str, float] = field(default_factory=dict)
    """GB/s of a rank in one direction by the name of the links; others as published. An uplink that ranks share
    changes with it."""
    name: Name | None = None
    host_memory_gib: Annotated[float, Range(1, 1e6)] | None = None
    """GiB of a node's host, for state that is offloaded to it; None: unknown."""
    gpu_memory_gib: Annotated[float, Range(1, 1e4)] | None = None
    """GiB of a GPU with the preset's chip and more or less memory, as an H20 of 141 GB; None: the preset's."""

    def __post_init__(self) -> None:
        require_ranges(self, "cluster")

    def cluster(self) -> ClusterSpec:
        """Return the cluster. Raises InputError for more GPUs than a preset's node has, or links that it lacks."""
        whole = preset(self.preset, self.nodes)
        most, size = whole.ranks_per_node, self.ranks_per_node or whole.ranks_per_node
        if size > most:
            raise InputError(
                "cluster.ranks_per_node", size, f"a node of {whole.name} has {most}", "use as many or fewer"
            )
        names = [tier.name for tier in whole.tiers]
        for link, rate in self.gb_per_s.items():
            if link not in names:
                raise InputError(
                    f"cluster.gb_per_s.{link}", rate, f"{whole.name} has no such links", nearest(link, names)
                )
            if not 0 < rate < 1e5:
                raise InputError(f"cluster.gb_per_s.{link}", rate, "must be GB/s of a rank, over 0 and below 100,000")
        tiers: dict[int, Tier] = {}  # by the ranks that they join: the inner links where two join as many
        for tier in whole.tiers:
            ranks = min(tier.ranks, size) if tier.ranks <= most else tier.ranks // most * size
            own, given = tier, self.gb_per_s.get(tier.name)
            if given is not None:
                own = _of_rate(tier, given * 1e9)
            tiers.setdefault(ranks, replace(own, ranks=ranks))
        name = self.name or whole.name
        host = None if self.host_memory_gib is None else int(self.host_memory_gib * GIB)
        device = whole.device if self.gpu_memory_gib is None else _of_memory(whole.device, self.gpu_memory_gib)
        return replace(
            whole,
            name=name,
            ranks_per_node=size,
            device=device,
            tiers=tuple(tiers.values()),
            host_memory_bytes=host,
        )


def _of_memory(device: Device, gib: float) -> Device:
    """Return a device with `gib` GiB of memory, of which the driver and libraries take as much as before."""
    size = int(gib * GIB)
    kept = device.memory_bytes - device.usable_bytes
    source = f"{device.source}; memory as the cluster's file says"
    return replace(device, memory_bytes=size, usable_bytes=max(size - kept, 1), source=source)


def _of_rate(tier: Tier, rate: float) -> Tier:
    """Return links of another rate in bytes/s. A shared uplink changes in proportion, as a host's one NIC does."""
    was, shared = tier.bandwidth_bytes_per_s_per_gpu_per_direction, tier.uplink_bandwidth_bytes_per_s_per_direction
    return replace(
        tier,
        bandwidth_bytes_per_s_per_gpu_per_direction=rate,
        uplink_bandwidth_bytes_per_s_per_direction=None if shared is None else shared * rate / was,
        source="as the cluster's file says",
    )


def resized(cluster: ClusterSpec, nodes: int) -> ClusterSpec:
    """Return a cluster of `nodes` nodes like the nodes of `cluster`: a preset's tiers follow from its nodes, any
    other cluster's tiers stay, and the outermost joins all nodes."""
    if cluster.name in PRESETS and preset(cluster.name, cluster.nodes) == cluster:
        return preset(cluster.name, nodes)
    ranks = nodes * cluster.ranks_per_node
    outermost = replace(cluster.tiers[-1], ranks=max(ranks, 1))
    inner = tuple(tier for tier in cluster.tiers[:-1] if tier.ranks < ranks)
    return replace(cluster, nodes=nodes, tiers=(*inner, outermost))
