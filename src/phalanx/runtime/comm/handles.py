"""Handles of collectives with additional work in `wait`."""

import time
from collections.abc import Callable

from torch import Tensor

from phalanx.runtime.comm.shm import Shm
from phalanx.runtime.comm.transport import DONE, Call, Handle


class InOrder:
    """A handle that first completes what was issued earlier over shared memory.

    A peer may be waiting for this rank's part of that before it reaches this collective.
    """

    def __init__(self, handle: Handle, memory: Shm) -> None:
        self._handle, self._memory, self._mark = handle, memory, memory.started

    def wait(self) -> None:
        """Complete what was issued earlier, then wait for the collective."""
        self._memory.finish_before(self._mark)
        self._handle.wait()


class Released:
    """A handle for instrumented steps that waits until the transport has released the tensors.

    Gloo's thread reports completion before it drops its references, on a busy machine long before; memory freed by
    the step would then still count as live.
    """

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
