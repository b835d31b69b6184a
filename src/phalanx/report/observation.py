"""Views of an observed program: collectives, FLOPs, memory, price, findings, differences from a plan."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.answers.observed import (
    ObservedFindings,
    ObservedImprovement,
    ObservedPrice,
    ObservedStep,
    PlanDifferences,
)
from phalanx.planning.explain.observed_lint import ProgramFinding, lint
from phalanx.planning.tables.table import Column, Sheet, columns
from phalanx.report.html.page import Section, page, section
from phalanx.report.pictures.figure import Bar, Bars
from phalanx.report.style import BYTES, FLOP, count_words, largest_unit, seconds, size
from phalanx.report.view import View
from phalanx.schedule.observation import Allocation, Observation, RankObservation, unit_of

PASSES = {"F": "forward", "B": "backward", "I": "input gradient (I)", "W": "weight gradient (W)", "opt": "optimizer"}
_ALLOCATIONS, _SHARE = 12, 0.01
"""The most allocations shown, and the smallest as a share of the peak."""


def finding(f: ProgramFinding) -> str:
    """Write a finding on one line: place, name, problem, lost time, remedy."""
    lost = f" ({seconds(f.seconds)} of communication)" if f.seconds is not None else ""
    return f"{f.where or '(unknown line)'}: {f.name}: {f.problem}{lost}; {f.remedy}"


def name_list(names: Sequence[str]) -> str:
    """Write the names of units: of more than two, the first and the last."""
    if len(names) <= 2:
        return ", ".join(n or "(root)" for n in names)
    return f"{names[0] or '(root)'} ... {names[-1] or '(root)'} ({len(names)})"


@dataclass(frozen=True)
class MemoryRow:
    """A holder of device memory: the kind of tensor, the line and operation that allocated it, its units, and its
    bytes at the peak and when the fullest backward pass begins."""

    kind: str
    made_by: str
    units: str
    peak_bytes: int
    backward_bytes: int


def memory_rows(r: RankObservation) -> list[MemoryRow]:
    """Return a rank's holders of memory, largest first: the largest allocations, and the rest of each kind."""
    start = r.fullest_backward_start
    peak, backward, units = Counter[str](), Counter[str](), dict[str, dict[str, None]]()
    for holders, totals in ((r.holders, peak), (start.holders if start else (), backward)):
        for h in holders:
            totals[h.kind] += h.bytes
            units.setdefault(h.kind, {}).setdefault(h.module)
    rows = []
    large = [a for a in r.allocations if max(a.peak_bytes, a.backward_bytes) >= _SHARE * r.peak]
    for a in large[:_ALLOCATIONS]:
        rows.append(
            MemoryRow(a.kind, _made_by(a), name_list([u for u in a.units if u]), a.peak_bytes, a.backward_bytes)
        )
        peak[a.kind] -= a.peak_bytes
        backward[a.kind] -= a.backward_bytes
    in_part = {row.kind for row in rows}
    for kind in dict.fromkeys((*peak, *backward)):
        if peak[kind] or backward[kind]:
            name, of = (
                (f"rest of {kind}", "") if kind in in_part else (kind, name_list([u for u in units[kind] if u]))
            )
            rows.append(MemoryRow(name, "", of, peak[kind], backward[kind]))
    return sorted(rows, key=lambda row: -max(row.peak_bytes, row.backward_bytes))


def _made_by(a: Allocation) -> str:
    """Write the operation that allocated memory, its line, and the backward passes that it is kept for."""
    line = " at ".join(part for part in (a.operation, str(a.site)) if part)
    return f"{line}; kept for the backward of {', '.join(a.saved_for)}" if a.saved_for else line


def peak_place(r: RankObservation) -> str:
    """Write the pass and unit in which a rank held the most bytes."""
    of = unit_of(r.peak_module) or ("" if r.models else "the root")
    return f"in the {PASSES[r.peak_phase]} pass" + f" of {of}" * bool(of)


_ROWS = 40
"""The most rows of a table; the JSON has all."""


