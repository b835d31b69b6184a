"""An observed program's price on a cluster, and its differences from a plan, as tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table

from phalanx.planning.explain.observed import PricedRank
from phalanx.planning.explain.observed_against_plan import PlanComparison
from phalanx.report.style import seconds, size, table


def figures(ranks: Sequence[PricedRank]) -> Table:
    """Tabulate what a step takes on every observed rank."""
    grid = table("a step, priced", "rank", "compute", "communication", "all hidden", "none hidden", "peak", "fits")
    for p in ranks:
        low, high = max(p.compute_s, p.communication_s), p.compute_s + p.communication_s
        fits = "yes" if p.fits else f"no: {size(p.usable)}"
        times = (seconds(x) for x in (p.compute_s, p.communication_s, low, high))
        grid.add_row(str(p.rank.rank), *times, size(p.rank.peak), fits)
    return grid


def flows(ranks: Sequence[PricedRank]) -> Iterator[Table]:
    """Tabulate each kind of collective of every observed rank, the longest first."""
    for p in ranks:
        names = ("over", "ranks", "type", "links", "times", "bytes", "alone")
        grid = table(f"rank {p.rank.rank}", "collective", *names, left=("collective", "over", "type", "links"))
        for f in sorted(p.flows, key=lambda f: -f.seconds):
            grid.add_row(
                f.op, f.axis, str(f.ranks), f.dtype, f.links, f"{f.count:,}", f"{f.bytes:,}", seconds(f.seconds)
            )
        yield grid


def differences(differing: Sequence[PlanComparison]) -> Table:
    """Tabulate plan against program, one observed rank after the other."""
    head = ("rank", "what", "plan", "program", "plan, total", "program, total", "")
    grid = table("plan against program", *head, left=("what",))
    for d in differing:
        counts = (f"{d.plan_count:,}", f"{d.program_count:,}") if d.plan_count or d.program_count else ("", "")
        grid.add_row(
            str(d.rank),
            d.what,
            *counts,
            f"{d.plan_total:,}",
            f"{d.program_total:,}",
            "differs" if d.differs else "same",
        )
    return grid
