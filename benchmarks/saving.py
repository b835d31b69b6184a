"""A benchmark rank: training that saves nothing, saves during the next steps, or waits until a checkpoint is written.

The model is that of benchmarks/zero.py at zero=1; every round of a program saves once.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.interleaved import Step, rounds
from benchmarks.zero import BATCH, SEQ, SIZES
from phalanx.measure.collectives import OPS
from phalanx.runtime.checkpoint.async_saver import Saver
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.process.environment import ALONE, World, external_world
from phalanx.runtime.process.rank import run_rank
from phalanx.spec.cluster.collective_choice import Choice
from phalanx.spec.files.job_file import build
from phalanx.spec.files.plan import write_json
from phalanx.spec.job import Job
from phalanx.spec.model.families import complete
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy
from phalanx.training.training_step import Training

ROUNDS, STEPS = 7, 8


def _programs(world: World, folder: Path) -> tuple[dict[str, tuple[Step, int]], Comm]:
    spec = build(ModelSpec, complete(SIZES), "model")
    strategy = Strategy(dp=world.size, zero=1, micro_batch=BATCH // world.size)
    comm = Comm(world, mesh(strategy), tuple(Choice(op, world.size, 0, "shm") for op in OPS))
    training = Training(spec, Job(BATCH, SEQ), strategy, comm, 0)
    saver = Saver(folder, comm, keep=1)
    done = 0

    def step(batch: Tensor) -> None:
        nonlocal done
        done += 1
        training.step([batch], 1e-3)

    def saving(wait: bool) -> Step:
        def save_first(batch: Tensor) -> None:
            if done % STEPS == 0:
                saver.save(done, training.owned(), {})
                if wait:
                    saver.wait()
                    comm.barrier()
            step(batch)

        return save_first

    programs = {"nothing": step, "beside": saving(wait=False), "waited for": saving(wait=True)}
    return {name: (program, world.size) for name, program in programs.items()}, comm


def main() -> None:
    arguments = json.loads(sys.argv[1])
    world = external_world() or ALONE
    torch.set_num_threads(1)

    def work() -> None:
        out = Path(arguments["out"])
        programs, comm = _programs(world, out.parent / "checkpoint")
        batch = torch.randint(SIZES["vocab"], (BATCH // world.size, SEQ + 1))  # type: ignore[call-overload]
        results = rounds(programs, batch, comm, ROUNDS, STEPS)
        if world.rank == 0:
            size = sum(f.stat().st_size for f in (out.parent / "checkpoint").rglob("*") if f.is_file())
            write_json(out, {"figures": results, "bytes": size})

    run_rank(world, 120, work)


if __name__ == "__main__":
    main()
