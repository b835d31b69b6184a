"""The search of partition.py: the counts of blocks per chunk whose worst rank is least, in whole numbers.

A cut is where a chunk begins: cut 0 is block 0, the last cut is the end. `deal` is for blocks that are all alike.
Otherwise `_improved` moves blocks for as long as that helps, and `_sweep` finds whether there is anything better: it
takes the ranks in turn and tries every way to cut their chunks. What later ranks can do depends only on cuts that
border on a chunk not yet cut, so of all beginnings with the same of those only the best one goes on. Those are one
cut where a rank has one chunk, two in a V, three where two chunks per rank are dealt out in turns: few. With more
chunks per rank they are many, and the sweep gives up beyond ROOM.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from phalanx.schedule.partition.bound import Ints, packed_bound

ROOM = 16_000_000  # cuts looked at in one go, of all beginnings
KICKS = 60  # tries to come out of where no move helps


@dataclass(frozen=True)
class Measure:
    """What the blocks before each take on a rank, `prefix` [ranks, L+1]; what a chunk takes besides, `extra`
    [chunks]: embed, head; what is taken off each rank's sum, `base` [ranks]."""

    prefix: Ints
    extra: Ints
    base: Ints

    def plus(self, worst: int) -> Measure:
        """Whose base is also the most that each rank may have."""
        return replace(self, base=self.base + worst)


@dataclass(frozen=True)
class Question:
    """Minimise the worst of target - base over ranks, with no rank of `limit` above its base. `least`: the fewest
    blocks of each chunk."""

    target: Measure
    limit: Measure | None
    rank_of: tuple[int, ...]
    least: tuple[int, ...]

    @property
    def measures(self) -> list[Measure]:
        return [self.target, self.limit] if self.limit else [self.target]

    @property
    def length(self) -> int:
        return int(self.target.prefix.shape[1]) - 1

    def own(self, rank: int) -> list[int]:
        return [chunk for chunk, other in enumerate(self.rank_of) if other == rank]


@dataclass(frozen=True)
class Found:
    """`worst` rank of `blocks` per chunk; none comes below `bound`."""

    blocks: tuple[int, ...]
    worst: int
    bound: int


class _TooMany(Exception):
    pass


def deal(asked: Question) -> Found | None:
    """Blocks all alike: each in turn to the rank that is then the best off, which is optimal for the worst rank and
    for the sum of squares alike, then within a rank to its cheapest chunk. None where they do not fit."""
    counts = list(asked.least)
    each = [[int(m.prefix[rank, 1]) if asked.length else 0 for rank in range(len(m.base))] for m in asked.measures]
    ranks = range(len(asked.target.base))
    sums = [[-int(base) for base in m.base] for m in asked.measures]
    for m, taken, one in zip(asked.measures, sums, each, strict=True):
        for chunk, rank in enumerate(asked.rank_of):
            taken[rank] += int(m.extra[chunk]) + one[rank] * counts[chunk]

    def next_of(rank: int) -> tuple[int, int]:
        return sums[0][rank] + each[0][rank], -rank  # of equals to the later: it holds fewer activations in 1F1B

    more = [0 for _ in ranks]
    heap = [next_of(rank) for rank in ranks]
    heapq.heapify(heap)
    left = asked.length - sum(counts)
    while left and heap:
        rank = -heapq.heappop(heap)[1]
        if asked.limit and sums[1][rank] + each[1][rank] > 0:
            continue  # full
        for taken, one in zip(sums, each, strict=True):
            taken[rank] += one[rank]
        more[rank] += 1
        left -= 1
        heapq.heappush(heap, next_of(rank))
    if left or (asked.limit and max(sums[1]) > 0):
        return None
    for rank in ranks:
        own = [(int(asked.target.extra[c]) + each[0][rank] * counts[c], counts[c], -c) for c in asked.own(rank)]
        heapq.heapify(own)
        for _ in range(more[rank]):
            cost, count, chunk = own[0]
            heapq.heapreplace(own, (cost + each[0][rank], count + 1, chunk))
        for _, count, chunk in own:
            counts[-chunk] = count
    return Found(tuple(counts), max(sums[0]), max(sums[0]))


