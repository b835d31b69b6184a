"""Live bytes along the passes of attention's core over several ranks, in the order of runtime/context_parallel.py."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from phalanx.cost.compute.unit_work import Column
from phalanx.cost.memory.live_bytes import Walk
from phalanx.schedule.layers.context import Context
from phalanx.spec.job import DTYPE_BYTES, Job
from phalanx.spec.model.spec import ModelSpec


class Core:
    """The tensors of the core, in bytes, for `t` tokens of a rank. `spec` is what the rank holds; `ring_index`: its
    place in the ring, None for whoever holds the most.

    Q    queries of the rank's tokens, or those of its group with a part of the heads; attention's result
    K    keys of the rank's tokens          A    keys of its group, of the heads that it has apart
    """

    def __init__(self, spec: ModelSpec, job: Job, t: Column, part: Context, ring_index: int | None) -> None:
        self.part, self.ring_index = part, ring_index
        self.e = DTYPE_BYTES[job.precision.compute]
        wide = max(self.e, 4)
        queries, keys = t * spec.heads * spec.core_dim, t * spec.kv_heads * spec.core_dim
        self.Q, self.K = queries * self.e, keys * self.e
        self.alike = max(1, part.ulysses // spec.kv_heads)  # ranks that have the same key head
        self.A = self.K * self.alike
        self.sums = t * spec.heads * wide
        self.widened = queries * wide if self.e < wide else 0
        separate = job.documents == "separate"
        self.masked = separate or spec.masked(part.seq)
        self.sequences = t // part.tokens if separate else 1  # that have masks of their own
        own = {spec.window_of(i) for i in spec.held_blocks}
        self.windows = {w if w is not None and w < part.seq else None for w in own}
        self.blocks = part.ring - 1  # of keys and values that travel

    def forward(self, walk: Walk) -> None:
        """Queries, keys and values are there; what is kept in the end is what the backward pass frees."""
        Q, K, A = self.Q, self.K, self.A
        if self.part.ulysses > 1:
            self._all_to_all(walk, Q + 2 * A)
        if self.blocks:
            walk.take(4 * A)  # what is sent and what comes
        mask = self._mask(walk, 1)
        walk.take(Q, self.sums)
        walk.give(mask)
        if self.blocks:
            if self.e < 4:
                walk.take(self.widened)
                walk.give(Q)
            walk.give(2 * A)
            for step in range(1, self.blocks + 1):
                more = 2 * A if step < self.blocks else 0
                walk.take(more)
                mask = self._mask(walk, 2)
                sums = self.sums
                size = Q + 2 * sums + np.maximum(self.widened, sums)  # another result, and what merging takes
                walk.touch(self._of(step, size, size // 2))
                walk.give(mask, more)
            if self.e < 4:
                walk.take(Q)
                walk.give(self.widened)
            walk.give(2 * A)
        if self.part.ulysses > 1:
            self._all_to_all(walk, Q)
            walk.give(Q + 2 * K)

    def backward(self, walk: Walk) -> None:
        """The gradient of the result is there, and gives way to those of queries, keys and values; what was kept goes
        too, but for the result itself where Ulysses has given it back."""
        Q, K, A = self.Q, self.K, self.A
        if self.part.ulysses > 1:
            self._all_to_all(walk, Q)
        if self.blocks:
            walk.take(4 * A)
        mask = self._mask(walk, 1)
        walk.take(Q + 2 * A)
        walk.give(mask)
        if self.blocks:
            walk.take(2 * A)  # gradients that will travel
            for step in range(1, self.blocks + 1):
                walk.give(2 * A)  # the block before
                more = 2 * A if step < self.blocks else 0
                walk.take(more)
                mask = self._mask(walk, 2)
                walk.touch(self._of(step, Q + A, Q // 2 + 2 * A))
                walk.give(mask)
                if step > 1:
                    walk.give(2 * A)  # gradients that have left
                walk.take(2 * A)
            walk.give(6 * A)
        if self.part.ulysses > 1:
            walk.give(Q)
            walk.take(2 * (Q + 2 * A))
            walk.give(Q + 2 * A)
            walk.take(Q)
            for _ in range(2):
                walk.take(K)
                if self.alike > 1:  # their sum, not yet in order
                    walk.touch(K)
            walk.give(Q + 2 * A)
            walk.give(Q + 2 * A)
        walk.give(Q)
        walk.give(2 * Q + 2 * A + self.sums)

    def first_visible_temporary(self) -> Column:
        """What making the first positions that queries see of separate documents takes beside them."""
        part = self.part
        tokens = self.sequences * part.tokens * part.ulysses
        places = tokens * 8 if part.ulysses > 1 else 0  # of all the group, one after the other
        begins = 0 if None in self.windows else tokens * 8
        shifted = part.tokens * part.ulysses * 8 if self.windows - {None} else 0
        return np.maximum(places, begins + shifted)

    def _of(self, step: int, before: Column, after: Column) -> Column:
        """What a step takes whose keys stand `before` this rank's queries, or `after` them."""
        if self.ring_index is None:
            return np.maximum(before, after)
        return before if step <= self.ring_index else after

    def _all_to_all(self, walk: Walk, size: Column) -> None:
        walk.take(2 * size)
        walk.give(size)
        walk.take(size)  # in order
        walk.give(size)

    def _mask(self, walk: Walk, parts: int) -> Column:
        """The mask of one in so many parts of the square of the group's tokens: what it leaves."""
        if not self.masked:
            return 0
        square = (self.part.tokens * self.part.ulysses) ** 2 // parts
        own = self.sequences * square
        walk.take(own)
        walk.touch(square)
        walk.take(own * self.e)
        walk.give(own)
        return own * self.e


def lowest(
    spec: ModelSpec, part: Context, sequences: Column, separate: bool, blocks: Sequence[int] | None = None
) -> dict[int, Column]:
    """Bytes of the first positions that queries see, by the block whose backward pass is the last to use them: of
    every micro-batch, or where documents are not kept apart made once. `blocks`: of a chunk; else all."""
    last: dict[int | None, int] = {}
    if separate or spec.masked(part.seq):
        for i in spec.held_blocks if blocks is None else blocks:
            window = spec.window_of(i)
            last.setdefault(window if window is not None and window < part.seq else None, i)
    return {i: sequences * part.tokens * part.ulysses * 8 for i in sorted(last.values())}
