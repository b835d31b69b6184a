"""A benchmark rank: strong and weak scaling of one job, and what the time is lost to.

A step of p ranks takes T, on average over the ranks: computing, waiting for messages of a pipeline (the bubble),
waiting until the rank that computes longest is done (imbalance), and the rest of what blocks them, exposed
communication. The same work takes T1 on one process, in interleaved rounds, so that other load affects both alike.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from phalanx.measure.this_machine import local_cluster
from phalanx.planning.auto import transport
from phalanx.planning.search.best_first import price
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.process.environment import ALONE, World, external_world
from phalanx.runtime.process.rank import run_rank
from phalanx.spec.cluster.spec import ClusterSpec
from phalanx.spec.files import job_file
from phalanx.spec.files.plan import write_json
from phalanx.spec.job import Job
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy
from phalanx.training.training_step import Training

ROUNDS, STEPS, BATCH, RANKS = 7, 2, 8, (1, 2, 4)
CASES = ("strong", "weak", "strong, pipeline")


def case(name: str, p: int, job: Job) -> tuple[Job, Strategy]:
    """Return the job and the strategy of a case on p ranks."""
    if name == "weak":
        return replace(job, global_batch=2 * p), Strategy(dp=p, micro_batch=2)
    if name == "strong":
        return replace(job, global_batch=BATCH), Strategy(dp=p, micro_batch=BATCH // p)
    return replace(job, global_batch=BATCH), Strategy(pp=p, micro_batch=1, schedule="1f1b")


class _Case:
    def __init__(self, name: str, file: job_file.JobFile, cluster: ClusterSpec, world: World) -> None:
        p = world.size
        job, strategy = case(name, p, file.job)
        self.candidate = price(file.model, cluster, job, strategy)
        self.comm = Comm(world, mesh(self.candidate.strategy), transport.decide(cluster, "auto"))
        self.training = Training(file.model, job, self.candidate.strategy, self.comm, 0)
        self.batches = _batches(job, strategy, file.model.vocab)
        # One process does the work of one rank in the weak case, and all of it otherwise.
        alone_job, alone = case(name, 1, file.job)
        self.alone = Training(file.model, alone_job, alone, Comm(ALONE, mesh(alone)), 0)
        self.alone_batches = _batches(alone_job, alone, file.model.vocab)
        self.alone_predicted = float(price(file.model, cluster, alone_job, alone).prediction.step_time_s)

    def round(self) -> dict[str, list[float]]:
        """Return seconds of every step: alone, together, and the parts of the latter, averaged over ranks."""
        results: dict[str, list[float]] = {
            key: [] for key in ("alone", "step", "compute", "imbalance", "bubble", "exposed")
        }
        for _ in range(STEPS):
            self.comm.barrier()
            start = time.perf_counter()
            if self.comm.world.rank == 0:
                self.alone.step(self.alone_batches, 1e-3)
                results["alone"].append(time.perf_counter() - start)
            self.comm.barrier()
            self.comm.timeline.begin()
            self.training.step(self.batches, 1e-3)
            seconds, times = self.comm.timeline.end(), self.comm.timeline.times()
            assert times is not None
            piped = times.axes["pp"].exposed_s if "pp" in times.axes else 0.0
            mine = torch.tensor([seconds, times.compute_s, piped], dtype=torch.float64)
            everyone = [torch.empty_like(mine) for _ in range(self.comm.world.size)]
            if len(everyone) > 1:
                dist.all_gather(everyone, mine)
            else:
                everyone = [mine]
            step, compute, bubble = torch.stack(everyone).mean(dim=0).tolist()
            longest = max(float(t[1]) for t in everyone)
            imbalance = 0.0 if bubble else min(longest - compute, step - compute)
            rest = step - compute - imbalance - bubble
            for key, value in zip(results, (None, step, compute, imbalance, bubble, rest), strict=True):
                if value is not None:
                    results[key].append(value)
        return results


def _batches(job: Job, strategy: Strategy, vocab: int) -> list[torch.Tensor]:
    shape = (strategy.micro_batch, job.seq + 1)
    return [torch.randint(vocab, shape) for _ in range(strategy.accumulation(job))]


def main() -> None:
    arguments = json.loads(sys.argv[1])
    world = external_world() or ALONE
    torch.set_num_threads(1)
    file = job_file.load(Path("examples/quickstart.toml"))
    cluster = local_cluster(arguments["most"], "float32", 1)

    def work() -> None:
        cases = {name: _Case(name, file, cluster, world) for name in CASES if world.size > 1 or "pipe" not in name}
        results: dict[str, Any] = {
            name: {
                "predicted": float(c.candidate.prediction.step_time_s),
                "predicted alone": c.alone_predicted,
                "predicted exposed": float(c.candidate.prediction.exposed_communication_s),
                "predicted bubble": float(c.candidate.prediction.bubble_fraction),
            }
            for name, c in cases.items()
        }
        for i in range(ROUNDS + 1):
            for name, c in cases.items():
                for key, values in c.round().items():
                    if i:
                        results[name].setdefault(key, []).extend(values)
        if world.rank == 0:
            write_json(Path(arguments["out"]), results)

    run_rank(world, 300, work)


if __name__ == "__main__":
    main()
