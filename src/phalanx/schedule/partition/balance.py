"""Which blocks of a model go into which pipeline chunk, so that the slowest rank is as fast as possible.

A model is embed, blocks 0..L-1, head. Chunks are contiguous runs of it, in order; the first holds embed and the last
head, so these two need no block, and every other has at least one. The cost of a rank is the sum of its chunks.

    blocks of equal cost       greedy, each block to the rank that is then the cheapest: optimal for any map of chunks
    a few, then equal ones     the same, for every way to cut the few (below)
    one chunk a rank, or a V   optimal dynamic programming, rank by rank: of the partial partitions that leave
                               the same choices open, only the best is kept
    other maps, other blocks   local search that moves blocks, then the same dynamic programming while it stays small,
                               as it does for two chunks per rank unless one unit costs far more than a rank's share
                               or blocks differ wildly. `bound` says whether it is optimal, or how far off at most

Among optimal partitions the most even is chosen: the least sum of squares over ranks (for unequal blocks, while the
search stays small). Costs are rounded to integer multiples of at most 2^-49 of their sum, so that blocks of equal
cost stay equal wherever they lie.

The first few blocks are of another kind than the rest where the first layers have a dense MLP and the rest experts
(DeepSeek-V3: 3 of 61). Chunks before the one in which the second kind begins hold blocks of the first kind alone. So
there are few ways to cut these, at most 2^n for n blocks; for each, the others cost the same and are dealt out
(`deal`), which is optimal.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from phalanx.schedule.partition.search import (
    Measure,
    PartitionQuestion,
    Solution,
    cuts_of,
    deal,
    least_worst,
    value_of,
)
from phalanx.spec.byte_sizes import write_bytes
from phalanx.spec.errors import InputError

MOST_FIRST_KIND = 6
"""The most blocks of the first kind: 64 ways to cut them."""


def leading_blocks(question: PartitionQuestion) -> int:
    """Return the number of blocks of the first kind, if these cost the same on each rank, and all later ones too; 0
    if blocks are not of two such kinds, or more than MOST_FIRST_KIND are of the first."""
    each = [np.diff(m.prefix, axis=1) for m in question.measures]
    for count in range(1, min(MOST_FIRST_KIND, question.length - 1) + 1):
        parts = [part for one in each for part in (one[:, :count], one[:, count:])]
        if all((part == part[:, :1]).all() for part in parts):
            return count
    return 0


def deal_after(question: PartitionQuestion, count: int) -> Solution | None:
    """Return the best partition if the first `count` blocks are of one kind and all others of another; None if no
    partition meets the limits."""
    best: tuple[tuple[int, int, int], tuple[int, ...]] | None = None
    for first in _ways(question, count):
        rest = deal(_second_kind(question, first))
        if rest is not None:
            blocks = (*first[:-1], first[-1] + rest.blocks[0], *rest.blocks[1:])
            value = value_of(question, cuts_of(blocks)), blocks
            best = value if best is None else min(best, value)
    return None if best is None else Solution(best[1], best[0][1], best[0][1])


def _ways(question: PartitionQuestion, count: int) -> Iterator[tuple[int, ...]]:
    """Yield every way to divide the blocks of the first kind, as counts per chunk up to the last chunk that has
    any."""

    def ways(chunk: int, left: int) -> Iterator[tuple[int, ...]]:
        yield (left,)
        if chunk + 1 < len(question.rank_of):
            for n in range(question.least[chunk], left):
                for rest in ways(chunk + 1, left - n):
                    yield (n, *rest)

    return ways(0, count)


def _second_kind(question: PartitionQuestion, first: tuple[int, ...]) -> PartitionQuestion:
    """Return the question of the second kind's blocks, for the chunks from the last in `first` (the blocks of the
    first kind by chunk) on."""
    begin, count = len(first) - 1, sum(first)
    rank_of = question.rank_of

    def rest(m: Measure) -> Measure:
        extra, base = m.extra[begin:].copy(), m.base.copy()
        one = m.prefix[:, 1]
        extra[0] += first[-1] * one[rank_of[begin]]
        for chunk, n in enumerate(first[:-1]):
            base[rank_of[chunk]] -= m.extra[chunk] + n * one[rank_of[chunk]]
        return Measure(m.prefix[:, count:] - m.prefix[:, count : count + 1], extra, base)

    return replace(
        question,
        target=rest(question.target),
        limit=rest(question.limit) if question.limit else None,
        rank_of=rank_of[begin:],
        least=(0, *question.least[begin + 1 :]),
    )


@dataclass(frozen=True)
class Units:
    """The cost of every unit of a model, in order: in seconds, or in bytes. Raises InputError unless all are finite
    and at least 0."""

    embed: float
    blocks: tuple[float, ...]
    head: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "blocks", tuple(self.blocks))
        for value in (self.embed, *self.blocks, self.head):
            if not (math.isfinite(value) and value >= 0):
                raise InputError("cost of a unit", value, "must be finite and at least 0")


@dataclass(frozen=True)
class MemoryLimits:
    """Memory limits. `most`: bytes available on each rank; `bytes`: bytes of each unit on each rank, which differ
    since in 1F1B an early rank holds the activations of more micro-batches."""

    bytes: tuple[Units, ...]
    most: tuple[float, ...]


@dataclass(frozen=True)
class Partition:
    """A partition: `blocks` of each chunk; `slowest`: seconds of the slowest rank; `bound`: a lower bound on the
    seconds of any partition."""

    blocks: tuple[int, ...]
    slowest: float
    bound: float

    @property
    def optimal(self) -> bool:
        """Whether the partition is proved optimal."""
        return self.slowest <= self.bound


@dataclass(frozen=True)
class ChunkShare:
    """The share of one chunk: blocks `first` to `last` inclusive, None if it holds only embed or head."""

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
    """The share of one rank. `share`: its seconds over the slowest rank's; `most`: its limit in bytes."""

    rank: int
    seconds: float
    share: float
    bytes: float | None
    most: float | None


