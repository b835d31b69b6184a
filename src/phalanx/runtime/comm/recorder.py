"""The recorder: the events issued by a rank, in the form in which a StepProgram predicts them."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from phalanx.schedule.event import Event, Phase


class Meter(Protocol):
    """Counts live bytes: `live` is the number now, `highest` the most since it was last set."""

    live: int
    highest: int


class RunningPass(NamedTuple):
    """The running pass: its micro-batch and phase (forward, backward, or one part of a split backward pass)."""

    micro_batch: int
    phase: Phase


@dataclass
class Recorder:
    """Counts bytes per axis always, and keeps events while `keeping`, with their live bytes if there is a `meter`."""

    keeping: bool = False
    counting: bool = True
    events: list[Event] = field(default_factory=list)
    bytes_per_axis: Counter[str] = field(default_factory=Counter)
    meter: Meter | None = None
    before: tuple[int, int] = (0, 0)
    """Live bytes when the first compute event began, and the peak between the step's beginning and then."""
    _computes: int = -1  # index of the latest compute event
    began: int = 0
    """Live bytes when the latest compute event began."""

    def collective(self, event: Event) -> None:
        """Record a collective or a message."""
        self.bytes_per_axis[event.axis] += event.bytes
        if self.keeping:
            self.events.append(event)

    def compute(self, op: str, phase: Phase, unit: str, micro_batch: int | None, dtype: str) -> None:
        """Begin a compute event: a unit's pass or the optimizer's. FLOPs and memory count towards it from here on."""
        if self.keeping:
            self.over()
            self._computes = len(self.events)
            self.events.append(Event("compute", op, phase, unit, micro_batch=micro_batch, dtype=dtype))

    def over(self) -> None:
        """End the latest compute event, and record the bytes that it allocated and freed."""
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
    def uncounted(self) -> Iterator[None]:
        """Exclude operations inside this context from the FLOP count: they are not part of the model."""
        self.counting = False
        try:
            yield
        finally:
            self.counting = True

    def flops(self, count: int) -> None:
        """Add FLOPs to the latest compute event."""
        if self.counting and self._computes >= 0:
            event = self.events[self._computes]
            self.events[self._computes] = replace(event, flops=event.flops + count)

    def clear(self) -> None:
        """Forget all events and byte counts."""
        self.events.clear()
        self.bytes_per_axis.clear()
        self._computes = -1
