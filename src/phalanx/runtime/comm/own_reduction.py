"""A rank that runs one collective schedule with a user-defined reduction, and writes its result to a file."""

import json
import sys
from pathlib import Path

import numpy as np
import torch

from phalanx.runtime.comm.reductions import reduction_by_name
from phalanx.runtime.comm.schedule_executor import Executor
from phalanx.runtime.process.environment import ALONE, external_world
from phalanx.runtime.process.rank import run_rank
from phalanx.runtime.process.world import group
from phalanx.schedule.collectives.rank_program import program
from phalanx.schedule.collectives.registry import build


def contribution(rank: int, size: int) -> torch.Tensor:
    """Return a rank's contribution: (size,) int64 in -9..9, seeded with its number."""
    return torch.from_numpy(np.random.default_rng(rank).integers(-9, 10, size))


def main() -> None:
    """Run as a launched rank: argument {algorithm, op, size, function, out}."""
    options = json.loads(sys.argv[1])
    world = external_world() or ALONE

    def work() -> None:
        buffer = contribution(world.rank, options["size"])
        tiers = tuple(options["tiers"])
        schedule = build(options["op"], options["algorithm"], world.size, options["size"], tiers=tiers)
        if world.size > 1:
            executor = Executor(group(tuple(range(world.size))), grouped=False)
            steps = program(schedule, world.rank)
            executor.run(steps, lambda low, high: buffer[low:high], reduction_by_name(options["function"]), buffer)
        mine = schedule.end.rank == world.rank
        ends = zip(schedule.end.offset[mine].tolist(), schedule.end.length[mine].tolist(), strict=True)
        held = {str(low): buffer[low : low + length].tolist() for low, length in ends}
        (Path(options["out"]) / f"{world.rank}.json").write_text(json.dumps(held))

    run_rank(world, 60.0, work)


if __name__ == "__main__":
    main()
