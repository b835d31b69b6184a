"""Options of a stack that a search sets by itself: those that change neither the results of a step nor its number
types, and so have no downside for the user.

The first pass searches strategies with the release's default for every option. Then options are set one after
another, each time the one that shortens the fastest step most by the formulas, until none does; then the second pass
prices the candidates with them (planning/search/refine.py). How blocks are cut into chunks is no option here: see
stage_lengths.py. Options that a user fixed (`where`) stay; options hard-coded in a program, which no configuration
sets, are left out. Offloading to the host, adapters, documents, optimizers and multi-token prediction are left to the
user.

Narrower number types are offered with their gain: Adam's moments in bfloat16 or in 8 bits, bfloat16 parameters with a
16-bit remainder for a master copy, gradients accumulated and reduced in bfloat16, parameters gathered in 8 bits.

They change the numbers of a training, so a search offers them and never applies one by itself: each set is priced
with the best strategies, and with the faster ones that did not fit without it. A search with the offer as a condition
(`where`) covers all strategies under it, so the gain of an offer is a lower bound.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from phalanx.frameworks.registry import facts
from phalanx.frameworks.stack import Stack
from phalanx.planning.search.column_pricing import Pricing
from phalanx.planning.search.priced import price_under_each
from phalanx.planning.search.refine import RankedStrategy, RefinedPrices, refine
from phalanx.spec.number_formats import NUMBER_FORMATS
from phalanx.spec.strategy.spec import Strategy
from phalanx.spec.strategy.stack_options import DEFAULTS, StackOptions

_CHANGES: tuple[dict[str, Any], ...] = (
    {"context": "all_gather"},
    {"cross_entropy": "linear"},
    {"tp_overlap": "userbuffers"},
    {"tp_overlap": "async"},
    {"dispatch": "deepep"},
    {"dispatch": "hybridep"},
    {"overlap_experts": "on"},
)
SEARCHED_OPTIONS = ("context", "cross_entropy", "tp_overlap", "dp_overlap", "dispatch", "overlap_experts")
"""Options that a search sets, or leaves at the release's default where that is the fastest."""
_GAIN = 0.002
"""Share of the step by which an option must shorten it to be set: less is not worth a line of configuration."""
_CANDIDATES = 6
"""Number of strategies with which an option is tried."""


def with_best_options(pricing: Pricing, strategies: Sequence[Strategy]) -> Pricing:
    """Return a question with the options of its stack that make the fastest of `strategies` faster; unchanged if the
    stack has no row, or none of these options."""
    row = pricing.row
    if row is None or not strategies:
        return pricing
    fastest = list(strategies[:_CANDIDATES])
    # `context=all_gather` has no effect with Ulysses, often the faster choice without that option: try both.
    fastest = list(dict.fromkeys([*fastest, *(replace(s, ulysses=1) for s in fastest)]))
    pinned = pricing.extra.changed()
    open_changes = [change for change in _settable(row) if not pinned.keys() & change.keys()]
    best, least = pricing, np.inf
    while True:
        tried = [best, *(replace(best, extra=replace(best.extra, **c)) for c in open_changes if _new(best, c))]
        if len(tried) == 1:
            return best
        if best is pricing:
            least, *timed = _shortest_steps(tried, fastest)
        else:
            timed = _shortest_steps(tried[1:], fastest)
        if min(timed) > (1 - _GAIN) * least:
            return best
        least, best = min(timed), tried[1 + timed.index(min(timed))]


def _settable(row: Stack) -> list[dict[str, Any]]:
    """Return the changes in `_CHANGES` that a configuration of the stack can make."""
    return [
        change
        for change in _CHANGES
        if all(name in row.options and row.options[name].offers(value) for name, value in change.items())
        and not any(row.options[name].in_code for name in change)
    ]


def single_changes(pricing: Pricing) -> Iterator[tuple[str, Pricing]]:
    """Yield (option, the question with another value of it) for each value that a search tries, and for the release's
    default if the question departs from it."""
    row, given = pricing.row, pricing.extra
    if row is None:
        return
    tried = [item for change in _settable(row) for item in change.items()]
    back = [(name, DEFAULTS[name]) for name in given.changed() if name in SEARCHED_OPTIONS]
    for name, value in dict.fromkeys((*tried, *back)):
        if getattr(given, name) != value:
            yield name, replace(pricing, extra=replace(given, **{name: value}))


def _new(pricing: Pricing, change: dict[str, Any]) -> bool:
    """Whether a change concerns options that are not set yet."""
    return not pricing.extra.changed().keys() & change.keys()


def _shortest_steps(each: Sequence[Pricing], strategies: Sequence[Strategy]) -> list[float]:
    """Return, for each question, the shortest step of the fitting strategies that the stack runs with its options;
    infinity if there is none."""
    shape = (len(each), len(strategies))
    terms, reserved = price_under_each(each, strategies)
    usable = np.array([[pricing.usable] for pricing in each])
    seconds = np.where(reserved.reshape(shape) <= usable, np.array(sum(terms.values())).reshape(shape), np.inf)
    least = []
    for pricing, row in zip(each, seconds, strict=True):
        fastest_first = (i for i in np.argsort(row, kind="stable").tolist() if row[i] < np.inf)
        allowed = (i for i in fastest_first if runnable_strategies(pricing, [strategies[i]]))
        least.append(next((float(row[i]) for i in allowed), np.inf))
    return least


def runnable_strategies(pricing: Pricing, strategies: Iterable[Strategy]) -> list[Strategy]:
    """Return the strategies that the stack runs with a question's options."""
    options, job = pricing.options, pricing.job
    return [s for s in strategies if options.allows(s, s.accumulation(job))]


