"""The second pass over what the first one chose: each strategy with its pipeline as it runs, and the neighbours of
the fastest for as long as one of them is faster.

The first pass prices bubbles by a formula for equal chunks, which flatters some schedules with few micro-batches; so
what it ranked first need not be the fastest, and what it ranked low may be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from phalanx.cost.analytic.flops import model_flops
from phalanx.plan import explore, makespan, reasons, space
from phalanx.plan.explore import FAMILIES, Found
from phalanx.plan.makespan import Run
from phalanx.plan.pricing import Pricing
from phalanx.plan.reasons import Priced
from phalanx.spec.strategy.spec import Strategy


@dataclass(frozen=True)
class Ranked:
    """A strategy, its pipeline as it runs; `mfu` of the peak in bf16."""

    family: str
    priced: Priced
    run: Run
    mfu: float

    @property
    def strategy(self) -> Strategy:
        return self.priced.strategy

    @property
    def seconds(self) -> float:
        return self.priced.seconds


class Second:
    """Prices each strategy of a question once."""

    def __init__(self, pricing: Pricing) -> None:
        self.pricing = pricing
        self._known: dict[Strategy, Ranked] = {}

    def of(self, given: Sequence[Strategy]) -> list[Ranked]:
        """Each of them."""
        new = [s for s in dict.fromkeys(given) if s not in self._known]
        if new:
            rows, peak = space.of(new), float(self.pricing.system.peak_bf16)
            flops = float(np.max(model_flops(self.pricing.shape, self.pricing.layout(rows))))  # of all the same
            for kind, (p, run) in zip(explore.family(rows), makespan.priced(self.pricing, new), strict=True):
                mfu = flops / (p.seconds * p.strategy.world * peak)
                self._known[p.strategy] = Ranked(FAMILIES[kind], p, run, mfu)
        return [self._known[s] for s in given]

    def descended(self, given: Sequence[Strategy]) -> list[Ranked]:
        """Those that fit of these, and of the neighbours of the fastest for as long as one of them is faster: fastest
        first."""
        every = {s: r for s, r in zip(given, self.of(given), strict=True) if r.priced.fits}
        looked: Strategy | None = None
        while (best := min(every, key=lambda s: every[s].seconds)) != looked:
            looked = best
            near = [s for _, s in reasons.neighbours(best, self.pricing)]
            every |= {s: r for s, r in zip(near, self.of(near), strict=True) if r.priced.fits}
        return sorted(every.values(), key=lambda r: r.seconds)


def best_of_each(found: Found) -> list[int]:
    """By the first pass: the row of each family that has any."""
    first: dict[int, int] = {}
    kinds = found.family[found.order]
    for kind in range(len(FAMILIES)):
        if np.any(kinds == kind):
            first[kind] = int(found.order[np.argmax(kinds == kind)])
    return list(first.values())
