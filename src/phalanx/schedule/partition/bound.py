"""A lower bound of the slowest rank for blocks of few kinds, as in models that mix dense layers with experts, or
local with global attention: each rank takes some number of each kind, in any order. partition/search.py uses it if
there are too many partitions to enumerate.
"""

import math
from collections import Counter
from itertools import product

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
ROOM = 300  # combinations of counts of all kinds but the most frequent one


def packed_bound(blocks: Ints, taken: list[int], low: int, high: int) -> int:
    """Return a lower bound, in low..high, on the worst rank's cost, given the costs of all blocks and what each rank
    has `taken` already; `low` if there are too many kinds."""
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
    """Whether ranks with these rooms (room -> number of ranks) can hold all blocks. Dynamic programming over arrays:
    entry (n1, n2, ...) is the most blocks of the first kind that fit along with n1, n2, ... blocks of the others."""
    (cost, count), others = kinds[0], kinds[1:] or [(0, 0)]
    shape = tuple(other + 1 for _, other in others)
    used = sum(
        (np.arange(n + 1).reshape([-1 if j == i else 1 for j in range(len(others))]) * kind)
        for i, (kind, n) in enumerate(others)
    )
    total = np.where(np.ones(shape, dtype=bool), -(2**60), 0)  # no rank yet, so no block of any kind
    total[(0,) * len(shape)] = 0
    for room, ranks in rooms.items():
        left = room - np.broadcast_to(np.asarray(used), shape)
        power = np.where(left >= 0, left // cost, -(2**60))
        while ranks:  # equal ranks, combined by doubling
            if ranks & 1:
                total = _joined(total, power)
            ranks >>= 1
            if ranks:
                power = _joined(power, power)
    return bool(total[(-1,) * len(shape)] >= count)


def _joined(one: Ints, other: Ints) -> Ints:
    """Combine two groups of ranks: return the most blocks that they hold together, over all ways to divide the other
    kinds between them."""
    most = np.full(one.shape, -(2**60), dtype=np.int64)
    for at in product(*(range(n) for n in one.shape)):
        if one[at] >= 0:
            here = most[tuple(slice(i, None) for i in at)]
            rest = other[tuple(slice(None, n - i) for i, n in zip(at, one.shape, strict=True))]
            np.maximum(here, one[at] + rest, out=here)
    return most
