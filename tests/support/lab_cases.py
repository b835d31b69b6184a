"""Functions that ranks on the lab's hosts run."""

from __future__ import annotations

import torch

from phalanx.measure import all_hosts, collectives, links, microbenchmarks
from phalanx.measure import links as messages
from phalanx.measure.collectives import SHARED
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.comm.schedule_executor import Executor
from phalanx.runtime.comm.transport import Call
from phalanx.runtime.process import world as worlds
from phalanx.runtime.process.environment import World
from phalanx.schedule.collectives.ir import Schedule
from phalanx.schedule.collectives.rank_program import program
from phalanx.spec.cluster.spec import ClusterSpec
from phalanx.spec.job import Job
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy
from phalanx.training.training_step import Training
from support.tiny_measurement import shorten_kernels

LONG = 2**18  # elements, of float32


def schedule(world: World, given: Schedule) -> None:
    """Run a schedule; after an all-reduce every element holds the number of ranks."""
    buffer = torch.ones(given.size)
    executor = Executor(worlds.group(tuple(range(world.size))), False)
    executor.run(program(given, world.rank, LONG), lambda low, high: buffer[low:high], "sum", buffer)
    if given.op == "all_reduce":
        assert (buffer == world.size).all()


def all_reduce(world: World, size: int, transport: str, algorithm: str, shared: bool = False) -> None:
    """All-reduce a buffer once and return the result. `shared`: the ranks of a host share its memory."""
    comm = Comm(world, mesh(Strategy(dp=world.size)), SHARED)
    ranks, n = tuple(range(world.size)), size // 4
    x = comm.buffer(n, torch.float32) if shared else torch.zeros(n)
    x.copy_(torch.arange(n) % 64 + world.rank)
    comm.start(Call("all_reduce", ranks, world.rank, x, x), transport, algorithm).wait()  # type: ignore[arg-type]
    assert torch.equal(x, (world.size * (torch.arange(n) % 64) + sum(ranks)).float())


def losses(world: World, spec: ModelSpec, job: Job, strategy: Strategy, steps: int) -> list[float]:
    """Return the losses of the first steps of a run."""
    comm = Comm(world, mesh(strategy))
    training = Training(spec, job, strategy, comm, seed=5)
    found = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        batch = torch.randint(spec.vocab, (job.global_batch, job.seq + 1), generator=generator)
        mine = batch.view(strategy.dp, -1, strategy.micro_batch, job.seq + 1)[comm.mesh.replica(world.rank)]
        found.append(training.step(list(map(training.context.cut, mine)), lr=1e-2).loss)
    training.engine.wait_parameters(list(training.engine.parameters))
    comm.barrier()
    return found


def measure(world: World) -> ClusterSpec | None:
    """Measure the cluster with few sizes and rounds."""
    shorten_kernels()
    collectives._SIZES = collectives._SIZES_BETWEEN = tuple(2**k for k in (10, 14))
    collectives._ROUNDS = collectives._ROUNDS_BETWEEN = 1
    messages.SIZES = (2**10, 2**14)
    links._ROUNDS, microbenchmarks._ROUNDS, microbenchmarks._COPIED = (1, 1), 1, {"cpu": 2**16}
    return all_hosts.measure(world, "float32", 1)
