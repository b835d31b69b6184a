"""Reports of what was looked at without its GPUs: a proof of our own program, an observation of anybody's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from phalanx.planning.explain.observed_lint import lint
from phalanx.report.html.page import Section, page
from phalanx.report.observation import finding, memory_rows, peak_place
from phalanx.report.pictures.figure import Bar, Bars
from phalanx.report.style import BYTES, FLOP, largest_unit, size
from phalanx.schedule.observation import Observation, RankObservation, unit


def verification(v: Mapping[str, Any]) -> str:
    """Return the page of a proof, from what `phalanx verify --json` prints."""
    verdict = "proved" if v["proved"] else "NOT proved"
    ranks = f"{v['world']:,} ranks, {v['micro_batches']} micro-batches in a step"
    text = [
        f"{verdict}: {v['about']}, {v['strategy']} on {ranks}",
        *v["notes"],
        *v["stale"],
    ]
    sections = [Section("The verdict", text=tuple(text))]
    for c in v["classes"]:
        sections += _class(c)
    return page(f"{v['strategy']}: {verdict}", "verification", sections, {"proved": v["proved"]})


def _class(c: Mapping[str, Any]) -> list[Section]:
    """Return the sections of one class of ranks: its traffic and memory, predicted and recorded."""
    name = f"rank {c['rank']}, which stands for {c['rank_count']:,}"
    differing = [d["message"] for d in c["differences"]] + ([c["failed"]] if c["failed"] else [])
    text = differing or [f"equal to its plan, in {c['seconds']:.1f} s"]
    if c["rank_count"] > 1:
        text = [f"its {c['rank_count']:,} ranks: {c['ranks']}", *text]
    recorded = c["recorded"] or {"collectives": [], "state_bytes": 0, "peak_bytes": 0}
    there = {(r["op"], r["axis"]): r for r in recorded["collectives"]}
    rows = []
    for p in c["predicted"]["collectives"]:
        r = there.pop((p["op"], p["axis"]), {"count": 0, "bytes": 0})
        rows.append((p["op"], p["axis"], f"{p['count']:,}", f"{r['count']:,}", f"{p['bytes']:,}", f"{r['bytes']:,}"))
    rows += [(r["op"], r["axis"], "0", f"{r['count']:,}", "0", f"{r['bytes']:,}") for r in there.values()]
    held = [
        (what, f"{c['predicted'][key]:,}", f"{recorded[key]:,}")
        for what, key in (("before the step", "state_bytes"), ("peak", "peak_bytes"))
    ]
    names = ("operation", "over", "predicted", "recorded", "bytes predicted", "bytes recorded")
    return [
        Section(f"Collectives of {name}", text=tuple(text), columns=names, rows=rows),
        Section(f"Memory of rank {c['rank']}", columns=("bytes", "predicted", "recorded"), rows=held),
    ]


def observation(o: Observation) -> str:
    """Return the page of an observed program."""
    axes = ", ".join(f"{name} {n}" for name, n in o.axes.items())
    about = f"{o.program}: {o.world:,} ranks{f' ({axes})' if axes else ''}, torch {o.torch}, device {o.device}"
    notes = tuple(dict.fromkeys(note for r in o.ranks for note in r.notes))
    sections = [
        Section("The program", text=(about, *notes)),
        Section("What could be better", text=tuple(map(finding, lint(o))) or ("Nothing was found.",)),
    ]
    for r in o.ranks:
        sections += _rank(r)
    return page(f"{o.program} on {o.world:,} ranks", "observation", sections)


def _rank(r: RankObservation) -> list[Section]:
    name = f"rank {r.rank}"
    sent: Counter[tuple[str, str, str, int, str]] = Counter()
    for c in r.communication:
        e = c.event
        sent[e.op, f"{e.axis} ({e.group_size})", e.phase, e.bytes, str(c.site)] += 1
    traffic = [
        (op, over, f"{count:,}", f"{bytes_:,}", phase, where)
        for (op, over, phase, bytes_, where), count in sent.items()
    ]
    flops: Counter[tuple[str, str]] = Counter()
    for (phase, module), n in r.flops.items():
        flops[unit(module) or "(root)", "backward" if phase == "B" else "forward"] += n
    flop, scale = largest_unit(max(flops.values(), default=0), FLOP)
    by_module: dict[str, list[tuple[str, float]]] = {}
    for (module, direction), n in flops.items():
        by_module.setdefault(module, []).append((direction, n / scale))
    bars = [Bar(name, parts, f"{sum(n for _, n in parts):.4g}") for name, parts in by_module.items()]
    kinds: Counter[str] = Counter()
    for h in r.holders:
        kinds[h.kind] += h.bytes
    start = r.fullest_backward_start
    as_it_begins = f"as backward of micro-batch {start.micro_batches[0]} begins" if start else "as backward begins"
    byte, binary = largest_unit(sum(kinds.values()), BYTES)
    held = Bar(name, [(kind, n / binary) for kind, n in kinds.items()], size(sum(kinds.values())))
    names = ("collective", "over", "count", "bytes each", "phase", "where")
    return [
        Section(f"Collectives of {name}", r.are or "", columns=names, rows=traffic),
        Section(
            f"FLOPs of {name}",
            columns=("unit", "pass", "FLOP"),
            rows=[(module, phase, f"{n:,}") for (module, phase), n in flops.items()],
            panels=(Bars(flop, tuple(bars)),) if bars else (),
        ),
        Section(
            f"Memory of {name} at its peak",
            f"{size(r.peak)} {peak_place(r)}",
            columns=("held by", "made by", "of units", "bytes", as_it_begins),
            rows=[
                (row.kind, row.made_by, row.units, f"{row.peak_bytes:,}", f"{row.backward_bytes:,}")
                for row in memory_rows(r)
            ],
            panels=(Bars(byte, (held,)),) if kinds else (),
        ),
        *_waits(r),
    ]


def _waits(r: RankObservation) -> list[Section]:
    if not r.synchronisations:
        return []
    rows = [(s.call, f"{s.count:,}", s.phase, f"{s.site} {s.module}".strip()) for s in r.synchronisations]
    return [Section(f"Where the host of rank {r.rank} waits", columns=("call", "count", "phase", "where"), rows=rows)]
