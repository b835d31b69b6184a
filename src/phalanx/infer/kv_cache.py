"""The KV cache of one rank, in pages (Kwon et al. 2023, "Efficient memory management for large language model serving
with PagedAttention").

    pages         for each block, memory for `pages` x `page` tokens: keys and values (tokens, kv_heads, head_dim), or
                  latents (tokens, kv_rank + rope_dim), allocated once
    block table   for each request its pages, in the order of its tokens; allocated by the scheduler
    step          where the tokens of a batch are written, and what each group of slots reads

A rank caches the key heads of its part of the blocks of its stage. Copies of a key head, where tp is more than the
key heads, and latents are cached on every rank that has them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from phalanx.nn.attention import Read
from phalanx.schedule.generation.batch import Batch, Slot, first_key, reads
from phalanx.spec.model.spec import ModelSpec


class PagedCache:
    """KV cache in pages; implements nn.attention.Cache, one step at a time. `local`: the rank's part of a model."""

    positions: Tensor
    wanted: Tensor | None

    def __init__(self, local: ModelSpec, pages: int, page: int, dtype: torch.dtype, device: torch.device) -> None:
        self.page, self.dtype, self.device = page, dtype, device
        a, heads = local.latent, (local.kv_heads, local.head_dim)
        shapes: tuple[tuple[int, ...], ...] = (heads, heads) if a is None else ((a.kv_rank + a.rope_dim,),)
        # Zeros: unwritten places are read too, with weight 0.
        self.memory = {
            block: tuple(torch.zeros(pages * page, *shape, dtype=dtype, device=device) for shape in shapes)
            for block in local.held_blocks
        }
        self._places: dict[int, Tensor] = {}
        self._reads: dict[int | None, tuple[Read, ...]] = {}
        self.end()

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return sum(t.nbytes for tensors in self.memory.values() for t in tensors)

    def begin(self, batch: Batch, tables: Mapping[int, Sequence[int]]) -> None:
        """Begin a step over a batch. `tables`: the pages of each of its requests."""
        self._batch, self._reads = batch, {}
        self._places = {s.request: self._of(s, tables[s.request]) for s in batch.slots}
        positions = [p for s in batch.slots for p in range(s.past, s.context)]
        self.positions = torch.tensor([positions], device=self.device)
        self._writes = torch.cat([self._places[s.request][s.past :] for s in batch.slots])
        ends, at = [], 0
        for s in batch.slots:
            at += s.new
            if s.samples:
                ends.append(at - 1)
        self.wanted = torch.tensor(ends, device=self.device) if ends else None

    def end(self) -> None:
        """End the step; cached tokens stay."""
        self._batch, self._reads, self._places, self.wanted = Batch(()), {}, {}, None
        self.positions = self._writes = torch.empty(0, dtype=torch.int64)

    def _of(self, slot: Slot, table: Sequence[int]) -> Tensor:
        """Return the place of every token of a slot, (context,)."""
        pages = torch.tensor(table, device=self.device)
        at = torch.arange(slot.context, device=self.device)
        return pages[at.div(self.page, rounding_mode="floor")].mul_(self.page).add_(at.remainder(self.page))

    def extend(self, block: int, *new: Tensor) -> None:
        for memory, tensor in zip(self.memory[block], new, strict=True):
            memory.index_copy_(0, self._writes, tensor[0])

    def read(self, block: int, read: Read) -> tuple[Tensor, ...]:
        flat = read.index.view(-1)
        return tuple(t.index_select(0, flat).unflatten(0, read.index.shape) for t in self.memory[block])

    def reads(self, window: int | None) -> tuple[Read, ...]:
        if window not in self._reads:
            parts, row = [], 0
            for slots, keys in reads(self._batch, window):
                rows = slice(row, row := row + sum(s.new for s in slots))
                parts.append(
                    self._decode(slots, keys, rows, window)
                    if slots[0].decodes
                    else self._prefill(slots[0], rows, window)
                )
            self._reads[window] = tuple(parts)
        return self._reads[window]

    def _decode(self, slots: Sequence[Slot], keys: int, rows: slice, window: int | None) -> Read:
        """Build the read of all decoding slots; shorter contexts are padded with a masked place of the cache."""
        index = torch.zeros(len(slots), keys, dtype=torch.int64, device=self.device)
        lengths = [s.context - first_key(s, window) for s in slots]
        for row, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
            index[row, :length] = self._places[slot.request][slot.context - length :]
        mask = None
        if min(lengths) < keys:
            beyond = torch.arange(keys, device=self.device) >= torch.tensor(lengths, device=self.device).unsqueeze(-1)
            mask = self._hiding(beyond)[:, None, None]
        return Read(rows, len(slots), index, mask, True)

    def _prefill(self, slot: Slot, rows: slice, window: int | None) -> Read:
        first, mask = first_key(slot, window), None
        if slot.new > 1 and (slot.past or (window is not None and slot.context > window)):
            query = torch.arange(slot.past, slot.context, device=self.device).unsqueeze(-1)
            key = torch.arange(first, slot.context, device=self.device)
            hidden = key > query
            if window is not None:
                hidden |= key <= query - window
            mask = self._hiding(hidden)[None, None]
        return Read(rows, 1, self._places[slot.request][first:].unsqueeze(0), mask, False)

    def _hiding(self, hidden: Tensor) -> Tensor:
        return torch.zeros(hidden.shape, dtype=self.dtype, device=self.device).masked_fill_(hidden, -math.inf)
