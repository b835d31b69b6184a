"""Every algorithm, proved for many worlds, chunkings and roots: what `phalanx collectives prove` runs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from phalanx.schedule.collectives.proof import prove
from phalanx.schedule.collectives.registry import ALGORITHMS, SEGMENTED, build
from phalanx.schedule.errors import Unproved


def sweep(most: int) -> Iterator[str | None]:
    """For every schedule of 1 to `most` ranks None where it is proved, else what is wrong with it."""
    for op, names in ALGORITHMS.items():
        for algorithm in names:
            for p in range(1, most + 1):
                for given in variants(op, algorithm, p):
                    try:
                        prove(build(op, algorithm, p, **given))
                        yield None
                    except Unproved as error:
                        yield f"{algorithm} {op}, {p} ranks, {given}: {error}"


def variants(op: str, algorithm: str, p: int) -> list[dict[str, Any]]:
    """What to build over p ranks: even chunks, uneven ones, and fewer elements than ranks; first, middle and last
    root; one segment, several and more than there are elements; two tiers; even blocks, uneven and empty ones."""
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
    """p as inner x outer, the inner one at least as large."""
    outer = max(d for d in range(1, math.isqrt(p) + 1) if p % d == 0)
    return (p // outer, outer)
