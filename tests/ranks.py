"""What pool ranks run: importable by name, so that a case travels as a few plain objects."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from phalanx.cost.program import differences, expand
from phalanx.runtime.comm import Comm
from phalanx.runtime.instrument import instrument
from phalanx.runtime.world import World
from phalanx.spec.job import Job, Train
from phalanx.spec.mesh import mesh
from phalanx.spec.model import ModelSpec
from phalanx.spec.strategy import Strategy
from phalanx.train.step import Training
from phalanx.verify import parity


def instrumented_step(world: World, spec: ModelSpec, job: Job, strategy: Strategy) -> dict[str, Any]:
    """One recorded step against its program: differences, predicted and measured peak."""
    comm = Comm(world, mesh(strategy))
    training = Training(spec, job, strategy, comm, seed=0)
    generator = torch.Generator().manual_seed(world.rank)
    shape = (strategy.micro_batch, job.seq + 1)
    batches = [torch.randint(spec.vocab, shape, generator=generator) for _ in range(strategy.accumulation(job))]
    with instrument(training.model.units(), comm.recorder, lambda: training.current) as tracker:
        training.step(batches, lr=1e-3)
    program = expand(spec, job, strategy)
    return {
        "differences": list(differences(program.events, tuple(comm.recorder.events))),
        "events": len(comm.recorder.events),
        "predicted_peak": program.peak_bytes,
        "measured_peak": tracker.peak,
        "bytes": dict(comm.recorder.bytes_per_axis),
    }


def examine(world: World, spec: ModelSpec, job: Job, strategy: Strategy, dtype: Any, steps: int) -> list[Any]:
    comm = Comm(world, mesh(strategy))
    train = Train(lr=1e-3, steps=100, warmup=2, seed=3)
    return [parity.examine(spec, job, strategy, train, comm, name, dtype, steps) for name in ("sgd", "adamw")]


def examine_broken(world: World, how: str, *case: Any) -> list[Any]:
    """Parity of an engine that was broken on purpose."""
    from phalanx.runtime import data_parallel

    engine = data_parallel.DataParallel
    original = engine._issue

    def mean_instead_of_sum(self: Any) -> None:
        self.buckets[self._next].flat.div_(self.comm.world.size)  # the oracle's engine stays whole
        original(self)

    def forgets_last_bucket(self: Any) -> None:
        if self.comm.world.size > 1 and self._next == len(self.buckets) - 1:
            self._next += 1
        else:
            original(self)

    engine._issue = {"mean": mean_instead_of_sum, "forgets": forgets_last_bucket}[how]  # type: ignore[method-assign]
    try:
        return examine(world, *case)
    finally:
        engine._issue = original  # type: ignore[method-assign]


def rank_and_sum(world: World) -> tuple[int, float]:
    comm = Comm(world, mesh(Strategy(dp=world.size)))
    total = torch.tensor([float(world.rank)])
    comm.all_reduce(total, "world", unit="test", phase="B").wait()
    return world.rank, float(total)


def raise_on(world: World, rank: int) -> None:
    if world.rank == rank:
        raise ValueError("on purpose")
    dist.barrier()


def sleep_on(world: World, rank: int) -> None:
    comm = Comm(world, mesh(Strategy(dp=world.size)))
    if world.rank == rank:
        comm.status.now("a nap")
        time.sleep(60)
