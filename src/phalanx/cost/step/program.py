"""The StepProgram: the ordered events of one step, which `verify` and the trainer's self-check compare with the
recorded step event by event, byte by byte (observation/diff.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from phalanx.cost.memory.state import State
from phalanx.schedule.event import Event


@dataclass(frozen=True)
class StepProgram:
    """The events of one step on one rank, in the order in which the rank issues them, and its state between steps."""

    events: tuple[Event, ...]
    state: State
    first: int = 0
    """Bytes above the state when the first pass begins: the input that it received, for example."""
    before: int = 0
    """The peak above the state until the first pass begins."""

    def bytes_per_axis(self) -> dict[str, int]:
        """Return the bytes sent in the step over each mesh axis."""
        totals: Counter[str] = Counter()
        for event in self.events:
            if event.axis:
                totals[event.axis] += event.bytes
        return dict(totals)

    def flops_per_unit(self) -> dict[tuple[str, str], int]:
        """Return FLOPs of the step by (phase, unit)."""
        return flops_per_unit(self.events)

    @property
    def peak_bytes(self) -> int:
        """The peak of live bytes over the step."""
        return max((i.highest for i in self.instants()), default=self.state.total + self.before)

    def instants(self) -> list[Instant]:
        """Return live bytes at every compute event."""
        return instants(self.events, self.state.total + self.first)


@dataclass(frozen=True)
class Instant:
    """Live bytes around a compute event."""

    event: Event
    live: int
    """Live bytes when the event begins."""
    highest: int
    """The peak of live bytes while the event runs."""


def instants(events: Iterable[Event], state: int) -> list[Instant]:
    """Return live bytes at every compute event of a step that begins with `state` live bytes."""
    result = []
    for event in events:
        if event.kind == "compute":
            result.append(Instant(event, state, state + event.alloc))
            state += event.alloc - event.free
    return result


def flops_per_unit(events: Iterable[Event]) -> dict[tuple[str, str], int]:
    """Return FLOPs by (phase, unit), without the optimizer."""
    totals: Counter[tuple[str, str]] = Counter()
    for event in events:
        if event.kind == "compute" and event.phase != "opt":
            totals[event.phase, event.unit] += event.flops
    return dict(totals)
