"""One rank's part of a model that generates text: its stage, its part of every layer, its cache; and its actions in a
step (cost/step/generation.py predicts them as events).

    receive    the stream from the stage before
    run        the chunk over the batch's tokens, with the collectives of its layers
    send       the stream to the stage after; on the last stage, sample

Layers communicate as in training: over tp an all-reduce after attention and after the MLP, over ep all-to-alls of
tokens to their experts and back. All ranks then sum the sampled tokens; one rank of each replica contributes its
part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from phalanx.cost.step.generation import TOKENS
from phalanx.infer.kv_cache import PagedCache
from phalanx.infer.sampling import Sampling, choose
from phalanx.nn import vocab_parallel
from phalanx.nn.init import create, fill_buffers, initial, of_rank
from phalanx.nn.weight_source import Weights
from phalanx.runtime.autograd.layer_comm import LayerComm
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.comm.dtypes import DTYPES
from phalanx.runtime.model_parallel.expert import ExpertParallel
from phalanx.runtime.model_parallel.tensor import TensorParallel
from phalanx.runtime.model_parallel.token_sharding import SequenceTokens
from phalanx.runtime.tracing import host_values
from phalanx.schedule.generation.batch import Batch
from phalanx.schedule.layout import RankView
from phalanx.spec.model.spec import parameters


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
