"""An observation as tables: collectives, FLOPs by unit, memory at the peak, waits of the host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from rich.table import Table

from phalanx.planning.explain.observed_lint import ProgramFinding, lint
from phalanx.report.style import seconds, size, table
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


def tables(o: Observation) -> Iterator[Table | str]:
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


def _rank(r: RankObservation) -> Iterator[Table | str]:
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


def _collectives(r: RankObservation) -> Table:
    """Tabulate collectives by operation, group, bytes and phase; alike ones of different units in one row."""
    counts: Counter[tuple[str, ...]] = Counter()
    units: dict[tuple[str, ...], dict[str, None]] = {}
    for o in r.communication:
        e = o.event
        key: tuple[str, ...] = (e.op, f"{e.axis} ({e.group_size})", f"{e.bytes:,}", e.dtype, e.phase, str(o.site))
        counts[key] += 1
        units.setdefault(key, {})[unit(o.module)] = None
    left = ("collective", "over", "type", "phase", "where", "units")
    grid = table("collectives of a step", "collective", "over", "count", "bytes each", *left[2:], left=left)
    for key, count in list(counts.items())[:_ROWS]:
        op, over, size_, dtype, phase, where = key
        grid.add_row(op, over, f"{count:,}", size_, dtype, phase, where, _units(list(units[key])))
    return _cut(grid, len(counts))


def _units(names: list[str]) -> str:
    if len(names) <= 2:
        return ", ".join(n or "(root)" for n in names)
    return f"{names[0] or '(root)'} ... {names[-1] or '(root)'} ({len(names)})"


def _flops(r: RankObservation) -> Table:
    totals: Counter[str] = Counter()
    by_phase: Counter[tuple[str, str]] = Counter()
    for (phase, module), n in r.flops.items():
        totals[unit(module)] += n
        by_phase[phase, unit(module)] += n
    phases = [p for p in _PASSES if p in ("F", "B") or any(q == p for q, _ in by_phase)]
    grid = table("FLOPs of a step", "unit", *(_PASSES[p] for p in phases), left=("unit",))
    for name in list(totals)[:_ROWS]:
        grid.add_row(name or "(root)", *(f"{by_phase[p, name]:.4g}" for p in phases))
    grid.add_row("all", *(f"{sum(n for (q, _), n in by_phase.items() if q == p):.4g}" for p in phases))
    return _cut(grid, len(totals))


def _memory(r: RankObservation) -> Table:
    where = _PASSES[r.peak_phase]
    kept = r.fullest_backward_start
    before = () if kept is None else (f"as backward of micro-batch {kept.micro_batches[0]} begins",)
    grid = table(
        f"live bytes: peak {size(r.peak)} ({r.peak:,} B) in the {where} pass of {unit(r.peak_module) or 'the root'}",
        "held by",
        "of units",
        "bytes",
        "",
        *before,
        left=("held by", "of units"),
    )
    totals: Counter[str] = Counter()
    totals_before: Counter[str] = Counter()
    units: dict[str, dict[str, None]] = {}
    for holders, sums in ((r.holders, totals), (kept.holders if kept else (), totals_before)):
        for h in holders:
            sums[h.kind] += h.bytes
            if h.module:
                units.setdefault(h.kind, {})[h.module] = None
    for kind, _ in (totals | totals_before).most_common():
        n = totals[kind]
        cells = (f"{totals_before[kind]:,}",) if kept else ()
        grid.add_row(kind, _units(list(units.get(kind, {}))), f"{n:,}", size(n), *cells)
    if r.host_peak:
        grid.add_row("(in the host's memory)", "", f"{r.host_peak:,}", size(r.host_peak))
    return grid


def _waits(r: RankObservation) -> Table:
    grid = table("the host waits for the device", "call", "count", "phase", "where", left=("call", "phase", "where"))
    for s in r.synchronisations[:_ROWS]:
        grid.add_row(s.call, f"{s.count:,}", s.phase, f"{s.site} {s.module}".strip())
    return _cut(grid, len(r.synchronisations))


def _cut(grid: Table, rows: int) -> Table:
    if rows > _ROWS:
        grid.caption = f"{rows - _ROWS:,} more rows in --json"
    return grid
