"""The price of a strategy under a software stack: step time by term, memory by kind of data; and the reason why it is
not the best: the memory it lacks, or the term that costs more.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import zip_longest
from typing import Any

import numpy as np

from phalanx.cost.analytic.memory import memory as memory_of
from phalanx.cost.analytic.profile import Profile
from phalanx.cost.analytic.step import TERM_NAMES, Step
from phalanx.cost.analytic.step import step as step_of
from phalanx.cost.hardware.columns import Column
from phalanx.cost.ledger.rank_layout import LayoutColumns
from phalanx.planning.search import strategy_columns
from phalanx.planning.search.column_pricing import Floats, Pricing
from phalanx.schedule.pipeline.given_layout import Blocks, ends_of
from phalanx.spec.cluster.spec import GIB
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy

COMMUNICATION = ("tp", "cp", "ep", "dp", "outer", "transfers")
"""The terms of a step that are exposed communication."""


@dataclass(frozen=True)
class PricedStrategy:
    """A strategy with its step time and memory."""

    strategy: Strategy
    seconds: float
    """Step time, the sum of `terms`."""
    bytes_: float
    """Reserved bytes on the fullest rank; the strategy fits if they do not exceed `usable`."""
    terms: dict[str, float]
    """Seconds of the step by term."""
    memory_terms: dict[str, float]
    """Bytes by kind of data: parameters, gradients, activations, ..."""
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
    """Return the prices of strategies, in their order. Raises InputError for a `recompute` or `order` that is never
    searched."""
    return price_with_step(pricing, strategies)[0] if strategies else []


def price_with_step(
    pricing: Pricing, strategies: Sequence[Strategy], cuts: Sequence[Blocks | None] = ()
) -> tuple[list[PricedStrategy], Step]:
    """Return the prices of strategies, of which there must be at least one, and their steps as columns of one row
    each. `cuts`: as for `layout_of`."""
    how = layout_of(pricing, strategies, cuts)
    step = step_of(pricing.shape, how, pricing.system, pricing.profile)
    memory = memory_of(pricing.shape, how, pricing.profile, step.ahead)
    count = len(strategies)
    terms, held = _per_row(step.terms, count), _per_row(memory.terms, count)
    reserved = np.broadcast_to(memory.reserved, count)
    priced = [
        PricedStrategy(s, sum(terms[i].values()), float(reserved[i]), terms[i], held[i], pricing.usable)
        for i, s in enumerate(strategies)
    ]
    return priced, step


def price_under_each(
    each: Sequence[Pricing], strategies: Sequence[Strategy], cuts: Sequence[Blocks | None] = ()
) -> tuple[dict[str, Floats], Floats]:
    """Price strategies under each of several questions that differ only in the constants of their stacks, in one
    call. Return the seconds of a step by term, and the reserved bytes, each of (questions x strategies,). `cuts`: as
    for `layout_of`."""
    pricing, rows = each[0], len(each) * len(strategies)
    everything = [*strategies] * len(each)
    by = _join_profiles([one.profile for one in each], len(strategies))
    how = layout_of(pricing, everything, [*cuts] * len(each))
    step = step_of(pricing.shape, how, pricing.system, by)
    reserved = np.broadcast_to(memory_of(pricing.shape, how, by, step.ahead).reserved, rows)
    return {name: np.broadcast_to(term, rows) for name, term in step.terms.items()}, reserved


def _join_profiles(profiles: Sequence[Profile], each: int) -> Profile:
    """Join the constants of several profiles into columns that repeat each profile's value `each` times; constants
    equal in all profiles stay numbers."""
    changes: dict[str, Any] = {}
    for f in fields(Profile):
        values = [getattr(p, f.name) for p in profiles]
        if any(isinstance(v, float) and v != values[0] for v in values):
            changes[f.name] = np.repeat(np.array(values, dtype=float), each)
    return replace(profiles[0], **changes)


def layout_of(pricing: Pricing, strategies: Sequence[Strategy], cuts: Sequence[Blocks | None] = ()) -> LayoutColumns:
    """Translate strategies into the columns that the formulas read, including the blocks of the first, the fullest
    and the last pipeline rank if a strategy's `layers` lists blocks, or `cuts` does: for each strategy the blocks of
    each chunk, or None."""
    even = pricing.layout(strategy_columns.columns_of(strategies))
    if all(s.layers == "auto" for s in strategies) and not any(cuts):
        return even
    layers = pricing.model.layers + pricing.extra.mtp
    ends = [ends_of(s, pricing.extra, layers, cut) for s, cut in zip_longest(strategies, cuts)]
    first, most, last, place = np.array(ends, dtype=float).T
    return replace(even, first_blocks=first, most_blocks=most, last_blocks=last, most_place=place)


def _per_row(columns: Mapping[str, Column], count: int) -> list[dict[str, float]]:
    """Turn columns by name into one dict per row."""
    full = {name: np.broadcast_to(column, count) for name, column in columns.items()}
    return [{name: float(column[i]) for name, column in full.items()} for i in range(count)]


def why_not(p: PricedStrategy, best: PricedStrategy | None, pricing: Pricing) -> str:
    """Return the reason, with numbers, why `p` is not the best strategy: its memory if it does not fit, else the term
    that grew most. `best` may be None only if `p` does not fit."""
    if not p.fits:
        name, most = max(p.memory_terms.items(), key=lambda item: item[1])
        free = f" ({pricing.allocatable / GIB:.1f} less {pricing.headroom:.0%})" if pricing.headroom else ""
        return f"needs {p.bytes_ / GIB:.1f} of {p.usable / GIB:.1f} GiB{free}, {most / GIB:.1f} of them {name}"
    assert best is not None
    slower = p.seconds / best.seconds - 1
    grown = {name: p.terms[name] - best.terms.get(name, 0.0) for name in p.terms}
    worst = max(grown, key=lambda name: grown[name])
    leaves = _wider_than_node(p.strategy, pricing)
    if worst in COMMUNICATION and leaves:
        return f"{slower:+.1%}: {leaves}: {p.communication:.0%} of the step is communication"
    here, instead = _seconds(p.terms[worst]), _seconds(best.terms[worst])
    return f"{slower:+.1%}: {TERM_NAMES.get(worst, worst)}: {here} instead of {instead}"


def _seconds(s: float) -> str:
    return f"{s:.2f} s" if s >= 1 else f"{s * 1e3:.0f} ms"


def _wider_than_node(s: Strategy, pricing: Pricing) -> str:
    """Return, in words, an axis with communication in every layer whose groups span nodes; "" if there is none."""
    node = pricing.cluster.ranks_per_node
    grid = mesh(s)
    for axis, degree in (("tp", s.tp), ("ep", s.ep), ("cp", s.cp)):
        if degree > 1 and not grid.within(axis, node):
            return f"{axis}={degree} leaves the node"
    return ""
