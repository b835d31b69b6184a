"""Pairs of a token and an earlier one in products of blocks: half a chunk with its other half, quarters with
quarters, and so on (nn/recurrences/channel_delta.py)."""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Halves:
    """`count` adjacent blocks of tokens from token `first` on, each of `half` earlier and then `rest` later
    tokens."""

    first: int
    count: int
    half: int
    rest: int

    @property
    def tokens(self) -> slice:
        """The tokens of all blocks."""
        return slice(self.first, self.first + self.count * (self.half + self.rest))


def halves(n: int) -> Iterator[Halves]:
    """Yield the blocks that together pair each of n tokens with all before it."""
    half = 1
    while half < n:
        count, rest = divmod(n, 2 * half)
        if count:
            yield Halves(0, count, half, half)
        if rest > half:
            yield Halves(n - rest, 1, half, rest - half)
        half *= 2
