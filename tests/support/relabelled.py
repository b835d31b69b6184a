"""Collective schedules whose ranks are renamed."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from phalanx.schedule.collectives.ir import Schedule


def relabel(s: Schedule, order: Sequence[int]) -> Schedule:
    """Rename ranks: what rank i did, rank order[i] does. An algorithm that favours neighbours gets the ranks in the
    order of the machine this way. Raises ValueError unless `order` is a permutation of the ranks."""
    name = np.asarray(order, dtype=np.int64)
    if not np.array_equal(np.sort(name), np.arange(s.ranks)):
        raise ValueError(f"{list(order)} does not name each of {s.ranks} ranks once")
    start, end = (replace(h, rank=name[h.rank]) for h in (s.start, s.end))
    return replace(s, source=name[s.source], destination=name[s.destination], start=start, end=end)
