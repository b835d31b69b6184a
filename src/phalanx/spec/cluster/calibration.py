"""How much longer the parts of a step take on a user's own machines than predicted, from steps that were measured."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated

from phalanx.spec.ranges import Name, Natural, Range, require_ranges

Factor = Annotated[float, Range(0.1, 10)]
"""Seconds of a part, measured over predicted."""


@dataclass(frozen=True)
class Calibration:
    """Factors of seconds, by part of a step; 1: as predicted. Written by `phalanx calibrate`."""

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

    def __post_init__(self) -> None:
        require_ranges(self, "cluster.calibration")


PARTS = tuple(f.name for f in fields(Calibration) if f.default == 1.0)
"""The parts of a step that have a factor."""
