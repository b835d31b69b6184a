"""What a run measured, compared with its prediction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from phalanx.answers.encode import plain


@dataclass(frozen=True)
class MeasuredQuantity:
    """One quantity, predicted and measured."""

    name: str
    predicted: float
    measured: float | None
    """None if it was not measured."""
    text: str
    """How to write the values: "s", "memory" or "bytes"."""

    @property
    def error(self) -> float | None:
        """Relative error of the prediction; None if nothing was measured."""
        if self.measured is None:
            return None
        if self.measured == 0:
            return 0.0 if self.predicted == 0 else float("inf")
        return self.predicted / self.measured - 1


@plain.register
def _(value: MeasuredQuantity) -> dict[str, Any]:
    numbers = {"predicted": value.predicted, "measured": value.measured, "error": value.error}
    return {"name": value.name, **numbers}
