"""Partitions of a model whose first few blocks are of one kind and all others of another, as when the first layers
have a dense MLP and the rest experts (DeepSeek-V3: 3 of 61).

Chunks before the one in which the second kind begins hold blocks of the first kind alone. So there are few ways to
cut these, at most 2^n for n blocks; for each, the others cost the same and are dealt out (`deal`), which is optimal.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from phalanx.schedule.partition.search import Measure, PartitionQuestion, Solution, cuts_of, deal, value_of

FEW = 6
"""The most blocks of the first kind: 64 ways to cut them."""


def leading(question: PartitionQuestion) -> int:
    """Return the number of blocks of the first kind, if all later ones cost the same on each rank; 0 if blocks are
    not of two such kinds, or too many are of the first."""
    each = [np.diff(m.prefix, axis=1) for m in question.measures]
    for count in range(1, min(FEW, question.length - 1) + 1):
        parts = [part for one in each for part in (one[:, :count], one[:, count:])]
        if all((part == part[:, :1]).all() for part in parts):
            return count
    return 0


def deal_after(question: PartitionQuestion, count: int) -> Solution | None:
    """Return the best partition if the first `count` blocks are of one kind and all others of another; None if no
    partition meets the limits."""
    best: tuple[tuple[int, int, int], tuple[int, ...]] | None = None
    for first in _ways(question, count):
        rest = deal(_others(question, first))
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


def _others(question: PartitionQuestion, first: tuple[int, ...]) -> PartitionQuestion:
    """Return the remaining question: deal out blocks of the second kind to the chunks from the last of `first` on."""
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
