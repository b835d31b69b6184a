"""An answer: published figures of failures and checkpoints with their predictions."""

from dataclasses import dataclass
from typing import Any

from phalanx.answers.answer import Answer


@dataclass(frozen=True)
class ScoredFigure:
    """One published figure with its prediction."""

    row: str
    family: str
    about: str
    quantity: str
    published: float
    predicted: float
    bound: bool
    """Whether the source gives a lower bound."""
    error: float
    """Relative error; for shares the difference, predicted less published; 0 if a bound holds."""
    why: str
    """What was taken from presets, and what would explain the error."""


@dataclass(frozen=True)
class RestartPair:
    """Two jobs of a source that differ in how they restart."""

    family: str
    slow: str
    fast: str
    published: tuple[float, float]
    predicted: tuple[float, float]


@dataclass(frozen=True)
class GoodputScores(Answer):
    """Figures scored, pairs, errors by quantity, and the rows without a figure that can be predicted."""

    figures: tuple[ScoredFigure, ...]
    pairs: tuple[RestartPair, ...]
    errors: dict[str, dict[str, Any]]
    left_out: dict[str, int]
