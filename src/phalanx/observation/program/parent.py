"""Processes that end with their parent."""

import ctypes
import os
import signal

_PARENT_DIED = 1  # prctl's PR_SET_PDEATHSIG


def end_with_parent(parent: int) -> None:
    """Let Linux kill this process when its parent dies; end it now if the parent is dead already."""
    ctypes.CDLL(None).prctl(_PARENT_DIED, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
