"""The search behind balance.py: the counts of blocks per chunk whose worst rank costs least, in integers.

A cut is where a chunk begins: cut 0 is block 0, the last cut is the end. `deal` serves blocks of equal cost, and
balance.py a few of one kind before others of equal cost. Otherwise `_improved` moves blocks for as long as that
helps, and `_sweep` finds out whether anything better exists: it goes through the ranks and tries every way to cut
their chunks. What later ranks can do depends only on the cuts that border on a chunk not yet cut, so of all partial
partitions that agree in those only the best is continued. That is one cut if a rank has one chunk, two in a V, three
if two chunks per rank are dealt out in turns: few. With more chunks per rank they are many, and the sweep gives up
beyond ROOM.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from phalanx.schedule.partition.bound import Ints, packed_bound

ROOM = 16_000_000  # cuts held at a time, over all partial partitions
KICKS = 60  # attempts to escape from a local optimum


@dataclass(frozen=True)
class Measure:
    """A cost in integers. `prefix` (ranks, L+1): cost on a rank of all blocks before each; `extra` (chunks,): embed
    and head; `base` (ranks,): subtracted from each rank's sum."""

    prefix: Ints
    extra: Ints
    base: Ints

    def plus(self, worst: int) -> Measure:
        """Return the measure whose base is each rank's budget, given that no rank may exceed `worst`."""
        return replace(self, base=self.base + worst)


@dataclass(frozen=True)
class PartitionQuestion:
    """Minimise the worst of target - base over ranks, such that no rank exceeds the base of `limit`. `least`: the
    fewest blocks of each chunk."""

    target: Measure
    limit: Measure | None
    rank_of: tuple[int, ...]
    least: tuple[int, ...]

    @property
    def measures(self) -> list[Measure]:
        """The target, and the limit if there is one."""
        return [self.target, self.limit] if self.limit else [self.target]

    @property
    def length(self) -> int:
        """The number of blocks, L."""
        return int(self.target.prefix.shape[1]) - 1

    def own(self, rank: int) -> list[int]:
        """Return the chunks of a rank."""
        return [chunk for chunk, other in enumerate(self.rank_of) if other == rank]


@dataclass(frozen=True)
class Solution:
    """A partition into `blocks` per chunk, the cost of its `worst` rank, and a `bound` that no partition
    undercuts."""

    blocks: tuple[int, ...]
    worst: int
    bound: int


class _TooMany(Exception):
    """The sweep has more partial partitions than ROOM."""


def deal(question: PartitionQuestion) -> Solution | None:
    """Partition blocks of equal cost: each in turn to the rank that is then the cheapest, which is optimal both for
    the worst rank and for the sum of squares; within a rank to its cheapest chunk. Returns None if the blocks do not
    fit."""
    counts = list(question.least)
    block_costs = [
        [int(m.prefix[rank, 1]) if question.length else 0 for rank in range(len(m.base))] for m in question.measures
    ]
    ranks = range(len(question.target.base))
    sums = [[-int(base) for base in m.base] for m in question.measures]
    for m, loads, costs in zip(question.measures, sums, block_costs, strict=True):
        for chunk, rank in enumerate(question.rank_of):
            loads[rank] += int(m.extra[chunk]) + costs[rank] * counts[chunk]

    def next_of(rank: int) -> tuple[int, int]:
        # Of equal ranks the later one, since it holds fewer activations in 1F1B.
        return sums[0][rank] + block_costs[0][rank], -rank

    added = [0 for _ in ranks]
    heap = [next_of(rank) for rank in sorted(set(question.rank_of))]
    heapq.heapify(heap)
    remainder = question.length - sum(counts)
    while remainder > 0 and heap:
        rank = -heapq.heappop(heap)[1]
        if question.limit and sums[1][rank] + block_costs[1][rank] > 0:
            continue  # full
        for loads, costs in zip(sums, block_costs, strict=True):
            loads[rank] += costs[rank]
        added[rank] += 1
        remainder -= 1
        heapq.heappush(heap, next_of(rank))
    if remainder or (question.limit and max(sums[1]) > 0):
        return None
    for rank in ranks:
        chunks_by_cost = [
            (int(question.target.extra[c]) + block_costs[0][rank] * counts[c], counts[c], -c)
            for c in question.own(rank)
        ]
        heapq.heapify(chunks_by_cost)
        for _ in range(added[rank]):
            cost, count, chunk = chunks_by_cost[0]
            heapq.heapreplace(chunks_by_cost, (cost + block_costs[0][rank], count + 1, chunk))
        for _, count, chunk in chunks_by_cost:
            counts[-chunk] = count
    return Solution(tuple(counts), max(sums[0]), max(sums[0]))


