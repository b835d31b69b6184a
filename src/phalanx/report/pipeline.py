"""Pipeline schedules drawn as Gantt charts, a line per rank, and their costs side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from phalanx.cost.pipeline_time import PricedSchedule
from phalanx.cost.step.predict_pipeline import price_pipeline
from phalanx.cost.step.terms import terms
from phalanx.report.style import seconds, size
from phalanx.schedule.layout import Layout
from phalanx.schedule.pipeline.sends import strip_sends
from phalanx.spec.documents import read_json
from phalanx.spec.errors import InputError
from phalanx.spec.files import plan as plans
from phalanx.spec.strategy.mesh import mesh

# Okabe and Ito's colours, which colour-blind people can tell; later chunks of a rank are underlined.
_COLOURS = {"F": "on #56b4e9", "B": "on #e69f00", "I": "on #e69f00", "W": "on #009e73"}
_IDLE = "·"


def chart(priced: PricedSchedule, width: int, longest: float) -> Text:
    """Draw the Gantt chart of a schedule in at most `width` columns, scaled to fit a makespan of `longest`.

    A block shows its kind and micro-batch, or only its kind if it is too narrow."""
    s = priced.schedule
    label = f"rank {s.ranks - 1} "
    columns = max(1, width - len(label) - len(_beside(priced, 0)))
    shortest = min((end - start for own in priced.times for start, end in own), default=1.0)
    widest = max(2, len(str(s.micro_batches - 1)) + 1)  # a letter and a number in the shortest block
    scale = min(columns / longest, widest / shortest)
    end = round(priced.makespan * scale)
    text = Text(no_wrap=True)
    for rank, (own, times) in enumerate(zip(s.actions, priced.times, strict=True)):
        text.append(f"rank {rank} ".ljust(len(label)))
        drawn_to = 0
        for action, (start, stop) in zip(own, times, strict=True):
            left, right = round(start * scale), round(stop * scale)
            text.append(_IDLE * (left - drawn_to), "dim")
            second = " underline" if action.chunk >= s.ranks else ""
            text.append(
                _block(action.kind, action.micro_batch, right - left), f"black {_COLOURS[action.kind]}{second}"
            )
            drawn_to = max(drawn_to, right)
        text.append(_IDLE * (end - drawn_to), "dim")
        text.append(_beside(priced, rank) + "\n")
    text.rstrip()
    return text


def _block(kind: str, micro_batch: int, width: int) -> str:
    label = f"{kind}{micro_batch}"
    return label.ljust(width) if len(label) <= width else kind * width


def _beside(priced: PricedSchedule, rank: int) -> str:
    idle = 1 - priced.work[rank] / priced.makespan
    return f"  idle {idle:4.0%}, at most {priced.peak[rank]:3} live"


def summary(priced: PricedSchedule) -> str:
    """Say in one sentence what a schedule costs."""
    s = priced.schedule
    of = "activations" if s.chunks == s.ranks else f"activations of a chunk, {s.chunks // s.ranks} chunks per rank"
    return (
        f"bubble fraction {priced.bubble_fraction:.1%} of the step, bubble overhead {priced.bubble_overhead:.1%} "
        f"over the ideal; at most {max(priced.peak)} {of}; {priced.messages} messages"
    )


def parts(chunks: Sequence[Mapping[str, Any]]) -> Table:
    """Tabulate what each chunk holds and costs, from a plan's rows (ChunkShare in schedule/partition/balance.py)."""
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("chunk", "rank"):
        table.add_column(name, justify="right")
    table.add_column("holds")
    for name in ("micro-batch", "memory"):
        table.add_column(name, justify="right")
    for chunk in chunks:
        first, last = chunk["first"], chunk["last"]
        blocks = [] if first is None else [f"blocks {first} to {last}" if last > first else f"block {first}"]
        holds = ["embed"] * chunk["embed"] + blocks + ["head"] * chunk["head"]
        memory = "" if chunk["bytes"] is None else size(chunk["bytes"])
        table.add_row(str(chunk["chunk"]), str(chunk["rank"]), ", ".join(holds), seconds(chunk["seconds"]), memory)
    return table


def compared(schedules: Sequence[PricedSchedule]) -> Table:
    """Tabulate schedules: bubble, makespan, live activations and messages."""
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("schedule")
    for name in ("chunks per rank", "bubble fraction", "bubble overhead", "makespan", "live at most", "messages"):
        table.add_column(name, justify="right")
    for priced in schedules:
        s = priced.schedule
        virtual = s.chunks // s.ranks
        table.add_row(
            s.name,
            str(virtual),
            f"{priced.bubble_fraction:.1%}",
            f"{priced.bubble_overhead:.1%}",
            f"{priced.makespan:g}",
            f"{max(priced.peak) / virtual:g}",
            str(priced.messages),
        )
    table.caption = (
        "live: activations of a rank's whole part of the model for a micro-batch, on the rank that holds most"
    )
    table.caption_justify = "left"
    return table


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
