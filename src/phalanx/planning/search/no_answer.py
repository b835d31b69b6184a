"""Reasons why a question has no answer, and remedies: one option fewer, another number of GPUs."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from phalanx.frameworks.registry import facts
from phalanx.frameworks.stack import Refusal
from phalanx.planning.search import branch_and_bound, priced, space
from phalanx.planning.search.branch_and_bound import FAMILIES, Exploration
from phalanx.planning.search.column_pricing import Pricing
from phalanx.planning.search.priced import PricedStrategy
from phalanx.planning.search.strategy_columns import Options, Strategies
from phalanx.spec.cluster.spec import GIB
from phalanx.spec.errors import InputError
from phalanx.spec.strategy.spec import Strategy, format_field
from phalanx.spec.strategy.stack_options import DEFAULTS, StackOptions
from phalanx.spec.strategy.zero_levels import ZERO_LEVELS

_NEAR = 64
"""Number of smaller GPU counts to try for the hint if the batch cannot be split over all GPUs."""


def nothing_legal(error: InputError, pricing: Pricing, gpus: int) -> InputError:
    """Return the error for a question without a legal strategy: `error`, or one about the stack's option that rules
    all out; an error about `gpus` names the next smaller number with a strategy."""
    if error.field in ("gpus", "where"):
        error = _option_to_blame(error, pricing, gpus) or error
    for n in range(gpus - 1, max(gpus - _NEAR, 0), -1) if error.field == "gpus" else ():
        try:
            space.cores(pricing.model, pricing.job, n, pricing.options)
        except InputError:
            continue
        return InputError(error.field, error.value, error.reason, f"use {n}, or another batch")
    return error


def _option_to_blame(error: InputError, pricing: Pricing, gpus: int) -> InputError | None:
    """Return an error about the option without which a strategy exists, with the stack's reason; None if no single
    option is to blame."""
    row, options = pricing.row, pricing.extra
    if row is None:
        return None
    for name, value in options.changed().items():
        default: dict[str, Any] = {name: DEFAULTS[name]}
        without = replace(pricing, extra=replace(options, **default))
        try:
            explored = branch_and_bound.explore(without, gpus, without.options, keep=1)
        except InputError:
            continue
        if not len(explored.rows):
            continue
        s = explored.rows.strategy(int(explored.order[0]))
        refusal = row.refusal(s, options, facts(pricing.model, pricing.job, s))
        wanted = f" as {error.value!r} asks" if error.field == "where" else ""
        says = f"; to {s} it says: {refusal.reason} ({refusal.source})" if refusal else ""
        reason = f"leaves {row.title} no strategy over {gpus} ranks{wanted}{says}"
        return InputError("options", f"{name}={value}", reason, "leave it out")
    return None


def misfits(pricing: Pricing, cores: Strategies, has: set[str], options: Options) -> list[tuple[PricedStrategy, str]]:
    """Return (price, family) of the strategy of least memory with cp = micro_batch = 1, if it does not fit, of each
    family not in `has`."""
    missing = [kind for kind, name in enumerate(FAMILIES) if name not in has]
    rows = cores.take((cores.cp == 1) & (cores.micro_batch == 1))
    rows = rows.take(branch_and_bound.may_become(rows, missing))
    rows = space.sharding(space.recomputations(rows, pricing.model, pricing.job, options), pricing.job, options)
    rows = rows.take(np.isin(branch_and_bound.family(rows), missing))
    kinds, bytes_ = branch_and_bound.family(rows), pricing.bytes_(rows)
    smallest: dict[str, int] = {}
    for kind in missing:
        members = np.flatnonzero(kinds == kind)
        if not len(members):
            continue
        least = int(members[np.argmin(bytes_[members])])
        if bytes_[least] > pricing.usable:
            smallest[FAMILIES[kind]] = least
    prices = priced.price(pricing, [rows.strategy(row) for row in smallest.values()])
    return list(zip(prices, smallest, strict=True))


def lacks_operators(pricing: Pricing) -> Refusal | None:
    """Return why the stack cannot run the model with any strategy; None if it has all operators."""
    row = pricing.row
    refusal = None if row is None else row.refusal(Strategy(), pricing.extra, facts(pricing.model))
    return refusal if refusal and refusal.field == "pattern" else None


def nothing_fits(
    pricing: Pricing, explored: Exploration, larger: Callable[[int], Pricing], gpus: int, options: Options
) -> InputError:
    """Return the error for a question whose legal strategies need more memory than a device has: the smallest of
    them, its needs, and the fewest GPUs that suffice."""
    each = [p for p, _ in misfits(pricing, explored.cores, set(), options)]
    smallest = min(each, key=lambda p: p.bytes_, default=None)
    needs = f": {smallest.strategy} {priced.why_not(smallest, None, pricing)}" if smallest else ""
    enough = least_ranks(larger, gpus, pricing.cluster.ranks_per_node, options)
    device = f"{pricing.cluster.device.name}, {pricing.cluster.device.usable_bytes / GIB:.1f} GiB each"
    remedy = f"{enough} of them would do ({device})" if enough else "no number of them would do: shorten seq"
    away = _offloading(pricing, gpus)
    return InputError("gpus", gpus, f"nothing fits{needs}", remedy + (f"; or options {away}" if away else ""))


_OFFLOADS: tuple[dict[str, Any], ...] = (
    {"optimizer_offload": 1.0},
    {"optimizer_offload": 1.0, "parameter_offload": True},
)
"""Options that take state off the devices, in the order in which they slow a step."""


def _offloading(pricing: Pricing, gpus: int) -> str:
    """Return the stack's options that put state on the host with which a strategy fits; "" if there are none."""
    row = pricing.row
    if row is None or pricing.cluster.device.kind != "cuda":
        return ""
    for away in _OFFLOADS:
        extra = StackOptions(**pricing.extra.changed() | away)
        if not all(row.has_option(name, value) for name, value in away.items()):
            continue
        if all(row.refusal(Strategy(dp=gpus, zero=level.number), extra) for level in ZERO_LEVELS):
            continue
        there = replace(pricing, extra=extra)
        if fits_somewhere(there, gpus, there.options):
            return ",".join(f"{name}={format_field(value)}" for name, value in away.items())
    return ""


