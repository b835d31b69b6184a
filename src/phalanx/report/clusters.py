"""Clusters as a table: device, memory, dense FLOP/s and tiers of links; and the source of each number."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from phalanx.answers.presets import PresetClusters
from phalanx.planning.tables.switch_levels import sheet as levels
from phalanx.planning.tables.table import Sheet, columns
from phalanx.report.view import View
from phalanx.spec.cluster.spec import ClusterSpec

if TYPE_CHECKING:
    from phalanx.report.pictures.figure import Picture


def view(a: PresetClusters) -> View:
    """Show clusters; one alone with its levels of switches and the sources of its numbers."""
    parts: list[str | Sheet] = [table(a.clusters)]
    if a.alone:
        parts += [levels(a.clusters[0]), *sources(a.clusters[0])]
    return View(parts, "clusters", lambda: _pictures(a))


def _pictures(a: PresetClusters) -> list[Picture]:
    from phalanx.report.gallery.hardware import bandwidths, hierarchy, switch_levels

    spec = a.clusters[0]
    return [hierarchy(spec.name, spec.ranks), switch_levels(spec.name, spec.ranks)] if a.alone else [bandwidths()]


def table(clusters: Sequence[ClusterSpec]) -> Sheet:
    """Tabulate clusters, with the tiers of each one below the other."""
    rows = []
    for spec in clusters:
        device = spec.device
        half = device.dense_flops_per_s.get("bfloat16")
        peak = f"{half / 1e12:g}" if half else f"{device.dense_flops_per_s['float16'] / 1e12:g} fp16"
        for i, tier in enumerate(spec.tiers):
            about = (spec.name, device.name, device.usable_bytes, peak) if i == 0 else ("", "", None, "")
            uplink = tier.uplink_bandwidth_bytes_per_s_per_direction
            shared = "" if uplink is None else f", {uplink / 1e9:g} shared"
            rate = tier.bandwidth_bytes_per_s_per_gpu_per_direction / 1e9
            rows.append((*about, tier.ranks, rate, tier.name + shared))
    names = columns(
        *(
            "preset",
            "device",
            ("usable", "bytes"),
            "TFLOP/s",
            ("ranks", "count"),
            ("GB/s per rank", "number"),
            "links",
        )
    )
    note = "TFLOP/s: dense, bf16 unless marked fp16; GB/s in one direction; ranks: joined by these links"
    return Sheet("", names, rows, note, charted=False)


def sources(spec: ClusterSpec) -> Iterator[str]:
    """Yield the sources of a cluster's numbers, a line for the device and one for each tier."""
    yield f"{spec.device.name}: {spec.device.origin}: {spec.device.source}"
    for tier in spec.tiers:
        yield f"{tier.name}: {tier.origin}: {tier.source}; latency {tier.latency_s * 1e6:g} µs, estimated"
    yield "rates of computation: estimated from the datasheet, until `phalanx measure` has run there"
