"""Every algorithm, proved for many worlds, chunkings and roots: what `phalanx collectives prove` runs."""

from __future__ import annotations

import math
from collections.abc import Iterator

from phalanx.schedule.collectives import ALGORITHMS, build
from phalanx.schedule.prove import Unproved, prove


def sweep(most: int) -> Iterator[str | None]:
    """For every schedule of 1 to `most` ranks None where it is proved, else what is wrong with it."""
    for op, names in ALGORITHMS.items():
        for algorithm in names:
            for p in range(1, most + 1):
                # even chunks, uneven ones, and fewer elements than ranks; an all-to-all has equal blocks
                sizes = {p, 2 * p} if op == "all_to_all" else {p, 3 * p + 1, max(1, p // 2)}
                for size in sorted(sizes):
                    try:
                        prove(build(op, algorithm, p, size, root=p // 2, tiers=_two_tiers(p)))
                        yield None
                    except Unproved as error:
                        yield f"{algorithm} {op}, {p} ranks, {size} elements: {error}"


def _two_tiers(p: int) -> tuple[int, ...]:
    """p as inner x outer, the inner one at least as large."""
    outer = max(d for d in range(1, math.isqrt(p) + 1) if p % d == 0)
    return (p // outer, outer)
