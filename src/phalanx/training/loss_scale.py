"""The loss scale: a factor that keeps fp16 gradients between the smallest and the largest number of that type.

The loss is multiplied by it before the backward pass, the gradients' sums are divided by it afterwards. A power of
two, so both are exact. It is halved in a step whose gradients overflow, which changes no weight, and doubled after
2000 good ones. Reference: Micikevicius et al. 2018, "Mixed Precision Training", section 3.2.
"""

from __future__ import annotations

from dataclasses import dataclass

GOOD_STEPS = 2000
"""Steps without an overflow after which the scale doubles."""


@dataclass(frozen=True)
class LossScale:
    """The scale and `good`, the steps without an overflow since it changed. Both are part of a checkpoint."""

    scale: float = 2.0**16
    good: int = 0

    def divisor(self, tokens: int) -> float:
        """Return the divisor of the loss over `tokens` target tokens: their number, rounded up to a power of two so
        that its inverse is exact in fp16, over the scale."""
        return float(2 ** (tokens - 1).bit_length() / self.scale)

    def after(self, overflow: bool) -> LossScale:
        """Return the scale of the next step."""
        if overflow:
            return LossScale(self.scale / 2)
        return LossScale(self.scale * 2) if self.good + 1 == GOOD_STEPS else LossScale(self.scale, self.good + 1)
