"""The options of a stack that a search sets by itself: those that change neither what a step computes nor its number
types, so that a user loses nothing by them.

Strategies are found first, with every option as the stack's release has it; then options are set one after another,
whichever makes the fastest of them faster by the formulas, until none does; then the second pass prices the
candidates with them (plan/search/refine.py). How blocks are cut into chunks is no option here: see stage_lengths.py.
What a user set with --where stays; what stands in a program's code, where no configuration sets it, is left out.
Number types are offered (number_types.py); offloading to the host, adapters, documents, optimizers and multi-token
prediction are the user's to choose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from phalanx.plan.search.column_pricing import Pricing
from phalanx.plan.search.priced import price
from phalanx.spec.strategy.spec import Strategy

_CHANGES: tuple[dict[str, Any], ...] = (
    {"context": "all_gather"},
    {"cross_entropy": "fused"},
    {"cross_entropy": "linear"},
    {"tp_overlap": "userbuffers"},
    {"tp_overlap": "async"},
    {"dispatch": "deepep"},
    {"dispatch": "hybridep"},
    {"overlap_experts": "on"},
)
_GAIN = 0.002
"""Share of the step by which an option must shorten it to be set: less is not worth a line of configuration."""
_CANDIDATES = 6
"""Strategies that an option is tried with."""


def with_best_options(pricing: Pricing, strategies: Sequence[Strategy]) -> Pricing:
    """Return a question with the options of its stack that make the fastest of `strategies` faster.

    A question without a row, or whose stack has none of these options, is returned as it is."""
    row = pricing.row
    if row is None or not strategies:
        return pricing
    some = list(strategies[:_CANDIDATES])
    pinned = set(pricing.extra.changed())
    open_changes = [
        change
        for change in _CHANGES
        if not pinned & change.keys()
        and all(name in row.options and row.options[name].allows(value) for name, value in change.items())
        and not any(row.options[name].in_code for name in change)
    ]
    best, least = pricing, _least(pricing, some)
    while True:
        tried = [replace(best, extra=replace(best.extra, **change)) for change in open_changes if _new(best, change)]
        timed = [(_least(candidate, some), i) for i, candidate in enumerate(tried)]
        if not timed or min(timed)[0] > (1 - _GAIN) * least:
            return best
        least, chosen = min(timed)
        best = tried[chosen]


def _new(pricing: Pricing, change: dict[str, Any]) -> bool:
    """Whether a change concerns options that are not set yet."""
    return not pricing.extra.changed().keys() & change.keys()


def _least(pricing: Pricing, strategies: Sequence[Strategy]) -> float:
    """Return the shortest step of those that fit and that the stack runs with these options; infinity if none."""
    legal = [s for s in strategies if pricing.options.allows(s, s.accumulation(pricing.job))]
    if not legal:
        return float("inf")
    return min((p.seconds for p in price(pricing, legal) if p.fits), default=float("inf"))
