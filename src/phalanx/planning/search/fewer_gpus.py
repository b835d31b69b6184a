"""The same training on fewer GPUs: days against money. Fewer GPUs take fewer GPU-hours, since they wait less, but
more days."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from phalanx.planning.search.column_pricing import Pricing
from phalanx.planning.search.planner import best_on
from phalanx.spec.strategy.spec import Strategy


@dataclass(frozen=True)
class Offer:
    """The fastest strategy on a number of GPUs."""

    gpus: int
    strategy: Strategy
    seconds: float
    """Seconds of a step."""

    @property
    def gpu_seconds(self) -> float:
        """GPU-seconds of a step."""
        return self.gpus * self.seconds


def offers(larger: Callable[[int], Pricing], most: int) -> list[Offer]:
    """Return the offers for `most` GPUs, a half, a quarter, ... if anything fits: the fastest first, each cheaper
    than all before it."""
    offered: list[Offer] = []
    n = most
    while n:
        best = best_on(larger(n), n)
        if best is not None:
            offered.append(Offer(n, best.strategy, best.seconds))
        n //= 2
    front: list[Offer] = []
    for offer in sorted(offered, key=lambda o: (o.seconds, o.gpus)):
        if not front or offer.gpu_seconds < front[-1].gpu_seconds:
            front.append(offer)
    return front