def observation(o: Observation) -> View:
    """Show the lines and tables of an observation; its page has the same, and charts."""
    return View(list(tables(o)), html=lambda: observation_page(o))


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
        yield _observed_collectives(r)
    if r.flops:
        yield _flops(r)
    yield _memory(r)
    if r.synchronisations:
        yield _waits(r)


def _observed_collectives(r: RankObservation, most: int | None = _ROWS) -> Sheet:
    """Tabulate collectives by model, operation, group, bytes, type, phase and line: one row for all units."""
    counts: Counter[tuple[Any, ...]] = Counter()
    units: dict[tuple[Any, ...], dict[str, None]] = {}
    for o in r.communication:
        e = o.event
        key = (r.model_of(o.module), e.op, f"{e.axis} ({e.group_size})", e.bytes, e.dtype, e.phase, str(o.site))
        counts[key] += 1
        units.setdefault(key, {})[unit_of(o.module)] = None
    rows = []
    for key, count in list(counts.items())[:most]:
        _, op, over, bytes_each, *where = key
        rows.append((op, over, count, bytes_each, *where, name_list(list(units[key]))))
    names = columns("collective | over | count [count] | bytes each [count] | type | phase | where | units")
    notes = [_cut(len(counts)) if most else ""]
    if r.rebuilt_at:
        sites = name_list([str(site) for site in r.rebuilt_at])
        notes.append(
            f"DDP rebuilds its buckets at {sites} as its second step begins: the "
            "broadcasts of int32 and their copies are of that step alone; --step 3 shows those that follow"
        )
    return Sheet("collectives of a step", names, rows, "; ".join(filter(None, notes)))


def _flops(r: RankObservation) -> Sheet:
    totals: Counter[str] = Counter()
    by_phase: Counter[tuple[str, str]] = Counter()
    for (phase, module), n in r.flops.items():
        totals[unit_of(module)] += n
        by_phase[phase, unit_of(module)] += n
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


def _waits(r: RankObservation, most: int | None = _ROWS) -> Sheet:
    rows = [(s.call, s.count, s.phase, f"{s.site} {s.module}".strip()) for s in r.synchronisations[:most]]
    names = columns("call | count [count] | phase | where")
    return Sheet("the host waits for the device", names, rows, _cut(len(r.synchronisations)) if most else "")


def _cut(rows: int) -> str:
    return f"{rows - _ROWS:,} more rows in --json" if rows > _ROWS else ""


_BOUNDS = (
    "compute is matrix products and attention alone, so a lower bound. A recording does not show other kernels, the "
    "host's time for launches, or what the program's streams overlap: the step takes at least the larger of both "
    "columns, and nothing here says by how much more"
)


def price(answer: ObservedPrice, collectives: bool = False) -> View:
    """Show the price of an observed program; `collectives`: whether each kind of them is listed."""
    flows = _flows(answer.ranks) if collectives else ()
    head = f"{answer.program}: {answer.world} ranks of {answer.cluster}"
    return View([head, _steps(answer.ranks), *flows, _BOUNDS])


def _steps(ranks: Sequence[ObservedStep]) -> Sheet:
    names = columns(
        "rank [count] | compute [s] | communication [s] | all hidden [s] | none hidden [s] | peak [bytes] | fits"
    )
    rows = []
    for p in ranks:
        times = (p.compute_s, p.communication_s, p.all_hidden_s, p.none_hidden_s)
        rows.append((p.rank, *times, p.peak_bytes, "yes" if p.fits else f"no: {size(p.usable_bytes)}"))
    return Sheet("a step, priced", names, rows)


def _flows(ranks: Sequence[ObservedStep]) -> Iterator[Sheet]:
    """Yield each kind of collective of every observed rank, the longest first."""
    names = columns("collective | over | ranks [count] | type | links | times [count] | bytes [count] | alone [s]")
    for p in ranks:
        rows = [
            (f.op, f.axis, f.ranks, f.dtype, f.links, f.count, f.bytes, f.seconds)
            for f in sorted(p.collectives, key=lambda f: -f.seconds)
        ]
        yield Sheet(f"rank {p.rank}", names, rows)