def least_worst(question: PartitionQuestion, begin: Sequence[int] | None = None) -> Solution | None:
    """Return the best partition found, starting from `begin` (blocks per chunk); None if no move meets the limits."""
    # Local search.
    starts = [begin] if begin else [_even(question), _by_cost(question)]
    best = min((_improved(question, cuts_of(start)) for start in starts), key=lambda cuts: value_of(question, cuts))
    excess, worst, _ = value_of(question, best)
    if excess > 0:
        return None
    # Guess a worst rank between the bound and the best partition, and sweep for it.
    below = _bound(question) - 1  # costs of the worst rank up to this are known to be impossible
    if len(question.rank_of) > 2 * len(question.target.base) and below < worst - 1:  # a sweep may have to give up
        below = _kinds_bound(question, below + 1, worst) - 1
    failed, fraction = 0, 4  # failed guesses since the last success; a lower guess is refuted sooner
    while below < worst - 1:
        tried = below + (worst - below) // fraction if failed < 2 else worst - 1
        try:
            result = _sweep(question, tried)
        except _TooMany:
            if fraction > 16:
                break
            if fraction == 4:
                best = _kicked(question, best, below + 1)
                worst = value_of(question, best)[1]
            failed, fraction = 0, 4 * fraction  # a lower guess leaves fewer partial partitions
            continue
        if result is None:
            below, failed = tried, failed + 1
        else:
            best, failed = _improved(question, result), 0
            worst = value_of(question, best)[1]
    # Of partitions as good, the most even one.
    with suppress(_TooMany):
        even = _sweep(question, worst, value_of(question, best)[2])
        best = best if even is None else even
    return Solution(tuple(int(n) for n in np.diff(best)), worst, below + 1)


def cuts_of(blocks: Sequence[int]) -> Ints:
    """Return where each chunk begins, and the end."""
    return np.concatenate([[0], np.cumsum(np.array(blocks, dtype=np.int64))])


def _even(question: PartitionQuestion) -> list[int]:
    """Return the blocks per chunk that `deal` gives if every block has the mean cost."""
    length = question.length
    mean = question.target.prefix[:, -1:] // max(length, 1)
    uniform = replace(question.target, prefix=mean * np.arange(length + 1))
    result = deal(replace(question, target=uniform, limit=None))
    assert result is not None
    return list(result.blocks)


def _by_cost(question: PartitionQuestion) -> list[int]:
    """Return the blocks per chunk if each cut is where the cumulative cost is closest to an even share."""
    at, length, left = 0, question.length, sum(question.least)
    prefix, extra = question.target.prefix[0], question.target.extra
    each = (prefix[-1] + extra.sum()) / len(extra)
    counts = []
    for chunk, least in enumerate(question.least):
        left -= least
        wanted = each * (chunk + 1) - extra[: chunk + 1].sum()
        cut = int(np.argmin(np.abs(prefix - wanted)))
        cut = length if chunk == len(extra) - 1 else min(max(cut, at + least), length - left)
        counts.append(cut - at)
        at = cut
    return counts


