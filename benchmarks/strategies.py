"""A benchmark rank: steps of several strategies of one job in interleaved rounds, some with a rank that is slowed,
and what was predicted of each.

A slowed rank sleeps after each of a unit's passes for as long as its factor says, so that processors are free for the
others, as if the rank had a slower one of its own.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import Variable

from benchmarks.memory import strategy_of
from phalanx.measure.steal_time import stolen_s, stolen_share
from phalanx.measure.this_machine import local_cluster
from phalanx.planning.auto import transport
from phalanx.planning.search.best_first import price
from phalanx.planning.stragglers.own import own_pipelines
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.process.environment import ALONE, World, external_world
from phalanx.runtime.process.rank import run_rank
from phalanx.spec.cluster.spec import ClusterSpec
from phalanx.spec.files import job_file
from phalanx.spec.files.plan import write_json
from phalanx.spec.strategy.mesh import mesh
from phalanx.training.training_step import Training

ROUNDS, STEPS = 9, 2


class Slowed:
    """Makes the passes of a model's units take `factor` times as long."""

    def __init__(self, model: Any, factor: float) -> None:
        self.factor, self.since = factor, 0.0
        for module in model.units().values():
            module.register_forward_pre_hook(self._begin)
            module.register_forward_hook(self._after)

    def _begin(self, *_: object) -> None:
        self.since = perf_counter()

    def _wait(self) -> None:
        if self.since:
            time.sleep((self.factor - 1) * (perf_counter() - self.since))
        self.since = 0.0

    def _after(self, _: nn.Module, args: object, out: Tensor) -> None:
        self._wait()
        if out.requires_grad:
            out.register_hook(self._backward)

    def _backward(self, _: Tensor) -> None:
        if self.since:
            self._wait()
        else:  # the first unit of this backward pass
            Variable._execution_engine.queue_callback(self._wait)
        self.since = perf_counter()


class _Case:
    """A strategy of a job, and the rank that is slowed, if any."""

    def __init__(
        self, file: job_file.JobFile, cluster: ClusterSpec, world: World, line: str, slow: list[float]
    ) -> None:
        candidate = price(file.model, cluster, file.job, strategy_of(line))
        s = candidate.strategy
        factor = np.ones(s.world)
        if slow:
            factor[int(slow[0])] = slow[1]
        pipelines = own_pipelines(file.model, cluster, file.job, s)
        self.predicted = pipelines.delayed(factor).step_s
        self.comm = Comm(world, mesh(s), transport.decide(cluster, "auto"))
        self.training = Training(file.model, file.job, s, self.comm, 0)
        if slow and world.rank == int(slow[0]):
            Slowed(self.training.model, slow[1])
        shape = (s.micro_batch, file.job.seq + 1)
        cut = self.training.context.cut
        self.batches = [cut(torch.randint(file.model.vocab, shape)) for _ in range(s.accumulation(file.job))]

    def round(self) -> tuple[float, float]:
        """Return seconds of a step and the share of the machine that others had meanwhile."""
        self.comm.barrier()
        start, stolen = perf_counter(), stolen_s()
        for _ in range(STEPS):
            self.training.step(self.batches, 1e-3)
        self.comm.barrier()
        seconds = perf_counter() - start
        return seconds / STEPS, stolen_share(stolen_s() - stolen, seconds)


def main() -> None:
    arguments = json.loads(sys.argv[1])
    world = external_world() or ALONE
    torch.set_num_threads(1)

    file = job_file.load(Path(arguments["job"]), ["job.global_batch=16"])
    cluster = local_cluster(arguments["most"], "float32", 1)

    def work() -> None:
        cases = {name: _Case(file, cluster, world, *how) for name, how in arguments["cases"].items()}
        results: dict[str, Any] = {
            name: {"predicted": c.predicted, "seconds": [], "stolen": []} for name, c in cases.items()
        }
        names = list(cases)
        for i in range(arguments.get("rounds", ROUNDS) + 1):
            for name in names[i % len(names) :] + names[: i % len(names)]:
                seconds, stolen = cases[name].round()
                if i:
                    results[name]["seconds"].append(seconds)
                    results[name]["stolen"].append(stolen)
        if world.rank == 0:
            write_json(Path(arguments["out"]), results)

    run_rank(world, 600, work)


if __name__ == "__main__":
    main()
