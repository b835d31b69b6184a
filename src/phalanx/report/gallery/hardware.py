"""Pictures of chips and links: rooflines, levels of memory, bandwidths, switches, the hierarchy of a cluster."""

from collections.abc import Sequence

import numpy as np

from phalanx.cost.analytic.chips import chip_name, system_of
from phalanx.cost.collectives.nccl_model import collective_s
from phalanx.planning.explain.operators import Operator
from phalanx.planning.lookup import cluster_named, require_counts
from phalanx.planning.tables.roofline import levels_of
from phalanx.planning.tables.switch_levels import sheet as levels
from phalanx.report.pictures.figure import (
    Arrow,
    Bar,
    Bars,
    Box,
    Diagram,
    Label,
    Lines,
    Mark,
    Picture,
    PlotAxis,
    RuleLine,
    Series,
)
from phalanx.report.pictures.numbers import short
from phalanx.spec.cluster.chips import CHIPS
from phalanx.spec.cluster.presets import PRESETS, preset
from phalanx.spec.cluster.spec import ClusterSpec
from phalanx.spec.errors import InputError

_CHIPS = ("V100", "A100", "H100", "B200")
_FLOPS = PlotAxis("FLOP/s that a chip can reach", "FLOP/s", log=True)


def _roof(name: str, peak: float, rate: float, low: float, high: float, colour: int) -> Series:
    """Return min(peak, x rate) over x from low to high."""
    xs = sorted({*np.geomspace(low, high, 24).tolist(), peak / rate})
    return Series(name, [(x, min(peak, x * rate)) for x in xs], colour=colour)


def compute_roofline() -> Picture:
    """Draw the roofs of four generations, 2-byte products, with their ridges."""
    series, marks = [], []
    for i, name in enumerate(_CHIPS):
        chip = CHIPS[name]
        series.append(_roof(name, chip.half, chip.bandwidth_bytes_per_s, 1, 10_000, i))
        ridge = chip.half / chip.bandwidth_bytes_per_s
        marks.append(Mark(ridge, chip.half, f"{name}: {ridge:.0f}", i))
    panel = Lines(
        PlotAxis("FLOP per byte of memory", "count", log=True, low=1, high=10_000),
        _FLOPS,
        tuple(series),
        tuple(marks),
    )
    return Picture(
        "Roofline of compute: from its ridge on, a chip computes as fast as it can",
        (panel,),
        "datasheets of the chips (`phalanx tables roofline`), dense products of 16-bit numbers, no efficiencies",
        "Left of its ridge (the dot, FLOP per byte) an operator waits for memory, right of it for tensor cores.",
    )


def job_roofline(cluster: ClusterSpec, question: str, operators: Sequence[Operator]) -> Picture:
    """Draw a chip's roof with the rates that the operators of a job's block achieve."""
    system = system_of(cluster)
    peak, rate = float(system.peak_bf16), float(system.memory_bytes_per_s)
    drawn = [o for o in operators if o.flops > 0 and o.seconds > 0]
    low = min([1.0, *(o.intensity * 0.7 for o in drawn)])
    high = max([peak / rate * 20, *(o.intensity * 1.5 for o in drawn)])
    marks = [Mark(peak / rate, peak, f"ridge: {peak / rate:.0f}", 7)]
    marks += [Mark(o.intensity, o.flops / o.seconds, o.name, 1) for o in drawn]
    axis = PlotAxis("FLOP per byte of memory", "count", log=True, low=low, high=high)
    roof = _roof("what the chip could reach", peak, rate, low, high, 0)
    return Picture(
        f"Roofline of {cluster.device.name} with the operators of a block",
        (Lines(axis, _FLOPS, (roof,), tuple(marks), height=340),),
        f"`phalanx tables roofline` of {question}; dots: FLOP over the seconds that fitted kernels take",
        "A dot far below the roof: small matrices, or kernels that do not fill the chip.",
    )


