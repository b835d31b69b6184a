"""Pipeline schedules drawn as Gantt charts, a line per rank, and their costs side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from phalanx.cost.pipeline_time import PricedSchedule
from phalanx.cost.step.predict_pipeline import price_pipeline
from phalanx.cost.step.terms import terms
from phalanx.planning.tables.table import Sheet, columns
from phalanx.schedule.layout import Layout
from phalanx.schedule.pipeline.sends import strip_sends
from phalanx.spec.documents import read_json
from phalanx.spec.errors import InputError
from phalanx.spec.files import plan as plans
from phalanx.spec.strategy.mesh import mesh

# Colours of Okabe and Ito, which colour-blind people can tell; every second chunk of a rank is written small.
_COLOURS = {"F": "on #56b4e9", "B": "on #e69f00", "I": "on #e69f00", "W": "on #009e73"}
_MOST_PANELS = 4
"""Panels, one below the other, that a schedule is cut into before its blocks lose their numbers."""


def columns_per_second(schedules: Sequence[PricedSchedule], width: int) -> float:
    """Return the one scale on which schedules are drawn: each block has room for its letter and micro-batch, unless
    more than a few panels of `width` columns would be needed."""
    longest = max(priced.makespan for priced in schedules)
    wanted = 0.0
    for priced in schedules:
        shortest = min((end - start for own in priced.times for start, end in own), default=1.0)
        wanted = max(wanted, max(2, len(str(priced.schedule.micro_batches - 1)) + 1) / shortest)
    room = max(1, width - max(len(_label(p.schedule.ranks - 1)) for p in schedules))
    return wanted if longest * wanted <= _MOST_PANELS * room else room / longest


def chart(priced: PricedSchedule, width: int, scale: float, idle: str = "·") -> Text:
    """Draw the Gantt chart of a schedule in lines of at most `width` columns, in panels if it is longer.

    A block shows its kind and micro-batch, or only its kind if it is too narrow. `idle`: a character."""
    s = priced.schedule
    label = len(_label(s.ranks - 1))
    room, end = max(1, width - label), round(priced.makespan * scale)
    room -= room % max(2, len(str(s.micro_batches - 1)) + 1) if room > 8 else 0  # so that no panel ends in a label
    lines = [_line(priced, rank, scale, end, idle) for rank in range(s.ranks)]
    text = Text(no_wrap=True)
    for start in range(0, end, room):
        if start:
            text.append(f"... from {start / end:.0%} of the step on\n", "dim")
        for rank, line in enumerate(lines):
            text.append(_label(rank).ljust(label))
            text.append_text(line[start : start + room])
            beside = _beside(priced, rank)
            last = start + room >= end
            text.append((beside if last and end - start + len(beside) <= room else "") + "\n")
            if last and end - start + len(beside) > room and rank == s.ranks - 1:
                text.append(_all_beside(priced) + "\n")
    text.rstrip()
    return text


def _label(rank: int) -> str:
    return f"rank {rank} "


def _line(priced: PricedSchedule, rank: int, scale: float, end: int, idle: str) -> Text:
    """Draw one rank's passes from the first to the last column."""
    s, text, drawn_to = priced.schedule, Text(no_wrap=True), 0
    for action, (start, stop) in zip(s.actions[rank], priced.times[rank], strict=True):
        left, right = round(start * scale), round(stop * scale)
        text.append(idle * (left - drawn_to), "dim")
        small = action.chunk // s.ranks % 2 == 1
        kind = action.kind.lower() if small else action.kind
        text.append(_block(kind, action.micro_batch, right - left), f"black {_COLOURS[action.kind]}")
        drawn_to = max(drawn_to, right)
    text.append(idle * (end - drawn_to), "dim")
    return text


def _block(kind: str, micro_batch: int, width: int) -> str:
    label = f"{kind}{micro_batch}"
    return label.ljust(width) if len(label) <= width else kind * width


def _all_beside(priced: PricedSchedule) -> str:
    """Say what stands beside each rank's line where there is room, of all ranks."""
    idle = " ".join(f"{1 - work / priced.makespan:.0%}" for work in priced.work)
    return f"idle by rank: {idle}; live at most: {' '.join(map(str, priced.peak))}"


def _beside(priced: PricedSchedule, rank: int) -> str:
    idle = 1 - priced.work[rank] / priced.makespan
    return f"  idle {idle:4.0%}, at most {priced.peak[rank]:3} live"


