"""The loss scale: a factor that keeps fp16 gradients between the smallest and the largest number of that type.

The loss is multiplied by it before the backward pass, the gradients' sums are divided by it afterwards. A power of
two, so both are exact. It is halved in a step whose gradients overflow, which changes no weight, and doubled after
2000 good ones. Reference: Micikevicius et al. 2018, "Mixed Precision Training", section 3.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from phalanx.spec.ranges import Natural, Range, require_ranges

GOOD_STEPS = 2000
"""Steps without an overflow after which the scale doubles."""


@dataclass(frozen=True)
class LossScale:
    """The scale and `good`, the steps without an overflow since it changed. Both are part of a checkpoint."""

    scale: Annotated[float, Range(0, 2.0**200, above=True)] = 2.0**16
    good: Natural = 0

    def __post_init__(self) -> None:
        require_ranges(self, "loss_scale")

    def divisor(self, tokens: int) -> float:
        """Return the divisor of the loss over `tokens` target tokens: their number, rounded up to a power of two so
        that its inverse is exact in fp16, over the scale."""
        return float(2 ** (tokens - 1).bit_length() / self.scale)

    def after(self, overflow: bool) -> LossScale:
        """Return the scale of the next step."""
        if overflow:
            return LossScale(self.scale / 2)
        return LossScale(self.scale * 2) if self.good + 1 == GOOD_STEPS else LossScale(self.scale, self.good + 1)


@dataclass(frozen=True)
class Numerics:
    """The numerical state in a checkpoint's manifest: steps skipped so far, and the loss scale of fp16 runs."""

    skipped: Natural = 0
    loss_scale: LossScale | None = None

    def __post_init__(self) -> None:
        require_ranges(self, "checkpoint")