def comm_roofline(cluster: str = "dgx-h100", gpus: int = 64) -> Picture:
    """Draw FLOP/s over FLOP per byte sent, a roof for each tier of links, and data parallelism by tokens a rank."""
    spec = _cluster(cluster, gpus)
    peak = float(system_of(spec).peak_bf16)
    series, marks = [], []
    for i, tier in enumerate(spec.tiers):
        rate = _rate(spec, i)
        series.append(_roof(f"{tier.name}, {rate / 1e9:g} GB/s", peak, rate, 10, 1e6, i))
        marks.append(Mark(peak / rate, peak, f"{tier.name}: {peak / rate:,.0f}", i))
    outer = _rate(spec, len(spec.tiers) - 1)
    for tokens in (512, 2048, 8192):
        ratio = 1.5 * tokens  # 6 N FLOP a token over 2 N gradients of 2 bytes (planning/tables/textbook.py)
        marks.append(Mark(ratio, min(peak, ratio * outer), f"{tokens:,} tokens", 7))
    panel = Lines(
        PlotAxis("FLOP per byte sent", "count", log=True, low=10, high=1e6), _FLOPS, tuple(series), tuple(marks)
    )
    return Picture(
        f"Roofline of communication on {spec.name}: a roof for each tier of links",
        (panel,),
        f"`phalanx tables roofline` (peak, links in one direction, of datasheets); {short(peak, 'FLOP/s')} in bf16",
        "Grey dots: data parallelism over the outermost links, by tokens on each rank: 6 N FLOP a token over 4 N "
        "bytes of gradients, 1.5 FLOP per byte for each token, whatever the model.",
    )


def staircase(cluster: str = "dgx-h100", gpus: int = 256) -> Picture:
    """Draw a rank's rate in an all-reduce over the size of its group: of the datasheet, and as NCCL achieves it."""
    spec = _cluster(cluster, gpus)
    system = system_of(spec)
    sizes = [2**k for k in range(1, gpus.bit_length()) if 2**k <= gpus]
    published = [(2.0, _rate(spec, 0))]
    published += [(float(t.ranks), _rate(spec, i + 1)) for i, t in enumerate(spec.tiers[:-1])]
    published.append((float(max(sizes)), published[-1][1]))
    curves = [Series("links of the tier that the group needs, datasheet", published, stairs=True)]
    for i, n in enumerate((2.0**30, 2.0**24, 2.0**20), 1):
        points = [(float(p), 2 * n * (p - 1) / p / float(collective_s("all_reduce", n, p, 1, system))) for p in sizes]
        curves.append(Series(f"all-reduce of {short(n, 'bytes')}, busbw", points, dots=True, colour=i))
    panel = Lines(
        PlotAxis("ranks in the group, neighbours first", "count", log=True, base=2, low=2, high=float(max(sizes))),
        PlotAxis("bytes/s of a rank in one direction", "B/s", log=True),
        tuple(curves),
        rules=tuple(RuleLine("x", float(t.ranks), f"{t.name}: up to {t.ranks}") for t in spec.tiers[:-1]),
    )
    return Picture(
        f"Staircase of bandwidth on {spec.name}: each tier that a group leaves costs a step",
        (panel,),
        "`phalanx tables clusters` (datasheets) and the fitted model of NCCL that `phalanx tables comm` prices with",
        "busbw counts 2 n (P-1)/P bytes of a rank. Above the datasheet: switches that reduce, and ranks of a node "
        "which use their network ports side by side. Small buffers wait for latency.",
    )


def memory_hierarchy(cluster: str = "dgx-h100") -> Picture:
    """Draw the size of each level of memory, and its rate by datasheet and as kernels achieve it."""
    spec = _cluster(cluster, 2 * preset(cluster, 1).ranks_per_node if cluster in PRESETS else 16)
    system, chip = system_of(spec), CHIPS[chip_name(spec.device.name)]
    sizes = [
        Bar(name, (("", float(np.log2(size / 2**20) + 1)),), f"{short(size, 'bytes')}: {whose}")
        for name, size, whose in levels_of(spec)
    ]
    rows = [("HBM", chip.bandwidth_bytes_per_s, float(system.memory_bytes_per_s) * float(system.memory))]
    for i, tier in enumerate(spec.tiers):
        reached = float(np.asarray(system.tiers[i].bytes_per_s_per_gpu_per_direction))
        rows.append((tier.name, _rate(spec, i), reached))
    rows.append(("host", float(system.host_bytes_per_s), 0.0))
    rows.sort(key=lambda row: -row[1])
    bars = []
    for name, published, reached in rows:
        how = f"reached {reached / 1e9:,.4g} ({reached / published:.0%})" if reached else "not fitted"
        text = f"{published / 1e9:,.4g} GB/s, {how}"
        parts = [("reached by kernels and NCCL", reached / 1e9)] if reached else []
        bars.append(Bar(name, [*parts, ("only on the datasheet", (published - reached) / 1e9)], text))
    return Picture(
        f"Levels of memory of {spec.device.name}, and of the links beyond it",
        (
            Bars(
                "size, on a logarithmic axis",
                tuple(sizes),
                head="What each level holds, on the chip in all",
                ticks=(("1 MiB", 0), ("32 MiB", 5), ("1 GiB", 10), ("32 GiB", 15)),
            ),
            Bars("GB/s of one GPU, links in one direction", tuple(bars), head="How fast it is"),
        ),
        "`phalanx tables roofline` (sizes: whitepapers and drivers; rates: datasheets); reached: fitted on published "
        "runs",
        "Rates of registers, L1 and L2 are not in datasheets; kernels that stay there are bound by compute.",
    )


