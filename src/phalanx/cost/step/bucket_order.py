"""The order in which the engine issues the collectives of its buckets (runtime/data_parallel/engine.py).

Reducing a bucket takes one collective, or several with compression. Each collective of a compressed bucket is
issued once the previous one has finished, which the engine checks when it issues a later bucket and at the end of the
backward pass. ZeRO-2 and ZeRO-3 complete a bucket before they issue the next one. With HSDP, a shard is reduced over
its replicas as soon as the shard is complete.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from phalanx.schedule.event import Event


@dataclass
class _Open:
    """A bucket whose reduction has started.

    `remaining`: collectives still to be issued. `across`: collectives that reduce its shard over the replicas.
    """

    remaining: list[Event]
    across: list[Event]
    complete: bool = False


@dataclass
class BucketOrder:
    """The buckets in flight and the order in which their collectives are issued.

    `early`: complete each bucket before the next one is issued (ZeRO-2 and ZeRO-3).
    """

    early: bool
    _open: list[_Open] = field(default_factory=list)
    _across: list[_Open] = field(default_factory=list)

    def issue(self, reduction: list[Event], across: list[Event]) -> Iterator[Event]:
        """Issue the reduction of a bucket that is full; `across` is non-empty at its last reduction of the step."""
        if self.early and self._open:
            yield from self._complete(self._open[-1])
        for earlier in self._open:
            if earlier.remaining:
                yield earlier.remaining.pop(0)
        self._open.append(_Open(reduction[1:], list(across)))
        yield from reduction[:1]  # empty over one rank

    def flush(self) -> Iterator[Event]:
        """Complete every open bucket: a backward pass has ended."""
        for bucket in self._open:
            yield from self._complete(bucket)
        self._open.clear()

    def finish(self) -> Iterator[Event]:
        """Complete everything, with the remaining reductions over replicas: the last backward pass has ended."""
        yield from self.flush()
        for bucket in self._across:
            yield from bucket.across
        self._across.clear()

    def _complete(self, bucket: _Open) -> Iterator[Event]:
        if bucket.complete:
            return
        bucket.complete = True
        yield from bucket.remaining
        bucket.remaining = []
        if bucket.across:
            yield bucket.across.pop(0)
            self._across.append(bucket)
