"""The events of a step on two streams, as on a GPU: compute, and concurrent communication.

Collectives run one after the other in the order in which they are issued. A collective issued after a pass begins
once that pass has ended; one issued before a pass overlaps with it. A pass waits only for the gather of its own unit.
So a gather that is issued one unit ahead (`prefetch`) is hidden by the pass before its own, and gradients by the
passes that follow them. Gathered parameters are freed when their pass ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from phalanx.schedule.event import Event

_ANY = ""
"""Parameters that several units share, such as a tied embedding: the next pass waits for them, and they stay."""


@dataclass(frozen=True)
class Timed:
    """An event with its start and end, in seconds."""

    event: Event
    start: float
    end: float


def timed(events: Sequence[Event], seconds: Callable[[Event], float]) -> list[Timed]:
    """Return each event of a step with its start and end, in the order of the program; `seconds`: duration of an
    event without contention.

    A pass before the optimizer waits for gathers of its unit; the optimizer for everything."""
    result: list[Timed] = []
    compute = link = 0.0
    gathered: dict[str, float] = {}
    units = {event.unit for event in events if event.kind == "compute"}
    for event in events:
        took = seconds(event)
        if event.kind == "compute":
            arrived = max(gathered.pop(event.unit, 0.0), gathered.pop(_ANY, 0.0))
            start = max(compute, arrived, link if event.phase == "opt" else 0.0)
            compute = start + took
            result.append(Timed(event, start, compute))
            continue
        start = max(compute, link)
        link = start + took
        result.append(Timed(event, start, link))
        if event.op == "all_gather":
            gathered[event.unit if event.unit in units else _ANY] = link
        elif event.phase == "opt":
            compute = link
    return result


def exposed(of: Sequence[Timed]) -> float:
    """Return the seconds of a step in which nothing is computed."""
    computing = sum(t.end - t.start for t in of if t.event.kind == "compute")
    return max((t.end for t in of), default=0.0) - computing


def gathered_bytes(of: Sequence[Timed]) -> list[tuple[float, float]]:
    """Return (seconds, bytes of gathered parameters from then on) of a step that gathers units for their passes."""
    changes: list[tuple[float, float]] = [(0.0, 0.0)]
    waiting: dict[str, float] = {}
    for t in of:
        if t.event.op == "all_gather":
            changes.append((t.start, float(t.event.bytes)))
            waiting[t.event.unit] = float(t.event.bytes)
        elif t.event.kind == "compute" and t.event.unit in waiting:
            changes.append((t.end, -waiting.pop(t.event.unit)))
    held, points = 0.0, dict[float, float]()
    for at, change in sorted(changes):
        held += change
        points[at] = held  # a free and a gather at the same instant leave no dip
    return list(points.items())