@dataclass(frozen=True)
class PartitionCosts:
    """The costs of a partition by chunk and rank. `imbalance`: seconds of the slowest rank over the mean of all
    ranks, minus 1; 0 is even."""

    chunks: tuple[ChunkShare, ...]
    ranks: tuple[RankShare, ...]
    imbalance: float


def partition(seconds: Units, rank_of: Sequence[int], limits: MemoryLimits | None = None) -> Partition:
    """Return the best partition for chunks on the ranks `rank_of`. Raises InputError if none fits the limits."""
    ranks = _checked(seconds, rank_of, limits)
    # Costs as integers, so that equal blocks stay equal.
    total = seconds.embed + sum(seconds.blocks) + seconds.head
    scale = 2.0 ** (49 - math.frexp(total)[1]) if total > 0 else 1.0
    time = _measure([_integers(seconds, lambda cost: round(cost * scale))] * ranks, [0] * ranks, rank_of)
    memory = None
    if limits:
        sizes = [_integers(units, math.ceil) for units in limits.bytes]
        most = [math.floor(min(most, sum(own))) for most, own in zip(limits.most, sizes, strict=True)]
        memory = _measure(sizes, most, rank_of)
    equal = all(len(set(units.blocks)) <= 1 for units in (seconds, *(limits.bytes if limits else ())))
    question = PartitionQuestion(time, memory, tuple(rank_of), _fewest_blocks(rank_of))
    first = 0 if equal else leading_blocks(question)

    def solve(question: PartitionQuestion) -> Solution | None:
        if equal:
            return deal(question)
        return deal_after(question, first) if first else least_worst(question)

    # If nothing fits, start from the partition of least memory, and search from there.
    best = solve(question)
    if best is None:
        assert limits is not None
        assert memory is not None
        nearest = solve(PartitionQuestion(memory, None, question.rank_of, question.least))  # closest to the limits
        assert nearest
        best = least_worst(question, nearest.blocks) if nearest.worst <= 0 and not equal and not first else None
        if best is None:
            raise _unfit(explain(seconds, rank_of, nearest.blocks, limits), nearest)
    slowest = max(share.seconds for share in explain(seconds, rank_of, best.blocks, limits).ranks)
    return Partition(best.blocks, slowest, slowest if best.bound == best.worst else best.bound / scale)


