"""Where nothing fits: the least hardware of the same kind that would do."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from phalanx.plan import space
from phalanx.plan.pricing import Pricing
from phalanx.plan.space import Options
from phalanx.spec.errors import InputError

_MOST = 2**17
"""GPUs beyond which nobody looks."""
_CORES = 400


def fits_somewhere(pricing: Pricing, ranks: int, options: Options) -> bool:
    """Whether any strategy over so many ranks fits: those whose least bytes promise most are looked at in full."""
    try:
        cores = space.cores(pricing.model, pricing.job, ranks)
    except InputError:
        return False
    cores = space.experts(cores, pricing.model)
    least = pricing.least_bytes(cores, whole=False)
    able = np.flatnonzero(least <= pricing.usable)
    able = able[np.argsort(least[able])][:_CORES]
    rows = space.pipelines(cores.take(able), pricing.model, pricing.job, options)
    rows = space.recomputing(rows, pricing.model, options)
    return bool(len(rows) and np.any(pricing.least_bytes(rows, whole=True) <= pricing.usable))


def least_ranks(larger: Callable[[int], Pricing], above: int, node: int, options: Options) -> int | None:
    """The fewest GPUs, in whole nodes, more than `above`, over which something fits; None where none within reach do.
    `larger`: the question on so many GPUs. Memory falls with ranks, but not every number of them divides a batch: so
    twice as many until something fits, then every eighth of the way from the last that did not."""
    low = high = max(above, node)
    while not fits_somewhere(larger(high), high, options):
        low, high = high, 2 * high
        if high > _MOST:
            return None
    for part in range(1, 8):
        middle = (low + (high - low) * part // 8) // node * node
        if low < middle < high and fits_somewhere(larger(middle), middle, options):
            return middle
    return high
