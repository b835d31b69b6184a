"""Compare a recorded step with its StepProgram: the first difference of each kind, with the events around it.

collectives   by axis, in order: kind, unit, phase, bytes
passes        by unit, in order: forward, backward, optimizer
order         of collectives and passes together; collectives inside layers (tp, cp) are ordered against the
              passes, and not against buckets
FLOPs         by unit, forward and backward
live bytes    when the step begins, when each pass begins, the peak of each pass, and when the step is over
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.cost.step.program import Instant, StepProgram, flops_per_unit, instants
from phalanx.schedule.event import INSIDE, Event

SLACK_BYTES, SLACK = 2**14, 1e-5
"""Live bytes may differ by SLACK_BYTES plus the share SLACK of the peak: the terms leave out the scratch memory of
single operations."""
_AROUND = 2  # events shown before and after a difference


@dataclass(frozen=True)
class Difference:
    """The first difference in one aspect of a step, such as the collectives over an axis. `number`: the event's index
    in its list; `around`: (number, predicted, recorded) of the events around it."""

    aspect: str
    predicted: str
    recorded: str
    cause: str = ""
    number: int | None = None
    around: tuple[tuple[int, str, str], ...] = ()

    def __str__(self) -> str:
        where = "" if self.number is None else f", event {self.number}"
        cause = f" ({self.cause})" if self.cause else ""
        return f"{self.aspect}{where}: predicted {self.predicted}, recorded {self.recorded}{cause}"


Same = Callable[[Event, Event], bool]


def identical(a: Event, b: Event) -> bool:
    """Whether two events agree to the byte, even if gradients decide how much is sent, so that bytes are a bound."""
    return a.identity == b.identity


def differences(
    predicted: Sequence[Event], recorded: Sequence[Event], same: Same = Event.matches
) -> Iterator[Difference]:
    """Yield the first difference between predicted and recorded events in each aspect: collectives by axis, passes,
    their common order, FLOPs by unit. Order is compared only if collectives and passes agree."""
    alike = True
    for axis in dict.fromkeys(e.axis for e in (*predicted, *recorded) if e.axis):
        ours = [e for e in predicted if e.axis == axis]
        theirs = [e for e in recorded if e.axis == axis]
        for difference in _first(f"collectives over {axis}", ours, theirs, same):
            alike = False
            yield difference
    for difference in _first(PASSES, _passes(predicted), _passes(recorded), identical):
        alike = False
        yield difference
    if alike:
        # The terms do not say between which sub-layers of a unit a bucket becomes full.
        for aspect, compared in (("order", _across_layers), ("order inside of layers", _inside_layers)):
            ours, theirs = ([e for e in side if compared(e)] for side in (predicted, recorded))
            yield from _first(aspect, ours, theirs, same)
    expected, actual = flops_per_unit(predicted), flops_per_unit(recorded)
    routed = {(e.phase, e.unit) for e in predicted if e.kind == "compute" and e.routed and same is not identical}
    for key in dict.fromkeys((*expected, *actual)):
        if key in routed:  # they depend on where the router sends tokens
            continue
        a, b = expected.get(key), actual.get(key)
        if a != b:
            yield Difference(f"FLOPs of {' '.join(key)}", _count(a), _count(b))


PASSES = "passes"


def unawaited_collectives(names: Sequence[str]) -> Iterator[Difference]:
    """Yield a difference that names the collectives that were never waited for, if there are any."""
    if names:
        others = f", nor for {len(names) - 1} more" if len(names) > 1 else ""
        yield Difference("waits", "for every collective", f"none for {names[0]}{others}")


def _across_layers(e: Event) -> bool:
    return e.axis not in INSIDE


def _inside_layers(e: Event) -> bool:
    return e.axis in ("", *INSIDE)


def _passes(events: Sequence[Event]) -> list[Event]:
    return [e for e in events if e.kind == "compute"]


@dataclass(frozen=True)
class RecordedMemory:
    """Live bytes of a recorded step. `state`: when it begins; `first`: when its first pass begins; `before`: the peak
    until then; `end`: when it is over; `peak`: of the whole step."""

    state: int
    first: int
    before: int
    end: int
    peak: int


def slack(program: StepProgram) -> int:
    """Return the bytes by which recorded live bytes may differ from the program's."""
    return SLACK_BYTES + program.state.scratch + int(SLACK * program.peak_bytes)


