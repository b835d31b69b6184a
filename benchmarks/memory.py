"""A benchmark rank: peak live tensor bytes in a warm step of each strategy; on CUDA, peak bytes of the allocator.

The model is that of benchmarks/zero.py. `bench_memory` predicts and verifies the same strategies.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import torch

from benchmarks.zero import BATCH, SEQ, SIZES
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.process.environment import ALONE, World, external_world
from phalanx.runtime.process.rank import run_rank
from phalanx.runtime.tracing.instrument import instrument
from phalanx.spec.files.job_file import build, make_strategy
from phalanx.spec.files.plan import write_json
from phalanx.spec.job import Job, Precision
from phalanx.spec.model.families import complete
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy
from phalanx.training.training_step import Training

CASES: dict[int, tuple[str, ...]] = {
    1: ("micro_batch=4", "micro_batch=8"),
    2: (
        "dp=2,micro_batch=4",
        "dp=2,zero=1,micro_batch=2",
        "dp=2,zero=2,micro_batch=2",
        "dp=2,zero=3,micro_batch=4",
        "dp=2,zero=3,reshard=step",
        "dp=2,micro_batch=4,compression=int8",
        "dp=2,zero=1,micro_batch=4,compression=topk:0.01",
    ),
    4: ("dp=4,zero=3,micro_batch=2", "dp=4,zero=2,shard=2"),
}
"""Strategies by number of ranks."""
PRECISIONS = (Precision("float32"), Precision("bfloat16"))


def job_of(precision: Precision) -> Job:
    return Job(BATCH, SEQ, precision=precision)


def model() -> ModelSpec:
    return build(ModelSpec, complete(SIZES), "model")


def strategy_of(line: str) -> Strategy:
    strategy = make_strategy(line)
    assert strategy is not None
    return strategy


def _measured(world: World, job: Job, strategy: Strategy) -> int:
    comm = Comm(world, mesh(strategy))
    training = Training(model(), job, strategy, comm, seed=0)
    shape = (strategy.micro_batch, SEQ + 1)
    batches = [torch.randint(SIZES["vocab"], shape) for _ in range(strategy.accumulation(job))]  # type: ignore[call-overload]
    batches = [b.to(world.device) for b in batches]
    training.step(batches, 1e-3)
    comm.barrier()
    gc.collect()
    if world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(world.device)
        training.step(batches, 1e-3)
        peak = torch.cuda.max_memory_allocated(world.device)
    else:
        with instrument(training.model.units(), comm.recorder, lambda: training.current) as tracker:
            training.step(batches, 1e-3)
        peak = tracker.peak
    comm.barrier()
    return int(max(comm.gather_objects(int(peak), "world")))


def main() -> None:
    arguments = json.loads(sys.argv[1])
    world = external_world() or ALONE
    torch.set_num_threads(1)

    def work() -> None:
        results = []
        for line in CASES[world.size]:
            for precision in PRECISIONS:
                results.append((line, precision.compute, _measured(world, job_of(precision), strategy_of(line))))
        if world.rank == 0:
            write_json(Path(arguments["out"]), results)

    run_rank(world, 120, work)


if __name__ == "__main__":
    main()
