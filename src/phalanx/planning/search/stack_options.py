"""Options of a stack that a search sets by itself: those that change neither the results of a step nor its number
types, and so have no downside for the user.

Strategies are found first, with the release's default for every option; then options are set one after another,
whichever makes the fastest of them faster by the formulas, until none does; then the second pass prices the
candidates with them (planning/search/refine.py). How blocks are cut into chunks is no option here: see
stage_lengths.py. Options that a user fixed (`where`) stay; options hard-coded in a program, which no configuration
sets, are left out. Number types are offered (number_types.py); offloading to the host, adapters, documents,
optimizers and multi-token prediction are left to the user.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from phalanx.planning.search.column_pricing import Pricing
from phalanx.planning.search.priced import price_under
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

    A question without a row, or whose stack has none of these options, is returned unchanged."""
    row = pricing.row
    if row is None or not strategies:
        return pricing
    some = list(strategies[:_CANDIDATES])
    # Gathering keys has no effect where heads are exchanged, often the faster choice without it.
    some = list(dict.fromkeys([*some, *(replace(s, ulysses=1) for s in some)]))
    pinned = set(pricing.extra.changed())
    open_changes = [
        change
        for change in _CHANGES
        if not pinned & change.keys()
        and all(name in row.options and row.options[name].allows(value) for name, value in change.items())
        and not any(row.options[name].in_code for name in change)
    ]
    best, least = pricing, np.inf
    while True:
        tried = [best, *(replace(best, extra=replace(best.extra, **c)) for c in open_changes if _new(best, c))]
        if len(tried) == 1:
            return best
        if best is pricing:
            least, *timed = _least(tried, some)
        else:
            timed = _least(tried[1:], some)
        if min(timed) > (1 - _GAIN) * least:
            return best
        least, best = min(timed), tried[1 + timed.index(min(timed))]


def _new(pricing: Pricing, change: dict[str, Any]) -> bool:
    """Whether a change concerns options that are not set yet."""
    return not pricing.extra.changed().keys() & change.keys()


def _least(each: Sequence[Pricing], strategies: Sequence[Strategy]) -> list[float]:
    """Return, for each question, the shortest step of the fitting strategies that the stack runs with its options;
    infinity if there is none."""
    shape = (len(each), len(strategies))
    terms, reserved = price_under(each, strategies)
    usable = np.array([[pricing.usable] for pricing in each])
    seconds = np.where(reserved.reshape(shape) <= usable, np.array(sum(terms.values())).reshape(shape), np.inf)
    least = []
    for pricing, row in zip(each, seconds, strict=True):
        fastest_first = (i for i in np.argsort(row, kind="stable").tolist() if row[i] < np.inf)
        allowed = (i for i in fastest_first if _allows(pricing, strategies[i]))
        least.append(next((float(row[i]) for i in allowed), np.inf))
    return least


def _allows(pricing: Pricing, s: Strategy) -> bool:
    return pricing.options.allows(s, s.accumulation(pricing.job))