_MOST_GPUS = 2**17
"""Maximum number of GPUs to try."""
_CORES = 400
"""Number of cores, of least memory, to check in full."""


def fits_somewhere(pricing: Pricing, ranks: int, options: Options) -> bool:
    """Whether a strategy over `ranks` ranks fits, among the expansions of the cores with the lowest memory bounds."""
    try:
        cores = space.cores(pricing.model, pricing.job, ranks, options)
    except InputError:
        return False
    cores = space.experts(cores, pricing.model, pricing.job, options)
    least = pricing.least_bytes(cores, complete=False)
    fitting = np.flatnonzero(least <= pricing.usable)
    fitting = fitting[np.argsort(least[fitting])][:_CORES]
    rows = space.pipelines(cores.take(fitting), pricing.model, pricing.job, options)
    rows = space.recomputations(rows, pricing.model, pricing.job, options)
    if options.local:  # replicas that step alone are never sharded over all ranks, as the bound is
        rows = space.sharding(rows, pricing.job, options)
        return bool(len(rows) and np.any(pricing.bytes_(rows) <= pricing.usable))
    return bool(len(rows) and np.any(pricing.least_bytes(rows, True, of_any_cut=False) <= pricing.usable))


def least_ranks(larger: Callable[[int], Pricing], above: int, node: int, options: Options) -> int | None:
    """Return approximately the fewest GPUs, more than `above`, on which a strategy fits: a divisor or a multiple of
    `node`; None if no number up to `_MOST_GPUS` suffices. Memory per rank falls with the number of ranks, but not
    every number divides the batch. So the number doubles until something fits, then seven numbers spaced evenly above
    the last one that did not are tried."""
    for part in range(above + 1, node):
        if node % part == 0 and fits_somewhere(larger(part), part, options):
            return part
    low = high = max(above, node)
    while not fits_somewhere(larger(high), high, options):
        low, high = high, 2 * high
        if high > _MOST_GPUS:
            return None
    for part in range(1, 8):
        middle = (low + (high - low) * part // 8) // node * node
        if low < middle < high and fits_somewhere(larger(middle), middle, options):
            return middle
    return high