def findings(answer: ObservedFindings) -> View:
    """Show the findings in an observed program."""
    count = count_words(len(answer.findings), "finding") if answer.findings else "nothing found"
    return View((*map(finding, answer.findings), f"{answer.program}: {count}"))


def improvement(answer: ObservedImprovement) -> View:
    """Show changes that would make an observed program faster."""
    lines = [finding(f) for f in answer.findings] or ["nothing found in the program itself"]
    if answer.better is None:
        lines.append("with --model, --batch and --seq the strategies of its ranks are searched too")
    else:
        mesh = ", ".join(f"{axis}={n}" for axis, n in answer.axes.items()) or "no named axis"
        best = answer.better.best
        lines.append(
            f"the program's mesh: {mesh}; better under {answer.better.question.stack}: {best.strategy}: "
            f"{seconds(best.step_time_s)} a step, MFU {best.mfu:.1%}, {size(best.memory_bytes)} a GPU, "
            "by fitted formulas (the program's own figures above are bounds)"
        )
    return View([_steps(answer.now), *lines])


def differences(answer: PlanDifferences) -> View:
    """Show the differences of an observed program from a plan."""
    names = columns(
        "rank [count] | what | plan [count] | program [count] | plan, total [count] | program, total [count] | "
    )
    rows = []
    for d in answer.differences:
        counts = (d.plan_count, d.program_count) if d.plan_count or d.program_count else (None, None)
        verdict = "differs" if d.differs else "same"
        rows.append((d.rank, d.what, *counts, d.plan_total, d.program_total, verdict))
    return View([Sheet("plan against program", names, rows)])


def observation_page(o: Observation) -> str:
    """Return the page of an observed program."""
    axes = ", ".join(f"{name} {n}" for name, n in o.axes.items())
    about = f"{o.program}: {o.world:,} ranks{f' ({axes})' if axes else ''}, torch {o.torch}, device {o.device}"
    notes = tuple(dict.fromkeys(note for r in o.ranks for note in r.notes))
    sections = [
        Section("The program", text=(about, *notes)),
        Section("What could be better", text=tuple(map(finding, lint(o))) or ("Nothing was found.",)),
    ]
    for r in o.ranks:
        sections += _rank_sections(r)
    return page(f"{o.program} on {o.world:,} ranks", "observation", sections)


def _rank_sections(r: RankObservation) -> list[Section]:
    name = f"rank {r.rank}"
    flops: Counter[tuple[str, str]] = Counter()
    for (phase, module), n in r.flops.items():
        flops[unit_of(module) or "(root)", "backward" if phase == "B" else "forward"] += n
    flop, scale = largest_unit(max(flops.values(), default=0), FLOP)
    by_module: dict[str, list[tuple[str, float]]] = {}
    for (module, direction), n in flops.items():
        by_module.setdefault(module, []).append((direction, n / scale))
    bars = [Bar(name, parts, f"{sum(n for _, n in parts):.4g}") for name, parts in by_module.items()]
    kinds: Counter[str] = Counter()
    for h in r.holders:
        kinds[h.kind] += h.bytes
    byte, binary = largest_unit(sum(kinds.values()), BYTES)
    memory = Bar(name, [(kind, n / binary) for kind, n in kinds.items()], size(sum(kinds.values())))
    waits = [section(_waits(r, None), title=f"Where the host of {name} waits")] if r.synchronisations else []
    return [
        section(_observed_collectives(r, None), title=f"Collectives of {name}", note=r.are),
        Section(
            f"FLOPs of {name}",
            columns=("unit", "pass", "FLOP"),
            rows=[(module, phase, f"{n:,}") for (module, phase), n in flops.items()],
            panels=(Bars(flop, tuple(bars)),) if bars else (),
        ),
        section(
            _memory(r),
            *((Bars(byte, (memory,)),) if kinds else ()),
            title=f"Memory of {name} at its peak",
            note=f"{size(r.peak)} {peak_place(r)}",
        ),
        *waits,
    ]
