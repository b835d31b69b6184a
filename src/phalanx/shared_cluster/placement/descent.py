"""Steepest descent from a placement: exchange two ranks' GPUs, or a rank's GPU for a free one, while that saves time.

Nested blocks are carved in one order of the axes for all ranks; where free GPUs are few and uneven, the fastest
placement may mix orders. Each round prices every exchange at once.
"""

from collections.abc import Callable

import numpy as np

from phalanx.shared_cluster.placement.price import Floats
from phalanx.spec.cluster.topology import Ints

RANKS = 32
"""The largest world that is descended from: a round prices about as many placements as its square."""
_ROUNDS = 16


def descend(start: Ints, unused: Ints, price: Callable[[Ints], Floats]) -> Ints:
    """Return the GPU of each rank, (world,), after at most 16 exchanges, each the one that saves most.

    `unused`: free GPUs that the start leaves out; `price`: seconds of placements, (n, world) -> (n,).
    """
    best, seconds = start, float(price(start[None])[0])
    for _ in range(_ROUNDS):
        candidates = _exchanges(best, unused)
        if not len(candidates):
            return best
        prices = price(candidates)
        first = int(np.argmin(prices))
        if prices[first] >= seconds:
            return best
        unused = np.setdiff1d(np.append(unused, best), candidates[first])
        best, seconds = candidates[first], float(prices[first])
    return best


def _exchanges(gpus: Ints, unused: Ints) -> Ints:
    """Return every exchange of the GPUs of two ranks, and of one rank's GPU for an unused one, (exchanges, world)."""
    world = len(gpus)
    one, other = np.triu_indices(world, 1)
    swapped = np.tile(gpus, (len(one), 1))
    rows = np.arange(len(one))
    swapped[rows, one], swapped[rows, other] = gpus[other], gpus[one]
    rank, spare = (part.reshape(-1) for part in np.indices((world, len(unused))))
    replaced = np.tile(gpus, (len(rank), 1))
    replaced[np.arange(len(rank)), rank] = unused[spare]
    return np.concatenate([swapped, replaced])
