"""A process that Linux ends when the one that started it dies."""

from __future__ import annotations

import ctypes
import os
import signal

_PARENT_DIED = 1  # prctl's PR_SET_PDEATHSIG


def end_with_parent(parent: int) -> None:
    """Let Linux end this process when its parent dies, and end it now if that has happened."""
    ctypes.CDLL(None).prctl(_PARENT_DIED, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
