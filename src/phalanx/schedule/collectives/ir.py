"""The collective IR: an algorithm as plain data, to be proved, priced, run and drawn.

A schedule is columns of transfers: in `round`, `source` sends elements [offset, offset + length) to `destination`,
which adds them to its own (`reduces`) or overwrites them. All offsets share one address space per collective: an
all-to-all of p ranks has p² blocks there, the block from rank i to rank j just before the one from i to j + 1.

All transfers of a round read the state before the round. Rounds exist for proof and drawing only.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Round:
    """Transfers that happen at the same time; arrays of equal shape."""

    source: Ints
    destination: Ints
    offset: Ints
    length: Ints
    reduces: bool


@dataclass(frozen=True)
class Holdings:
    """Which rank holds which elements, as columns of intervals."""

    rank: Ints
    offset: Ints
    length: Ints


@dataclass(frozen=True)
class Schedule:
    """A collective as columns of transfers, sorted by round; `size` in elements. `start` and `end` define the result:
    every rank ends with its `end` intervals, each containing the contribution of every rank that starts with it,
    exactly once."""

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
        """The number of rounds."""
        return int(self.round.max()) + 1 if len(self.round) else 0

    @property
    def sent(self) -> Ints:
        """The elements that each rank sends, (ranks,)."""
        return np.bincount(self.source, weights=self.length, minlength=self.ranks).astype(np.int64)

    @property
    def buffer(self) -> int:
        """The most elements that a rank starts or ends with: of an all-to-all one rank's blocks, else `size`."""
        held = (np.bincount(h.rank, weights=h.length, minlength=1) for h in (self.start, self.end))
        return max(int(elements.max()) for elements in held)


def compose(
    op: str, algorithm: str, ranks: int, size: int, rounds: Sequence[Round], start: Holdings, end: Holdings
) -> Schedule:
    """Build a schedule from its rounds. Drops empty transfers, and rounds without any other."""
    filled = []
    for r in rounds:
        columns = [c.ravel() for c in (r.source, r.destination, r.offset, r.length)]
        nonempty = columns[3] > 0
        if not nonempty.all():
            columns = [c[nonempty] for c in columns]
        if len(columns[0]):
            filled.append((columns, r.reduces))
    counts = [len(columns[0]) for columns, _ in filled]
    source, destination, offset, length = (
        np.concatenate([columns[i] for columns, _ in filled]) if filled else np.zeros(0, dtype=np.int64)
        for i in range(4)
    )
    number = np.repeat(np.arange(len(filled), dtype=np.int64), counts)
    reduces = np.repeat(np.array([r for _, r in filled], dtype=bool), counts)
    return Schedule(op, algorithm, ranks, size, number, source, destination, offset, length, reduces, start, end)


# Schedules made from schedules.


def _joined_columns(parts: Sequence[Schedule]) -> dict[str, Any]:
    """Concatenate the columns of several schedules' transfers, all but `round`."""
    names = ("source", "destination", "offset", "length", "reduces")
    return {name: np.concatenate([getattr(s, name) for s in parts]) for name in names}


def chain(first: Schedule, second: Schedule, op: str, algorithm: str) -> Schedule:
    """Chain two schedules. Raises ValueError unless the second starts with what the first ends with."""
    if (first.ranks, first.size) != (second.ranks, second.size) or not _same(first.end, second.start):
        raise ValueError(f"{second.op} does not start with what {first.op} ends with")
    return replace(
        first,
        op=op,
        algorithm=algorithm,
        round=np.concatenate([first.round, second.round + first.rounds]),
        end=second.end,
        **_joined_columns((first, second)),
    )


def stagger(parts: Sequence[Schedule]) -> Schedule:
    """Pipeline an all-reduce or a broadcast over parts of a buffer, each one round behind the part before it: while
    one part uses the links of one tier, another uses the next tier's. Simultaneous steps of different parts are
    written as consecutive rounds, the first part first."""
    begins = np.cumsum([0, *(s.size for s in parts)])[:-1]
    turn = np.concatenate([(i + s.round) * len(parts) + i for i, s in enumerate(parts)])
    rows = np.argsort(turn, kind="stable")
    shifted = [replace(s, offset=s.offset + begin) for s, begin in zip(parts, begins, strict=True)]
    return replace(
        parts[0],
        size=sum(s.size for s in parts),
        round=np.unique(turn[rows], return_inverse=True)[1],
        **{name: column[rows] for name, column in _joined_columns(shifted).items()},
        start=_placed([s.start for s in parts], begins),
        end=_placed([s.end for s in parts], begins),
    )


