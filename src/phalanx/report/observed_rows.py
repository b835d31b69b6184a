"""What the tables and the page of an observation share: findings, holders of memory, names of passes and units."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.planning.explain.observed_lint import ProgramFinding
from phalanx.report.style import seconds
from phalanx.schedule.observation import Allocation, RankObservation, unit

PASSES = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient (I)",
    "W": "weight gradient (W)",
    "opt": "optimizer",
}
_ALLOCATIONS, _SHARE = 12, 0.01
"""Allocations that are shown at most, and the smallest, as a share of the peak."""


def finding(f: ProgramFinding) -> str:
    """Write a finding on one line: place, name, problem, what it costs in time, remedy."""
    lost = f" ({seconds(f.seconds)} of communication)" if f.seconds is not None else ""
    return f"{f.where or '(unknown line)'}: {f.name}: {f.problem}{lost}; {f.remedy}"


def listed(names: Sequence[str]) -> str:
    """Name units: all of two, the first and the last of more."""
    if len(names) <= 2:
        return ", ".join(n or "(root)" for n in names)
    return f"{names[0] or '(root)'} ... {names[-1] or '(root)'} ({len(names)})"


@dataclass(frozen=True)
class MemoryRow:
    """What holds device memory: a kind of tensor, the line and operation that allocated it, its units, and its bytes
    at the peak and as the fullest backward pass begins."""

    kind: str
    made_by: str
    units: str
    peak_bytes: int
    backward_bytes: int


def memory_rows(r: RankObservation) -> list[MemoryRow]:
    """Return the holders of memory of a rank, largest first: the largest allocations, and the rest of each kind."""
    start = r.fullest_backward_start
    peak, backward, units = Counter[str](), Counter[str](), dict[str, dict[str, None]]()
    for holders, totals in ((r.holders, peak), (start.holders if start else (), backward)):
        for h in holders:
            totals[h.kind] += h.bytes
            units.setdefault(h.kind, {}).setdefault(h.module)
    rows = []
    large = [a for a in r.allocations if max(a.peak_bytes, a.backward_bytes) >= _SHARE * r.peak]
    for a in large[:_ALLOCATIONS]:
        rows.append(MemoryRow(a.kind, _made_by(a), listed([u for u in a.units if u]), a.peak_bytes, a.backward_bytes))
        peak[a.kind] -= a.peak_bytes
        backward[a.kind] -= a.backward_bytes
    in_part = {row.kind for row in rows}
    for kind in dict.fromkeys((*peak, *backward)):
        if peak[kind] or backward[kind]:
            name, of = (f"rest of {kind}", "") if kind in in_part else (kind, listed([u for u in units[kind] if u]))
            rows.append(MemoryRow(name, "", of, peak[kind], backward[kind]))
    return sorted(rows, key=lambda row: -max(row.peak_bytes, row.backward_bytes))


def _made_by(a: Allocation) -> str:
    """Write what allocated memory: the operation, its line, and what it is kept for."""
    line = " at ".join(part for part in (a.operation, str(a.site)) if part)
    return f"{line}; kept for the backward of {', '.join(a.saved_for)}" if a.saved_for else line


def peak_place(r: RankObservation) -> str:
    """Write the pass and unit in which a rank held the most bytes."""
    of = unit(r.peak_module) or ("" if r.models else "the root")
    return f"in the {PASSES[r.peak_phase]} pass" + f" of {of}" * bool(of)
