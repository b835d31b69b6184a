"""What good figures are, and who says so: the one table that `explain` marks against and `lint` warns by."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """`good` is the bound, `excellent` a better one; `more`: whether more is better."""

    name: str
    good: float
    excellent: float
    more: bool
    source: str

    def mark(self, value: float) -> str:
        """excellent, good, or below target."""
        sign = 1 if self.more else -1
        if sign * value >= sign * self.excellent:
            return "excellent"
        return "good" if sign * value >= sign * self.good else "below target"


MFU = Target(
    "MFU",
    0.40,
    0.50,
    True,
    "large runs report 38-43 % (Grattafiori et al. 2024, table 4), 46 % (Chowdhery et al. 2022), 52 % (Narayanan et "
    "al. 2021)",
)
BUBBLE = Target(
    "bubble",
    0.20,
    0.10,
    False,
    "(P-1)/(M+P-1) is below 20 % from M = 4P on, the floor of Huang et al. 2019; interleaving halves it and better",
)
EXPOSED = Target(
    "exposed communication",
    0.20,
    0.10,
    False,
    "below it, halving all communication speeds the step up by less than 1.11",
)
OVERLAP = Target(
    "overlap of data parallelism",
    0.80,
    0.95,
    True,
    "gradients and parameters have a whole pass to hide behind (Li et al. 2020, Rajbhandari et al. 2020)",
)
IMBALANCE = Target("imbalance of stages", 0.05, 0.02, False, "every step waits for the slowest rank: lost as it is")
MICRO_BATCHES = 4
"""Per pipeline rank (Huang et al. 2019)."""
TOKENS = 1024
"""Of a micro-batch on a rank: below it matrix products of common widths fill less than the chip's processors."""
TARGETS = (MFU, BUBBLE, EXPOSED, OVERLAP, IMBALANCE)
