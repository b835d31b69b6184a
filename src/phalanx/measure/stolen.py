"""Processor time that a virtual machine wanted and its host gave to others: times taken meanwhile are not the
machine's own."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_STAT = Path("/proc/stat")
_STEAL = 8  # word of its first line, in clock ticks of all processors (man 5 proc_stat)
NOTED = 0.02
"""The share of a machine's processors from which it is said."""


def stolen_s() -> float:
    """Processor seconds since the machine began; 0 where nobody counts them."""
    try:
        return int(_STAT.read_text().split()[_STEAL]) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return 0.0


def stolen_share(stolen: float, seconds: float) -> float:
    """Of this machine's processors over some seconds."""
    return stolen / max(seconds, 1e-9) / (os.cpu_count() or 1)


@contextmanager
def noted(announce: Callable[[str], None]) -> Iterator[None]:
    """Say it where too much was taken meanwhile."""
    began, before = time.monotonic(), stolen_s()
    yield
    share = stolen_share(stolen_s() - before, time.monotonic() - began)
    if share >= NOTED:
        announce(
            f"note: this virtual machine's host gave {share:.0%} of its processors to others meanwhile; "
            "measured times are too long: measure again when it is quiet (phalanx measure)"
        )
