"""An observation as tables: collectives, FLOPs by unit, memory at the peak, waits of the host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from phalanx.planning.explain.observed_lint import lint
from phalanx.planning.tables.table import Column, Sheet, columns
from phalanx.report.observed_rows import PASSES, listed, memory_rows, peak_place
from phalanx.report.style import size
from phalanx.report.view import View
from phalanx.schedule.observation import Observation, RankObservation, unit

_ROWS = 40
"""Rows of a table at most; the JSON has all."""


def view(o: Observation) -> View:
    """Show the lines and tables of an observation; its page has the same, and charts."""

    def page() -> str:
        from phalanx.report.html.proof import observation

        return observation(o)

    return View(list(tables(o)), html=page)


def tables(o: Observation) -> Iterator[Sheet | str]:
    """Yield the lines and tables that show an observation, one class of ranks after the other."""
    axes = ", ".join(f"{name} {n}" for name, n in o.axes.items())
    yield f"{o.program}: {o.world} ranks{f' ({axes})' if axes else ''}, torch {o.torch}, device {o.device}"
    for r in o.ranks:
        yield from _rank(r)
    for n, f in enumerate(lint(o)):
        yield f"{'' if n else chr(10)}lint: {f.where or '(unknown line)'}: {f.name}: {f.problem}"


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
        rows.append((op, over, count, bytes_each, *where, listed(list(units[key]))))
    names = columns("collective | over | count [count] | bytes each [count] | type | phase | where | units")
    return Sheet("collectives of a step", names, rows, _cut(len(counts)))


def _flops(r: RankObservation) -> Sheet:
    totals: Counter[str] = Counter()
    by_phase: Counter[tuple[str, str]] = Counter()
    for (phase, module), n in r.flops.items():
        totals[unit(module)] += n
        by_phase[phase, unit(module)] += n
    phases = [p for p in PASSES if p in ("F", "B") or any(q == p for q, _ in by_phase)]
    rows = [(name or "(root)", *(by_phase[p, name] for p in phases)) for name in list(totals)[:_ROWS]]
    rows.append(("all", *(sum(n for (q, _), n in by_phase.items() if q == p) for p in phases)))
    names = (*columns("unit"), *(Column(PASSES[p], "number") for p in phases))
    return Sheet("FLOPs of a step", names, rows, _cut(len(totals)))


def _memory(r: RankObservation) -> Sheet:
    kept = r.fullest_backward_start
    rows: list[tuple[Any, ...]] = [
        (row.kind, row.made_by, row.units, row.peak_bytes, row.peak_bytes, *((row.backward_bytes,) if kept else ()))
        for row in memory_rows(r)
    ]
    if r.host_peak:
        rows.append(("(in the host's memory)", "", "", r.host_peak, r.host_peak, *((None,) if kept else ())))
    names = columns("held by | made by | of units | bytes [count] | [bytes]")
    if kept:
        names += columns(f"as backward of micro-batch {kept.micro_batches[0]} begins [count]")
    return Sheet(f"live bytes: peak {size(r.peak)} ({r.peak:,} B) {peak_place(r)}", names, rows)


def _waits(r: RankObservation) -> Sheet:
    rows = [(s.call, s.count, s.phase, f"{s.site} {s.module}".strip()) for s in r.synchronisations[:_ROWS]]
    names = columns("call | count [count] | phase | where")
    return Sheet("the host waits for the device", names, rows, _cut(len(r.synchronisations)))


def _cut(rows: int) -> str:
    return f"{rows - _ROWS:,} more rows in --json" if rows > _ROWS else ""