def explain(
    seconds: Units, rank_of: Sequence[int], blocks: Sequence[int], limits: MemoryLimits | None = None
) -> PartitionCosts:
    """Return the cost of each chunk and each rank of a given partition. Raises InputError if it is not a
    partition."""
    ranks = _checked(seconds, rank_of, limits)
    least = _fewest_blocks(rank_of)
    if len(blocks) != len(rank_of) or sum(blocks) != len(seconds.blocks) or any(map(int.__lt__, blocks, least)):
        reason = f"must be {len(rank_of)} counts that make {len(seconds.blocks)}, none of them 0 in the middle"
        raise InputError("blocks per chunk", tuple(blocks), reason)
    # The cost of each chunk.
    chunks, first = [], 0
    for chunk, (rank, count) in enumerate(zip(rank_of, blocks, strict=True)):
        blocks_here = slice(first, first + count)
        embed, head = chunk == 0, chunk == len(rank_of) - 1
        costs = [
            math.fsum((units.embed * embed, *units.blocks[blocks_here], units.head * head))
            for units in (seconds, *([limits.bytes[rank]] if limits else []))
        ]
        begin, end = (first, first + count - 1) if count else (None, None)
        chunks.append(ChunkShare(chunk, rank, embed, head, begin, end, costs[0], costs[1] if limits else None))
        first += count
    # The cost of each rank.
    shares_of = [[share for share in chunks if share.rank == rank] for rank in range(ranks)]
    seconds_of = [math.fsum(share.seconds for share in shares) for shares in shares_of]
    slowest, mean = max(seconds_of), math.fsum(seconds_of) / ranks
    rows = tuple(
        RankShare(
            rank,
            seconds_of[rank],
            seconds_of[rank] / slowest if slowest else 1.0,
            math.fsum(share.bytes or 0 for share in shares_of[rank]) if limits else None,
            limits.most[rank] if limits else None,
        )
        for rank in range(ranks)
    )
    return PartitionCosts(tuple(chunks), rows, slowest / mean - 1 if mean else 0.0)


def _checked(seconds: Units, rank_of: Sequence[int], limits: MemoryLimits | None) -> int:
    """Check the input and return the number of ranks."""
    ranks = len(set(rank_of))
    if not ranks or set(rank_of) != set(range(ranks)):
        raise InputError("rank of each chunk", tuple(rank_of), "every rank from 0 on must have a chunk")
    if len(seconds.blocks) < sum(_fewest_blocks(rank_of)):
        inner = sum(_fewest_blocks(rank_of))
        raise InputError(
            "blocks",
            len(seconds.blocks),
            f"{len(rank_of)} chunks need at least {inner}: only the first and the last may have none",
            f"use at most {len(seconds.blocks) + 2} chunks",
        )
    if limits and (len(limits.bytes) != ranks or len(limits.most) != ranks):
        raise InputError("limits", None, f"must have one entry for each of {ranks} ranks")
    if limits and any(len(units.blocks) != len(seconds.blocks) for units in limits.bytes):
        raise InputError("limits", None, f"must give bytes for each of {len(seconds.blocks)} blocks")
    return ranks


def _unfit(best: PartitionCosts, solution: Solution) -> InputError:
    """Return the error for a model that does not fit, quoting the partition whose worst excess is smallest."""
    excess, worst = max(((r.bytes or 0) - (r.most or 0), r.rank) for r in best.ranks)
    needs, may = best.ranks[worst].bytes or 0, best.ranks[worst].most or 0
    reason = (
        f"rank {worst} needs {write_bytes(needs)} and may have {write_bytes(may)}, {write_bytes(excess)} too much"
    )
    proven = "at best" if solution.bound == solution.worst else "in the best partition found"
    return InputError("limits", None, f"{proven} {reason}", "use more ranks, or less memory per block")


def _fewest_blocks(rank_of: Sequence[int]) -> tuple[int, ...]:
    """Return the fewest blocks that each chunk may have: 0 at the two ends, else 1."""
    return tuple(int(0 < chunk < len(rank_of) - 1) for chunk in range(len(rank_of)))


def _integers(units: Units, rounded: Callable[[float], int]) -> list[int]:
    return [rounded(cost) for cost in (units.embed, *units.blocks, units.head)]


def _measure(units: Sequence[Sequence[int]], base: Sequence[int], rank_of: Sequence[int]) -> Measure:
    table = np.array(units, dtype=np.int64)  # [ranks, embed + blocks + head]
    prefix = np.zeros((len(table), table.shape[1] - 1), dtype=np.int64)
    np.cumsum(table[:, 1:-1], axis=1, out=prefix[:, 1:])
    extra = np.zeros(len(rank_of), dtype=np.int64)
    extra[0] += table[rank_of[0], 0]
    extra[-1] += table[rank_of[-1], -1]
    return Measure(prefix, extra, np.array(base, dtype=np.int64))