def summary(priced: PricedSchedule) -> str:
    """Say in one sentence what a schedule costs."""
    s = priced.schedule
    of = "activations" if s.chunks == s.ranks else f"activations of a chunk, {s.chunks // s.ranks} chunks per rank"
    small = "; small letters: every second chunk of a rank" if s.chunks > s.ranks else ""
    return (
        f"bubble fraction {priced.bubble_fraction:.1%} of the step, bubble overhead {priced.bubble_overhead:.1%} "
        f"over the ideal; at most {max(priced.peak)} {of}; {priced.messages} messages{small}"
    )


def chunk_table(chunks: Sequence[Mapping[str, Any]]) -> Sheet:
    """Tabulate what each chunk holds and costs, from a plan's rows (ChunkShare in schedule/partition/balance.py)."""
    rows = []
    for chunk in chunks:
        first, last = chunk["first"], chunk["last"]
        blocks = [] if first is None else [f"blocks {first} to {last}" if last > first else f"block {first}"]
        holds = ["embed"] * chunk["embed"] + blocks + ["head"] * chunk["head"]
        rows.append((chunk["chunk"], chunk["rank"], ", ".join(holds), chunk["seconds"], chunk["bytes"]))
    names = columns(("chunk", "count"), ("rank", "count"), "holds", ("micro-batch", "s"), ("memory", "bytes"))
    return Sheet("", names, rows)


def compared(schedules: Sequence[PricedSchedule]) -> Sheet:
    """Tabulate schedules: bubble, makespan, live activations and messages."""
    rows = []
    for priced in schedules:
        virtual = priced.schedule.chunks // priced.schedule.ranks
        bubble = (priced.bubble_fraction, priced.bubble_overhead, priced.makespan)
        rows.append((priced.schedule.name, virtual, *bubble, max(priced.peak) / virtual, priced.messages))
    names = columns(
        *("schedule", ("chunks per rank", "count"), ("bubble fraction", "share"), ("bubble overhead", "share")),
        *(("makespan", "number"), ("live at most", "number"), ("messages", "count")),
    )
    note = "live: activations of a rank's whole part of the model for a micro-batch, on the rank that holds most"
    return Sheet("", names, rows, note, charted=False)


Spans = dict[tuple[str, int, int], tuple[float, float]]
"""Start and end of each pass in seconds, by kind, chunk and micro-batch."""


def of_run(folder: Path) -> tuple[PricedSchedule, PricedSchedule]:
    """Return the pipeline of a run's first rank, as measured and as predicted.

    Raises InputError if the run had no pipeline, or its trace is missing or incomplete."""
    plan = plans.read(folder / "plan.json")
    s = plan.strategy
    if s.pp == 1:
        raise InputError("run", str(folder), f"was trained without a pipeline ({s})", "train with --strategy pp=2")
    path = folder / "trace.json"
    if not path.exists():
        raise InputError("run", str(folder), "has no trace.json", "it is written in a run's third step")
    ranks = mesh(s).group_of(0, "pp")
    spans: dict[int, Spans] = {rank: {} for rank in ranks}
    try:
        for event in read_json(path, "run")["traceEvents"]:
            if event.get("cat") == "schedule" and event["pid"] in spans:
                action = event["args"]
                start = event["ts"] / 1e6
                spans[event["pid"]][action["kind"], action["chunk"], action["micro_batch"]] = (
                    start,
                    start + event["dur"] / 1e6,
                )
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError("run", str(folder), f"its trace.json is damaged ({error!r})", "train it again") from None
    layout = Layout(plan.model, plan.job, s)
    views = layout.stage_views()
    predicted = price_pipeline(views, [terms(view) for view in views], plan.cluster).priced
    schedule = strip_sends(layout.schedule)
    try:
        times = [
            [spans[rank][a.kind, a.chunk, a.micro_batch] for a in own]
            for rank, own in zip(ranks, schedule.actions, strict=True)
        ]
    except KeyError as error:
        raise InputError("run", str(folder), f"its trace lacks {error.args[0]}", "train it again") from None
    origin = min(own[0][0] for own in times)
    measured = [[(start - origin, stop - origin) for start, stop in own] for own in times]
    return PricedSchedule(schedule, measured, predicted.messages, predicted.peak), predicted
