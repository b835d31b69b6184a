"""The StepProgram: the terms of one strategy, expanded into the ordered events of one training step.

`verify` and the trainer's self-check compare it with the recorded step, event for event, byte for byte
(observation/diff.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from phalanx.cost.memory.state import State
from phalanx.schedule.event import Event


@dataclass(frozen=True)
class StepProgram:
    """The events of one step on one rank, in the order in which they are issued, and the state around them."""

    events: tuple[Event, ...]
    state: State
    first: int = 0
    """Bytes above the state when the first pass begins: the first pass's input has been received by then."""
    before: int = 0
    """The peak above the state until then."""

    def bytes_per_axis(self) -> dict[str, int]:
        """Return bytes sent in the step by mesh axis."""
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
    """Live bytes when an event begins (`live`), and their peak while it runs (`highest`)."""

    event: Event
    live: int
    highest: int


def instants(events: Iterable[Event], state: int) -> list[Instant]:
    """Walk over the events of a step that begins with `state` bytes; return live bytes at every compute event."""
    result = []
    for event in events:
        if event.kind == "compute":
            result.append(Instant(event, state, state + event.alloc))
            state += event.alloc - event.free
    return result


def flops_per_unit(events: Iterable[Event]) -> dict[tuple[str, str], int]:
    """Return FLOPs of the model's passes by (phase, unit); the optimizer is left out."""
    totals: Counter[tuple[str, str]] = Counter()
    for event in events:
        if event.kind == "compute" and event.phase != "opt":
            totals[event.phase, event.unit] += event.flops
    return dict(totals)
