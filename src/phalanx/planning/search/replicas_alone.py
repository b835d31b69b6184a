"""A strategy whose replicas step alone (`local`), with other numbers of steps and its changes sent in fewer bits.

Fewer synchronisations and fewer bits save time and cost learning, which no price covers. So each way is given with
the share of tokens that the same loss may take in addition before it is no faster than synchronising every step.
"""

from dataclasses import dataclass, replace

from phalanx.cost.analytic.estimate import estimate
from phalanx.planning.search.column_pricing import Pricing
from phalanx.spec.errors import InputError
from phalanx.spec.strategy.legality import check, require_runnable
from phalanx.spec.strategy.spec import Strategy

_STEPS = (4, 16, 64, 256)
_COMPRESSORS = ("none", "int8", "int4")


@dataclass(frozen=True)
class StepsAlone:
    """A strategy with a number of steps alone and a type of the changes that are sent."""

    strategy: Strategy
    step_time_s: float
    more_tokens: float | None
    """Share of tokens that the same loss may take in addition; None if nothing that synchronises every step fits."""


def steps_alone_around(pricing: Pricing, s: Strategy, plain_s: float | None) -> tuple[StepsAlone, ...]:
    """Return `s` with several numbers of steps alone, in ascending order, and types of its changes, if they fit and
    run. `plain_s`: seconds of the best step that synchronises each time."""
    ways = []
    for local in sorted({s.local, *_STEPS}):
        for compression in _COMPRESSORS:
            way = replace(s, local=local, compression=compression)
            try:
                check(way, pricing.model, pricing.job, s.world)
                require_runnable(way, pricing.job)
                p = pricing
                price = estimate(p.model, p.cluster, p.job, way, p.stack, p.number_format, p.extra)
            except InputError:
                continue
            seconds = float(price.seconds)
            if float(price.memory.reserved) <= pricing.usable:
                ways.append(StepsAlone(way, seconds, None if plain_s is None else plain_s / seconds - 1))
    return tuple(ways)
