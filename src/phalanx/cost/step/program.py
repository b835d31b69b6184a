"""The StepProgram: the terms of one strategy, expanded into the ordered events of one training step.

What `verify` and the trainer's own check compare with the recorded step, event for event, byte for byte
(verify/compare.py).
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
    """Bytes above the state when the first pass begins: what comes is received before."""
    before: int = 0
    """The most above the state until then."""

    def bytes_per_axis(self) -> dict[str, int]:
        found: Counter[str] = Counter()
        for event in self.events:
            if event.axis:
                found[event.axis] += event.bytes
        return dict(found)

    def flops_per_unit(self) -> dict[tuple[str, str], int]:
        """FLOPs of the step by (phase, unit)."""
        return flops_per_unit(self.events)

    @property
    def peak_bytes(self) -> int:
        """The most live bytes at any instant."""
        return max((i.highest for i in self.instants()), default=self.state.total + self.before)

    def instants(self) -> list[Instant]:
        return instants(self.events, self.state.total + self.first)


@dataclass(frozen=True)
class Instant:
    """Live bytes when an event begins, and the most while it lasts."""

    event: Event
    live: int
    highest: int


def instants(events: Iterable[Event], state: int) -> list[Instant]:
    """Live bytes over the computes of a step that begins with `state`: a walk over the events."""
    found = []
    for event in events:
        if event.kind == "compute":
            found.append(Instant(event, state, state + event.alloc))
            state += event.alloc - event.free
    return found


def flops_per_unit(events: Iterable[Event]) -> dict[tuple[str, str], int]:
    """FLOPs of the model's passes by (phase, unit)."""
    found: Counter[tuple[str, str]] = Counter()
    for event in events:
        if event.kind == "compute" and event.phase != "opt":
            found[event.phase, event.unit] += event.flops
    return dict(found)
