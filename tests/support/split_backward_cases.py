"""Functions that ranks run in tests of split backward passes (runtime/autograd/deferred_weight_grads.py)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.nn.decoder import Decoder
from phalanx.nn.init import create, initial_source, restrict_to_rank
from phalanx.runtime.autograd.deferred_weight_grads import DeferredGradients, DeferredUnits, Product
from phalanx.runtime.autograd.layer_comm import LayerComm
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.comm.dtypes import DTYPES
from phalanx.runtime.model_parallel.context import ContextParallel
from phalanx.runtime.model_parallel.tensor import TensorParallel
from phalanx.runtime.process.environment import World
from phalanx.schedule.layers.context import context
from phalanx.spec.job import Job
from phalanx.spec.model.blocks.lowering import has_recurrence
from phalanx.spec.model.spec import ModelSpec, parameters
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy
from phalanx.spec.strategy.split import Split


class Part:
    """One rank's part of a model, without an engine."""

    deferred_gradients: DeferredGradients

    def __init__(self, spec: ModelSpec, job: Job, s: Strategy, comm: Comm) -> None:
        rank = comm.world.rank
        self.job, self.inner = job, LayerComm(comm)
        place = Split(spec, s.tp, comm.mesh.place(rank)["tp"], s.sp)
        self.context = replace(context(s, comm.mesh, rank, job.seq), scans=has_recurrence(spec))
        tp = TensorParallel(self.inner, place) if s.tp > 1 else None
        cp = ContextParallel(self.inner, self.context, job.documents == "packed") if s.cp > 1 else None
        self.model: Decoder = create(place.local, DTYPES[job.precision.compute], comm.world.device, tp=tp, cp=cp)
        self.model.recompute(s.recompute_of, self.inner)
        weights, first = dict(self.model.named_parameters()), restrict_to_rank(initial_source(spec, 0, None), place)
        with torch.no_grad():
            for p in parameters(place.local):  # norms and biases too are not all alike
                drawn = first(p, 0, p.numel).view(p.shape)
                noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(len(p.fqn)))
                weights[p.fqn].copy_(drawn + 0.1 * noise)
        self.names = {id(p): name for name, p in weights.items()}
        self.gradients = {name: torch.zeros_like(p) for name, p in weights.items()}

    def splits(self) -> None:
        """Allow weight gradients to be deferred from now on."""
        self.deferred_gradients = DeferredGradients(self.model.units(), self.inner)

    def forward(self, batch: Tensor, micro_batch: int = 0) -> Tensor:
        self.inner.micro_batch = micro_batch
        if self.context.parallel:
            tokens, targets, *_ = batch
            places = None if self.job.documents == "packed" else batch[2:]
            return self.model(tokens, targets, positions=places)
        if batch.dim() == 2:
            return self.model(batch[:, :-1], batch[:, 1:])
        tokens, places = batch
        return self.model(tokens[:, :-1], tokens[:, 1:], positions=places[:, :-1])

    def backward(self, loss: Tensor, micro_batch: int = 0) -> None:
        """Run both parts of the backward pass at once."""
        self.inner.micro_batch = micro_batch
        loss.backward()
        for name, p in self.model.named_parameters():
            assert p.grad is not None
            self.gradients[name] += p.grad
            p.grad = None

    def inputs(self, loss: Tensor, micro_batch: int = 0) -> DeferredUnits:
        self.inner.micro_batch = micro_batch
        self.deferred_gradients.active = True
        loss.backward()
        self.deferred_gradients.active = False
        assert all(p.grad is None for p in self.model.parameters())
        return self.deferred_gradients.take()

    def weights(self, left: DeferredUnits, micro_batch: int = 0) -> list[str]:
        """Compute the deferred weight gradients; return the parameters in the order in which they came."""
        self.inner.micro_batch = micro_batch
        came: list[str] = []

        def deliver(p: nn.Parameter, gradient: Tensor | Product | None, rows: list[tuple[Tensor, Tensor]]) -> None:
            name = self.names[id(p)]
            came.append(name)
            if isinstance(gradient, Product):
                gradient.write(self.gradients[name], add=True)
            elif gradient is not None:
                self.gradients[name] += gradient
            for index, values in rows:
                self.gradients[name].index_add_(0, index, values)

        for _, gradients in left:
            gradients(deliver)
        return came


def batches(spec: ModelSpec, job: Job, s: Strategy, part: Part, count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    found = torch.randint(spec.vocab, (count, s.micro_batch, job.seq + 1), generator=generator)
    if job.documents == "packed":
        return [part.context.cut(batch) for batch in found]
    places = torch.arange(job.seq + 1) % (job.seq // 2 + 1)  # two documents in every sequence
    return [part.context.cut(torch.stack([batch, places.expand_as(batch)])) for batch in found]


def apart(world: World, spec: ModelSpec, job: Job, s: Strategy) -> dict[str, Any]:
    """Run three micro-batches by a plain backward pass, and by split ones that are interleaved.

    Returns the largest difference of a parameter's gradients by name, the communication inside layers by micro-batch,
    and the order of W.
    """
    comm = Comm(world, mesh(s))
    part = Part(spec, job, s, comm)
    given = batches(spec, job, s, part, 3)
    for batch in given:
        part.backward(part.forward(batch))
    whole = {name: g.clone() for name, g in part.gradients.items()}
    part.splits()
    comm.recorder.keeping = True
    losses = [part.forward(given[i], i) for i in (0, 1)]
    first = part.inputs(losses.pop(0), 0)
    losses.append(part.forward(given[2], 2))
    second = part.inputs(losses.pop(0), 1)
    part.weights(first, 0)
    part.backward(losses.pop(), 2)
    came = part.weights(second, 1)
    comm.recorder.keeping = False
    comm.barrier()
    # A bias of keys has no gradient but rounding.
    floor = 1e-3 * max(float(g.abs().max()) for g in whole.values())
    return {
        "differences": {
            # of two sums: the plain passes', and those in parts after them
            name: float((2 * g - part.gradients[name]).abs().max() / g.abs().max().clamp_min(floor))
            for name, g in whole.items()
        },
        "events": [e for e in comm.recorder.events if e.axis],
        "came": came,
    }


def all_apart(world: World, cases: list[tuple[ModelSpec, Job, Strategy]]) -> list[dict[str, Any]]:
    return [apart(world, *case) for case in cases]
