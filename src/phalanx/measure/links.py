"""α and β of the links of each tier, and γ: from messages between pairs of ranks, and from adding.

Each pair exchanges n bytes in both directions at once, α + β n. First one pair alone: what a link gives one rank.
Then all pairs together, as many as a host has ranks: what they share. Of a pair alone the best of the rounds counts:
nothing else that a machine does makes a message faster. Together the median, of long messages: pairs that begin at
different moments leave each other the link.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Protocol

import numpy as np

from phalanx.measure.fit import Line, robust_line
from phalanx.spec.cluster.spec import Figure, Tier

SIZES = tuple(2**k for k in range(10, 25))  # 1 KiB .. 16 MiB
_ENDS = 6  # sizes that are short, or long
_SHARED = 0.8  # of what a rank gets alone; if together it is less, the pairs share a link


class Wire(Protocol):
    """What can be timed: of each method the seconds of every round."""

    def exchange(self, tier: str, size: int, together: bool) -> list[float]: ...

    def add(self, size: int) -> list[float]: ...


@dataclass(frozen=True)
class TierLines:
    """Of one tier: a pair alone, and all `pairs` of a host together (None where there is one)."""

    name: str
    pairs: int
    alone: Line
    together: Line | None
    points: tuple[tuple[int, float], ...]

    @property
    def uplink(self) -> float | None:
        """Bytes per second in one direction that all of a host share; None where each has its own."""
        if self.together is None or self.together.beta * _SHARED <= self.alone.beta:
            return None
        return self.pairs / self.together.beta

    def tier(self, ranks: int) -> Tier:
        line = self.alone
        low, high = line.beta_range
        how = f"exchanges of 1 KiB to 16 MiB between pairs; median error {line.residual:.1%}"
        if low:
            how += f"; 90 % range {1e-9 / high:.4g} to {1e-9 / low:.4g} GB/s"
        return Tier(
            name=self.name,
            ranks=ranks,
            latency_s=line.alpha,
            bandwidth_bytes_per_s_per_gpu_per_direction=1 / line.beta if line.beta else 1e12,
            origin="measured",
            source=how,
            uplink_bandwidth_bytes_per_s_per_direction=self.uplink,
        )


def measure_tier(wire: Wire, name: str, pairs: int) -> TierLines:
    """Fit the links of one tier; `pairs` of a host's ranks can use them together."""
    sizes = SIZES
    best = [min(wire.exchange(name, n, False)) for n in sizes]
    together = None
    if pairs > 1:
        long = sizes[-_ENDS:]
        together = robust_line(long, [median(wire.exchange(name, n, True)) for n in long])
    return TierLines(name, pairs, _link_line(sizes, best), together, tuple(zip(sizes, best, strict=True)))


def _link_line(sizes: tuple[int, ...], seconds: list[float]) -> Line:
    """β by long messages and α by short ones: between them links have buffers, which take a message in a burst."""
    n, t = np.array(sizes, dtype=np.float64), np.array(seconds)
    long = robust_line(n[-_ENDS:], t[-_ENDS:])
    rest = np.maximum(t - long.beta * n, 0.0)[:_ENDS]
    alpha, (low, high) = float(np.median(rest)), np.percentile(rest, [5, 95])
    residual = float(np.median(np.abs(alpha + long.beta * n - t) / t))
    return Line(alpha, long.beta, residual, (float(low), float(high)), long.beta_range)


def measure_gamma(wire: Wire) -> Figure:
    """γ: seconds per byte added to what is there; its intercept is what starting an operation takes."""
    line = robust_line(SIZES, [min(wire.add(n)) for n in SIZES])
    low, high = line.beta_range
    note = f"adding 1 KiB to 16 MiB; {line.alpha * 1e6:.3g} µs to begin; median error {line.residual:.1%}"
    return Figure("gamma", line.beta, "s/B", low, high, note)
