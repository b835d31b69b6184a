"""How much longer the parts of a step take on a user's own machines than predicted, from steps that were measured."""

from dataclasses import dataclass, fields
from typing import Annotated

from phalanx.spec.ranges import Name, Natural, Range, require_ranges

Factor = Annotated[float, Range(0.1, 10)]
"""Seconds of a part, measured over predicted."""


@dataclass(frozen=True)
class Calibration:
    """Factors of seconds, by part of a step; 1: as predicted. Written by `phalanx measure steps`."""

    products: Factor = 1.0
    """Matrix products, in every number format."""
    attention: Factor = 1.0
    """Attention's core."""
    memory: Factor = 1.0
    """Work bound by memory: norms, activations, permutations, the optimizer."""
    inside: Factor = 1.0
    """Communication inside a node."""
    between: Factor = 1.0
    """Communication between nodes."""
    host: Factor = 1.0
    """Launches by the CPU."""
    stack: Name = ""
    """The software stack whose steps were measured."""
    steps: Natural = 0
    """Number of measured configurations."""
    off: Annotated[float, Range(0, 1e9)] = 0.0
    """Median error of these steps' predictions without the factors, in per cent."""
    remains: Annotated[float, Range(0, 1e9)] = 0.0
    """The same with factors fitted to the other steps (leave one out), or to the only step."""

    def __post_init__(self) -> None:
        require_ranges(self, "cluster.calibration")


def in_words(by: Calibration) -> str:
    """Return a phrase: how many measured steps of which stack calibrate a price, and its error without and with."""
    better = f" (off {by.off:.1f} % without, {by.remains:.1f} % with them)" if by.off else ""
    return f"calibrated with {by.steps} measured steps of {by.stack}{better}"


PARTS = tuple(f.name for f in fields(Calibration) if f.default == 1.0)
"""The parts of a step that have a factor."""
