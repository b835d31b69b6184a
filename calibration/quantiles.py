"""Quantiles of how far measured figures of servers lie from predicted ones: r = measured / predicted.

The 10 % and 90 % quantiles q bound a prediction's range [q10 s, q90 s]. Rows of one source err alike, so that a
family of n rows weighs sqrt(n). What a range holds is examined on families that it has not seen.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from phalanx.validate.intervals import SHARE

HELD = 0.75
"""Share of the runs of a family that the range of the others must hold."""


@dataclass(frozen=True)
class Ratio:
    """Measured over predicted time of one run."""

    kind: str
    family: str
    value: float


def quantiles(of: Sequence[Ratio], share: float) -> tuple[float, float]:
    """Return the quantiles that bound a share of the ratios, each weighing 1 / sqrt(ratios of its family)."""
    count: dict[str, int] = defaultdict(int)
    for r in of:
        count[r.family] += 1
    ordered = sorted(of, key=lambda r: r.value)
    weights = np.array([count[r.family] ** -0.5 for r in ordered])
    places = (np.cumsum(weights) - weights / 2) / weights.sum()
    low, high = np.exp(np.interp([(1 - share) / 2, (1 + share) / 2], places, np.log([r.value for r in ordered])))
    return float(low), float(high)


def held(of: Sequence[Ratio], share: float) -> float:
    """Return the mean share of a family's ratios between the quantiles of the other families'."""
    families = sorted({r.family for r in of})
    shares = []
    for name in families:
        low, high = quantiles([r for r in of if r.family != name], share)
        shares.append(np.mean([low <= r.value <= high for r in of if r.family == name]))
    return float(np.mean(shares))


def fitted(of: Sequence[Ratio]) -> tuple[float, float, float]:
    """Return the quantiles of a kind's interval, and what they hold of families left out (nan of one family): those
    of `SHARE`, or of the least more that holds `HELD`. Few families say little about the next one."""
    if len({r.family for r in of}) == 1:
        return *quantiles(of, SHARE), float("nan")
    shares = np.arange(SHARE, 1.0, 0.005)
    holds = [held(of, share) for share in shares]
    enough = [i for i, h in enumerate(holds) if h >= HELD]
    best = enough[0] if enough else int(np.argmax(holds))
    return *quantiles(of, float(shares[best])), holds[best]
