"""Measurements of a cluster: tables, and plots of points, fitted line and crossover n* in a terminal or as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.table import Table

from phalanx.report.pictures.figure import Lines, Picture, PlotAxis, RuleLine, Series
from phalanx.report.style import empty_table, seconds, size
from phalanx.spec.cluster.spec import ClusterSpec, CollectiveFit
from phalanx.spec.errors import InputError

_WIDTH, _HEIGHT = 64, 14


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
    """Plot time over size in characters, both axes logarithmic: o points, - the fitted line, | at n*."""
    scale = _Scale(fit)
    grid = [[" "] * _WIDTH for _ in range(_HEIGHT)]
    crossover = scale.crossover
    if crossover is not None:
        column = scale.column(crossover)
        for row in grid:
            row[column] = "|"
    for column in range(_WIDTH):
        n = 2 ** (scale.low_n + (scale.high_n - scale.low_n) * column / (_WIDTH - 1))
        row_ = scale.row(fit.alpha_s + fit.beta_s_per_byte * n)
        if 0 <= row_ < _HEIGHT:
            grid[row_][column] = "-"
    for n, t in fit.points:
        grid[min(max(scale.row(t), 0), _HEIGHT - 1)][scale.column(n)] = "o"
    top, bottom = seconds(2**scale.high_t), seconds(2**scale.low_t)
    marks = [top, *[""] * (_HEIGHT - 2), bottom]
    lines = [f"{mark:>9} {''.join(row)}".rstrip() for mark, row in zip(marks, grid, strict=True)]
    left, right = size(2**scale.low_n), size(2**scale.high_n)
    under = f"{left}{right:>{_WIDTH - len(left)}}"
    if crossover is not None:
        mark = f"n* {size(crossover)}"
        column = min(scale.column(crossover), _WIDTH - len(mark))
        if len(left) < column < _WIDTH - len(right) - len(mark):
            under = f"{left:<{column}}{mark}{right:>{_WIDTH - column - len(mark)}}"
    return [*lines, f"{'':>9} {under}"]


class _Scale:
    """The logarithmic axes of a plot: their ends, and the position of a size or time between them."""

    def __init__(self, fit: CollectiveFit) -> None:
        sizes, times = zip(*fit.points, strict=True)
        self.low_n, self.high_n = math.log2(min(sizes)), math.log2(max(sizes))
        low, high = math.log2(min(times)), math.log2(max(times))
        self.low_t, self.high_t = low, max(high, low + 1)
        n = fit.alpha_s / fit.beta_s_per_byte if fit.beta_s_per_byte else 0.0
        self.crossover = n if n > 0 and self.low_n <= math.log2(n) <= self.high_n else None

    def x(self, n: float) -> float:
        """Position of a size, 0 to 1."""
        return (math.log2(n) - self.low_n) / max(self.high_n - self.low_n, 1e-9)

    def y(self, t: float) -> float:
        """Position of a time, 0 to 1."""
        return (math.log2(t) - self.low_t) / (self.high_t - self.low_t) if t > 0 else -1.0

    def column(self, n: float) -> int:
        """Character column of a size."""
        return round(self.x(n) * (_WIDTH - 1))

    def row(self, t: float) -> int:
        """Character row of a time."""
        return _HEIGHT - 1 - round(self.y(t) * (_HEIGHT - 1))


def picture(fits: Sequence[CollectiveFit]) -> Picture:
    """Draw a panel for every fit that has points: points, line and n*. Raises InputError if none has any."""
    panels = []
    for fit in fits:
        if len(fit.points) < 2:
            continue
        low, high = min(n for n, _ in fit.points), max(n for n, _ in fit.points)
        sizes = [low * (high / low) ** (k / 40) for k in range(41)]
        line = [(n, fit.alpha_s + fit.beta_s_per_byte * n) for n in sizes]
        crossover = _Scale(fit).crossover
        panels.append(
            Lines(
                PlotAxis("bytes", "bytes", log=True, base=2, low=low, high=high),
                PlotAxis("seconds", "s", log=True),
                (
                    Series("fitted: alpha + n beta", [p for p in line if p[1] > 0]),
                    Series("measured", sorted(fit.points), dots=True, dashed=True),
                ),
                rules=() if crossover is None else (RuleLine("x", crossover, f"n* {size(crossover)}"),),
                head=title(fit),
                height=200,
            )
        )
    if not panels:
        raise InputError("--plot", None, "has nothing to draw: no collective was measured at two sizes")
    return Picture("Collectives as measured, and the lines fitted to them", tuple(panels), "`phalanx measure`")


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
