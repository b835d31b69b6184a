"""An observation as tables: collectives, FLOPs by unit, memory at the peak, waits of the host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from phalanx.planning.explain.observed_lint import ProgramFinding, lint
from phalanx.planning.tables.table import Column, Sheet, columns
from phalanx.report.style import seconds, size
from phalanx.schedule.observation import Allocation, Observation, RankObservation, unit

_PASSES = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient (I)",
    "W": "weight gradient (W)",
    "opt": "optimizer",
}
_ROWS = 40
"""Rows of a table at most; the JSON has all."""
_ALLOCATIONS, _SHARE = 12, 0.01
"""Allocations that are shown at most, and the smallest, as a share of the peak."""


def tables(o: Observation) -> Iterator[Sheet | str]:
    """Yield the lines and tables that show an observation, one class of ranks after the other."""
    axes = ", ".join(f"{name} {n}" for name, n in o.axes.items())
    yield f"{o.program}: {o.world} ranks{f' ({axes})' if axes else ''}, torch {o.torch}, device {o.device}"
    for r in o.ranks:
        yield from _rank(r)
    for n, f in enumerate(lint(o)):
        yield f"{'' if n else chr(10)}lint: {f.where or '(unknown line)'}: {f.name}: {f.problem}"


def finding(f: ProgramFinding) -> str:
    """Write a finding on one line: place, name, problem, what it costs in time, mend."""
    lost = f" ({seconds(f.seconds)} of communication)" if f.seconds is not None else ""
    return f"{f.where or '(unknown line)'}: {f.name}: {f.problem}{lost}; {f.remedy}"


def _rank(r: RankObservation) -> Iterator[Sheet | str]:
    batches = "1 micro-batch" if r.micro_batches == 1 else f"{r.micro_batches} micro-batches"
    optimizer = ", ".join(r.optimizers) or "no optimizer"
    yield f"\nrank {r.rank} ({r.are or 'one rank'}), step {r.step}: {batches}, {optimizer}"
    if r.communication:
        yield _collectives(r)
    if r.flops:
        yield _flops(r)
    yield _memory(r)
    if r.synchronisations:
        yield _waits(r)


def _collectives(r: RankObservation) -> Sheet:
    """Tabulate collectives by model, operation, group, bytes and phase; alike ones of different units in one row."""
    counts: Counter[tuple[Any, ...]] = Counter()
    units: dict[tuple[Any, ...], dict[str, None]] = {}
    for o in r.communication:
        e = o.event
        key = (r.model_of(o.module), e.op, f"{e.axis} ({e.group_size})", e.bytes, e.dtype, e.phase, str(o.site))
        counts[key] += 1
        units.setdefault(key, {})[unit(o.module)] = None
    rows = []
    for key, count in list(counts.items())[:_ROWS]:
        _, op, over, bytes_each, *where = key
        rows.append((op, over, count, bytes_each, *where, _units(list(units[key]))))
    names = columns(
        "collective", "over", ("count", "count"), ("bytes each", "count"), "type", "phase", "where", "units"
    )
    return Sheet("collectives of a step", names, rows, _cut(len(counts)))


def _units(names: list[str]) -> str:
    if len(names) <= 2:
        return ", ".join(n or "(root)" for n in names)
    return f"{names[0] or '(root)'} ... {names[-1] or '(root)'} ({len(names)})"


def _flops(r: RankObservation) -> Sheet:
    totals: Counter[str] = Counter()
    by_phase: Counter[tuple[str, str]] = Counter()
    for (phase, module), n in r.flops.items():
        totals[unit(module)] += n
        by_phase[phase, unit(module)] += n
    phases = [p for p in _PASSES if p in ("F", "B") or any(q == p for q, _ in by_phase)]
    rows = [(name or "(root)", *(by_phase[p, name] for p in phases)) for name in list(totals)[:_ROWS]]
    rows.append(("all", *(sum(n for (q, _), n in by_phase.items() if q == p) for p in phases)))
    names = (*columns("unit"), *(Column(_PASSES[p], "number") for p in phases))
    return Sheet("FLOPs of a step", names, rows, _cut(len(totals)))


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
        rows.append(MemoryRow(a.kind, _made_by(a), _units([u for u in a.units if u]), a.peak_bytes, a.backward_bytes))
        peak[a.kind] -= a.peak_bytes
        backward[a.kind] -= a.backward_bytes
    in_part = {row.kind for row in rows}
    for kind in dict.fromkeys((*peak, *backward)):
        if peak[kind] or backward[kind]:
            name, of = (f"rest of {kind}", "") if kind in in_part else (kind, _units([u for u in units[kind] if u]))
            rows.append(MemoryRow(name, "", of, peak[kind], backward[kind]))
    return sorted(rows, key=lambda row: -max(row.peak_bytes, row.backward_bytes))


def _made_by(a: Allocation) -> str:
    """Write what allocated memory: the operation, its line, and what it is kept for."""
    line = " at ".join(part for part in (a.operation, str(a.site)) if part)
    return f"{line}; kept for the backward of {', '.join(a.saved_for)}" if a.saved_for else line


def _memory(r: RankObservation) -> Sheet:
    kept = r.fullest_backward_start
    rows: list[tuple[Any, ...]] = [
        (row.kind, row.made_by, row.units, row.peak_bytes, row.peak_bytes, *((row.backward_bytes,) if kept else ()))
        for row in memory_rows(r)
    ]
    if r.host_peak:
        rows.append(("(in the host's memory)", "", "", r.host_peak, r.host_peak, *((None,) if kept else ())))
    names = columns("held by", "made by", "of units", ("bytes", "count"), ("", "bytes"))
    if kept:
        names += columns((f"as backward of micro-batch {kept.micro_batches[0]} begins", "count"))
    return Sheet(f"live bytes: peak {size(r.peak)} ({r.peak:,} B) {peak_place(r)}", names, rows)


def peak_place(r: RankObservation) -> str:
    """Write the pass and unit in which a rank held the most bytes."""
    of = unit(r.peak_module) or ("" if r.models else "the root")
    return f"in the {_PASSES[r.peak_phase]} pass" + f" of {of}" * bool(of)


def _waits(r: RankObservation) -> Sheet:
    rows = [(s.call, s.count, s.phase, f"{s.site} {s.module}".strip()) for s in r.synchronisations[:_ROWS]]
    names = columns("call", ("count", "count"), "phase", "where")
    return Sheet("the host waits for the device", names, rows, _cut(len(r.synchronisations)))


def _cut(rows: int) -> str:
    return f"{rows - _ROWS:,} more rows in --json" if rows > _ROWS else ""
