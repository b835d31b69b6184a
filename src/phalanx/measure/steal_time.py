"""Processor time missing from a measurement: given to others by the host of a virtual machine (steal time), or used
by other programs of the machine. Times measured meanwhile say little about the machine.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_STAT = Path("/proc/stat")
_STEAL = 8  # index of the word in its first line: clock ticks of all processors (man 5 proc_stat)
_BUSY = (1, 2, 3, 6, 7)  # user, nice, system, interrupts
NOTABLE_SHARE = 0.02
"""The stolen share of a machine's processors above which a measurement counts as disturbed."""
_CROWDED_SHARE = 0.1  # of the processors that a measurement needs, kept busy by other programs: too many
LEAST_ROUNDS = 3  # undisturbed ones that a measurement needs


def stolen_s() -> float:
    """Return the processor seconds stolen since the machine started; 0 if the system does not count them."""
    try:
        return int(_STAT.read_text().split()[_STEAL]) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return 0.0


def stolen_share(stolen: float, seconds: float) -> float:
    """Return the share of this machine's processor time in `seconds` that `stolen` processor seconds are."""
    return stolen / max(seconds, 1e-9) / (os.cpu_count() or 1)


@dataclass(frozen=True)
class TimedRounds:
    """The rounds of a measurement: the seconds of each, and the share of the machine's processors stolen meanwhile
    (the largest share, if several machines took part)."""

    seconds: tuple[float, ...] = ()
    stolen: tuple[float, ...] = ()

    def __add__(self, more: TimedRounds) -> TimedRounds:
        return TimedRounds(self.seconds + more.seconds, self.stolen + more.stolen)

    @property
    def settled(self) -> bool:
        """Whether enough rounds were undisturbed."""
        return sum(share <= NOTABLE_SHARE for share in self.stolen) >= min(LEAST_ROUNDS, len(self.stolen))

    @property
    def quiet(self) -> list[float]:
        """The seconds of the undisturbed rounds or, if they are too few, of the least disturbed ones."""
        limit = max([NOTABLE_SHARE, *sorted(self.stolen)[:LEAST_ROUNDS]])
        return [s for s, share in zip(self.seconds, self.stolen, strict=True) if share <= limit]


def others_s() -> float:
    """Return the processor seconds of all programs but this one and the children it has waited for; 0 if the system
    does not count them."""
    try:
        words = _STAT.read_text().split()
        busy = sum(int(words[i]) for i in _BUSY) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return 0.0
    return busy - sum(os.times()[:4])


def is_crowded(taken: float, needed: int) -> bool:
    """Whether other programs, which keep `taken` processors busy, disturb a measurement that needs `needed`."""
    return taken - max((os.cpu_count() or 1) - needed, 0) >= _CROWDED_SHARE * needed


def quiet_now(needed: int, seconds: float = 0.5) -> bool:
    """Watch the machine for `seconds`; return whether a measurement on `needed` processors would be undisturbed."""
    stolen, others = stolen_s(), others_s()
    time.sleep(seconds)
    disturbed = stolen_share(stolen_s() - stolen, seconds) >= NOTABLE_SHARE
    return not disturbed and not is_crowded((others_s() - others) / seconds, needed)


class Neighbours:
    """Other programs on the machine since this object was made. Each of the `ranks` ranks, of `threads` threads,
    holds one, and assumes that the other ranks use as much processor time as itself."""

    def __init__(self, ranks: int, threads: int) -> None:
        self.ranks, self.needed = ranks, ranks * threads
        self.start, self.others, self.own = time.monotonic(), others_s(), time.process_time()

    @property
    def crowd(self) -> bool:
        """Whether they kept processors busy that the ranks needed."""
        of_ranks = (self.ranks - 1) * (time.process_time() - self.own)
        seconds = max(time.monotonic() - self.start, 1e-9)
        return is_crowded((others_s() - self.others - of_ranks) / seconds, self.needed)


@contextmanager
def disturbances(announce: Callable[[str], None], needed: int) -> Iterator[list[str]]:
    """Announce at the end if a measurement on `needed` processors lacked processor time inside this context. Yields
    the list of reasons, which is filled then."""
    start, before, others = time.monotonic(), stolen_s(), others_s()
    reasons: list[str] = []
    yield reasons
    seconds = max(time.monotonic() - start, 1e-9)
    share = stolen_share(stolen_s() - before, seconds)
    again = "kernels may be measured too slow: measure again when it is quiet (phalanx measure)"
    if share >= NOTABLE_SHARE:
        reasons.append(f"this virtual machine's host gave {share:.0%} of its processors to others")
    taken = (others_s() - others) / seconds
    if is_crowded(taken, needed):
        reasons.append(f"other programs kept {taken:.1f} of {os.cpu_count() or 1} processors busy")
    for reason in reasons:
        announce(f"note: {reason} meanwhile; {again}")
