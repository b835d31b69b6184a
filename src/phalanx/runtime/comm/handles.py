"""Handles of collectives with additional work in `wait`, or with none: over the null transport a handle has the
memory that is in use until its `wait`, and verification checks every operation of a step against it."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from phalanx.runtime.comm.shm import Shm
from phalanx.runtime.comm.transport import DONE, Call, Handle


class OrderedHandle:
    """A handle that first completes the collectives issued earlier over shared memory: a peer may wait for this
    rank's part of them before it reaches this one."""

    def __init__(self, handle: Handle, memory: Shm) -> None:
        self._handle, self._memory, self._mark = handle, memory, memory.started

    def wait(self) -> None:
        """Complete earlier collectives over shared memory, then wait for this one."""
        self._memory.finish_before(self._mark)
        self._handle.wait()


class ReleasedHandle:
    """A handle for instrumented steps that waits until the transport has released the tensors. Gloo's thread reports
    completion before it drops its references, on a busy machine long before; memory freed by the step would then
    still count as live."""

    _PATIENCE_S = 1.0

    def __init__(self, call: Call, start: Callable[[], Handle]) -> None:
        self._tensors = [(t, _use_count(t)) for t in (call.source, call.target)]
        self._handle = start()

    def wait(self) -> None:
        """Wait for the collective, then, for a bounded time, until its tensors are released."""
        self._handle.wait()
        self._handle, until = DONE, time.monotonic() + self._PATIENCE_S
        while any(_use_count(t) > before for t, before in self._tensors) and time.monotonic() < until:
            time.sleep(0)
        self._tensors = []


def _use_count(tensor: Tensor) -> int:
    """Return the number of references to a tensor, from Python and C++."""
    return int(tensor._use_count())  # type: ignore[attr-defined]


@dataclass(frozen=True)
class ByteRange:
    """The bytes from `low` to `high` of a storage, which it does not keep alive."""

    storage: weakref.ref[Any]
    low: int
    high: int

    @classmethod
    def of(cls, tensor: Tensor) -> ByteRange:
        """All bytes between the first and the last element of a tensor."""
        storage = tensor.untyped_storage()
        if not tensor.numel():
            return cls(weakref.ref(storage), 0, 0)
        size = tensor.element_size()
        low = int(tensor.storage_offset()) * size
        last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        return cls(weakref.ref(storage), low, low + (int(last) + 1) * size)

    def meets(self, other: ByteRange) -> bool:
        """Whether two ranges share a byte."""
        mine, its = self.storage(), other.storage()
        same = mine is not None and its is not None and mine._cdata == its._cdata
        return same and self.low < other.high and other.low < self.high


class UnissuedHandle:
    """The handle of a collective over the null transport: waiting only marks it as awaited. `reads` and `writes`: the
    memory it uses until then."""

    def __init__(
        self, unawaited: dict[int, UnissuedHandle], name: str, reads: Sequence[Tensor], writes: Sequence[Tensor]
    ) -> None:
        self._unawaited, self.name = unawaited, name
        self.reads, self.writes = tuple(map(ByteRange.of, reads)), tuple(map(ByteRange.of, writes))

    def wait(self) -> None:
        """Mark the collective as complete."""
        self._unawaited.pop(id(self), None)