def _bound(question: PartitionQuestion) -> int:
    """Return a lower bound of the worst rank's cost: the largest of the mean, the most expensive block, and the least
    that any rank must hold."""
    target = question.target
    each = np.diff(target.prefix, axis=1)  # [ranks, L]
    ranks = len(target.base)
    mean = -(-int(each.min(axis=0).sum() + target.extra.sum() - target.base.sum()) // ranks)
    if not question.length:
        return max(mean, int(_sums(question, np.zeros(len(question.rank_of) + 1, dtype=np.int64))[0].max()))
    forced = [
        int(target.extra[own].sum() - target.base[rank]) + int(each[rank].min()) * sum(question.least[c] for c in own)
        for rank, own in ((rank, question.own(rank)) for rank in range(ranks))
    ]
    return max(mean, int((each - target.base[:, None]).min(axis=0).max()), *forced)


def _kinds_bound(question: PartitionQuestion, low: int, high: int) -> int:
    """Return a lower bound of the worst rank from the number of blocks of each kind."""
    each = np.diff(question.target.prefix, axis=1)
    if (each != each[0]).any():
        return low
    ranks = range(len(question.target.base))
    taken = [int(question.target.extra[question.own(rank)].sum() - question.target.base[rank]) for rank in ranks]
    return packed_bound(each[0], taken, low, high)


def _sums(question: PartitionQuestion, cuts: Ints) -> Ints:
    """Return the cost of each rank above its base, (measures, ranks)."""
    result = np.array([-m.base for m in question.measures])
    for row, m in zip(result, question.measures, strict=True):
        ranks = np.array(question.rank_of)
        np.add.at(row, ranks, m.prefix[ranks, cuts[1:]] - m.prefix[ranks, cuts[:-1]] + m.extra)
    return result


def _squares(load: Ints) -> Ints:
    """Return squares in units of 2^40, which do not overflow 64 bits for sums up to 2^50."""
    return (load >> 20) ** 2


def value_of(question: PartitionQuestion, cuts: Ints) -> tuple[int, int, int]:
    """Return (excess over the limits, worst rank, sum of squares): smaller is better, in this order."""
    sums = _sums(question, cuts)
    excess = int(np.maximum(sums[1:], 0).sum())
    return excess, int(sums[0].max()), int(_squares(sums[0]).sum())


def _improved(question: PartitionQuestion, cuts: Ints) -> Ints:
    """Improve by steepest descent: shift a run of neighbouring cuts by one block while that helps. Shifting a run
    moves a block between two chunks, however far apart."""
    ranks = np.array(question.rank_of)
    least = np.array(question.least)
    inner = np.arange(1, len(ranks))
    value = value_of(question, cuts)
    while True:
        best = value
        sums = _sums(question, cuts)
        # All runs of cuts, shifted either way: cost of each rank after the move, by prefix sums.
        for shift in (1, -1):
            taker, giver = (ranks[:-1], ranks[1:]) if shift > 0 else (ranks[1:], ranks[:-1])
            block = np.clip(cuts[1:-1] - (shift < 0), 0, question.length - 1)
            change = np.zeros((len(sums), len(inner), sums.shape[1]), dtype=np.int64)
            for i, m in enumerate(question.measures):
                one = np.diff(m.prefix, axis=1)
                np.add.at(change[i], (inner - 1, taker), one[taker, block])
                np.add.at(change[i], (inner - 1, giver), -one[giver, block])
            until = np.concatenate([np.zeros_like(change[:, :1]), np.cumsum(change, axis=1)], axis=1)
            first, last = np.triu_indices(len(inner))  # cuts first+1..last+1
            spare = np.diff(cuts) > least
            may = spare[last + 1] if shift > 0 else spare[first]
            first, last = first[may], last[may]
            if not len(first):
                continue
            # Compare the moves that leave every chunk its fewest blocks.
            moved = sums[:, None] + until[:, last + 1] - until[:, first]
            excess = np.maximum(moved[1:], 0).sum(axis=(0, 2))
            worst, squares = moved[0].max(axis=1), _squares(moved[0]).sum(axis=1)
            at = np.lexsort((squares, worst, excess))[0]
            if (excess[at], worst[at], squares[at]) < best:
                best = int(excess[at]), int(worst[at]), int(squares[at])
                run = (first[at] + 1, last[at] + 1, shift)
        # Make the best move, until none helps.
        if best == value:
            return cuts
        cuts = cuts.copy()
        cuts[run[0] : run[1] + 1] += run[2]
        value = best


def _kicked(question: PartitionQuestion, cuts: Ints, bound: int) -> Ints:
    """Escape from a local optimum: move a few blocks at random, improve again, and keep the result if it is no worse.
    The seed is fixed."""
    draw, least = np.random.default_rng(0), np.array(question.least)
    value = value_of(question, cuts)
    for _ in range(KICKS):
        if value[1] <= bound:
            break
        blocks = np.diff(cuts)
        for _ in range(3):
            givers = np.flatnonzero(blocks > least)
            if len(givers):
                blocks[draw.choice(givers)] -= 1
                blocks[draw.integers(len(blocks))] += 1
        tried = _improved(question, cuts_of(blocks.tolist()))
        if value_of(question, tried) <= value:
            cuts, value = tried, value_of(question, tried)
    return cuts


def _sweep(question: PartitionQuestion, worst: int, below: int | None = None) -> Ints | None:
    """Return the cuts of a partition with no rank above `worst`, or None. With `below`: the cuts with the least sum
    of squares, if it is less than `below`."""
    measures = [question.target.plus(worst), *question.measures[1:]]
    chunks, length = len(question.rank_of), question.length
    ranks = len(question.target.base)
    # Lower bounds on the cost of the blocks not yet assigned, on their cheapest ranks.
    cheapest = [np.concatenate([[0], np.cumsum(np.diff(m.prefix, axis=1).min(axis=0))]) for m in measures]
    tail = [np.array([low[-1] + m.extra.sum()]) for low, m in zip(cheapest, measures, strict=True)]
    cuts = np.full((1, chunks + 1), -1, dtype=np.int64)
    cuts[:, 0], cuts[:, chunks] = 0, length
    squares = np.zeros(1, dtype=np.int64)
    fixed_cuts, done = {0, chunks}, set()
    # Extend all partial partitions (rows) rank by rank, chunk by chunk.
    for rank in range(ranks):
        room = [np.full(len(cuts), m.base[rank]) for m in measures]  # what the rank may still take
        chunks_here = question.own(rank)
        for chunk in chunks_here:
            room = [r - m.extra[chunk] for r, m in zip(room, measures, strict=True)]
            for cut in (chunk, chunk + 1):
                if cut in fixed_cuts:
                    continue
                # Every place of this cut that keeps the rank within its budget.
                low, high = _range(question, cuts, fixed_cuts, cut)
                for r, m in zip(room, measures, strict=True):
                    prefix = m.prefix[rank]
                    if cut == chunk and chunk + 1 in fixed_cuts:
                        low = np.maximum(low, np.searchsorted(prefix, prefix[cuts[:, cut + 1]] - r, "left"))
                    elif cut == chunk + 1:
                        high = np.minimum(high, np.searchsorted(prefix, prefix[cuts[:, chunk]] + r, "right") - 1)
                counts = np.maximum(high - low + 1, 0)
                if counts.sum() * (chunks + 1) > ROOM:
                    raise _TooMany
                # One row for each place of the cut.
                rows = np.repeat(np.arange(len(cuts)), counts)
                cuts, squares = cuts[rows], squares[rows]
                cuts[:, cut] = low[rows] + np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
                room = [r[rows] for r in room]
                tail = [n[rows] for n in tail]
                fixed_cuts.add(cut)
            done.add(chunk)
            begin, end = cuts[:, chunk], cuts[:, chunk + 1]
            room = [r - (m.prefix[rank][end] - m.prefix[rank][begin]) for r, m in zip(room, measures, strict=True)]
            tail = [
                n - (low[end] - low[begin]) - m.extra[chunk]
                for n, low, m in zip(tail, cheapest, measures, strict=True)
            ]
            # Drop rows whose remaining blocks cannot fit on the remaining ranks, or that cannot be more even.
            keep = np.all([r >= 0 for r in room], axis=0)
            last = chunk == chunks_here[-1]
            for n, r, m in zip(tail, room, measures, strict=True):
                keep &= n <= m.base[rank + 1 :].sum() + (0 if last else r)
            if last:
                squares = squares + _squares(worst - room[0])
                if below is not None:  # if the other ranks come out perfectly even
                    rest = np.maximum((tail[0] - question.target.base[rank + 1 :].sum() >> 20) - ranks, 0)
                    keep &= squares + rest**2 // max(ranks - 1 - rank, 1) < below
            cuts, squares = cuts[keep], squares[keep]
            room, tail = [r[keep] for r in room], [n[keep] for n in tail]
            if last or below is None:
                # Of rows with equal open cuts, later ranks have equal choices: keep only the best.
                open_cuts = [c for c in sorted(fixed_cuts - {0, chunks}) if not {c - 1, c} <= done]
                best_rows = _best(cuts[:, open_cuts], length + 1, [squares] if last else [-r for r in room])
                cuts, squares = cuts[best_rows], squares[best_rows]
                room, tail = [r[best_rows] for r in room], [n[best_rows] for n in tail]
            if not len(cuts):
                return None
    result: Ints = cuts[np.argmin(squares)]
    return result


def _range(question: PartitionQuestion, cuts: Ints, known: set[int], cut: int) -> tuple[Ints, Ints]:
    """Return the range (inclusive) of a cut that leaves the chunks up to the next known cuts their fewest blocks."""
    before, after = max(c for c in known if c < cut), min(c for c in known if c > cut)
    return cuts[:, before] + sum(question.least[before:cut]), cuts[:, after] - sum(question.least[cut:after])


def _best(same: Ints, base: int, values: list[Ints]) -> Ints:
    """Return the rows to keep: of those with the same cuts, the Pareto front in one or two values (smaller is
    better)."""
    if base ** same.shape[1] >= 2**62:
        raise _TooMany
    key = same @ np.array([base**i for i in range(same.shape[1])], dtype=np.int64)
    order = np.lexsort((*reversed(values), key))
    group = np.cumsum(np.diff(key[order], prepend=key[order[:1]]) != 0)
    second = np.unique(-values[1], return_inverse=True)[1][order] if len(values) > 1 else np.zeros_like(group)
    rising = group * (len(order) + 1) + second + 1  # within a group, a row must rise above all before it
    above = np.maximum.accumulate(rising)
    result: Ints = order[rising > np.concatenate([[0], above[:-1]])]
    return result
