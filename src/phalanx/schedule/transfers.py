"""The collective IR: an algorithm as plain data, for whoever proves, prices, runs or draws it.

A schedule is columns of transfers: in `round`, `source` sends elements [offset, offset + length) to `destination`,
which adds them to its own (`reduces`) or takes them over. Offsets lie in one address space of the whole collective:
an all-to-all of p ranks has p² blocks there, block i p + j going from rank i to rank j.

All transfers of a round read what was there before the round. Rounds are for proof and drawing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Round:
    """Transfers that happen together; arrays of equal shape."""

    source: Ints
    destination: Ints
    offset: Ints
    length: Ints
    reduces: bool


@dataclass(frozen=True)
class Holdings:
    """Which rank holds which elements: columns of intervals."""

    rank: Ints
    offset: Ints
    length: Ints


@dataclass(frozen=True)
class Schedule:
    """A collective as columns. What must come out follows from `start` and `end`: every rank ends with its `end`
    intervals, each holding the contribution of every rank that starts with it, exactly once."""

    op: str
    algorithm: str
    ranks: int
    size: int
    round: Ints
    source: Ints
    destination: Ints
    offset: Ints
    length: Ints
    reduces: npt.NDArray[np.bool_]
    start: Holdings
    end: Holdings

    @property
    def rounds(self) -> int:
        return int(self.round.max()) + 1 if len(self.round) else 0

    @property
    def sent(self) -> Ints:
        """Elements that each rank sends, (ranks,)."""
        return np.bincount(self.source, weights=self.length, minlength=self.ranks).astype(np.int64)


def compose(
    op: str, algorithm: str, ranks: int, size: int, rounds: Sequence[Round], start: Holdings, end: Holdings
) -> Schedule:
    """A schedule from its rounds. Transfers of nothing are dropped, and rounds that are left empty."""
    kept = []
    for r in rounds:
        there = r.length.ravel() > 0
        if there.any():
            columns = [c.ravel()[there] for c in (r.source, r.destination, r.offset, r.length)]
            kept.append((columns, r.reduces))
    counts = [len(columns[0]) for columns, _ in kept]
    source, destination, offset, length = (
        np.concatenate([columns[i] for columns, _ in kept]) if kept else np.zeros(0, dtype=np.int64) for i in range(4)
    )
    number = np.repeat(np.arange(len(kept), dtype=np.int64), counts)
    reduces = np.repeat(np.array([r for _, r in kept], dtype=bool), counts)
    return Schedule(op, algorithm, ranks, size, number, source, destination, offset, length, reduces, start, end)


def reverse(rounds: Sequence[Round], reduces: bool) -> list[Round]:
    """The dual: every transfer the other way, last round first. A broadcast turns into a reduce, a reduce-scatter
    into an all-gather, a scatter into a gather."""
    return [Round(r.destination, r.source, r.offset, r.length, reduces) for r in reversed(rounds)]


def intervals(rank: npt.ArrayLike, offset: npt.ArrayLike, length: npt.ArrayLike) -> Holdings:
    columns = np.broadcast_arrays(*(np.asarray(c, dtype=np.int64) for c in (rank, offset, length)))
    return Holdings(*(c.ravel() for c in columns))


def cut(low: Ints, high: Ints, parts: int) -> Ints:
    """Boundaries of `parts` nearly equal pieces of [low, high): (..., parts + 1)."""
    return low[..., None] + (high - low)[..., None] * np.arange(parts + 1) // parts