def least_worst(asked: Question, begin: Sequence[int] | None = None) -> Found | None:
    """The best partition, begun at the blocks per chunk of `begin`; None where moving blocks meets no limit."""
    starts = [begin] if begin else [_even(asked), _by_cost(asked)]
    best = min((_improved(asked, _cuts(start)) for start in starts), key=lambda cuts: _value(asked, cuts))
    lack, worst, _ = _value(asked, best)
    if lack > 0:
        return None
    below = _bound(asked) - 1  # a worst rank known not to be
    if len(asked.rank_of) > 2 * len(asked.target.base) and below < worst - 1:  # a sweep may have to give up
        below = _of_kinds(asked, below + 1, worst) - 1
    vain, part = 0, 4  # low guesses since the last find: the lower, the sooner seen to be too low
    while below < worst - 1:
        tried = below + (worst - below) // part if vain < 2 else worst - 1
        try:
            found = _sweep(asked, tried)
        except _TooMany:
            if part > 16:
                break
            if part == 4:
                best = _kicked(asked, best, below + 1)
                worst = _value(asked, best)[1]
            vain, part = 0, 4 * part  # lower, there are fewer
            continue
        if found is None:
            below, vain = tried, vain + 1
        else:
            best, vain = _improved(asked, found), 0
            worst = _value(asked, best)[1]
    with suppress(_TooMany):
        even = _sweep(asked, worst, _value(asked, best)[2])
        best = best if even is None else even
    return Found(tuple(int(n) for n in np.diff(best)), worst, below + 1)


def _cuts(blocks: Sequence[int]) -> Ints:
    return np.concatenate([[0], np.cumsum(np.array(blocks, dtype=np.int64))])


def _even(asked: Question) -> list[int]:
    """As dealt out if every block were the mean of all."""
    length = asked.length
    mean = asked.target.prefix[:, -1:] // max(length, 1)
    alike = replace(asked.target, prefix=mean * np.arange(length + 1))
    found = deal(replace(asked, target=alike, limit=None))
    assert found is not None
    return list(found.blocks)


def _by_cost(asked: Question) -> list[int]:
    """Cut where the cost so far is what so many chunks should have."""
    at, length, left = 0, asked.length, sum(asked.least)
    prefix, extra = asked.target.prefix[0], asked.target.extra
    each = (prefix[-1] + extra.sum()) / len(extra)
    counts = []
    for chunk, least in enumerate(asked.least):
        left -= least
        wanted = each * (chunk + 1) - extra[: chunk + 1].sum()
        cut = int(np.argmin(np.abs(prefix - wanted)))
        cut = length if chunk == len(extra) - 1 else min(max(cut, at + least), length - left)
        counts.append(cut - at)
        at = cut
    return counts