def bandwidths() -> Picture:
    """Draw memory and link rates of all presets as bars."""
    panels = []
    names = {name: preset(name, 32) for name in PRESETS}
    memory = []
    for name, c in names.items():
        rate = c.device.memory_bandwidth_bytes_per_s / 1e12
        memory.append(Bar(name, [("", rate)], f"{rate:.3g} TB/s, {c.device.name}"))
    panels.append(Bars("TB/s of one GPU", tuple(memory), head="Memory"))
    for outermost, head in (
        (False, "Links inside a node"),
        (True, "Links between nodes, all ranks of a node at once"),
    ):
        bars = []
        for name, c in names.items():
            tier = len(c.tiers) - 1 if outermost else 0
            rate = _rate(c, tier) / 1e9
            bars.append(Bar(name, [("", rate)], f"{rate:.4g} GB/s, {c.tiers[tier].name}"))
        panels.append(Bars("GB/s of one GPU in one direction", tuple(bars), head=head))
    return Picture(
        "Bandwidths of all presets",
        tuple(panels),
        "`phalanx tables clusters`: datasheets and published descriptions; sources by `phalanx tables clusters NAME`",
        "Where the ranks of a node share a port, each has its part of it.",
    )


def switch_levels(cluster: str = "dgx-h100", gpus: int = 256) -> Picture:
    """Draw a cluster's switches as a tree of levels: the blocks below each, and its rates."""
    spec = _cluster(cluster, gpus)
    rows = levels(spec).rows
    items: list[Box | Arrow | Label] = []
    y = 0
    for depth, row in enumerate(reversed(rows)):
        name, blocks, ranks, rate, carried, bisection, over = row
        below, innermost = int(ranks) // int(blocks), depth == len(rows) - 1
        what = f"join {int(blocks)} " + ("GPUs" if below == 1 else f"blocks of {below} GPUs")
        items.append(Box(24, y, 31, 4, (f"{name} switches", what), depth % 2))
        figures = (
            f"a GPU {rate / 1e9:g} GB/s",
            f"all {carried / 1e12:.4g} TB/s",
            f"bisection {bisection / 1e12:.4g} TB/s",
            f"oversubscribed {over:.3g}",
        )
        items += [Label(56, y + k, figure) for k, figure in enumerate(figures)]
        shown = min(int(blocks), 4)
        y += 4
        for k in range(shown):
            middle = 8 + 21 * k if shown == 4 else 39 - 10 * (shown - 1) + 20 * k
            items.append(Arrow(((39, y), (39, y + 1), (middle, y + 1), (middle, y + 2)), 0))
            number = int(blocks) - 1 if k == 3 else k
            word = f"{'GPU' if below == 1 else 'block'} {number}"
            word = f"... {word}"[-13:] if number > k else word
            items.append(Box(middle - 7, y + 3, 15, 3, (word,), 2 if innermost else None))
        y += 7
        if not innermost:
            items.append(Label(1, y, f"inside each block of {below} GPUs:"))
            y += 2
    return Picture(
        f"Levels of switches of {spec.name} with {spec.ranks} GPUs",
        (Diagram(tuple(items)),),
        f"`phalanx tables clusters {spec.name}`: datasheets, links in one direction",
        "A fat tree that is not oversubscribed (1) lets one half of the GPUs send to the other at full rate: the "
        "bisection. NVSwitch is such a level inside a node.",
    )


