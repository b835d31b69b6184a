"""A Term: all events of one template in one step."""

from dataclasses import dataclass

from phalanx.cost.compute.unit_work import NO_WORK, Work
from phalanx.schedule.event import Event


@dataclass(frozen=True)
class Term:
    """`count` events like `event` in one step of one rank."""

    event: Event
    count: int
    bytes: int = 0
    """Bytes that all events send."""
    work: Work = NO_WORK
    """The work of all events."""
    alloc: int = 0
    """Bytes that each event allocates: its peak above the live bytes when it begins."""
    free: int = 0
    """Bytes that each event frees, out of `alloc` and of what it found."""
    before: int = 0
    """Bytes freed before each event, by passes whose own terms do not count them."""
    masked: int = 0
    """The part of `alloc` that is live before the event frees its masks between documents."""
    recomputed: Work = NO_WORK
    """The part of `work` that repeats forward passes."""
    overlapping: Work = NO_WORK
    """Compute in the same passes that overlaps this communication."""
    coding: Work = NO_WORK
    """The work of compressing the sent bytes."""
    code: str = ""
    """The compressor that `coding` is the work of."""

    def peak(self, masks: int) -> int:
        """Return `alloc` of an event that frees `masks` bytes of masks before its end."""
        return max(self.masked, self.alloc - masks)
