"""A strategy with its price under a stack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from phalanx.cost.hardware.columns import Column
from phalanx.plan.search import space
from phalanx.plan.search.column_pricing import Pricing
from phalanx.spec.strategy.spec import Strategy

COMMUNICATION = ("tp", "cp", "ep", "dp", "transfers")


@dataclass(frozen=True)
class Priced:
    """One strategy's figures. `terms`: seconds of the step by term; `held`: bytes by what holds them; `bytes_`: what
    must be less than the device's usable ones."""

    strategy: Strategy
    seconds: float
    bytes_: float
    terms: dict[str, float]
    held: dict[str, float]
    usable: int

    @property
    def fits(self) -> bool:
        return self.bytes_ <= self.usable

    @property
    def communication(self) -> float:
        """Its share of the step, as far as nothing hides it."""
        return sum(self.terms.get(name, 0.0) for name in COMMUNICATION) / self.seconds


def price(pricing: Pricing, given: Sequence[Strategy]) -> list[Priced]:
    """Each strategy, term by term. Raises InputError for one that a search would not take."""
    if not given:
        return []
    rows = space.of(given)
    step, memory = pricing.step(rows), pricing.memory(rows)
    terms, held = each(step.terms, len(rows)), each(memory.terms, len(rows))
    reserved = np.broadcast_to(memory.reserved, len(rows))
    return [
        Priced(s, sum(terms[i].values()), float(reserved[i]), terms[i], held[i], pricing.usable)
        for i, s in enumerate(given)
    ]


def each(columns: Mapping[str, Column], count: int) -> list[dict[str, float]]:
    """Columns by name as the numbers of each row."""
    full = {name: np.broadcast_to(column, count) for name, column in columns.items()}
    return [{name: float(column[i]) for name, column in full.items()} for i in range(count)]
