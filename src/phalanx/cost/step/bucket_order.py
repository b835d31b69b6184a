"""The order in which the engine issues the collectives of its buckets (runtime/data_parallel.py).

A bucket's reduction is one collective, or with compression several, of which the next is issued when the one before
is over: that is when a later bucket is issued, or in the end. Stages 2 and 3 wait for a bucket when the next is
issued; the shards' reduction over their replicas (HSDP) begins as soon as a shard is complete.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from phalanx.schedule.event import Event


@dataclass
class _Open:
    """A bucket under way: what is left of its reduction, and of its shard's over the replicas."""

    left: list[Event]
    across: list[Event]
    complete: bool = False


@dataclass
class Issued:
    """`early`: stages 2 and 3."""

    early: bool
    _open: list[_Open] = field(default_factory=list)
    _across: list[_Open] = field(default_factory=list)

    def issue(self, reduction: list[Event], across: list[Event]) -> Iterator[Event]:
        """The next bucket is full; `across` where this is its last reduction of the step."""
        if self.early and self._open:
            yield from self._complete(self._open[-1])
        for earlier in self._open:
            if earlier.left:
                yield earlier.left.pop(0)
        self._open.append(_Open(reduction[1:], list(across)))
        yield from reduction[:1]  # over one rank it is nothing

    def flush(self) -> Iterator[Event]:
        """A backward pass is over, and everything is waited for."""
        for bucket in self._open:
            yield from self._complete(bucket)
        self._open.clear()

    def finish(self) -> Iterator[Event]:
        """The step's last backward pass is over."""
        yield from self.flush()
        for bucket in self._across:
            yield from bucket.across
        self._across.clear()

    def _complete(self, bucket: _Open) -> Iterator[Event]:
        if bucket.complete:
            return
        bucket.complete = True
        yield from bucket.left
        bucket.left = []
        if bucket.across:
            yield bucket.across.pop(0)
            self._across.append(bucket)
