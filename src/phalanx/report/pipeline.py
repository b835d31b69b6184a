"""Views of pipeline schedules: Gantt charts with a line per rank, costs side by side, and proofs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.text import Text

from phalanx.answers.schedules.pipeline import (
    PipelineComparison,
    PipelineDrawing,
    PipelineProofs,
    ScheduleCost,
    ScheduleProof,
)
from phalanx.cost.pipeline_time import PricedSchedule
from phalanx.planning.tables.table import Sheet, columns
from phalanx.report.view import View, ViewPart

if TYPE_CHECKING:
    from phalanx.report.pictures.figure import Picture

# Colours of Okabe and Ito, which colour-blind people can distinguish. Every second chunk of a rank has small letters.
_COLOURS = {"F": "on #56b4e9", "B": "on #e69f00", "I": "on #e69f00", "W": "on #009e73"}
_MOST_PANELS = 4
"""The most panels that a schedule is cut into; a longer one is drawn with narrower blocks, without numbers."""


def view(a: PipelineDrawing | PipelineComparison | PipelineProofs) -> View:
    """Show charts of schedules, their costs side by side, or their proofs."""
    if isinstance(a, PipelineProofs):
        return View([_proof(p) for p in a.proofs])
    if isinstance(a, PipelineComparison):
        return View([cost_table(a.schedules), *(f"left out: {line}" for line in a.left_out)])
    return View(list(_charts(a)), "pipeline", partial(_pictures, a))


def _proof(p: ScheduleProof) -> str:
    live = ", ".join(map(str, p.live_by_rank))
    proved = f"proved; {p.messages} messages; live at most, by rank: {live}"
    return f"{p.schedule}: {proved if p.proved else p.reason}"


def _charts(a: PipelineDrawing) -> Iterator[ViewPart]:
    """Yield title, chart and costs of every schedule; times of runs are seconds, so each run has its own scale."""
    groups = [[("", s) for s in a.schedules]]
    for r in a.runs:
        both = (("measured", r.measured), ("predicted", r.predicted))
        groups.append([(f"{r.run}, {how} in {s.makespan:.3g} s", s) for how, s in both])
    for group in groups:
        all_priced = [s.priced for _, s in group]
        for label, s in group:
            title = f"{s.name}: {s.ranks} ranks, {s.micro_batches} micro-batches" + (f"; {label}" if label else "")
            yield partial(_title_line, title)
            yield partial(_scale, s.priced, all_priced)
            yield f"{summary(s)}\n"


def _title_line(title: str, columns: int) -> Text:
    return Text(title, "bold")


def _scale(priced: PricedSchedule, group: Sequence[PricedSchedule], columns: int) -> Text:
    return chart(priced, columns, columns_per_second(group, columns))


def _pictures(a: PipelineDrawing) -> list[Picture]:
    """Draw schedules as one picture, and each run as another."""
    from phalanx.report.gallery.pipelines import schedules

    source = "`phalanx pipeline show`: the schedules that are proved, priced and run"
    both = [("", s.priced) for s in a.schedules]
    pictures = [schedules(both, f"time: F, I, W = {a.costs}", source)] if both else []
    for r in a.runs:
        both = [(f" of {r.run}, measured", r.measured.priced), (f" of {r.run}, predicted", r.predicted.priced)]
        pictures.append(schedules(both, "time, s", f"the trace of {r.run}, and `phalanx predict` of its plan"))
    return pictures


def columns_per_second(schedules: Sequence[PricedSchedule], width: int) -> float:
    """Return columns per unit of time, the same for all schedules: wide enough for the letter and micro-batch of each
    block, unless that needs more than a few panels of `width` columns."""
    longest = max(priced.makespan for priced in schedules)
    wanted = 0.0
    for priced in schedules:
        shortest = min((end - start for passes in priced.times for start, end in passes), default=1.0)
        wanted = max(wanted, max(2, len(str(priced.schedule.micro_batches - 1)) + 1) / shortest)
    room = max(1, width - max(len(_label(p.schedule.ranks - 1)) for p in schedules))
    return wanted if longest * wanted <= _MOST_PANELS * room else room / longest


def chart(priced: PricedSchedule, width: int, scale: float) -> Text:
    """Draw the Gantt chart of a schedule in lines of at most `width` columns, in panels if it is longer.

    A block shows its kind and micro-batch, or only its kind if it is too narrow."""
    s = priced.schedule
    label = len(_label(s.ranks - 1))
    room, end = max(1, width - label), round(priced.makespan * scale)
    room -= room % max(2, len(str(s.micro_batches - 1)) + 1) if room > 8 else 0  # so that no panel ends in a label
    lines = [_line(priced, rank, scale, end) for rank in range(s.ranks)]
    text = Text(no_wrap=True)
    for start in range(0, end, room):
        if start:
            text.append(f"... from {start / end:.0%} of the step on\n", "dim")
        for rank, line in enumerate(lines):
            text.append(_label(rank).ljust(label))
            text.append_text(line[start : start + room])
            remark = _remark(priced, rank)
            last = start + room >= end
            text.append((remark if last and end - start + len(remark) <= room else "") + "\n")
            if last and end - start + len(remark) > room and rank == s.ranks - 1:
                text.append(_all_remarks(priced) + "\n")
    text.rstrip()
    return text


def _label(rank: int) -> str:
    return f"rank {rank} "


_IDLE = "·"


def _line(priced: PricedSchedule, rank: int, scale: float, end: int) -> Text:
    """Draw one rank's passes from the first to the last column."""
    s, text, drawn_to = priced.schedule, Text(no_wrap=True), 0
    for action, (start, stop) in zip(s.actions[rank], priced.times[rank], strict=True):
        left, right = round(start * scale), round(stop * scale)
        text.append(_IDLE * (left - drawn_to), "dim")
        small = action.chunk // s.ranks % 2 == 1
        kind = action.kind.lower() if small else action.kind
        text.append(_block(kind, action.micro_batch, right - left), f"black {_COLOURS[action.kind]}")
        drawn_to = max(drawn_to, right)
    text.append(_IDLE * (end - drawn_to), "dim")
    return text


