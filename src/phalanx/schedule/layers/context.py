"""Context parallelism: which positions of a sequence each rank holds, and what attention sends.

The ranks of cp form a ring of Ulysses groups; neighbouring ranks are in one group. For a ring of R a sequence is cut
into 2R chunks. Ring rank r holds chunks r and 2R-1-r, an early one and a late one, so that under a causal mask all
ranks have equal work ("zig-zag"). Attention of queries of rank r to keys of rank j:

    j = r    causal, over both chunks one after the other
    j < r    all queries see the first chunk of the keys, and none of the second
    j > r    the second chunk of the queries sees all keys, the first none

so no rectangle needs a mask. The U ranks of a group hold equal contiguous parts of their two chunks (of the entire
sequence if R = 1).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from phalanx.schedule.event import Phase
from phalanx.spec.job import DTYPE_BYTES, DType
from phalanx.spec.model.blocks.block import Sublayer, products_of
from phalanx.spec.model.blocks.operators import Attend, Scan
from phalanx.spec.strategy.mesh import Mesh
from phalanx.spec.strategy.spec import Strategy

Positions = npt.NDArray[np.int64]
Batch = TypeVar("Batch")
"""Token ids in any array that can be indexed: (sequences, seq + 1), or (2, sequences, seq + 1) with their
positions."""


@dataclass(frozen=True)
class Context:
    """One rank's part of sequences of `seq` tokens. `index`: the rank's coordinate along cp."""

    seq: int
    ring: int = 1
    ulysses: int = 1
    index: int = 0
    scans: bool = False
    """Whether some block has a recurrence, whose ranks need the documents' positions of entire sequences."""

    @property
    def parallel(self) -> bool:
        """Whether sequences are split at all."""
        return self.ring * self.ulysses > 1

    @property
    def ring_index(self) -> int:
        """The coordinate of this rank's Ulysses group along the ring."""
        return self.index // self.ulysses

    @property
    def tokens(self) -> int:
        """Tokens of each sequence on each rank."""
        return self.seq // (self.ring * self.ulysses)

    def of_ring(self, rank: int) -> Positions:
        """Return the positions held by the Ulysses group at `rank` of the ring, (ulysses x tokens,)."""
        if self.ring == 1:
            return np.arange(self.seq)
        chunks = np.arange(self.seq).reshape(2 * self.ring, -1)
        return np.concatenate([chunks[rank], chunks[2 * self.ring - 1 - rank]])

    @cached_property
    def group(self) -> Positions:
        """The positions that each rank of this rank's Ulysses group holds, (ulysses, tokens)."""
        return self.of_ring(self.ring_index).reshape(self.ulysses, -1)

    @property
    def own(self) -> Positions:
        """The positions that this rank holds, (tokens,)."""
        own: Positions = self.group[self.index % self.ulysses]
        return own

    @cached_property
    def everyone(self) -> Positions:
        """The positions that each rank of cp holds, (ring x ulysses, tokens)."""
        return np.stack([self.of_ring(rank).reshape(self.ulysses, -1) for rank in range(self.ring)]).reshape(
            -1, self.tokens
        )

    @property
    def _placed(self) -> Positions:
        """The positions (in the sequence) of the tokens of which this rank gets the places in documents, (ranks,
        tokens)."""
        return self.everyone if self.scans else self.group

    def shape(self, sequences: int, rows: int) -> tuple[int, ...]:
        """Return the shape of a micro-batch on this rank, as `cut` makes it. `rows`: Job.batch_rows."""
        if not self.parallel:
            return (rows,) * (rows > 1) + (sequences, self.seq + 1)
        return (2 + len(self._placed) * (rows > 1), sequences, self.tokens)

    def cut(self, batch: Batch) -> Batch:
        """Return this rank's part of a batch of complete sequences: without context parallelism the batch itself,
        else (2, sequences, tokens), token ids and targets. If documents are separate, tokens' places in them follow,
        for the ranks of the Ulysses group, with recurrences for all ranks: (2 + ranks, sequences, tokens)."""
        array: Any = batch
        if not self.parallel:
            return batch
        separate = array.ndim == 3
        ids = array if separate else array[None]
        placed = self._placed if separate else ()
        at = np.stack([self.own, self.own + 1, *placed])
        row = np.array([0, 2 if len(ids) == 3 else 0, *([1] * len(placed))])
        sequences = np.arange(ids.shape[1])
        return ids[row[:, None, None], sequences[None, :, None], at[:, None, :]]  # type: ignore[no-any-return]


def context(s: Strategy, mesh: Mesh, rank: int, seq: int) -> Context:
    """Return the context of a rank of the mesh for sequences of `seq` tokens."""
    return Context(seq, s.ring, s.ulysses, mesh.place(rank)["cp"])


def keys_per_query(seq: int, ring: int) -> int:
    """Return the number of keys per query: all of them, or on a ring the average over its rectangles."""
    return seq if ring == 1 else seq // (2 * ring) * (ring + 1)


@dataclass(frozen=True)
class CoreMessage:
    """One message or collective of the attention core; `bytes` may be a column."""

    op: str
    axis: str
    bytes: Any


def communication(
    op: Attend | Scan, sublayer: Sublayer, s: Strategy, dtype: DType, phase: Phase, tokens: Any
) -> Iterator[CoreMessage]:
    """Yield the messages of a sublayer's attention core or recurrence in a pass over `tokens` tokens of a rank (a
    number or a column), in order."""
    if s.cp == 1:
        return
    if isinstance(op, Scan):
        yield from _of_scan(op, sublayer, s, tokens * DTYPE_BYTES[dtype], phase)
        return
    head = tokens * op.core * DTYPE_BYTES[dtype]
    heads, kv_heads = op.y.dim.groups(s), max(1, op.kv.groups(s) // s.ulysses)
    scatter_heads = CoreMessage("all_to_all", "ulysses", head * (heads + 2 * kv_heads * s.ulysses))
    gather_heads = CoreMessage("all_to_all", "ulysses", head * heads)
    if s.ulysses > 1:
        yield scatter_heads if phase == "F" else gather_heads
    block = [CoreMessage(op, "ring", head * s.ulysses * 2 * kv_heads) for op in ("send", "recv")]
    for _ in range((s.ring - 1) * (1 if phase == "F" else 2)):
        yield from block
    if s.ulysses > 1:
        yield gather_heads if phase == "F" else scatter_heads


def _of_scan(op: Scan, sublayer: Sublayer, s: Strategy, element: Any, phase: Phase) -> Iterator[CoreMessage]:
    """Yield the two all-to-alls of a recurrence over all ranks that share sequences: of the inputs of its convolution
    and its own, which become whole sequences of a part of the heads, and of its result back. If ranks are more than
    groups of keys, groups are repeated (Megatron-LM d98e8a6, core/ssm/mamba_context_parallel.py:119-133)."""
    groups = op.groups.groups(s)
    width = op.gates * op.y.dim.groups(s)
    for part in (out for product in products_of(sublayer) for out in product.y if out.name in op.x):
        width += part.dim.here(s) * (max(1, s.cp // groups) if part.dim == op.groups else 1)
    there = CoreMessage("all_to_all", "cp", element * width)
    back = CoreMessage("all_to_all", "cp", element * op.y.dim.here(s))
    yield from (there, back) if phase == "F" else (back, there)
