"""The same question under every stack that has a row: what each would run, and how long its step takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from phalanx.plan.search.column_pricing import Pricing
from phalanx.plan.search.planner import best_on
from phalanx.plan.search.priced import PricedStrategy
from phalanx.spec.errors import InputError
from phalanx.stacks.registry import ROWS
from phalanx.stacks.stack import Stack


@dataclass(frozen=True)
class OfStack:
    """A stack's best strategy, its step in seconds and its MFU; or why it has none."""

    row: Stack
    best: PricedStrategy | None = None
    seconds: float = float("inf")
    mfu: float = 0.0
    reason: str = ""


def compare(pricing: Callable[[str], Pricing], gpus: int) -> list[OfStack]:
    """Return every stack's best strategy on so many GPUs, the fastest first. `pricing`: the question under a
    stack."""
    found = [_of(row, pricing(name), gpus) for name, row in ROWS.items()]
    return sorted(found, key=lambda f: f.seconds)


def _of(row: Stack, pricing: Pricing, gpus: int) -> OfStack:
    for name, value in pricing.extra.changed().items():
        if name not in row.options or not row.options[name].allows(value):
            return OfStack(row, reason=f"has no {name}={value}")
    try:
        found = best_on(replace(pricing, stack=row.name), gpus)
    except InputError as error:
        return OfStack(row, reason=error.reason)
    if found is None:
        return OfStack(row, reason="nothing fits, or nothing is within the conditions")
    best, seconds, mfu = found
    return OfStack(row, best, seconds, mfu)
