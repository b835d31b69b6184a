"""Processor time that a virtual machine wanted and its host gave to others: times taken meanwhile are not the
machine's own."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_STAT = Path("/proc/stat")
_STEAL = 8  # word of its first line, in clock ticks of all processors (man 5 proc_stat)
NOTED = 0.02
"""The share of a machine's processors from which it is said."""
LEAST = 3  # rounds in which less was stolen


def stolen_s() -> float:
    """Processor seconds since the machine began; 0 where nobody counts them."""
    try:
        return int(_STAT.read_text().split()[_STEAL]) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return 0.0


def stolen_share(stolen: float, seconds: float) -> float:
    """Of this machine's processors over some seconds."""
    return stolen / max(seconds, 1e-9) / (os.cpu_count() or 1)


@dataclass(frozen=True)
class Rounds:
    """Of what was timed several times: seconds, and the share of the machine's processors that were stolen
    meanwhile; of several machines the largest."""

    seconds: tuple[float, ...] = ()
    stolen: tuple[float, ...] = ()

    def __add__(self, more: Rounds) -> Rounds:
        return Rounds(self.seconds + more.seconds, self.stolen + more.stolen)

    @property
    def settled(self) -> bool:
        """Whether enough of them were the machine's own."""
        return sum(share <= NOTED for share in self.stolen) >= min(LEAST, len(self.stolen))

    @property
    def quiet(self) -> list[float]:
        """Seconds of those that were; or where they are too few of the least disturbed ones."""
        limit = max([NOTED, *sorted(self.stolen)[:LEAST]])
        return [s for s, share in zip(self.seconds, self.stolen, strict=True) if share <= limit]


@contextmanager
def noted(announce: Callable[[str], None]) -> Iterator[None]:
    """Say it where too much was taken meanwhile."""
    began, before = time.monotonic(), stolen_s()
    yield
    share = stolen_share(stolen_s() - before, time.monotonic() - began)
    if share >= NOTED:
        announce(
            f"note: this virtual machine's host gave {share:.0%} of its processors to others meanwhile; "
            "kernels may be measured too slow: measure again when it is quiet (phalanx measure)"
        )
