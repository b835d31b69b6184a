"""Cost of a user's conditions: the step with them over the step without, all together and one by one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from phalanx.planning.search.column_pricing import Pricing
from phalanx.planning.search.limits import without
from phalanx.planning.search.planner import best_on
from phalanx.spec.strategy.spec import Strategy

_PATIENCE_S = 4.0
"""Seconds after which no further condition is left out separately."""


@dataclass(frozen=True)
class ConditionCost:
    """The price of some conditions. `share`: the step with them over the step without, minus 1; None if nothing fits
    without them either, or time ran out."""

    text: str
    share: float | None
    without: Strategy | None = None
    """The best strategy without them."""
    seconds: float | None = None
    """Its step time, seconds."""


def condition_costs(
    larger: Callable[[int], Pricing], gpus: int, seconds: float
) -> tuple[ConditionCost, tuple[ConditionCost, ...]]:
    """Return the cost of all conditions of a question with a best step of `seconds`, and of each on top of the
    others."""
    pricing = larger(gpus)
    texts = list(dict.fromkeys(c.text for c in pricing.wanted))
    start = time.perf_counter()
    whole = _cost(replace(pricing, wanted=()), gpus, ", ".join(texts), seconds)
    each = []
    for text in texts if len(texts) > 1 else ():
        if time.perf_counter() - start > _PATIENCE_S:
            each.append(ConditionCost(text, None))
            continue
        each.append(_cost(replace(pricing, wanted=without(pricing.wanted, text)), gpus, text, seconds))
    return whole, tuple(each)


def _cost(pricing: Pricing, gpus: int, text: str, seconds: float) -> ConditionCost:
    best = best_on(pricing, gpus)
    if best is None:
        return ConditionCost(text, None)
    return ConditionCost(text, max(seconds / best.seconds - 1, 0.0), best.strategy, best.seconds)
