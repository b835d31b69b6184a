"""One rank's part of a model that generates text: its stage, its part of every layer, its cache; and its actions in a
step (cost/step/generation.py predicts them as events).

    receive    the stream from the stage before
    run        the chunk over the batch's tokens, with the collectives of its layers
    send       the stream to the stage after; on the last stage, sample

Layers communicate as in training: over tp an all-reduce after attention and after the MLP, over ep all-to-alls of
tokens to their experts and back. All ranks then sum the sampled tokens; one rank of each replica contributes its
part.

The cache of one rank. Keys and values are in pages (Kwon et al. 2023, "Efficient memory management for large language
model serving with PagedAttention").

    pages         for each block, memory for `pages` x `page` tokens: keys and values (tokens, kv_heads, head_dim), or
                  latents (tokens, kv_rank + rope_dim), allocated once
    block table   for each request its pages, in the order of its tokens; allocated by the scheduler
    seat          for each running request a place of its own in what does not grow with its text: the state of a
                  recurrence; the last inputs of a convolution; the last tokens of a window, in turn
    step          where the tokens of a batch are written, and what each group of slots reads

A rank caches the key heads and states of its part of the blocks of its stage. Copies of a key head, where tp is more
than the key heads, and latents are cached on every rank that has them.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from phalanx.cost.step.generation import TOKENS
from phalanx.infer.sampling import Sampling, choose
from phalanx.nn import vocab_parallel
from phalanx.nn.attention import Read, SlotGroup
from phalanx.nn.functional import accumulate_dtype
from phalanx.nn.init import create, fill_buffers, initial_source, restrict_to_rank
from phalanx.nn.weight_source import Weights
from phalanx.runtime.autograd.layer_comm import LayerComm
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.comm.dtypes import DTYPES
from phalanx.runtime.model_parallel.expert import ExpertParallel
from phalanx.runtime.model_parallel.tensor import TensorParallel
from phalanx.runtime.model_parallel.token_sharding import SequenceTokens
from phalanx.runtime.tracing import host_values
from phalanx.schedule.generation import Batch, CacheSeat, Room, Slot, first_key, reads
from phalanx.schedule.layout import RankView
from phalanx.spec.model.blocks.lowering import architecture
from phalanx.spec.model.blocks.operators import Attend, Conv, Expand, Scan
from phalanx.spec.model.spec import ModelSpec, parameters


class PagedCache:
    """The cache of one rank; implements nn.attention.Cache, one step at a time. `local`: the rank's part of the
    model."""

    positions: Tensor
    wanted: Tensor | None

    def __init__(self, local: ModelSpec, room: Room, dtype: torch.dtype, device: torch.device) -> None:
        self.room, self.dtype, self.device = room, dtype, device
        # Zeros: unwritten places are read too, with weight 0.
        self.memory: dict[int, tuple[Tensor, ...]] = {}
        self.inputs: dict[int, Tensor] = {}  # (seats, taps - 1, channels)
        self.states: dict[int, Tensor] = {}  # (seats, groups, state, values of a group)
        self._rolling: dict[int, int | None] = {}
        blocks, wide = architecture(local).blocks, accumulate_dtype(dtype)
        for i in local.held_blocks:
            attend, conv, scan = blocks[i].first(Attend), blocks[i].first(Conv), blocks[i].first(Scan)
            latent = blocks[i].first(Expand) is not None
            if attend is not None:
                rows = self._rolling[i] = room.last_tokens(attend.window)
                tokens = room.tokens if rows is None else room.seats * rows
                heads = attend.kv.count, attend.key
                self.memory[i] = (
                    (self._zeros(tokens, attend.cache),)
                    if latent
                    else (self._zeros(tokens, *heads), self._zeros(tokens, *heads))
                )
            if conv is not None:
                self.inputs[i] = self._zeros(room.seats, conv.taps - 1, sum(dim.size for dim in conv.channels))
            elif scan is not None:
                self.inputs[i] = self._zeros(room.seats, 0, 0)
            if scan is not None:
                groups = scan.groups.count
                sizes = room.seats, groups, scan.state, scan.y.dim.size // groups
                self.states[i] = torch.zeros(sizes, dtype=wide, device=device)
        self.end()

    def _zeros(self, *sizes: int) -> Tensor:
        return torch.zeros(sizes, dtype=self.dtype, device=self.device)

    @property
    def nbytes(self) -> int:
        """Bytes of all pages and seats."""
        kept = [t for tensors in self.memory.values() for t in tensors]
        return sum(t.nbytes for t in (*kept, *self.inputs.values(), *self.states.values()))

    def begin(self, batch: Batch, held: Mapping[int, CacheSeat]) -> None:
        """Begin a step over a batch. `held`: the pages and seat of each of its requests."""
        self.end()
        self._batch, self._held = batch, held
        positions = [p for s in batch.slots for p in range(s.past, s.context)]
        self.positions = torch.tensor([positions], device=self.device)
        for rolling in {*self._rolling.values()}:
            places = {s.request: self._places_of(s, held[s.request], rolling) for s in batch.slots}
            self._places[rolling] = places
            self._writes[rolling] = torch.cat([places[s.request][s.past :] for s in batch.slots])
        ends, at = [], 0
        for s in batch.slots:
            at += s.new
            if s.samples:
                ends.append(at - 1)
        self.wanted = torch.tensor(ends, device=self.device) if ends else None

    def end(self) -> None:
        """End the step; cached tokens and states stay."""
        self._batch, self._held, self.wanted = Batch(()), dict[int, CacheSeat](), None
        self._reads: dict[int | None, tuple[Read, ...]] = {}
        self._continuations: tuple[SlotGroup, ...] = ()
        self._places: dict[int | None, dict[int, Tensor]] = {}
        self._writes: dict[int | None, Tensor] = {}
        self.positions = torch.empty(0, dtype=torch.int64)

    def _places_of(self, slot: Slot, held: CacheSeat, rolling: int | None) -> Tensor:
        """Return the index in the cache's memory of every token of a slot, (context,): in its pages, or round-robin
        in the `rolling` places of its seat."""
        at = torch.arange(slot.context, device=self.device)
        if rolling is not None:
            return at.remainder_(rolling).add_(held.seat * rolling)
        pages, page = torch.tensor(held.pages, device=self.device), self.room.page
        return pages[at.div(page, rounding_mode="floor")].mul_(page).add_(at.remainder(page))

    def extend(self, block: int, *new: Tensor) -> None:
        for memory, tensor in zip(self.memory[block], new, strict=True):
            memory.index_copy_(0, self._writes[self._rolling[block]], tensor[0])

    def read(self, block: int, read: Read) -> tuple[Tensor, ...]:
        flat = read.index.view(-1)
        return tuple(t.index_select(0, flat).unflatten(0, read.index.shape) for t in self.memory[block])

    def continuations(self) -> tuple[SlotGroup, ...]:
        if not self._continuations:
            parts, row = [], 0
            for slots, _ in reads(self._batch, None):
                rows = slice(row, row := row + sum(s.new for s in slots))
                seats = torch.tensor([self._held[s.request].seat for s in slots], device=self.device)
                parts.append(SlotGroup(rows, seats, not slots[0].past))
            self._continuations = tuple(parts)
        return self._continuations

    def recall(self, block: int, slots: SlotGroup) -> tuple[Tensor, Tensor | None]:
        inputs, states = self.inputs[block], self.states.get(block)
        if slots.begins:
            return inputs.new_zeros(len(slots.seats), *inputs.shape[1:]), None
        return inputs[slots.seats], None if states is None else states[slots.seats]

    def keep(self, block: int, slots: SlotGroup, inputs: Tensor, state: Tensor | None = None) -> None:
        self.inputs[block][slots.seats] = inputs
        if state is not None:
            self.states[block][slots.seats] = state

    def reads(self, window: int | None) -> tuple[Read, ...]:
        if window not in self._reads:
            parts, row, places = [], 0, self._places[self.room.last_tokens(window)]
            for slots, keys in reads(self._batch, window):
                rows = slice(row, row := row + sum(s.new for s in slots))
                parts.append(
                    self._decode(slots, keys, rows, window, places)
                    if slots[0].decodes
                    else self._prefill(slots[0], rows, window, places)
                )
            self._reads[window] = tuple(parts)
        return self._reads[window]

    def _decode(
        self, slots: Sequence[Slot], keys: int, rows: slice, window: int | None, places: Mapping[int, Tensor]
    ) -> Read:
        """Build the read of all decoding slots; shorter contexts are padded with a masked place of the cache."""
        index = torch.zeros(len(slots), keys, dtype=torch.int64, device=self.device)
        lengths = [s.context - first_key(s, window) for s in slots]
        for row, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
            index[row, :length] = places[slot.request][slot.context - length :]
        mask = None
        if min(lengths) < keys:
            beyond = torch.arange(keys, device=self.device) >= torch.tensor(lengths, device=self.device).unsqueeze(-1)
            mask = self._hiding(beyond)[:, None, None]
        return Read(rows, len(slots), index, mask, True)

    def _prefill(self, slot: Slot, rows: slice, window: int | None, places: Mapping[int, Tensor]) -> Read:
        first, mask = first_key(slot, window), None
        if slot.new > 1 and (slot.past or (window is not None and slot.context > window)):
            query = torch.arange(slot.past, slot.context, device=self.device).unsqueeze(-1)
            key = torch.arange(first, slot.context, device=self.device)
            hidden = key > query
            if window is not None:
                hidden |= key <= query - window
            mask = self._hiding(hidden)[None, None]
        return Read(rows, 1, places[slot.request][first:].unsqueeze(0), mask, False)

    def _hiding(self, hidden: Tensor) -> Tensor:
        return torch.zeros(hidden.shape, dtype=self.dtype, device=self.device).masked_fill_(hidden, -math.inf)


class Replica:
    """One rank of a replica; all ranks of the world construct theirs together. `room`: of its cache."""

    @torch.no_grad()
    def __init__(self, view: RankView, comm: Comm, weights: Weights, room: Room) -> None:
        self.view, self.comm, s = view, comm, view.strategy
        self.inner, experts = LayerComm(comm), view.local.experts
        self.inner.micro_batch = 0
        self.tp = TensorParallel(self.inner, view.split) if s.tp > 1 else None
        ep = ExpertParallel(self.inner, experts, s.ep, s.etp) if experts else None
        self.dtype, self.device = DTYPES[view.job.precision.compute], comm.world.device
        tokens = SequenceTokens(self.inner, self.tp)
        self.model = create(view.local, self.dtype, self.device, tp=self.tp, ep=ep, tokens=tokens)
        own, first = (
            dict(self.model.named_parameters()),
            restrict_to_rank(initial_source(view.model, 0, weights), view.split),
        )
        for p in parameters(view.local):
            own[p.fqn].copy_(first(p, 0, p.numel).view(p.shape))
        fill_buffers(self.model, weights)
        self.cache = PagedCache(view.local, room, self.dtype, self.device)
        self.last = view.place == s.pp - 1
        self.samples = self.last and (self.tp is None or self.tp.split.index == 0)

    @torch.no_grad()
    def step(self, batch: Batch, tokens: Sequence[int], held: Mapping[int, CacheSeat]) -> Tensor | None:
        """Run a batch of this replica, with tokens in the order of its slots. Returns logits (samples, vocab) on the
        last stage if any request receives a token; else None."""
        place, spec, comm = self.view.place, self.view.model, self.comm
        if not batch.slots:
            return None
        comm.status.now(f"a step over {batch.tokens} tokens of {len(batch.slots)} requests")
        self.cache.begin(batch, held)
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
        return logits if self.tp is None else vocab_parallel.gather_logits(self.tp, logits)

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
