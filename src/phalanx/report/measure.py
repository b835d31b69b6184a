"""Measurements of a cluster: tables, and plots of points, fitted line and crossover n*."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from phalanx.report.pictures.figure import Lines, Picture, PlotAxis, RuleLine, Series
from phalanx.report.pictures.files import panel_text
from phalanx.report.style import empty_table, seconds, size
from phalanx.spec.cluster.spec import ClusterSpec, CollectiveFit
from phalanx.spec.errors import InputError


def links(cluster: ClusterSpec) -> Table:
    """Tabulate latency and bandwidth of each tier of links."""
    table = empty_table("links, by messages between pairs of ranks")
    for name in ("tier", "ranks", "alpha", "GB/s of a rank", "GB/s of a host", "n*"):
        table.add_column(name, justify="left" if name == "tier" else "right")
    for tier in cluster.tiers:
        rate, uplink = (
            tier.bandwidth_bytes_per_s_per_gpu_per_direction,
            tier.uplink_bandwidth_bytes_per_s_per_direction,
        )
        shared = "each its own" if uplink is None else f"{uplink / 1e9:.4g}"
        table.add_row(
            tier.name,
            f"{tier.ranks:,}",
            seconds(tier.latency_s),
            f"{rate / 1e9:.4g}",
            shared,
            size(tier.latency_s * rate),
        )
    return table


def figures(cluster: ClusterSpec) -> Table:
    """Tabulate matrix products, attention, memory, launches and γ: the best round and the middle 90 %."""
    table = empty_table("a rank, while all others do the same")
    for name in ("", "best", "5 % to 95 % of the rounds"):
        table.add_column(name, justify="right" if name == "best" else "left")
    for f in cluster.figures:
        low, high = (_written(x, f.unit) for x in (f.low, f.high))
        table.add_row(f.name, _written(f.value, f.unit), f"{low} to {high}" + (f"; {f.note}" if f.note else ""))
    return table


def _written(value: float, unit: str) -> str:
    if unit == "FLOP/s":
        return f"{value / 1e9:,.1f} GFLOP/s" if value < 1e12 else f"{value / 1e12:.1f} TFLOP/s"
    if unit == "B/s":
        return f"{value / 1e9:.1f} GB/s"
    return f"{value * 1e9:.4f} ns/B" if unit == "s/B" else seconds(value)


def title(fit: CollectiveFit) -> str:
    """Describe a fit in one line: collective, group, α and β, crossover, error, and whether to trust it."""
    hosts = f" on {fit.hosts} hosts" if fit.hosts > 1 else ""
    line = f"{seconds(fit.alpha_s)} + {fit.beta_s_per_byte * 1e9:.4g} ns/B"
    crossover = f", n* = {size(fit.alpha_s / fit.beta_s_per_byte)}" if fit.beta_s_per_byte and fit.alpha_s else ""
    trust = "" if fit.trusted else ": NOT TO BE TRUSTED"
    what = f"{fit.op} of {fit.group_size} ranks{hosts} over {fit.way}"
    return f"{what}: {line}{crossover}, error {fit.fit_error:.0%}{trust}"


def plot(fit: CollectiveFit) -> list[str]:
    """Plot time over size in characters, both axes logarithmic: points, the fitted line, and a bar at n*."""
    return panel_text(panel_of(fit))


def picture(fits: Sequence[CollectiveFit]) -> Picture:
    """Draw a panel for every fit that has points: points, line and n*. Raises InputError if none has any."""
    panels = tuple(panel_of(fit) for fit in fits if len(fit.points) > 1)
    if not panels:
        raise InputError("plot", None, "has nothing to draw: no collective was measured at two sizes")
    return Picture("Collectives as measured, and the lines fitted to them", panels, "`phalanx measure`")


def panel_of(fit: CollectiveFit) -> Lines:
    """Return the points of a fit, its line, and its crossover n* where that lies among the sizes."""
    low, high = min(n for n, _ in fit.points), max(n for n, _ in fit.points)
    sizes = [low * (high / low) ** (k / 40) for k in range(41)]
    line = [(n, fit.alpha_s + fit.beta_s_per_byte * n) for n in sizes]
    crossover = fit.alpha_s / fit.beta_s_per_byte if fit.beta_s_per_byte else 0.0
    return Lines(
        PlotAxis("bytes", "bytes", log=True, base=2, low=low, high=high),
        PlotAxis("seconds", "s", log=True),
        (
            Series("fitted: alpha + n beta", [p for p in line if p[1] > 0]),
            Series("measured", sorted(fit.points), dots=True, dashed=True),
        ),
        rules=(RuleLine("x", crossover, f"n* {size(crossover)}"),) if low <= crossover <= high else (),
        head=title(fit),
        height=200,
    )


def rates(cluster: ClusterSpec) -> list[Table]:
    """Tabulate the measured kernels and, if there are any, collectives of a cluster."""
    kernels = empty_table(f"kernels of {cluster.device.name}; peak and matrix products in TFLOP/s")
    for name in (
        "type",
        "at once",
        "peak",
        "forward",
        "backward",
        "bandwidth",
        "per kernel",
        "whole",
        "fit error",
    ):
        kernels.add_column(name, justify="right")
    for k in cluster.kernels:
        kernels.add_row(
            k.dtype,
            str(k.concurrent),
            _tera(k.peak_flops_per_s),
            _tera(1 / k.forward.per_gemm_flop) if k.forward.per_gemm_flop else "-",
            _tera(1 / k.backward.per_gemm_flop) if k.backward.per_gemm_flop else "-",
            f"{1e-9 / k.backward.per_byte:.1f} GB/s" if k.backward.per_byte else "-",
            seconds(k.forward.per_kernel),
            f"x {k.pass_slowdown:.2f}",
            f"{k.fit_error:.0%}" + (" (not to be trusted)" if k.fit_error > 0.2 else ""),
        )
    links = empty_table(
        "collectives: alpha + n beta for n bytes, n* = alpha / beta; a second: calls of the smallest size"
    )
    for name in ("operation", "ranks", "over", "alpha", "a second", "ns/B", "n*", "16 MiB", "error"):
        links.add_column(name, justify="left" if name in ("operation", "over") else "right", no_wrap=True)
    for fit in cluster.collectives:
        links.add_row(
            fit.op,
            f"{fit.group_size} on {fit.hosts} hosts" if fit.hosts > 1 else str(fit.group_size),
            fit.way,
            seconds(fit.alpha_s),
            f"{1 / fit.seconds(fit.points[0][0]):,.0f}" if fit.points else "-",
            f"{fit.beta_s_per_byte * 1e9:.3f}",
            size(fit.alpha_s / fit.beta_s_per_byte) if fit.beta_s_per_byte else "-",
            seconds(fit.seconds(2**24)),
            f"{fit.fit_error:.0%}" + ("!" if fit.fit_error > 0.2 else ""),
        )
    if any(fit.fit_error > 0.2 for fit in cluster.collectives):
        links.caption = "!: the line is not to be trusted; times between the measured sizes are"
        links.caption_justify = "left"
    return [kernels, links] if cluster.collectives else [kernels]


def _tera(flops_per_s: float) -> str:
    return f"{flops_per_s / 1e12:.3f}"
