"""The order in which the engine issues the collectives of its buckets (runtime/data_parallel/engine.py).

A bucket is reduced by one collective, or by several if it is compressed. Each collective of a compressed bucket is
issued once the previous one has finished, which the engine checks when it issues a later bucket and at the end of the
backward pass. ZeRO-2 and ZeRO-3 complete a bucket before they issue the next one. With HSDP, a shard is reduced over
its replicas as soon as the shard is complete.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from phalanx.schedule.event import Event


@dataclass
class _Open:
    """A bucket whose reduction has started."""

    remaining: list[Event]
    """Collectives that are yet to be issued."""
    across: list[Event]
    """Collectives that reduce its shard over the replicas (HSDP)."""
    complete: bool = False


@dataclass
class BucketOrder:
    """The buckets in flight and the order in which their collectives are issued."""

    early: bool
    """Whether each bucket is completed before the next one is issued (ZeRO-2 and ZeRO-3)."""
    _open: list[_Open] = field(default_factory=list)
    _across: list[_Open] = field(default_factory=list)

    def issue(self, reduction: list[Event], across: list[Event]) -> Iterator[Event]:
        """Issue the reduction of a full bucket. `across`: collectives over its replicas; empty unless this is the
        bucket's last reduction in the step."""
        if self.early and self._open:
            yield from self._complete(self._open[-1])
        for earlier in self._open:
            if earlier.remaining:
                yield earlier.remaining.pop(0)
        self._open.append(_Open(reduction[1:], list(across)))
        yield from reduction[:1]  # empty over one rank

    def flush(self) -> Iterator[Event]:
        """Complete every open bucket, at the end of a backward pass."""
        for bucket in self._open:
            yield from self._complete(bucket)
        self._open.clear()

    def finish(self) -> Iterator[Event]:
        """Complete everything, including reductions over replicas, at the end of the last backward pass."""
        yield from self.flush()
        for bucket in self._across:
            yield from bucket.across
        self._across.clear()

    def _complete(self, bucket: _Open) -> Iterator[Event]:
        """Issue the rest of a bucket's reduction and, with HSDP, the first collective over its replicas."""
        if bucket.complete:
            return
        bucket.complete = True
        yield from bucket.remaining
        bucket.remaining = []
        if bucket.across:
            yield bucket.across.pop(0)
            self._across.append(bucket)