_MOMENTS = {"first_moment": "bfloat16", "second_moment": "bfloat16"}
_GRADIENTS = {"gradients": "bfloat16", "reduce": "bfloat16"}
_SETS: tuple[dict[str, Any], ...] = (
    _MOMENTS,
    {"first_moment": "bfloat16"},
    {"first_moment": "float8", "second_moment": "float8"},
    {"master": "float16"},
    {"reduce": "bfloat16"},
    {"gradients": "bfloat16"},
    _GRADIENTS,
    {**_MOMENTS, "master": "float16"},
    {**_MOMENTS, **_GRADIENTS},
    {**_MOMENTS, "master": "float16", **_GRADIENTS},
)
_GAIN_OF_TYPES = 0.002
"""Share of the step by which a set must shorten it to be offered."""
_BEST, _TOO_LARGE = 4, 12
"""Number of strategies with which each set is priced: the best, and faster ones that do not fit without it."""


@dataclass(frozen=True)
class NarrowerTypes:
    """A set of number types, and the best strategy of those tried with it."""

    types: dict[str, Any]
    strategy: Strategy
    seconds: float
    """Step time."""
    bytes_: float
    gain: float
    """Share of the step that it saves."""

    @property
    def where(self) -> str:
        """The offer as a condition, for `where`."""
        return ", ".join(f"{name}={value}" for name, value in self.types.items())


def narrower_types(prices: RefinedPrices, best: Sequence[RankedStrategy]) -> tuple[NarrowerTypes, ...]:
    """Return the sets of number types that shorten the step of the best strategy, the shortest step first; without
    sets that contain another one and gain hardly more."""
    pricing, limit = prices.pricing, best[0].seconds
    sets = list(_sets(pricing))
    if not sets:
        return ()
    too_large = sorted((r for r in prices.met() if not r.priced.fits), key=lambda r: r.seconds)
    too_large = [r for r in too_large if r.seconds < limit][:_TOO_LARGE]
    tried = [*best[:_BEST], *too_large, *_with_fewer_chunks(prices, too_large, limit)]
    offers: list[NarrowerTypes] = []
    for there, offer in _least_types(pricing, sets, tried, limit):
        if offer is None:
            continue
        offer = _cut_anew(there, offer, limit)
        within = (o for o in offers if o.types.items() <= offer.types.items())
        if all(offer.seconds < (1 - _GAIN_OF_TYPES) * o.seconds for o in within):
            offers.append(offer)
    return tuple(sorted(offers, key=lambda o: o.seconds))


def _cut_anew(there: Pricing, offer: NarrowerTypes, limit: float) -> NarrowerTypes:
    """Return an offer with its pipeline cut anew: with its types, a faster cut may fit."""
    ((p, _),) = refine(there, [offer.strategy])
    return replace(offer, seconds=p.seconds, bytes_=p.bytes_, gain=1 - p.seconds / limit)


def _with_fewer_chunks(
    prices: RefinedPrices, too_large: Sequence[RankedStrategy], limit: float
) -> list[RankedStrategy]:
    """Return strategies with one chunk fewer on each rank than those that are too large, if faster than `limit`
    seconds: they take less memory and may fit with fewer narrow types."""
    pricing, known = prices.pricing, [r.strategy for r in too_large]
    fewer = [replace(s, virtual=s.virtual - 1) for s in known if s.virtual > 2]
    fewer = runnable_strategies(pricing, (s for s in fewer if s not in known))
    return sorted((r for r in prices.price(fewer, limit) if r.seconds < limit), key=lambda r: r.seconds)


def _sets(pricing: Pricing) -> Iterator[dict[str, Any]]:
    """Yield the sets of types that the stack offers and the user has not fixed, small ones first."""
    row = pricing.row
    if row is None or "exp_avg_sq" not in pricing.job.optimizer.row.others.moments:
        return
    products = pricing.number_format if pricing.extra.products == "auto" else pricing.extra.products
    narrow = NUMBER_FORMATS[products].narrow
    sets = sorted((*_SETS, *([{"narrow_parameters": "on"}] if narrow else [])), key=len)
    pinned = pricing.extra.changed().keys()
    for types in sets:
        has = all(name in row.options and row.options[name].offers(value) for name, value in types.items())
        if has and not pinned & types.keys():
            yield types


def _least_types(
    pricing: Pricing, sets: Sequence[dict[str, Any]], tried: Sequence[RankedStrategy], limit: float
) -> Iterator[tuple[Pricing, NarrowerTypes | None]]:
    """Yield the question with each set of types, and the fastest strategy under it that is faster than `limit`, or
    None. Formulas are evaluated for all sets in one call; pipelines keep their times."""
    strategies = [r.strategy for r in tried]
    each = [replace(pricing, extra=StackOptions(**pricing.extra.changed() | types)) for types in sets]
    terms, reserved = price_under_each(each, strategies, [r.run.blocks if r.strategy.pp > 1 else None for r in tried])
    for k, (types, there) in enumerate(zip(sets, each, strict=True)):
        least: NarrowerTypes | None = None
        for i, r in enumerate(tried, k * len(tried)):
            of_row = {name: float(term[i]) for name, term in terms.items()}
            seconds = r.run.seconds(of_row) if r.strategy.pp > 1 else sum(of_row.values())
            faster = seconds < min(least.seconds if least else limit, (1 - _GAIN_OF_TYPES) * limit)
            if faster and reserved[i] <= pricing.usable and _legal(there, r.strategy):
                least = NarrowerTypes(types, r.strategy, seconds, float(reserved[i]), 1 - seconds / limit)
        yield there, least


def _legal(there: Pricing, s: Strategy) -> bool:
    row = there.row
    assert row is not None
    return row.refusal(s, there.extra, facts(there.model, there.job, s)) is None
