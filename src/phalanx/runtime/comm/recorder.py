"""The recorder: the events that a rank really issued, in the form in which they were predicted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from phalanx.schedule.event import Event, Phase


class Meter(Protocol):
    """Live bytes: how many now, and the most that there were since `highest` was set."""

    live: int
    highest: int


class Now(NamedTuple):
    """What runs: the micro-batch, and whether forward, backward, or which part of it."""

    micro_batch: int
    phase: Phase


@dataclass
class Recorder:
    """Bytes per axis are always counted; whole events are kept while `keeping`, with their memory where there is a
    `meter`."""

    keeping: bool = False
    counting: bool = True
    events: list[Event] = field(default_factory=list)
    bytes_per_axis: Counter[str] = field(default_factory=Counter)
    meter: Meter | None = None
    before: tuple[int, int] = (0, 0)
    """Live bytes when the first compute began, and the most that there were since the step had."""
    _computes: int = -1  # the event of the compute that began last
    began: int = 0
    """Live bytes when the last compute did."""

    def collective(self, event: Event) -> None:
        self.bytes_per_axis[event.axis] += event.bytes
        if self.keeping:
            self.events.append(event)

    def compute(self, op: str, phase: Phase, unit: str, micro_batch: int | None, dtype: str) -> None:
        """A unit's pass begins, or the optimizer's; FLOPs counted and memory taken from here on are its own."""
        if self.keeping:
            self.over()
            self._computes = len(self.events)
            self.events.append(Event("compute", op, phase, unit, micro_batch=micro_batch, dtype=dtype))

    def over(self) -> None:
        """The compute that began last is over: what it allocated and freed."""
        if self.meter is None:
            return
        live, highest = self.meter.live, self.meter.highest
        if self._computes >= 0:
            event = self.events[self._computes]
            self.events[self._computes] = replace(event, alloc=highest - self.began, free=highest - live)
        else:
            self.before = live, highest
        self.began = self.meter.highest = live

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What happens here is no part of the model: its FLOPs do not count."""
        self.counting = False
        try:
            yield
        finally:
            self.counting = True

    def flops(self, count: int) -> None:
        """Add to the compute event that began last."""
        if self.counting and self._computes >= 0:
            event = self.events[self._computes]
            self.events[self._computes] = replace(event, flops=event.flops + count)

    def clear(self) -> None:
        self.events.clear()
        self.bytes_per_axis.clear()
        self._computes = -1
