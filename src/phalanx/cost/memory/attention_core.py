"""Live bytes along the passes of attention's core over several ranks, in the order of
runtime/model_parallel/context.py."""

from collections.abc import Sequence

import numpy as np

from phalanx.cost.compute.unit_work import Column
from phalanx.cost.memory.live_bytes import Walk
from phalanx.schedule.layers.context import Context
from phalanx.spec.job import DTYPE_BYTES, Job
from phalanx.spec.model.blocks.lowering import blocks_with
from phalanx.spec.model.blocks.operators import Attend
from phalanx.spec.model.spec import ModelSpec


class Core:
    """The tensors of a context-parallel attention core, in bytes, for `t` tokens of a rank. `spec`: the rank's part
    of the model. `ring_index`: its index in the ring, or None for the rank that holds the most.

    Q    queries of the rank's tokens, with Ulysses of its group's for part of the heads; attention's result
    K    keys of the rank's tokens          A    keys of its group's tokens, for the heads that Ulysses leaves it
    """

    def __init__(self, spec: ModelSpec, job: Job, t: Column, part: Context, ring_index: int | None) -> None:
        self.part, self.ring_index = part, ring_index
        self.e = DTYPE_BYTES[job.precision.compute]
        wide = max(self.e, 4)
        queries, keys = t * spec.heads * spec.core_dim, t * spec.kv_heads * spec.core_dim
        self.Q, self.K = queries * self.e, keys * self.e
        self.sharing = max(1, part.ulysses // spec.kv_heads)  # ranks of a Ulysses group with the same key head
        self.A = self.K * self.sharing
        self.sums = t * spec.heads * wide
        self.widened = queries * wide if self.e < wide else 0
        separate = job.separate
        self.masked = separate or spec.masked(part.seq)
        self.sequences = t // part.tokens if separate else 1  # with separate masks
        all_windows = {spec.window_of(i) for i in blocks_with(spec, spec.held_blocks, Attend)}
        self.windows = {w if w is not None and w < part.seq else None for w in all_windows}
        self.blocks = part.ring - 1  # of keys and values sent around the ring

    def forward(self, walk: Walk) -> None:
        """Walk the forward pass. Queries, keys and values are live at its start; the tensors live above them at its
        end are freed by the backward pass."""
        Q, K, A = self.Q, self.K, self.A
        if self.part.ulysses > 1:
            self._all_to_all(walk, Q + 2 * A)
        if self.blocks:
            walk.alloc(4 * A)  # send and receive buffers
        mask = self._mask(walk, 1)
        walk.alloc(Q, self.sums)
        walk.free(mask)
        if self.blocks:
            if self.e < 4:
                walk.alloc(self.widened)
                walk.free(Q)
            walk.free(2 * A)
            for step in range(1, self.blocks + 1):
                more = 2 * A if step < self.blocks else 0
                walk.alloc(more)
                mask = self._mask(walk, 2)
                sums = self.sums
                # Another partial result, and what merging allocates.
                size = Q + 2 * sums + np.maximum(self.widened, sums)
                walk.touch(self._of(step, size, size // 2))
                walk.free(mask, more)
            if self.e < 4:
                walk.alloc(Q)
                walk.free(self.widened)
            walk.free(2 * A)
        if self.part.ulysses > 1:
            self._all_to_all(walk, Q)
            walk.free(Q + 2 * K)

    def backward(self, walk: Walk) -> None:
        """Walk the backward pass. The result's gradient is replaced by the gradients of queries, keys and values;
        tensors kept by the forward pass are freed, except the copy of the result that Ulysses has returned."""
        Q, K, A = self.Q, self.K, self.A
        if self.part.ulysses > 1:
            self._all_to_all(walk, Q)
        # Blocks of the ring, followed by their gradients.
        if self.blocks:
            walk.alloc(4 * A)
        # The rank's own block.
        mask = self._mask(walk, 1)
        walk.alloc(Q + 2 * A)
        walk.free(mask)
        if self.blocks:
            walk.alloc(2 * A)  # gradients that will travel the ring
            for step in range(1, self.blocks + 1):
                walk.free(2 * A)  # the previous block
                more = 2 * A if step < self.blocks else 0
                walk.alloc(more)
                mask = self._mask(walk, 2)
                walk.touch(self._of(step, Q + A, Q // 2 + 2 * A))
                walk.free(mask)
                if step > 1:
                    walk.free(2 * A)  # gradients that have been sent
                walk.alloc(2 * A)
            walk.free(6 * A)
        if self.part.ulysses > 1:
            walk.free(Q)
            walk.alloc(2 * (Q + 2 * A))
            walk.free(Q + 2 * A)
            walk.alloc(Q)
            for _ in range(2):
                walk.alloc(K)
                if self.sharing > 1:  # their sum, before it is reordered
                    walk.touch(K)
            walk.free(Q + 2 * A)
            walk.free(Q + 2 * A)
        walk.free(Q)
        walk.free(2 * Q + 2 * A + self.sums)

    def first_visible_temporary(self) -> Column:
        """Return the temporary bytes of computing the first visible position of each query, with separate
        documents."""
        part = self.part
        tokens = self.sequences * part.tokens * part.ulysses
        positions = tokens * 8 if part.ulysses > 1 else 0  # of the whole group, concatenated
        begins = 0 if None in self.windows else tokens * 8
        shifted = part.tokens * part.ulysses * 8 if self.windows - {None} else 0
        return np.maximum(positions, begins + shifted)

    def _of(self, step: int, before: Column, after: Column) -> Column:
        """Return the bytes of a ring step whose keys lie before this rank's queries (`before`) or after them
        (`after`)."""
        if self.ring_index is None:
            return np.maximum(before, after)
        return before if step <= self.ring_index else after

    def _all_to_all(self, walk: Walk, size: Column) -> None:
        """Exchange tensors of `size` bytes in total: send and receive buffers, then the reordered result."""
        walk.alloc(2 * size)
        walk.free(size)
        walk.alloc(size)  # reordered
        walk.free(size)

    def _mask(self, walk: Walk, parts: int) -> Column:
        """Build the mask of one of `parts` parts of the square of the group's tokens; return the bytes that stay
        allocated."""
        if not self.masked:
            return 0
        square = (self.part.tokens * self.part.ulysses) ** 2 // parts
        per_sequence = self.sequences * square
        walk.alloc(per_sequence)
        walk.touch(square)
        walk.alloc(per_sequence * self.e)
        walk.free(per_sequence)
        return per_sequence * self.e


def first_visible_bytes(
    spec: ModelSpec, part: Context, sequences: Column, separate: bool, blocks: Sequence[int] | None = None
) -> dict[int, Column]:
    """Return the bytes of each query's first visible position, by the block whose backward pass is the last to use
    them. They are created for every micro-batch with `separate` documents, else once. `blocks`: a chunk's blocks; by
    default all."""
    last: dict[int | None, int] = {}
    if separate or spec.masked(part.seq):
        for i in blocks_with(spec, spec.held_blocks if blocks is None else blocks, Attend):
            window = spec.window_of(i)
            last.setdefault(window if window is not None and window < part.seq else None, i)
    return {i: sequences * part.tokens * part.ulysses * 8 for i in sorted(last.values())}
