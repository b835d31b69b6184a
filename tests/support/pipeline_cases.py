"""Functions that ranks run in tests of pipeline execution."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.multiprocessing.reductions import StorageWeakRef

from phalanx.observation.parity.parity import gradient_errors
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.process import world as worlds
from phalanx.runtime.process.environment import ALONE, World
from phalanx.schedule.pipeline.actions import Action, PipelineSchedule
from phalanx.spec.job import Job
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy
from phalanx.training.training_step import Training

WIDTH = 5


def _layers(chunks: int) -> list[nn.Module]:
    """Build a small model with one layer per chunk, identical on every rank."""
    torch.manual_seed(3)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double() for _ in range(chunks)]


def _loss(x: Tensor, target: Tensor) -> Tensor:
    return (x - target).square().sum()


def run_by_torch(world: World, files: Sequence[tuple[Path, Any, tuple[int, ...], int]]) -> list[float]:
    """Execute schedules (file, format, rank of each chunk, micro-batches) by torch's own runtime.

    Returns for each the largest relative error of a gradient compared with one process.
    """
    errors = []
    for file, form, rank_of, micro_batches in files:
        x, target = torch.randn(
            2, micro_batches, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(5)
        )
        truth, ours = _layers(len(rank_of)), _layers(len(rank_of))
        _loss(nn.Sequential(*truth)(x), target).backward()
        shape, group = (
            torch.zeros(1, WIDTH, dtype=torch.float64, requires_grad=True),
            worlds.group(tuple(range(world.size))),
        )
        stages = [
            PipelineStage(ours[c], c, len(rank_of), world.device, input_args=shape, output_args=shape, group=group)
            for c, rank in enumerate(rank_of)
            if rank == world.rank
        ]
        runtime = _PipelineScheduleRuntime(stages, micro_batches, _loss, scale_grads=False)  # type: ignore[arg-type]
        runtime._load_csv(str(file), form)
        first, last = (rank_of[c] == world.rank for c in (0, -1))
        runtime.step(*[x] * first, target=target if last else None)
        errors += [
            max(
                float((mine.grad - its.grad).abs().max() / its.grad.abs().max())  # type: ignore[operator, union-attr]
                for c, rank in enumerate(rank_of)
                if rank == world.rank
                for mine, its in zip(ours[c].parameters(), truth[c].parameters(), strict=True)
            )
        ]
    return errors


def _batches(spec: ModelSpec, job: Job, strategy: Strategy) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(spec.vocab, (job.global_batch, job.seq + 1), generator=generator)
    return list(tokens.view(-1, strategy.micro_batch, job.seq + 1))


def run_by_us(world: World, spec: ModelSpec, job: Job, strategy: Strategy, schedule: PipelineSchedule) -> float:
    """Execute a schedule over the chunks of `strategy` by our executor.

    Returns the largest error of a gradient compared with one process.
    """
    comm = Comm(world, mesh(strategy))
    ours = Training(spec, job, strategy, comm, 0, schedule=schedule)
    alone = Training(spec, job, Strategy(), Comm(ALONE, mesh(Strategy())), 0)
    assert ours.pipeline.schedule is schedule
    for training in (ours, alone):
        training.step(_batches(spec, job, training.strategy), 1e-2)
    errors = gradient_errors(ours.gradients(), dict(alone.engine.gradients()))
    comm.barrier()
    return max(error for _, error in errors)


class Memory:
    """Tracks which tensors of a kind are alive, by chunk and micro-batch, without keeping them alive."""

    def __init__(self) -> None:
        self._refs: dict[Any, list[StorageWeakRef]] = {}

    def follow(self, key: Any, tensor: Tensor) -> None:
        self._refs.setdefault(key, []).append(StorageWeakRef(tensor.untyped_storage()))

    def live(self) -> set[Any]:
        return {key for key, refs in self._refs.items() if any(not ref.expired() for ref in refs)}


def live_memory(world: World, spec: ModelSpec, job: Job, strategy: Strategy) -> list[tuple[Action, list[set[Any]]]]:
    """Return, after every action of a rank, for which chunks and micro-batches tensors are alive, and what is left.

    Tracked are inputs of norms, which input gradients need, their outputs, which weight gradients need, and messages
    that were sent.
    """
    comm = Comm(world, mesh(strategy))
    training = Training(spec, job, strategy, comm, 0)
    training.step(_batches(spec, job, strategy), 1e-2)
    pipeline, found = training.pipeline, []
    kinds = into, out_of, sent = Memory(), Memory(), Memory()
    at = Action("F", 0, 0)

    def see(_: nn.Module, args: tuple[Tensor], out: Tensor) -> None:
        into.follow(at[1:], args[0])
        out_of.follow(at[1:], out)

    for block in training.model.blocks.values():
        block.norm1.register_forward_hook(see)  # type: ignore[union-attr, arg-type]
    send = comm.send

    def watched_send(tensor: Tensor, *rest: Any) -> Any:
        sent.follow(at, tensor)
        return send(tensor, *rest)

    def watched(method: Any, action: Action, *rest: Any, **more: Any) -> Any:
        nonlocal at
        at = action
        result = method(action, *rest, **more)
        found.append((action, [kind.live() for kind in kinds]))
        return result

    comm.send = watched_send  # type: ignore[method-assign]
    for name in ("_forward", "_backward", "_weights", "_message"):
        setattr(pipeline, name, partial(watched, getattr(pipeline, name)))
    training.step(_batches(spec, job, strategy), 1e-2)
    found.append((at, [kind.live() for kind in kinds]))
    comm.barrier()
    return found


def origins(world: World, spec: ModelSpec, job: Job, strategy: Strategy) -> list[tuple[str, str, int]]:
    """Return the messages about a non-finite output, and about a non-finite weight, for each block, and its rank."""
    comm = Comm(world, mesh(strategy))
    training = Training(spec, job, strategy, comm, 0, "skip")
    found = []
    for n in range(spec.layers):
        block: Any = dict(training.model.blocks.items()).get(str(n))
        handle = block and block.mlp.register_forward_hook(lambda _, args, out: out / 0)
        output = training.step(_batches(spec, job, strategy), 0.0).skipped
        if block:
            handle.remove()
            block.norm2.weight.data[3] += float("nan")
        weight = training.step(_batches(spec, job, strategy), 0.0).skipped
        if block:
            block.norm2.weight.data[3] = 1.0
        (rank,) = (r for r, has in enumerate(comm.gather_objects(block is not None, "world")) if has)
        found.append((output, weight, rank))
    comm.barrier()
    return found