def memory_differences(
    program: StepProgram, recorded: Sequence[Event], memory: RecordedMemory
) -> Iterator[Difference]:
    """Yield the first place where live bytes differ by more than the slack, if any. The recorded passes must equal
    the predicted ones."""
    most, state = slack(program), program.state.total
    for aspect, predicted, actual in (
        ("live bytes when the step begins", state, memory.state),
        ("live bytes when the first pass begins", state + program.first, memory.first),
        ("the most live bytes before the first pass", state + program.before, memory.before),
    ):
        if abs(actual - predicted) > most:
            yield Difference(aspect, f"{predicted:,}", f"{actual:,}")
            return
    ours, theirs = program.instants(), instants(recorded, memory.first)
    for name, value in _LIVE.items():
        pairs = enumerate(zip(ours, theirs, strict=True))
        wrong = next((i for i, (a, b) in pairs if abs(value(a) - value(b)) > most), None)
        if wrong is not None:
            a, b = (f"{value(side[wrong]):,}" for side in (ours, theirs))
            aspect = f"live bytes {name} {_short(ours[wrong].event)}"
            yield Difference(aspect, a, b, "", wrong, _around(wrong, ours, theirs, _as_bytes))
            return
    for aspect, predicted, actual in (
        ("live bytes when the step is over", state, memory.end),
        ("the most live bytes", program.peak_bytes, memory.peak),
    ):
        if abs(actual - predicted) > most:
            yield Difference(aspect, f"{predicted:,}", f"{actual:,}")


_LIVE: dict[str, Callable[[Instant], int]] = {"before": lambda i: i.live, "in": lambda i: i.highest}


def largest_deviation(program: StepProgram, recorded: Sequence[Event], memory: RecordedMemory) -> int:
    """Return the largest difference between predicted and recorded live bytes over the passes of a step."""
    pairs = zip(program.instants(), instants(recorded, memory.first), strict=True)
    return max(max(abs(a.live - b.live), abs(a.highest - b.highest)) for a, b in pairs)


def _first(aspect: str, ours: Sequence[Event], theirs: Sequence[Event], same: Same) -> Iterator[Difference]:
    for i in range(max(len(ours), len(theirs))):
        a = ours[i] if i < len(ours) else None
        b = theirs[i] if i < len(theirs) else None
        if a is None or b is None or not same(a, b):
            cause = _cause(ours[i:], theirs[i:], same)
            yield Difference(aspect, _named(a), _named(b), cause, i, _around(i, ours, theirs, str))
            return


def _cause(ours: Sequence[Event], theirs: Sequence[Event], same: Same) -> str:
    """Explain why two lists differ from here on: by one extra event, one missing, or one replaced."""

    def all_same(a: Sequence[Event], b: Sequence[Event]) -> bool:
        return len(a) == len(b) and all(map(same, a, b))

    if theirs and all_same(ours, theirs[1:]):
        return "one too many is issued; all others are as predicted"
    if ours and all_same(ours[1:], theirs):
        return "one is missing; all others are as predicted"
    if ours and theirs and all_same(ours[1:], theirs[1:]):
        return "all others are as predicted"
    return f"{len(ours)} are predicted from here on, {len(theirs)} recorded"


def _around(
    at: int, ours: Sequence[Any], theirs: Sequence[Any], say: Callable[[Any], str]
) -> tuple[tuple[int, str, str], ...]:
    def of(side: Sequence[Any], i: int) -> str:
        return say(side[i]) if i < len(side) else "nothing"

    last = min(at + _AROUND + 1, max(len(ours), len(theirs)))
    return tuple((i, of(ours, i), of(theirs, i)) for i in range(max(0, at - _AROUND), last))


def _named(event: Event | None) -> str:
    return "nothing" if event is None else str(event)


def _count(flops: int | None) -> str:
    return "none" if flops is None else f"{flops:,}"


def _short(e: Event) -> str:
    return f"{e.op} {e.unit}".strip() + (f" of micro-batch {e.micro_batch}" if e.micro_batch is not None else "")


def _as_bytes(i: Instant) -> str:
    return f"{_short(i.event)}: {i.live:,} B before, {i.highest:,} B at most"
