"""One model under torch's own data parallelism, as in its tutorials, and under ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.interleaved import Step
from phalanx.measure.collectives import OPS
from phalanx.nn.decoder import Decoder
from phalanx.nn.init import create, draw
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.process.environment import World
from phalanx.spec.cluster.collective_choice import Choice
from phalanx.spec.job import Job
from phalanx.spec.model.spec import ModelSpec, parameters
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy
from phalanx.training.training_step import Training


@torch.no_grad()
def initialise(model: nn.Module, spec: ModelSpec, seed: int) -> None:
    """Initialise an unsharded model in place, with the initial weights of a run of this seed."""
    own = dict(model.named_parameters())
    for p in parameters(spec):
        own[p.fqn].copy_(torch.from_numpy(draw(spec, p, seed, 0, p.numel)).view(p.shape))


def ddp(model: Decoder) -> nn.Module:
    """Return the model under DistributedDataParallel with its best settings."""
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def fsdp(reshard: bool) -> Callable[[Decoder], nn.Module]:
    """Return the model under fully_shard by blocks, which keeps parameters for the backward pass or regathers."""

    def wrap(model: Decoder) -> nn.Module:
        for block in model.blocks.values():
            fully_shard(block, reshard_after_forward=reshard)
        fully_shard(model, reshard_after_forward=reshard)
        return model

    return wrap


def torch_step(spec: ModelSpec, job: Job, wrap: Callable[[Decoder], nn.Module]) -> Step:
    """Return a training step with fused AdamW in fp32."""
    model: Decoder = create(spec, torch.float32, torch.device("cpu"))
    initialise(model, spec, 0)
    wrapped = wrap(model)
    own = dict(wrapped.named_parameters())
    optimizer = torch.optim.AdamW(own.values(), lr=1e-3, fused=True)

    def step(batch: Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        loss = wrapped(batch[:, :-1], batch[:, 1:]) / (batch.shape[0] * job.seq)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(wrapped.parameters(), job.clip)
        optimizer.step()
        loss.item()

    return step


def our_step(
    spec: ModelSpec, job: Job, world: World, strategy: Strategy, transport: Literal["native", "shm"]
) -> Step:
    """Return a training step of ours with every collective over one transport."""
    chosen = tuple(Choice(op, world.size, 0, transport) for op in OPS)
    training = Training(spec, job, strategy, Comm(world, mesh(strategy), chosen), 0)
    return lambda batch: training.step([batch], 1e-3)
