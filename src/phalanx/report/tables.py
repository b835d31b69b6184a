"""Terminal tables: the alternatives of a plan, predicted against measured, where a step's time goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from phalanx.spec.cluster.spec import GIB, ClusterSpec
from phalanx.spec.job import Job

if TYPE_CHECKING:  # a table needs none of what prices a strategy
    from phalanx.plan.search.best_first import Candidate, Searched


def seconds(value: float) -> str:
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.1f} ms" if value >= 1e-3 else f"{value * 1e6:.0f} µs"


def size(value: float) -> str:
    """Memory, in powers of 1024."""
    for unit, scale in (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= scale:
            return f"{value / scale:.1f} {unit}"
    return f"{value:.0f} B"


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)


def alternatives(found: Sequence[Candidate], chosen: Candidate, job: Job, rows: int) -> Table:
    """The fastest candidates, the chosen one marked, and the first that splits anything else."""
    table = _table("strategies, predicted")
    for name in ("", "strategy", "accum.", "step", "tokens/s", "exposed", "memory"):
        table.add_column(name, justify="left" if name in ("", "strategy") else "right", no_wrap=True)
    piped = any(c.strategy.pp > 1 for c in found)
    if piped:
        table.add_column("bubble", justify="right", no_wrap=True)
    if any(c.reason for c in found):
        table.add_column("rejected")
    split = {id(c): tuple(getattr(c.strategy, axis) > 1 for axis in ("tp", "cp", "ep", "pp")) for c in found}
    first = {split[id(c)]: c for c in reversed(found)}
    shown = [c for i, c in enumerate(found) if i < rows or c is chosen or first[split[id(c)]] is c]
    for c in shown:
        p = c.prediction
        exposed = p.exposed_communication_s
        table.add_row(
            "→" if c is chosen else "",
            str(c.asked),
            str(c.strategy.accumulation(job)),
            seconds(p.step_time_s),
            f"{job.global_batch * job.seq / p.step_time_s:,.0f}",
            seconds(exposed) if exposed else "none",
            size(p.memory_bytes),
            *([f"{p.bubble_fraction:.0%}"] if piped else []),
            *([c.reason] if c.reason else []),
            style="bold" if c is chosen else ("dim" if c.reason else ""),
        )
    left = len(found) - len(shown)
    table.caption = "exposed: communication that nothing hides" + (f"; {left} more not shown" if left else "")
    table.caption_justify = "left"
    return table


def searched(found: Searched) -> str:
    """One line on what was chosen from."""
    *some, most = found.worlds
    over = " or ".join(filter(None, [", ".join(map(str, some)), str(most)])) + (" rank" if most == 1 else " ranks")
    others = (
        "no other promises to be faster" if found.settled else "the others are slower, or do not fit, by estimate"
    )
    return f"{found.legal:,} legal strategies over {over}: {len(found.candidates)} priced one by one, {others}"


@dataclass(frozen=True)
class Comparison:
    """One quantity, predicted and measured. `text`: how to write its values."""

    name: str
    predicted: float
    measured: float | None
    text: str

    @property
    def error(self) -> float | None:
        """Relative, of the prediction; None where nothing was measured."""
        if self.measured is None:
            return None
        if self.measured == 0:
            return 0.0 if self.predicted == 0 else float("inf")
        return self.predicted / self.measured - 1

    def write(self, value: float | None) -> str:
        if value is None:
            return "not measured"
        return {"s": seconds(value), "memory": size(value), "bytes": f"{value:,.0f} B"}[self.text]


def comparison(rows: Sequence[Comparison]) -> Table:
    table = _table("predicted against measured")
    for name in ("", "predicted", "measured", "error"):
        table.add_column(name, justify="left" if not name else "right")
    for row in rows:
        error = row.error
        exact = row.text == "bytes" and error == 0
        shown = "" if error is None else ("exact" if exact else f"{error:+.1%}")
        table.add_row(row.name, row.write(row.predicted), row.write(row.measured), shown)
    return table


def step_times(step_time_s: float, timeline: dict[str, Any], trace: str) -> str:
    """One line on where a step's time goes. `trace`: the file that shows it, if there is one."""
    exposed, hidden = timeline["exposed_communication_s"], timeline["hidden_communication_s"]
    line = f"a step of {seconds(step_time_s)}: "
    if exposed + hidden:
        line += f"compute {seconds(timeline['compute_s'])}, exposed communication {seconds(exposed)}, "
        line += f"hidden communication {seconds(hidden)} (overlap {timeline['overlap']:.0%})"
    else:
        line += "compute, no communication"
    return line + (f"; timeline in {trace}" if trace else "")


def rates(cluster: ClusterSpec) -> list[Table]:
    """What was measured of a cluster."""
    kernels = _table(f"kernels of {cluster.device.name}; peak and matrix products in TFLOP/s")
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
            f"x {k.whole:.2f}",
            f"{k.residual:.0%}" + (" (not to be trusted)" if k.residual > 0.2 else ""),
        )
    links = _table("collectives: time of n bytes as alpha + n beta, crossover n* = alpha / beta")
    for name in ("operation", "ranks", "over", "alpha", "ns/B", "n*", "16 MiB", "error"):
        links.add_column(name, justify="left" if name in ("operation", "over") else "right", no_wrap=True)
    for fit in cluster.collectives:
        links.add_row(
            fit.op,
            f"{fit.group_size} on {fit.hosts} hosts" if fit.hosts > 1 else str(fit.group_size),
            fit.way,
            seconds(fit.alpha_s),
            f"{fit.beta_s_per_byte * 1e9:.3f}",
            size(fit.alpha_s / fit.beta_s_per_byte) if fit.beta_s_per_byte else "-",
            seconds(fit.seconds(2**24)),
            f"{fit.residual:.0%}" + ("!" if fit.residual > 0.2 else ""),
        )
    if any(fit.residual > 0.2 for fit in cluster.collectives):
        links.caption = "!: the line is not to be trusted; times between the measured sizes are"
        links.caption_justify = "left"
    return [kernels, links] if cluster.collectives else [kernels]


def _tera(flops_per_s: float) -> str:
    return f"{flops_per_s / 1e12:.3f}"
