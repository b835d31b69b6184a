"""Views of a measured cluster, of fitted lines, of a machine's state, and of a calibration."""

from collections.abc import Sequence

from phalanx.answers.machine.calibration import Calibrated
from phalanx.answers.machine.inventory import MachineState
from phalanx.answers.machine.measure import Measurement
from phalanx.planning.tables.table import Sheet, columns
from phalanx.report.pictures.figure import Lines, Picture, PlotAxis, RuleLine, Series
from phalanx.report.pictures.files import panel_text
from phalanx.report.style import seconds, size
from phalanx.report.view import View
from phalanx.spec.cluster.spec import ClusterSpec, CollectiveFit
from phalanx.spec.errors import InputError


def view(m: Measurement) -> View:
    """Show kernels, collectives, links and figures of a cluster, and the all-reduce of its largest group."""
    c = m.cluster
    parts: list[str | Sheet] = [*rates(c), links(c)]
    if c.figures:
        parts.append(figures(c))
    fits = [fit for fit in c.collectives if fit.op == "all_reduce" and len(fit.points) > 1]
    if fits:
        parts += plot(max(fits, key=lambda fit: (fit.group_size, fit.hosts, -float(fit.seconds(2**24)))))
    return View(parts, "measure", lambda: [picture(c.collectives)])


def links(cluster: ClusterSpec) -> Sheet:
    """Tabulate latency and bandwidth of each tier of links."""
    rows = []
    for tier in cluster.tiers:
        rate = tier.bandwidth_bytes_per_s_per_gpu_per_direction
        uplink = tier.uplink_bandwidth_bytes_per_s_per_direction
        rows.append((tier.name, tier.ranks, tier.latency_s, rate, uplink, tier.latency_s * rate))
    names = columns("tier | ranks [count] | alpha [s] | of a rank [rate] | of a host [rate] | n* [bytes]")
    note = "of a host: where its ranks share links"
    return Sheet("links, by messages between pairs of ranks", names, rows, note, charted=False)


def figures(cluster: ClusterSpec) -> Sheet:
    """Tabulate matrix products, attention, memory, launches and γ: the best round and the middle 90 %."""
    rows = []
    for f in cluster.figures:
        low, high = (_written(x, f.unit) for x in (f.low, f.high))
        rows.append((f.name, _written(f.value, f.unit), f"{low} to {high}" + (f"; {f.note}" if f.note else "")))
    names = columns(" | best | 5 % to 95 % of the rounds")
    return Sheet("a rank, while all others do the same", names, rows, charted=False)


def _written(value: float, unit: str) -> str:
    if unit == "FLOP/s":
        return f"{value / 1e9:,.1f} GFLOP/s" if value < 1e12 else f"{value / 1e12:.1f} TFLOP/s"
    if unit == "B/s":
        return f"{value / 1e9:.1f} GB/s"
    return f"{value * 1e9:.4f} ns/B" if unit == "s/B" else seconds(value)


def title(fit: CollectiveFit) -> str:
    """Return a fit in one line: collective, group, α and β, crossover, error, and whether to trust it."""
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
        raise InputError("save", None, "has nothing to draw: no collective was measured at two sizes")
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


def rates(cluster: ClusterSpec) -> list[Sheet]:
    """Tabulate the measured kernels and, if there are any, collectives of a cluster."""
    kernels = []
    for k in cluster.kernels:
        speeds = (1e-12 / one.per_gemm_flop if one.per_gemm_flop else None for one in (k.forward, k.backward))
        bandwidth = 1 / k.backward.per_byte if k.backward.per_byte else None
        others = (bandwidth, k.forward.per_kernel, k.pass_slowdown, k.fit_error)
        kernels.append((k.dtype, k.concurrent, k.peak_flops_per_s / 1e12, *speeds, *others))
    names = columns(
        "type | at once [count] | peak [number] | forward [number] | backward [number] | bandwidth [rate] "
        "| per kernel [s] | whole [number] | fit error [share]"
    )
    title = f"kernels of {cluster.device.name}; peak and matrix products in TFLOP/s"
    note = "a fit error above 20 % is not to be trusted; whole: a pass over the sum of its kernels"
    tables = [Sheet(title, names, kernels, note, charted=False)]
    if cluster.collectives:
        tables.append(_collectives(cluster.collectives))
    return tables


def _collectives(fits: Sequence[CollectiveFit]) -> Sheet:
    rows = []
    for fit in fits:
        ranks = f"{fit.group_size} on {fit.hosts} hosts" if fit.hosts > 1 else str(fit.group_size)
        calls_per_s = 1 / float(fit.seconds(fit.points[0][0])) if fit.points else None
        crossover = fit.alpha_s / fit.beta_s_per_byte if fit.beta_s_per_byte else None
        line = (fit.alpha_s, calls_per_s, fit.beta_s_per_byte * 1e9, crossover)
        rows.append((fit.op, ranks, fit.way, *line, float(fit.seconds(2**24)), fit.fit_error))
    names = columns(
        "operation | ranks | over | alpha [s] | a second [count] | ns/B [number] | n* [bytes] "
        "| 16 MiB [s] | error [share]"
    )
    title = "collectives: alpha + n beta for n bytes, n* = alpha / beta; a second: calls of the smallest size"
    untrusted = any(fit.fit_error > 0.2 for fit in fits)
    note = "of an error above 20 % the line is not to be trusted; times between the measured sizes are"
    return Sheet(title, names, rows, note if untrusted else "", charted=False, keys=3)


def machine_state(a: MachineState) -> View:
    """Show every check of this machine, then how to get what is missing."""
    rows = [("ok" if c.good else "MISSING", c.what, c.state) for c in a.checks]
    missing = [c for c in a.checks if c.remedy and (not c.good or "optional" in c.state)]
    return View(
        [Sheet("this machine", columns(" | what | state"), rows), *(f"{c.what}: {c.remedy}" for c in missing)]
    )


_PARTS = {
    "products": "matrix products",
    "attention": "attention's core",
    "memory": "work bound by memory",
    "inside": "communication inside a node",
    "between": "communication between nodes",
    "host": "launches by the CPU",
}


def calibration(a: Calibrated) -> View:
    """Show the factors, and the error of each step's prediction without and with them."""
    factors = [
        (words, a.factors[part], 100 * a.spreads[part], "hardly constrained" if part in a.unconstrained else "")
        for part, words in _PARTS.items()
    ]
    steps = [
        (s.name, s.gpus, s.measured_s, s.predicted_s, s.error, s.calibrated_error, s.left_out_error) for s in a.steps
    ]
    notes = [f"{s.name}: {s.note}" for s in a.steps if s.note]
    return View(
        [
            f"{a.stack} on {a.cluster}: {len(a.steps)} measured step{'s' * (len(a.steps) > 1)}",
            Sheet(
                "",
                columns("part | measured / predicted [number] | ± % [number] | "),
                factors,
                "a factor moves only as far as the steps constrain it; without them it is 1",
                charted=False,
            ),
            Sheet(
                "",
                columns(
                    "step | GPUs [count] | measured s [number] | predicted s [number] | off % [number] "
                    "| calibrated % [number] | by the others % [number]"
                ),
                steps,
                "by the others: calibrated without this step, which says how far an unmeasured one may be off",
                charted=False,
            ),
            *notes,
            *([f"wrote {a.file}: every command that prices takes it with --calibration"] if a.file else []),
        ],
        "calibration",
    )
