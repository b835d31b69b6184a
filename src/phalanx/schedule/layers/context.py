"""Context parallelism: which positions of a sequence each rank holds, and what attention sends.

The ranks of cp are a ring of Ulysses groups, neighbours in one group. A sequence falls into 2R chunks for a ring of
R; its rank r has the chunks r and 2R-1-r, an early one and a late one, so that under a causal mask all have as much
to do ("zig-zag"). Attention of queries of rank r to keys of rank j:

    j = r    causal, over both chunks one after the other
    j < r    all queries see the first chunk of the keys, and nothing of the second
    j > r    the second chunk of the queries sees all keys, the first nothing

so no rectangle needs a mask. The U ranks of a group have equal contiguous parts of their two chunks (of the whole
sequence where R = 1).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from phalanx.schedule.event import Phase
from phalanx.spec.job import DTYPE_BYTES, DType
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.mesh import Mesh
from phalanx.spec.strategy.spec import Strategy

Positions = npt.NDArray[np.int64]
Batch = TypeVar("Batch")
"""Token ids in whatever array can be indexed: (sequences, seq + 1), or (2, sequences, seq + 1) with their places."""


@dataclass(frozen=True)
class Context:
    """One rank's part of sequences of `seq` tokens; `index`: its place along cp."""

    seq: int
    ring: int = 1
    ulysses: int = 1
    index: int = 0

    @property
    def parallel(self) -> bool:
        return self.ring * self.ulysses > 1

    @property
    def ring_index(self) -> int:
        return self.index // self.ulysses

    @property
    def tokens(self) -> int:
        """Of a sequence, on each rank."""
        return self.seq // (self.ring * self.ulysses)

    def of_ring(self, rank: int) -> Positions:
        """The positions that a rank of the ring has, all of its group together."""
        if self.ring == 1:
            return np.arange(self.seq)
        chunks = np.arange(self.seq).reshape(2 * self.ring, -1)
        return np.concatenate([chunks[rank], chunks[2 * self.ring - 1 - rank]])

    @cached_property
    def group(self) -> Positions:
        """The positions of each rank of this one's Ulysses group, (ulysses, tokens)."""
        return self.of_ring(self.ring_index).reshape(self.ulysses, -1)

    @property
    def own(self) -> Positions:
        """The positions of this rank."""
        own: Positions = self.group[self.index % self.ulysses]
        return own

    def shape(self, sequences: int, separate: bool) -> tuple[int, ...]:
        """That of a micro-batch on this rank."""
        if not self.parallel:
            return (2,) * separate + (sequences, self.seq + 1)
        return (2 + self.ulysses * separate, sequences, self.tokens)

    def cut(self, batch: Batch) -> Batch:
        """This rank's part of whole sequences: itself without context parallelism, else (2, sequences, tokens), token
        ids and targets. Of separate documents then follow the places of the tokens of the whole Ulysses group,
        (2 + ulysses, sequences, tokens)."""
        given: Any = batch
        if not self.parallel:
            return batch
        separate = given.ndim == 3
        whole = given if separate else given[None]
        rows = np.stack([self.own, self.own + 1, *(self.group if separate else ())])
        of = np.array([0, 0, *([1] * self.ulysses if separate else ())])
        sequences = np.arange(whole.shape[1])
        return whole[of[:, None, None], sequences[None, :, None], rows[:, None, :]]  # type: ignore[no-any-return]


def context(s: Strategy, mesh: Mesh, rank: int, seq: int) -> Context:
    """A rank's part."""
    return Context(seq, s.ring, s.ulysses, mesh.place(rank)["cp"])


def keys_per_query(seq: int, ring: int) -> int:
    """Of all keys, those that the rectangles hold which a query is part of: on average, where a ring has several."""
    return seq if ring == 1 else seq // (2 * ring) * (ring + 1)


@dataclass(frozen=True)
class Sent:
    """One message, or collective, of a rank."""

    op: str
    axis: str
    bytes: Any


def sent(spec: ModelSpec, s: Strategy, dtype: DType, phase: Phase, tokens: Any) -> Iterator[Sent]:
    """What the core of attention sends in a pass over `tokens` tokens of a rank, a number or a column, in order.
    `spec` is what the rank holds."""
    if s.cp == 1:
        return
    head = tokens * spec.core_dim * DTYPE_BYTES[dtype]
    kv_heads = max(1, spec.kv_heads // s.ulysses)
    apart = Sent("all_to_all", "ulysses", head * (spec.heads + 2 * kv_heads * s.ulysses))
    together = Sent("all_to_all", "ulysses", head * spec.heads)
    if s.ulysses > 1:
        yield apart if phase == "F" else together
    block = [Sent(op, "ring", head * s.ulysses * 2 * kv_heads) for op in ("send", "recv")]
    for _ in range((s.ring - 1) * (1 if phase == "F" else 2)):
        yield from block
    if s.ulysses > 1:
        yield together if phase == "F" else apart
