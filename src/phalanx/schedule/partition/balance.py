"""Which blocks of a model lie in which chunk of a pipeline, so that the slowest rank is as fast as may be.

A model is embed, blocks 0..L-1, head. Chunks are runs of it in its order; the first holds embed and the last head,
so these two may do without a block, and every other has one at least. What a rank costs is the sum of its chunks.

    blocks that cost alike     each block to the rank that is then the cheapest: optimal for any map
    one chunk a rank, or a V   optimal: rank by rank, of partitions that leave the same open only the best is kept
    others, of unlike blocks   by moving blocks for as long as that helps, then the same search while it stays small,
                               as it does for two chunks per rank unless a unit is far dearer than a rank's share
                               or blocks differ wildly. `bound` says whether it is optimal, or how far off at most

Of the optimal ones the most even is chosen: the least sum of squares over ranks (of unlike blocks while the search
stays small). Costs count as whole multiples of 2^-49 of their sum or less, so that blocks that cost alike do so
wherever they lie.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from phalanx.schedule.partition.search import Found, Measure, Question, deal, least_worst
from phalanx.spec.byte_sizes import write_bytes
from phalanx.spec.errors import InputError


@dataclass(frozen=True)
class Units:
    """A cost of every unit of a model, in its order: seconds, bytes."""

    embed: float
    blocks: tuple[float, ...]
    head: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "blocks", tuple(self.blocks))
        for value in (self.embed, *self.blocks, self.head):
            if not (math.isfinite(value) and value >= 0):
                raise InputError("cost of a unit", value, "must be a number of at least 0")


@dataclass(frozen=True)
class Limits:
    """The most bytes that each rank may have, and what each unit would take on it: a rank early in 1F1B holds the
    activations of more micro-batches."""

    bytes: tuple[Units, ...]
    most: tuple[float, ...]


@dataclass(frozen=True)
class Partition:
    """`blocks`: how many of each chunk. `slowest`: seconds of the slowest rank; no partition comes below `bound`."""

    blocks: tuple[int, ...]
    slowest: float
    bound: float

    @property
    def optimal(self) -> bool:
        return self.slowest <= self.bound


@dataclass(frozen=True)
class ChunkShare:
    """Blocks `first`..`last`, both included; None where a chunk has but embed or head."""

    chunk: int
    rank: int
    embed: bool
    head: bool
    first: int | None
    last: int | None
    seconds: float
    bytes: float | None


@dataclass(frozen=True)
class RankShare:
    """`share`: of the slowest rank's seconds."""

    rank: int
    seconds: float
    share: float
    bytes: float | None
    most: float | None


@dataclass(frozen=True)
class Explained:
    """`imbalance`: what the slowest rank takes over the mean of all, as a share of it; 0 is even."""

    chunks: tuple[ChunkShare, ...]
    ranks: tuple[RankShare, ...]
    imbalance: float


def partition(seconds: Units, rank_of: Sequence[int], limits: Limits | None = None) -> Partition:
    """The best partition for chunks on these ranks. Raises InputError where none fits."""
    ranks = _checked(seconds, rank_of, limits)
    total = seconds.embed + sum(seconds.blocks) + seconds.head
    scale = 2.0 ** (49 - math.frexp(total)[1]) if total > 0 else 1.0
    time = _measure([_whole(seconds, lambda cost: round(cost * scale))] * ranks, [0] * ranks, rank_of)
    memory = None
    if limits:
        whole = [_whole(units, math.ceil) for units in limits.bytes]
        most = [math.floor(min(most, sum(own))) for most, own in zip(limits.most, whole, strict=True)]
        memory = _measure(whole, most, rank_of)
    alike = all(len(set(units.blocks)) <= 1 for units in (seconds, *(limits.bytes if limits else ())))
    asked = Question(time, memory, tuple(rank_of), _least(rank_of))
    solve = deal if alike else least_worst
    found = solve(asked)
    if found is None:
        assert limits is not None
        assert memory is not None
        nearest = solve(Question(memory, None, asked.rank_of, asked.least))  # that lacks the least
        assert nearest
        found = least_worst(asked, nearest.blocks) if nearest.worst <= 0 and not alike else None
        if found is None:
            raise _unfit(explain(seconds, rank_of, nearest.blocks, limits), nearest)
    slowest = max(share.seconds for share in explain(seconds, rank_of, found.blocks, limits).ranks)
    return Partition(found.blocks, slowest, slowest if found.bound == found.worst else found.bound / scale)


