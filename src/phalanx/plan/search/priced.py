"""The price of a strategy under a software stack: step time by term, memory by what occupies it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from phalanx.cost.analytic.memory import memory as memory_of
from phalanx.cost.hardware.columns import Column
from phalanx.plan.search import space
from phalanx.plan.search.column_pricing import Pricing
from phalanx.spec.strategy.spec import Strategy

COMMUNICATION = ("tp", "cp", "ep", "dp", "transfers")
"""The terms of a step that are exposed communication."""


@dataclass(frozen=True)
class PricedStrategy:
    """A strategy with its step time and memory."""

    strategy: Strategy
    seconds: float
    """Step time, the sum of `terms`."""
    bytes_: float
    """Reserved memory of the fullest rank; the strategy fits if it does not exceed `usable`."""
    terms: dict[str, float]
    """Seconds of the step by term."""
    memory_terms: dict[str, float]
    """Bytes by what occupies them: parameters, gradients, activations, ..."""
    usable: int
    """Usable bytes of the device."""

    @property
    def fits(self) -> bool:
        """Whether the strategy fits the device's usable memory."""
        return self.bytes_ <= self.usable

    @property
    def communication(self) -> float:
        """Exposed communication as a share of the step."""
        return sum(self.terms.get(name, 0.0) for name in COMMUNICATION) / self.seconds


def price(pricing: Pricing, strategies: Sequence[Strategy]) -> list[PricedStrategy]:
    """Price strategies term by term. Raises InputError for a `recompute` or `order` that is never searched."""
    if not strategies:
        return []
    rows = space.of(strategies)
    step = pricing.step(rows)
    memory = memory_of(pricing.shape, pricing.layout(rows), pricing.profile, step.ahead)
    terms, held = _per_row(step.terms, len(rows)), _per_row(memory.terms, len(rows))
    reserved = np.broadcast_to(memory.reserved, len(rows))
    return [
        PricedStrategy(s, sum(terms[i].values()), float(reserved[i]), terms[i], held[i], pricing.usable)
        for i, s in enumerate(strategies)
    ]


def _per_row(columns: Mapping[str, Column], count: int) -> list[dict[str, float]]:
    """Turn columns by name into one dict per row."""
    full = {name: np.broadcast_to(column, count) for name, column in columns.items()}
    return [{name: float(column[i]) for name, column in full.items()} for i in range(count)]