def _block(kind: str, micro_batch: int, width: int) -> str:
    label = f"{kind}{micro_batch}"
    return label.ljust(width) if len(label) <= width else kind * width


def _all_remarks(priced: PricedSchedule) -> str:
    """Return the remarks of all ranks on one line, for charts without room for them at the ends of lines."""
    idle = " ".join(f"{1 - work / priced.makespan:.0%}" for work in priced.work)
    return f"idle by rank: {idle}; live at most: {' '.join(map(str, priced.peak))}"


def _remark(priced: PricedSchedule, rank: int) -> str:
    idle = 1 - priced.work[rank] / priced.makespan
    return f"  idle {idle:4.0%}, at most {priced.peak[rank]:3} live"


def summary(s: ScheduleCost) -> str:
    """Return a sentence on a schedule's bubble, activations and messages."""
    of = "activations" if s.chunks == s.ranks else f"activations of a chunk, {s.chunks // s.ranks} chunks per rank"
    small = "; small letters: every second chunk of a rank" if s.chunks > s.ranks else ""
    return (
        f"bubble fraction {s.bubble_fraction:.1%} of the step, bubble overhead {s.bubble_overhead:.1%} "
        f"over the ideal; at most {max(s.peak_activations)} {of}; {s.messages} messages{small}"
    )


def chunk_table(chunks: Sequence[Mapping[str, Any]]) -> Sheet:
    """Tabulate the units, seconds and bytes of chunks, from a plan's rows (ChunkShare in
    schedule/partition/balance.py)."""
    rows = []
    for chunk in chunks:
        first, last = chunk["first"], chunk["last"]
        blocks = [] if first is None else [f"blocks {first} to {last}" if last > first else f"block {first}"]
        holds = ["embed"] * chunk["embed"] + blocks + ["head"] * chunk["head"]
        rows.append((chunk["chunk"], chunk["rank"], ", ".join(holds), chunk["seconds"], chunk["bytes"]))
    names = columns("chunk [count] | rank [count] | holds | micro-batch [s] | memory [bytes]")
    return Sheet("", names, rows)


def cost_table(schedules: Sequence[ScheduleCost]) -> Sheet:
    """Tabulate schedules: bubble, makespan, live activations and messages."""
    rows = []
    for s in schedules:
        virtual = s.chunks // s.ranks
        bubble = (s.bubble_fraction, s.bubble_overhead, s.makespan)
        rows.append((s.name, virtual, *bubble, max(s.peak_activations) / virtual, s.messages))
    names = columns(
        "schedule | chunks per rank [count] | bubble fraction [share] | bubble overhead [share] "
        "| makespan [number] | live at most [number] | messages [count]"
    )
    note = "live: activations of a rank's whole part of the model for a micro-batch, on the rank that holds most"
    return Sheet("", names, rows, note, charted=False)
