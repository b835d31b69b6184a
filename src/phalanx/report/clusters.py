"""Clusters as a table: device, memory, dense FLOP/s and tiers of links; and the source of each number."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.table import Table

from phalanx.report.style import size
from phalanx.spec.cluster.spec import ClusterSpec, Tier


def table(clusters: Sequence[ClusterSpec]) -> Table:
    """Tabulate clusters, with the tiers of each one below the other."""
    grid = Table(header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("preset", "device", "usable", "TFLOP/s", "ranks", "GB/s per rank", "links"):
        grid.add_column(name, justify="left" if name in ("preset", "device", "links") else "right", no_wrap=True)
    for spec in clusters:
        device = spec.device
        flops = device.dense_flops_per_s
        half = flops.get("bfloat16")
        peak = f"{half / 1e12:g}" if half else f"{flops['float16'] / 1e12:g} fp16"
        for i, tier in enumerate(spec.tiers):
            about = (spec.name, device.name, size(device.usable_bytes), peak) if i == 0 else ("",) * 4
            grid.add_row(*about, f"{tier.ranks:,}", _rate(tier), tier.name + _shared(tier))
    grid.caption = "TFLOP/s: dense, bf16 unless marked fp16; GB/s in one direction; ranks: joined by these links"
    grid.caption_justify = "left"
    return grid


def _rate(tier: Tier) -> str:
    return f"{tier.bandwidth_bytes_per_s_per_gpu_per_direction / 1e9:g}"


def _shared(tier: Tier) -> str:
    uplink = tier.uplink_bandwidth_bytes_per_s_per_direction
    return "" if uplink is None else f", {uplink / 1e9:g} shared"


def sources(spec: ClusterSpec) -> Iterator[str]:
    """Yield the sources of a cluster's numbers, a line for the device and one for each tier."""
    yield f"{spec.device.name}: {spec.device.origin}: {spec.device.source}"
    for tier in spec.tiers:
        yield f"{tier.name}: {tier.origin}: {tier.source}; latency {tier.latency_s * 1e6:g} µs, estimated"
    yield "rates of computation: estimated from the datasheet, until `phalanx measure` has run there"
