"""The recorder: the events that a rank really issued, in the form in which they were predicted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from phalanx.schedule.event import Event, Phase


@dataclass
class Recorder:
    """Bytes per axis are always counted; whole events are kept while `keeping`."""

    keeping: bool = False
    counting: bool = True
    events: list[Event] = field(default_factory=list)
    bytes_per_axis: Counter[str] = field(default_factory=Counter)

    def collective(self, event: Event) -> None:
        self.bytes_per_axis[event.axis] += event.bytes
        if self.keeping:
            self.events.append(event)

    def compute(self, op: str, phase: Phase, unit: str, micro_batch: int | None, dtype: str) -> None:
        """A unit's pass begins; FLOPs counted from here on are its own."""
        if self.keeping:
            self.events.append(Event("compute", op, phase, unit, micro_batch=micro_batch, dtype=dtype))

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
        if not self.counting:
            return
        for i in range(len(self.events) - 1, -1, -1):
            if self.events[i].kind == "compute":
                self.events[i] = replace(self.events[i], flops=self.events[i].flops + count)
                return

    def clear(self) -> None:
        self.events.clear()
        self.bytes_per_axis.clear()
