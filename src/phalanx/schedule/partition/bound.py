"""What the slowest rank cannot be below where blocks are of few kinds, as in models that mix dense layers with
experts or local with global attention: each rank takes so many of each kind, in whatever order. That is the bound of
partition_search.py where there are too many partitions to look at.
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import product

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
ROOM = 300  # ways to take of all kinds but the most frequent


def packed_bound(blocks: Ints, taken: list[int], low: int, high: int) -> int:
    """The least within low..high that the worst rank can be with blocks of these costs and what each has `taken`
    already; `low` where there are too many kinds to tell."""
    kinds = [(int(kind), count) for kind, count in Counter(blocks.tolist()).most_common()]
    counts = [count for _, count in kinds[1:]]
    if not kinds or not kinds[0][0] or math.prod(count + 1 for count in counts) > ROOM:
        return low
    while low < high:
        middle = (low + high) // 2
        if _packs(kinds, Counter(middle - used for used in taken)):
            high = middle
        else:
            low = middle + 1
    return low


def _packs(kinds: list[tuple[int, int]], rooms: Counter[int]) -> bool:
    """Whether ranks with so much room hold all blocks. What is kept: the most blocks of the first kind that ranks
    have room for beside the so many of each other kind, an array over these."""
    (cost, count), others = kinds[0], kinds[1:] or [(0, 0)]
    shape = tuple(other + 1 for _, other in others)
    used = sum(
        (np.arange(n + 1).reshape([-1 if j == i else 1 for j in range(len(others))]) * kind)
        for i, (kind, n) in enumerate(others)
    )
    every = np.where(np.ones(shape, dtype=bool), -(2**60), 0)  # no ranks yet: none of any kind
    every[(0,) * len(shape)] = 0
    for room, ranks in rooms.items():
        left = room - np.broadcast_to(np.asarray(used), shape)
        power = np.where(left >= 0, left // cost, -(2**60))
        while ranks:  # so many alike, by doubling
            if ranks & 1:
                every = _joined(every, power)
            ranks >>= 1
            if ranks:
                power = _joined(power, power)
    return bool(every[(-1,) * len(shape)] >= count)


def _joined(one: Ints, other: Ints) -> Ints:
    """The most that two groups of ranks hold together, for all that they may share between them."""
    found = np.full(one.shape, -(2**60), dtype=np.int64)
    for at in product(*(range(n) for n in one.shape)):
        if one[at] >= 0:
            here = found[tuple(slice(i, None) for i in at)]
            rest = other[tuple(slice(None, n - i) for i, n in zip(at, one.shape, strict=True))]
            np.maximum(here, one[at] + rest, out=here)
    return found
