"""The timeline of a step on one rank: when every collective was issued, under way, waited for and complete.

    issued      the caller is inside the call that starts it
    under way   from when its transport begins on it until it is really complete, whether or not the caller waits
    waited for  the caller is inside `wait`

Inside an issue or a wait the caller computes nothing: it is blocked. From these intervals, by axis:
    active    some collective of the axis is under way, or the caller is blocked by one
    exposed   active while the caller is blocked, by any collective
    hidden    active while the caller computes: the rest;  overlap = 1 - exposed / active

Over shared memory the work is done inside the caller's own waits, sometimes inside the wait for another operation:
it is under way only then, and all of it is exposed. Times are `time.perf_counter()`, in seconds. With an accelerator
the stream waits instead of the host, so host times say nothing and no collective is timed.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from phalanx.runtime.comm.transport import DONE, Handle
from phalanx.schedule.event import Event

Interval = tuple[float, float]
COMPUTE, WAITING = "compute", "waiting"
"""The tracks of a rank, in addition to one for each axis."""


@dataclass(frozen=True)
class Span:
    """A named interval on a track: compute, waiting, or the name of an axis."""

    name: str
    track: str
    start: float
    stop: float
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class AxisTimes:
    """Seconds of one step in which an axis communicated, and in which that blocked the rank."""

    active_s: float
    exposed_s: float

    @property
    def overlap(self) -> float | None:
        """Share of the communication hidden by computation; None without communication."""
        return 1 - self.exposed_s / self.active_s if self.active_s else None


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one step on one rank: its length is compute plus exposed communication. Hidden communication
    overlaps compute. Compute is everything that the rank does while nothing blocks it."""

    compute_s: float
    exposed_communication_s: float
    hidden_communication_s: float
    axes: dict[str, AxisTimes]


class Flight:
    """The times of one collective. It holds no tensor; the transport reports what the caller cannot see."""

    def __init__(self, event: Event) -> None:
        self.event, self.transport = event, ""
        self.start = perf_counter()
        self.issued = self.started = self.done = 0.0
        self.waits: list[Interval] = []

    def begins(self, transport: str) -> None:
        """Note that a transport begins to work on it."""
        self.transport, self.started = transport, perf_counter()

    def over(self) -> None:
        """Note that it is complete."""
        self.done = self.done or perf_counter()

    def waited(self, start: float) -> None:
        """Note that the caller waited from `start` on: the collective is complete, even if the reporting thread is
        late."""
        stop = perf_counter()
        self.done = self.done or stop
        self.waits.append((start, stop))

    @property
    def blocked(self) -> list[Interval]:
        """Intervals in which it blocked the caller: while it was issued and waited for."""
        return [(self.start, self.issued), *self.waits]

    def under_way(self, now: float) -> list[Interval]:
        """Intervals in which it was under way, up to `now`."""
        return [(self.started, self.done or now)] if self.started else []


class _Timed:
    """A handle that records how long its caller waits."""

    def __init__(self, handle: Handle, flight: Flight) -> None:
        self._handle: Handle = handle
        self._flight = flight

    def wait(self) -> None:
        start = perf_counter()
        self._handle.wait()
        self._flight.waited(start)
        self._handle = DONE  # release the tensors


class CommTimeline:
    """Times the collectives between `begin` and `end` of a step; one that is incomplete then counts in the next too.

    `possible`: whether host times are meaningful here (not with an accelerator).
    """

    def __init__(self, possible: bool) -> None:
        self.possible, self.following = possible, False
        self.passes: list[Span] = []
        self._flights: list[Flight] = []
        self._open: list[Flight] = []
        self._start = self._stop = 0.0

    def issue(self, event: Event) -> Flight | None:
        """Begin to time a collective that is about to be issued; None outside of a timed step."""
        if not self.following:
            return None
        flight = Flight(event)
        self._open.append(flight)
        return flight

    def issued(self, flight: Flight | None, handle: Handle) -> Handle:
        """Note that a collective has been issued; return the handle that its caller waits on."""
        if flight is None:
            return handle
        flight.issued = perf_counter()
        return _Timed(handle, flight)

    def begin(self) -> None:
        """Begin a step."""
        self.following = self.possible
        self.passes = []
        self._start = perf_counter()

    def end(self) -> float:
        """End the step and return its length in seconds."""
        self._stop = perf_counter()
        self.following = False
        self._flights = self._open
        self._open = [f for f in self._flights if not f.done or not f.waits]
        return self._stop - self._start

    def times(self) -> StepTimes | None:
        """Return the times of the last step, or None if host times are not meaningful."""
        if not self.possible:
            return None
        blocked = self._union(i for f in self._flights for i in f.blocked)
        active: dict[str, list[Interval]] = {}
        for flight in self._flights:
            intervals = active.setdefault(flight.event.axis, [])
            intervals += flight.blocked + flight.under_way(self._stop)
        active = {axis: self._union(intervals) for axis, intervals in active.items()}
        axes = {
            axis: AxisTimes(total_length(times), total_length(intersection(times, blocked)))
            for axis, times in active.items()
        }
        exposed, total = (
            total_length(blocked),
            total_length(self._union(i for times in active.values() for i in times)),
        )
        return StepTimes(self._stop - self._start - exposed, exposed, total - exposed, axes)

    def spans(self) -> list[Span]:
        """Return the spans of the last step, clipped to it: passes if they were timed, waits, and collectives."""
        spans = list(self.passes)
        for flight in self._flights:
            e = flight.event
            name = f"{e.op} of {e.unit}"
            detail = {"op": e.op, "unit": e.unit, "bytes": e.bytes, "dtype": e.dtype, "transport": flight.transport}
            if e.micro_batch is not None:
                detail["micro_batch"] = e.micro_batch
            waiting = {"axis": e.axis, **detail}
            spans += [Span(name, e.axis, *interval, detail) for interval in self._union(flight.under_way(self._stop))]
            spans += [Span(f"issue {name}", WAITING, *i, waiting) for i in self._union([flight.blocked[0]])]
            spans += [Span(f"wait for {name}", WAITING, *i, waiting) for i in self._union(flight.waits)]
        return spans

    def _union(self, intervals: Iterable[Interval]) -> list[Interval]:
        """Return the union of intervals, clipped to the step, as disjoint ascending intervals."""
        union: list[Interval] = []
        for start, stop in sorted((max(a, self._start), min(b, self._stop)) for a, b in intervals):
            if stop <= start:
                continue
            if union and start <= union[-1][1]:
                union[-1] = (union[-1][0], max(union[-1][1], stop))
            else:
                union.append((start, stop))
        return union


def total_length(intervals: Iterable[Interval]) -> float:
    """Return the total length of disjoint intervals."""
    return sum(stop - start for start, stop in intervals)


def intersection(a: list[Interval], b: list[Interval]) -> list[Interval]:
    """Return the intersection of two lists of disjoint ascending intervals."""
    overlaps: list[Interval] = []
    i = j = 0
    while i < len(a) and j < len(b):
        start, stop = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < stop:
            overlaps.append((start, stop))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return overlaps
