"""Numbers of training tokens: parsing, writing, and the goal of a training."""

import re
from dataclasses import dataclass

from phalanx.spec.errors import InputError
from phalanx.spec.model.spec import ModelSpec

OPTIMAL = 20
"""Compute-optimal tokens per parameter (Hoffmann et al. 2022, table 3)."""
_SCALE = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


@dataclass(frozen=True)
class Goal:
    """A training of a number of tokens on a number of GPUs."""

    tokens: float
    gpus: int


def tokens(text: str, model: ModelSpec) -> float:
    """Parse a number of tokens: `300B`, `2e12`, `2,000,000,000,000`, or `optimal`, 20 per active parameter. Raises
    InputError."""
    if text.strip().lower() == "optimal":
        return float(OPTIMAL * model.active_count)
    number = large_number(text)
    if number is None:
        raise InputError("tokens", text, "is not a number of tokens", "write 300B, 1.4T, 2e12, or optimal")
    return number


def short_number(number: float) -> str:
    """Write a large number as `tokens` reads it: 300B, 1.4T."""
    scales = (item for item in reversed(_SCALE.items()) if item[1] <= number)
    name, scale = next(scales, ("", 1.0))
    return f"{number / scale:.4g}{name}"


def large_number(text: str) -> float | None:
    """Parse `300B`, `1.4T`, `2e12`, `2,000,000,000,000`; None for anything else, and unless positive and finite."""
    match = re.fullmatch(
        r"(\d{1,3}(?:[,_]\d{3})+|\d+(?:\.\d+)?(?:e\+?\d{1,3})?)\s*([KMBT]?)", text.strip(), re.IGNORECASE
    )
    number = float(re.sub("[,_]", "", match[1])) * _SCALE[match[2].upper()] if match else 0.0
    return number if 0 < number < float("inf") else None