def _bound(asked: Question) -> int:
    """What the worst rank cannot be below: the mean, the dearest block alone, the fewest that a rank must have."""
    target = asked.target
    each = np.diff(target.prefix, axis=1)  # [ranks, L]
    ranks = len(target.base)
    mean = -(-int(each.min(axis=0).sum() + target.extra.sum() - target.base.sum()) // ranks)
    if not asked.length:
        return max(mean, int(_sums(asked, np.zeros(len(asked.rank_of) + 1, dtype=np.int64))[0].max()))
    forced = [
        int(target.extra[own].sum() - target.base[rank]) + int(each[rank].min()) * sum(asked.least[c] for c in own)
        for rank, own in ((rank, asked.own(rank)) for rank in range(ranks))
    ]
    return max(mean, int((each - target.base[:, None]).min(axis=0).max()), *forced)


def _of_kinds(asked: Question, low: int, high: int) -> int:
    """The bound from how many of each kind of block there are."""
    each = np.diff(asked.target.prefix, axis=1)
    if (each != each[0]).any():
        return low
    ranks = range(len(asked.target.base))
    taken = [int(asked.target.extra[asked.own(rank)].sum() - asked.target.base[rank]) for rank in ranks]
    return packed_bound(each[0], taken, low, high)


def _sums(asked: Question, cuts: Ints) -> Ints:
    """[measures, ranks]: of each rank above its base."""
    found = np.array([-m.base for m in asked.measures])
    for row, m in zip(found, asked.measures, strict=True):
        ranks = np.array(asked.rank_of)
        np.add.at(row, ranks, m.prefix[ranks, cuts[1:]] - m.prefix[ranks, cuts[:-1]] + m.extra)
    return found


def _squares(load: Ints) -> Ints:
    """Exact in 64 bits for what sums up to 2^50."""
    return (load >> 20) ** 2


def _value(asked: Question, cuts: Ints) -> tuple[int, int, int]:
    """What is over the limit, the worst rank, the sum of squares: less is better, in this order."""
    sums = _sums(asked, cuts)
    lack = int(np.maximum(sums[1:], 0).sum())
    return lack, int(sums[0].max()), int(_squares(sums[0]).sum())


def _improved(asked: Question, cuts: Ints) -> Ints:
    """Shifts a run of neighbouring cuts by a block, the best such move each time, until none helps. A run of cuts
    takes a block to one chunk from another however far away."""
    ranks = np.array(asked.rank_of)
    least = np.array(asked.least)
    inner = np.arange(1, len(ranks))
    value = _value(asked, cuts)
    while True:
        best = value
        sums = _sums(asked, cuts)
        for shift in (1, -1):
            taker, giver = (ranks[:-1], ranks[1:]) if shift > 0 else (ranks[1:], ranks[:-1])
            block = np.clip(cuts[1:-1] - (shift < 0), 0, asked.length - 1)
            change = np.zeros((len(sums), len(inner), sums.shape[1]), dtype=np.int64)
            for i, m in enumerate(asked.measures):
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
            moved = sums[:, None] + until[:, last + 1] - until[:, first]
            lack = np.maximum(moved[1:], 0).sum(axis=(0, 2))
            worst, squares = moved[0].max(axis=1), _squares(moved[0]).sum(axis=1)
            at = np.lexsort((squares, worst, lack))[0]
            if (lack[at], worst[at], squares[at]) < best:
                best = int(lack[at]), int(worst[at]), int(squares[at])
                run = (first[at] + 1, last[at] + 1, shift)
        if best == value:
            return cuts
        cuts = cuts.copy()
        cuts[run[0] : run[1] + 1] += run[2]
        value = best


def _kicked(asked: Question, cuts: Ints, bound: int) -> Ints:
    """From where no move helps: a few blocks put anywhere, and moved again, kept if that is no worse. The draws are
    the same each time."""
    draw, least = np.random.default_rng(0), np.array(asked.least)
    value = _value(asked, cuts)
    for _ in range(KICKS):
        if value[1] <= bound:
            break
        blocks = np.diff(cuts)
        for _ in range(3):
            givers = np.flatnonzero(blocks > least)
            if len(givers):
                blocks[draw.choice(givers)] -= 1
                blocks[draw.integers(len(blocks))] += 1
        tried = _improved(asked, _cuts(blocks.tolist()))
        if _value(asked, tried) <= value:
            cuts, value = tried, _value(asked, tried)
    return cuts


def _sweep(asked: Question, worst: int, below: int | None = None) -> Ints | None:
    """A partition with no rank above `worst`, if there is one. With `below`: the one of the least sum of squares
    that is below this."""
    measures = [asked.target.plus(worst), *asked.measures[1:]]
    chunks, length = len(asked.rank_of), asked.length
    ranks = len(asked.target.base)
    cheapest = [np.concatenate([[0], np.cumsum(np.diff(m.prefix, axis=1).min(axis=0))]) for m in measures]
    left = [np.array([low[-1] + m.extra.sum()]) for low, m in zip(cheapest, measures, strict=True)]
    cuts = np.full((1, chunks + 1), -1, dtype=np.int64)
    cuts[:, 0], cuts[:, chunks] = 0, length
    squares = np.zeros(1, dtype=np.int64)
    known, done = {0, chunks}, set()
    for rank in range(ranks):
        room = [np.full(len(cuts), m.base[rank]) for m in measures]  # what the rank may still have
        own = asked.own(rank)
        for chunk in own:
            room = [r - m.extra[chunk] for r, m in zip(room, measures, strict=True)]
            for cut in (chunk, chunk + 1):
                if cut in known:
                    continue
                low, high = _range(asked, cuts, known, cut)
                for r, m in zip(room, measures, strict=True):
                    prefix = m.prefix[rank]
                    if cut == chunk and chunk + 1 in known:
                        low = np.maximum(low, np.searchsorted(prefix, prefix[cuts[:, cut + 1]] - r, "left"))
                    elif cut == chunk + 1:
                        high = np.minimum(high, np.searchsorted(prefix, prefix[cuts[:, chunk]] + r, "right") - 1)
                counts = np.maximum(high - low + 1, 0)
                if counts.sum() * (chunks + 1) > ROOM:
                    raise _TooMany
                rows = np.repeat(np.arange(len(cuts)), counts)
                cuts, squares = cuts[rows], squares[rows]
                cuts[:, cut] = low[rows] + np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
                room = [r[rows] for r in room]
                left = [n[rows] for n in left]
                known.add(cut)
            done.add(chunk)
            begin, end = cuts[:, chunk], cuts[:, chunk + 1]
            room = [r - (m.prefix[rank][end] - m.prefix[rank][begin]) for r, m in zip(room, measures, strict=True)]
            left = [
                n - (low[end] - low[begin]) - m.extra[chunk]
                for n, low, m in zip(left, cheapest, measures, strict=True)
            ]
            keep = np.all([r >= 0 for r in room], axis=0)
            last = chunk == own[-1]
            for n, r, m in zip(left, room, measures, strict=True):
                keep &= n <= m.base[rank + 1 :].sum() + (0 if last else r)
            if last:
                squares = squares + _squares(worst - room[0])
                if below is not None:  # the rest at its most even
                    rest = np.maximum((left[0] - asked.target.base[rank + 1 :].sum() >> 20) - ranks, 0)
                    keep &= squares + rest**2 // max(ranks - 1 - rank, 1) < below
            cuts, squares = cuts[keep], squares[keep]
            room, left = [r[keep] for r in room], [n[keep] for n in left]
            if last or below is None:
                open_cuts = [c for c in sorted(known - {0, chunks}) if not {c - 1, c} <= done]
                kept = _best(cuts[:, open_cuts], length + 1, [squares] if last else [-r for r in room])
                cuts, squares = cuts[kept], squares[kept]
                room, left = [r[kept] for r in room], [n[kept] for n in left]
            if not len(cuts):
                return None
    found: Ints = cuts[np.argmin(squares)]
    return found


def _range(asked: Question, cuts: Ints, known: set[int], cut: int) -> tuple[Ints, Ints]:
    """Where a cut may lie, both ends included, such that chunks up to the next known cuts have their least."""
    before, after = max(c for c in known if c < cut), min(c for c in known if c > cut)
    return cuts[:, before] + sum(asked.least[before:cut]), cuts[:, after] - sum(asked.least[cut:after])


def _best(same: Ints, base: int, values: list[Ints]) -> Ints:
    """Which rows to keep: of those with the same cuts, those that no other is at least as good as in one or two
    values (less is better)."""
    if base ** same.shape[1] >= 2**62:
        raise _TooMany
    key = same @ np.array([base**i for i in range(same.shape[1])], dtype=np.int64)
    order = np.lexsort((*reversed(values), key))
    group = np.cumsum(np.diff(key[order], prepend=key[order[:1]]) != 0)
    second = np.unique(-values[1], return_inverse=True)[1][order] if len(values) > 1 else np.zeros_like(group)
    rising = group * (len(order) + 1) + second + 1  # within a group, must rise above all before it
    above = np.maximum.accumulate(rising)
    found: Ints = order[rising > np.concatenate([[0], above[:-1]])]
    return found
