"""A Term: all events of one template in one step."""

from dataclasses import dataclass

from phalanx.cost.compute.unit_work import NO_WORK, Work
from phalanx.schedule.event import Event


@dataclass(frozen=True)
class Term:
    """`count` events like `event` in one step of one rank.

    `bytes` and `work` are totals over all of them; `alloc` and `free` are bytes of each. `before`: bytes freed before
    each, by passes whose own terms do not count them. `masked`: `alloc` until the masks are no longer needed."""

    event: Event
    count: int
    bytes: int = 0
    work: Work = NO_WORK
    alloc: int = 0
    free: int = 0
    before: int = 0
    masked: int = 0
    recomputed: Work = NO_WORK
    """The part of `work` that repeats forward passes (recomputation)."""
    overlapping: Work = NO_WORK
    """Compute of the same passes, overlapped with this communication."""
    coding: Work = NO_WORK
    """The work of compressing the sent bytes, with the compressor `code`."""
    code: str = ""


def highest(term: Term, masks: int) -> int:
    """Return the peak of a pass that is the last to need `masks` bytes of masks."""
    return max(term.masked, term.alloc - masks)