def _placed(parts: Sequence[Holdings], begins: Ints) -> Holdings:
    offset = np.concatenate([h.offset + begin for h, begin in zip(parts, begins, strict=True)])
    return Holdings(np.concatenate([h.rank for h in parts]), offset, np.concatenate([h.length for h in parts]))


def dual(s: Schedule, op: str, algorithm: str, reduces: bool) -> Schedule:
    """Reverse a schedule in time and direction. A broadcast turns into a reduce, a scatter into a gather, a
    reduce-scatter into an all-gather."""
    number = s.rounds - 1 - s.round
    rows = np.argsort(number, kind="stable")
    return replace(
        s,
        op=op,
        algorithm=algorithm,
        round=number[rows],
        source=s.destination[rows],
        destination=s.source[rows],
        offset=s.offset[rows],
        length=s.length[rows],
        reduces=np.full(len(rows), reduces),
        start=s.end,
        end=s.start,
    )


def _same(a: Holdings, b: Holdings) -> bool:
    """Whether each rank holds the same elements in both, regardless of how they are cut into intervals."""

    def merged(h: Holdings) -> Ints:
        """Return (rank, first, stop), (3, intervals), with touching intervals merged."""
        order = np.lexsort((h.offset, h.rank))
        order = order[h.length[order] > 0]
        rank, low, high = h.rank[order], h.offset[order], h.offset[order] + h.length[order]
        joins = (rank[1:] == rank[:-1]) & (low[1:] == high[:-1])
        opens, closes = np.append(True, ~joins)[: len(rank)], np.append(~joins, True)[-len(rank) :]
        return np.stack([rank[opens], low[opens], high[closes]]) if len(rank) else np.zeros((3, 0), dtype=np.int64)

    return np.array_equal(merged(a), merged(b))


# Rounds made from members and intervals.


def parallel_round(groups: Ints, source: Ints, destination: Ints, low: Ints, high: Ints, reduces: bool) -> Round:
    """Build one round in which several groups act in parallel: ranks `groups` (groups, p), `source` and `destination`
    as member indices (members,), intervals [low, high) as (groups, members)."""
    shape = (len(groups), len(source))
    low, high = np.broadcast_to(low, shape), np.broadcast_to(high, shape)
    return Round(groups[:, source], groups[:, destination], low, high - low, reduces)


def merge_rounds(parts: Sequence[Round]) -> Round:
    """Merge parts of one round, such as several intervals of one message."""
    source, destination, offset, length = (
        np.concatenate([getattr(r, c).ravel() for r in parts]) for c in ("source", "destination", "offset", "length")
    )
    return Round(source, destination, offset, length, parts[0].reduces)


def reverse(rounds: Sequence[Round], reduces: bool) -> list[Round]:
    """Reverse rounds in time and direction, as `dual` does a schedule."""
    return [Round(r.destination, r.source, r.offset, r.length, reduces) for r in reversed(rounds)]


def intervals(rank: npt.ArrayLike, offset: npt.ArrayLike, length: npt.ArrayLike) -> Holdings:
    """Build Holdings from columns that are broadcast against each other and flattened."""
    columns = np.broadcast_arrays(*(np.asarray(c, dtype=np.int64) for c in (rank, offset, length)))
    return Holdings(*(c.ravel() for c in columns))


def cut(low: Ints, high: Ints, parts: int) -> Ints:
    """Return the boundaries of `parts` nearly equal pieces of [low, high), (..., parts + 1)."""
    return low[..., None] + (high - low)[..., None] * np.arange(parts + 1) // parts


# Atoms: pieces that no transfer divides.


def boundaries(s: Schedule) -> Ints:
    """Return where atoms, the pieces that no interval of a schedule divides, begin and end: (atoms + 1,), sorted."""
    ends = [s.offset, s.offset + s.length, np.array([0, s.size])]
    for h in (s.start, s.end):
        ends += [h.offset, h.offset + h.length]
    return np.unique(np.concatenate(ends))


def atoms(edges: Ints, offset: Ints, length: Ints) -> tuple[Ints, Ints]:
    """Return (row, atom) for every atom of each interval: two arrays of equal length."""
    low = np.searchsorted(edges, offset)
    count = np.searchsorted(edges, offset + length) - low
    row = np.repeat(np.arange(len(offset)), count)
    return row, np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count) + np.repeat(low, count)
