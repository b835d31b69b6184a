"""An observation as tables: collectives, FLOPs by unit, memory at the peak, waits of the host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from phalanx.planning.explain.observed_lint import ProgramFinding, lint
from phalanx.planning.tables.table import Column, Sheet, columns
from phalanx.report.style import seconds, size
from phalanx.schedule.observation import Observation, RankObservation, unit

_PASSES = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient (I)",
    "W": "weight gradient (W)",
    "opt": "optimizer",
}
_ROWS = 40
"""Rows of a table at most; the JSON has all."""


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
    """Tabulate collectives by operation, group, bytes and phase; alike ones of different units in one row."""
    counts: Counter[tuple[Any, ...]] = Counter()
    units: dict[tuple[Any, ...], dict[str, None]] = {}
    for o in r.communication:
        e = o.event
        key = (e.op, f"{e.axis} ({e.group_size})", e.bytes, e.dtype, e.phase, str(o.site))
        counts[key] += 1
        units.setdefault(key, {})[unit(o.module)] = None
    rows = []
    for key, count in list(counts.items())[:_ROWS]:
        op, over, bytes_each, *where = key
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


def _memory(r: RankObservation) -> Sheet:
    where = _PASSES[r.peak_phase]
    kept = r.fullest_backward_start
    totals: Counter[str] = Counter()
    totals_before: Counter[str] = Counter()
    units: dict[str, dict[str, None]] = {}
    for holders, sums in ((r.holders, totals), (kept.holders if kept else (), totals_before)):
        for h in holders:
            sums[h.kind] += h.bytes
            if h.module:
                units.setdefault(h.kind, {})[h.module] = None
    rows: list[tuple[Any, ...]] = []
    for kind, _ in (totals | totals_before).most_common():
        before = (totals_before[kind],) if kept else ()
        rows.append((kind, _units(list(units.get(kind, {}))), totals[kind], totals[kind], *before))
    if r.host_peak:
        rows.append(("(in the host's memory)", "", r.host_peak, r.host_peak, *((None,) if kept else ())))
    names = columns("held by", "of units", ("bytes", "count"), ("", "bytes"))
    if kept:
        names += columns((f"as backward of micro-batch {kept.micro_batches[0]} begins", "count"))
    place = f"in the {where} pass of {unit(r.peak_module) or 'the root'}"
    return Sheet(f"live bytes: peak {size(r.peak)} ({r.peak:,} B) {place}", names, rows)


def _waits(r: RankObservation) -> Sheet:
    rows = [(s.call, s.count, s.phase, f"{s.site} {s.module}".strip()) for s in r.synchronisations[:_ROWS]]
    names = columns("call", ("count", "count"), "phase", "where")
    return Sheet("the host waits for the device", names, rows, _cut(len(r.synchronisations)))


def _cut(rows: int) -> str:
    return f"{rows - _ROWS:,} more rows in --json" if rows > _ROWS else ""
