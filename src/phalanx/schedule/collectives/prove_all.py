"""Prove every algorithm for many world sizes, chunkings and roots: what `phalanx collectives prove` runs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from phalanx.schedule.collectives.proof import prove
from phalanx.schedule.collectives.registry import ALGORITHMS, SEGMENTED, build
from phalanx.schedule.errors import Unproved


def sweep(most: int) -> Iterator[str | None]:
    """Yield, for every schedule over 1 to `most` ranks, None if it is proved, else its defect."""
    for op, names in ALGORITHMS.items():
        for algorithm in names:
            for p in range(1, most + 1):
                for options in variants(op, algorithm, p):
                    try:
                        prove(build(op, algorithm, p, **options))
                        yield None
                    except Unproved as error:
                        yield f"{algorithm} {op}, {p} ranks, {options}: {error}"


def count(most: int) -> int:
    """Return how many schedules `sweep` proves."""
    worlds = range(1, most + 1)
    return sum(len(variants(op, name, p)) for op, names in ALGORITHMS.items() for name in names for p in worlds)


def variants(op: str, algorithm: str, p: int) -> list[dict[str, Any]]:
    """Return the arguments of `build` to try over p ranks: even chunks, uneven ones, fewer elements than ranks;
    first, middle and last root; one segment, several, more than elements; two tiers; even, uneven and empty
    blocks."""
    if op == "barrier":
        return [{"size": p}]
    if op == "all_to_all":
        i = np.arange(p)
        uneven = ((7 * i[:, None] + 3 * i) % 5, np.outer(i, i[::-1]) % 3)
        return [{"size": p}, {"size": 2 * p}, *({"size": 0, "splits": table} for table in uneven)]
    sizes = sorted({p, 3 * p + 1, max(1, p // 2)})
    rooted = op in ("broadcast", "reduce", "scatter", "gather")
    return [
        {"size": size, "root": root, "tiers": _two_tiers(p), "segments": segments}
        for size in sizes
        for root in (sorted({0, p // 2, p - 1}) if rooted else [0])
        for segments in ((1, 3, 2 * p) if (op, algorithm) in SEGMENTED else (1,))
    ]


def _two_tiers(p: int) -> tuple[int, ...]:
    """Factor p into (inner, outer), with inner >= outer and as close as possible."""
    outer = max(d for d in range(1, math.isqrt(p) + 1) if p % d == 0)
    return (p // outer, outer)
