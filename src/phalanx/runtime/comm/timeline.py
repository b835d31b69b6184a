"""The timeline of a step on one rank: when every collective was issued, under way, waited for and over.

    issued      the caller is inside the call that starts it
    under way   from the moment when its transport begins on it until it is really done, whoever waits
    waited for  the caller is inside `wait`

While it is inside an issue or a wait the caller computes nothing: it is blocked. From these intervals, by axis:
    active    some collective of the axis is under way, or the caller is blocked by one
    exposed   active while the caller is blocked, by whatever
    hidden    active while it computes: the rest;  overlap = 1 - exposed / active

Shared memory is worked on inside the caller's own waits, one operation perhaps inside the wait for another: it is
under way only then, and all of it is exposed. Times are `time.perf_counter()`, in seconds. Where an accelerator's
stream waits instead of the host, host times say nothing, and nothing is followed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from phalanx.runtime.comm.transport import DONE, Handle
from phalanx.schedule.event import Event

Interval = tuple[float, float]
COMPUTE, WAITING = "compute", "waiting"
"""The tracks of a rank beside one per axis."""


@dataclass(frozen=True)
class Span:
    """Something that took its time, on a track: compute, waiting, or the name of an axis."""

    name: str
    track: str
    start: float
    stop: float
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class AxisTimes:
    """Seconds of one axis in one step."""

    active_s: float
    exposed_s: float

    @property
    def overlap(self) -> float | None:
        """The part of the communication that computation hides."""
        return 1 - self.exposed_s / self.active_s if self.active_s else None


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one step on one rank: compute and exposed communication make its length, what is hidden runs beside
    compute. Compute is all that the rank does while nothing blocks it."""

    compute_s: float
    exposed_communication_s: float
    hidden_communication_s: float
    axes: dict[str, AxisTimes]


class Flight:
    """One collective, followed. It holds times and no tensor; transports tell it what its caller cannot see."""

    def __init__(self, event: Event) -> None:
        self.event, self.transport = event, ""
        self.start = perf_counter()
        self.issued = self.begun = self.done = 0.0
        self.waits: list[Interval] = []

    def begins(self, transport: str) -> None:
        self.transport, self.begun = transport, perf_counter()

    def over(self) -> None:
        self.done = self.done or perf_counter()

    def waited(self, start: float) -> None:
        """Its caller has it: then it is over, even if the thread that says so comes late."""
        stop = perf_counter()
        self.done = self.done or stop
        self.waits.append((start, stop))

    @property
    def blocked(self) -> list[Interval]:
        return [(self.start, self.issued), *self.waits]

    def under_way(self, now: float) -> list[Interval]:
        return [(self.begun, self.done or now)] if self.begun else []


class _Followed:
    """A handle that notes how long its caller waits."""

    def __init__(self, handle: Handle, flight: Flight) -> None:
        self._handle: Handle = handle
        self._flight = flight

    def wait(self) -> None:
        start = perf_counter()
        self._handle.wait()
        self._flight.waited(start)
        self._handle = DONE  # what was communicated is free to die


class Timeline:
    """Follows the collectives between `begin` and `end` of a step; one that is not over then goes on in the next.
    `possible`: whether the host's times say anything."""

    def __init__(self, possible: bool) -> None:
        self.possible, self.following = possible, False
        self.passes: list[Span] = []
        self._flights: list[Flight] = []
        self._open: list[Flight] = []
        self._start = self._stop = 0.0

    def issue(self, event: Event) -> Flight | None:
        """A collective is about to be issued; None where it is not followed."""
        if not self.following:
            return None
        flight = Flight(event)
        self._open.append(flight)
        return flight

    def issued(self, flight: Flight | None, handle: Handle) -> Handle:
        """It has been."""
        if flight is None:
            return handle
        flight.issued = perf_counter()
        return _Followed(handle, flight)

    def begin(self) -> None:
        """A step begins."""
        self.following = self.possible
        self.passes = []
        self._start = perf_counter()

    def end(self) -> float:
        """The step is over: its seconds."""
        self._stop = perf_counter()
        self.following = False
        self._flights = self._open
        self._open = [f for f in self._flights if not f.done or not f.waits]
        return self._stop - self._start

    def times(self) -> StepTimes | None:
        """Of the step that ended last; None where the host's times say nothing."""
        if not self.possible:
            return None
        blocked = self._union(i for f in self._flights for i in f.blocked)
        active: dict[str, list[Interval]] = {}
        for flight in self._flights:
            own = active.setdefault(flight.event.axis, [])
            own += flight.blocked + flight.under_way(self._stop)
        active = {axis: self._union(intervals) for axis, intervals in active.items()}
        axes = {axis: AxisTimes(length(own), length(common(own, blocked))) for axis, own in active.items()}
        exposed, whole = length(blocked), length(self._union(i for own in active.values() for i in own))
        return StepTimes(self._stop - self._start - exposed, exposed, whole - exposed, axes)

    def spans(self) -> list[Span]:
        """Of the step that ended last, cut off at its ends: passes where they were watched, waits, collectives."""
        found = list(self.passes)
        for flight in self._flights:
            e = flight.event
            name = f"{e.op} of {e.unit}"
            detail = {"op": e.op, "unit": e.unit, "bytes": e.bytes, "dtype": e.dtype, "transport": flight.transport}
            if e.micro_batch is not None:
                detail["micro_batch"] = e.micro_batch
            waiting = {"axis": e.axis, **detail}
            found += [Span(name, e.axis, *interval, detail) for interval in self._union(flight.under_way(self._stop))]
            found += [Span(f"issue {name}", WAITING, *i, waiting) for i in self._union([flight.blocked[0]])]
            found += [Span(f"wait for {name}", WAITING, *i, waiting) for i in self._union(flight.waits)]
        return found

    def _union(self, intervals: Iterable[Interval]) -> list[Interval]:
        """What intervals cover of the step: disjoint, ascending."""
        found: list[Interval] = []
        for start, stop in sorted((max(a, self._start), min(b, self._stop)) for a, b in intervals):
            if stop <= start:
                continue
            if found and start <= found[-1][1]:
                found[-1] = (found[-1][0], max(found[-1][1], stop))
            else:
                found.append((start, stop))
        return found


def length(intervals: Iterable[Interval]) -> float:
    """What disjoint intervals cover."""
    return sum(stop - start for start, stop in intervals)


def common(a: list[Interval], b: list[Interval]) -> list[Interval]:
    """What both of two lists of disjoint ascending intervals cover."""
    found, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        start, stop = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < stop:
            found.append((start, stop))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return found