def explain(seconds: Units, rank_of: Sequence[int], blocks: Sequence[int], limits: Limits | None = None) -> Explained:
    """What each chunk and each rank costs in a partition, be it ours or not."""
    ranks = _checked(seconds, rank_of, limits)
    least = _least(rank_of)
    if len(blocks) != len(rank_of) or sum(blocks) != len(seconds.blocks) or any(map(int.__lt__, blocks, least)):
        reason = f"must be {len(rank_of)} counts that make {len(seconds.blocks)}, none of them 0 in the middle"
        raise InputError("blocks per chunk", tuple(blocks), reason)
    chunks, first = [], 0
    for chunk, (rank, count) in enumerate(zip(rank_of, blocks, strict=True)):
        held = slice(first, first + count)
        embed, head = chunk == 0, chunk == len(rank_of) - 1
        costs = [
            math.fsum((units.embed * embed, *units.blocks[held], units.head * head))
            for units in (seconds, *([limits.bytes[rank]] if limits else []))
        ]
        begin, end = (first, first + count - 1) if count else (None, None)
        chunks.append(ChunkShare(chunk, rank, embed, head, begin, end, costs[0], costs[1] if limits else None))
        first += count
    own = [[share for share in chunks if share.rank == rank] for rank in range(ranks)]
    taken = [math.fsum(share.seconds for share in shares) for shares in own]
    slowest, mean = max(taken), math.fsum(taken) / ranks
    rows = tuple(
        RankShare(
            rank,
            taken[rank],
            taken[rank] / slowest if slowest else 1.0,
            math.fsum(share.bytes or 0 for share in own[rank]) if limits else None,
            limits.most[rank] if limits else None,
        )
        for rank in range(ranks)
    )
    return Explained(tuple(chunks), rows, slowest / mean - 1 if mean else 0.0)


def _checked(seconds: Units, rank_of: Sequence[int], limits: Limits | None) -> int:
    """How many ranks there are."""
    ranks = len(set(rank_of))
    if not ranks or set(rank_of) != set(range(ranks)):
        raise InputError("rank of each chunk", tuple(rank_of), "every rank from 0 on must have a chunk")
    if len(seconds.blocks) < sum(_least(rank_of)):
        inner = sum(_least(rank_of))
        raise InputError(
            "blocks",
            len(seconds.blocks),
            f"{len(rank_of)} chunks need at least {inner}: only the first and the last can do without",
            f"use at most {len(seconds.blocks) + 2} chunks",
        )
    if limits and (len(limits.bytes) != ranks or len(limits.most) != ranks):
        raise InputError("limits", None, f"there must be one for each of {ranks} ranks")
    if limits and any(len(units.blocks) != len(seconds.blocks) for units in limits.bytes):
        raise InputError("limits", None, f"there must be bytes for each of {len(seconds.blocks)} blocks")
    return ranks


def _unfit(best: Explained, found: Found) -> InputError:
    """Said of the partition whose rank that lacks the most lacks the least."""
    lack, worst = max(((r.bytes or 0) - (r.most or 0), r.rank) for r in best.ranks)
    needs, may = best.ranks[worst].bytes or 0, best.ranks[worst].most or 0
    reason = f"rank {worst} needs {write_bytes(needs)} and may have {write_bytes(may)}, {write_bytes(lack)} too much"
    proven = "at best" if found.bound == found.worst else "in the best partition found"
    return InputError("limits", None, f"{proven} {reason}", "use more ranks, or less memory per block")


def _least(rank_of: Sequence[int]) -> tuple[int, ...]:
    """The fewest blocks that each chunk may have."""
    return tuple(int(0 < chunk < len(rank_of) - 1) for chunk in range(len(rank_of)))


def _whole(units: Units, rounded: Callable[[float], int]) -> list[int]:
    return [rounded(cost) for cost in (units.embed, *units.blocks, units.head)]


def _measure(units: Sequence[Sequence[int]], base: Sequence[int], rank_of: Sequence[int]) -> Measure:
    table = np.array(units, dtype=np.int64)  # [ranks, embed + blocks + head]
    prefix = np.zeros((len(table), table.shape[1] - 1), dtype=np.int64)
    np.cumsum(table[:, 1:-1], axis=1, out=prefix[:, 1:])
    extra = np.zeros(len(rank_of), dtype=np.int64)
    extra[0] += table[rank_of[0], 0]
    extra[-1] += table[rank_of[-1], -1]
    return Measure(prefix, extra, np.array(base, dtype=np.int64))
