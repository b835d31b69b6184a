"""Target values for the figures of a training, with sources, by which `explain` rates them and `lint` warns."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """A figure, and the values that count as good and as excellent."""

    name: str
    good: float
    excellent: float
    more: bool
    """Whether larger values are better."""
    source: str

    def mark(self, value: float) -> str:
        """Rate a value: "excellent", "good" or "below target"."""
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
    "gradients and parameters have an entire pass to hide behind (Li et al. 2020, Rajbhandari et al. 2020)",
)
IMBALANCE = Target(
    "imbalance of stages", 0.05, 0.02, False, "every step waits for the slowest rank, so all of it is lost"
)
MICRO_BATCHES = 4
"""Micro-batches per pipeline rank above which the bubble is small (Huang et al. 2019)."""
TOKENS = 1024
"""Minimum tokens of a micro-batch on a rank: with fewer, matrix products of common widths do not fill the chip."""
TARGETS = (MFU, BUBBLE, EXPOSED, OVERLAP, IMBALANCE)
