"""One rank's part of a model that generates text: its stage, its part of every layer, its cache; and its actions in a
step (cost/step/generation.py predicts them as events).

    receive    the stream from the stage before
    run        the chunk over the batch's tokens, with the collectives of its layers
    send       the stream to the stage after; on the last stage, sample

Layers communicate as in training: over tp an all-reduce after attention and after the MLP, over ep all-to-alls of
tokens to their experts and back. All ranks then sum the sampled tokens; one rank of each replica contributes its
part.

The KV cache of one rank, in pages (Kwon et al. 2023, "Efficient memory management for large language model serving
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

from phalanx.cost.step.generation import TOKENS
from phalanx.infer.sampling import Sampling, choose
from phalanx.nn import vocab_parallel
from phalanx.nn.attention import Read
from phalanx.nn.init import create, fill_buffers, initial, of_rank
from phalanx.nn.weight_source import Weights
from phalanx.runtime.autograd.layer_comm import LayerComm
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.comm.dtypes import DTYPES
from phalanx.runtime.model_parallel.expert import ExpertParallel
from phalanx.runtime.model_parallel.tensor import TensorParallel
from phalanx.runtime.model_parallel.token_sharding import SequenceTokens
from phalanx.runtime.tracing import host_values
from phalanx.schedule.generation import Batch, Slot, first_key, reads
from phalanx.schedule.layout import RankView
from phalanx.spec.model.spec import ModelSpec, parameters


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


class Replica:
    """One rank of a replica; all ranks of the world construct theirs together. `pages`, `page`: number of pages of
    its cache, and tokens in a page."""

    @torch.no_grad()
    def __init__(self, view: RankView, comm: Comm, weights: Weights, pages: int, page: int) -> None:
        self.view, self.comm, s = view, comm, view.strategy
        self.inner, experts = LayerComm(comm), view.local.experts
        self.inner.micro_batch = 0
        self.tp = TensorParallel(self.inner, view.split) if s.tp > 1 else None
        ep = ExpertParallel(self.inner, experts, s.ep, s.etp) if experts else None
        self.dtype, self.device = DTYPES[view.job.precision.compute], comm.world.device
        tokens = SequenceTokens(self.inner, self.tp)
        self.model = create(view.local, self.dtype, self.device, tp=self.tp, ep=ep, tokens=tokens)
        own, first = dict(self.model.named_parameters()), of_rank(initial(view.model, 0, weights), view.split)
        for p in parameters(view.local):
            own[p.fqn].copy_(first(p, 0, p.numel).view(p.shape))
        fill_buffers(self.model, weights)
        self.cache = PagedCache(view.local, pages, page, self.dtype, self.device)
        self.last = view.place == s.pp - 1
        self.samples = self.last and (self.tp is None or self.tp.split.index == 0)

    @torch.no_grad()
    def step(self, batch: Batch, tokens: Sequence[int], tables: Mapping[int, Sequence[int]]) -> Tensor | None:
        """Run a batch of this replica, with tokens in the order of its slots. Returns logits (samples, vocab) on the
        last stage if any request receives a token; else None."""
        place, spec, comm = self.view.place, self.view.model, self.comm
        if not batch.slots:
            return None
        comm.status.now(f"a step over {batch.tokens} tokens of {len(batch.slots)} requests")
        self.cache.begin(batch, tables)
        ids, x = torch.tensor([tokens], device=self.device), None
        if place:
            x = torch.empty(1, batch.tokens, spec.hidden, dtype=self.dtype, device=self.device)
            comm.receive(x, place - 1, "F", place, 0).wait()
        x = self.model(ids, cache=self.cache, x=x)
        self.cache.end()
        if not self.last:
            comm.send(x, place + 1, "F", place, 0).wait()
            return None
        if not batch.samples:
            return None
        logits = x[0]
        return logits if self.tp is None else vocab_parallel.gathered(self.tp, logits)

    def choose(self, logits: Tensor | None, batch: Batch, how: Sampling) -> list[int]:
        """Sample from the logits returned by `step`, on the replica's sampling rank; empty on other ranks."""
        if logits is None or not self.samples:
            return []
        rows = logits.double().cpu().numpy()
        slots = [slot for slot in batch.slots if slot.samples]
        return [choose(row, how, slot.request, slot.context) for slot, row in zip(slots, rows, strict=True)]

    def share(self, chosen: Sequence[int], first: int, total: int) -> list[int]:
        """Exchange sampled tokens: returns all replicas' tokens, (total,), where `chosen` begin at `first`; all ranks
        together."""
        got = [0] * total
        got[first : first + len(chosen)] = chosen
        if not total or self.comm.world.size == 1:
            return got
        everyone = torch.tensor(got, device=self.device)
        self.comm.all_reduce(everyone, "world", unit=TOKENS, phase="F").wait()
        return host_values.read(everyone, got)