def hierarchy(cluster: str = "dgx-h100", gpus: int = 256) -> Picture:
    """Draw the first and the last node of a cluster: their GPUs, the links inside, the ports, the levels between."""
    spec = _cluster(cluster, gpus)
    device, inside, outer = spec.device, spec.tiers[0], spec.tiers[1:]
    flops = max(device.dense_flops_per_s.values())
    items: list[Box | Arrow | Label] = []
    # The levels between nodes, the outermost at the top.
    for depth, i in enumerate(reversed(range(1, len(spec.tiers)))):
        tier, below = spec.tiers[i], spec.tiers[i - 1].ranks
        words = (f"{tier.name}: {tier.ranks // below} x {below} GPUs", _speed(spec, i))
        items.append(Box(0, 5 * depth, 79, 4, words))
        items += [Arrow(((39, 5 * depth + 4), (39, 5 * depth + 5)), 2)] if i > 1 else []
    for place, node in enumerate(dict.fromkeys((0, spec.ranks // inside.ranks - 1))):
        items += _node(spec, node, 41 * place, 5 * len(outer))
    each = f"{short(float(device.memory_bytes), 'bytes')} at {device.memory_bandwidth_bytes_per_s / 1e12:.3g} TB/s"
    return Picture(
        f"The hierarchy of {spec.name}: {spec.ranks} GPUs on {spec.ranks // spec.ranks_per_node} nodes",
        (Diagram(tuple(items)),),
        f"`phalanx tables clusters {spec.name}`: datasheets in one direction; latencies are estimates",
        f"A GPU is {device.name}: {each}, {flops / 1e12:,.4g} TFLOP/s. In a node, {inside.name}: {_speed(spec, 0)}. "
        "From the inside out each level is larger, slower and further away: what talks most stays innermost.",
    )


def _node(spec: ClusterSpec, node: int, x: int, y: int) -> list[Box | Arrow | Label]:
    """Return the shapes of a node at (x, y): its port or ports, if there is a network, its GPUs and their links."""
    gpus, inside = _shown(spec.tiers[0].ranks), spec.tiers[0]
    network = len(spec.tiers) > 1
    items: list[Box | Arrow | Label] = [Box(x, y, 38, 17 if network else 12)]
    places = [x + 2 + 9 * k for k, gpu in enumerate(gpus) if gpu is not None]
    if network:
        shared = spec.tiers[1].uplink_bandwidth_bytes_per_s_per_direction is not None
        for left, wide, name in [(x + 2, 35, "a port for all")] if shared else [(p, 8, "port") for p in places]:
            items.append(Box(left, y + 2, wide, 3, (name,), 3))
            items.append(Arrow(((left + wide // 2, y - 1), (left + wide // 2, y + 1)), 2))
        items += [Arrow(((p + 4, y + 5), (p + 4, y + 6)), 2) for p in places]
        y += 5
    items += [
        Box(x + 2 + 9 * k, y + 2, 8, 3, ("..." if gpu is None else f"GPU {gpu}",), 2) for k, gpu in enumerate(gpus)
    ]
    items += [Arrow(((p + 4, y + 5), (p + 4, y + 6)), 2) for p in places]
    items.append(Box(x + 2, y + 7, 35, 3, (f"{inside.name}: {inside.ranks} GPUs",), 0))
    word = "node" if inside.ranks == spec.ranks_per_node else "block"
    return [*items, Label(x + 15, y + 10, f"{word} {node}", strong=True)]


def _shown(gpus: int) -> list[int | None]:
    """Return the GPUs of a node that are drawn, in at most four places; None for the GPUs left out."""
    return [0, 1, None, gpus - 1] if gpus > 4 else list(range(gpus))


def _speed(cluster: ClusterSpec, tier: int) -> str:
    """Return the rate and the latency of a tier of links, in words."""
    latency = f"{cluster.tiers[tier].latency_s * 1e6:,g} µs"
    return f"{_rate(cluster, tier) / 1e9:.3g} GB/s a GPU in one direction, {latency}"


def _cluster(name: str, gpus: int) -> ClusterSpec:
    """Return a cluster for a number of GPUs, of whole nodes. Raises InputError."""
    require_counts(("gpus", gpus))
    if gpus < 2:
        raise InputError("gpus", gpus, "has no links to draw", "ask for 2 or more")
    return cluster_named(name)(gpus)


def _rate(cluster: ClusterSpec, tier: int) -> float:
    """Return bytes/s of a rank over a tier in one direction, if all ranks of a block below it send at once."""
    t = cluster.tiers[tier]
    shared = t.uplink_bandwidth_bytes_per_s_per_direction
    rate = t.bandwidth_bytes_per_s_per_gpu_per_direction
    if shared is None:
        return rate
    below = cluster.tiers[tier - 1].ranks if tier else 1
    return min(rate, shared / below)
