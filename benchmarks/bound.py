"""A benchmark rank: a step that is mostly communication and optimizer, of 38 M parameters and 64 tokens per rank.

Rounds are interleaved, so that other load on the machine affects all programs alike. One thread per rank.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from benchmarks.interleaved import Step, rounds
from benchmarks.programs import ddp, our_step, torch_step
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.process.environment import ALONE, external_world
from phalanx.runtime.process.rank import run_rank
from phalanx.spec.files.job_file import build
from phalanx.spec.files.plan import write_json
from phalanx.spec.job import Job
from phalanx.spec.model.families import complete
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy

ROUNDS, STEPS = 7, 2
SIZES = {"family": "gpt2", "vocab": 50257, "hidden": 512, "layers": 4, "heads": 8, "ffn": 2048, "max_seq": 64}
SEQ = 64


def main() -> None:
    arguments = json.loads(sys.argv[1])
    world = external_world() or ALONE
    torch.set_num_threads(1)
    spec = build(ModelSpec, complete(SIZES), "model")

    def work() -> None:
        ranks = world.size
        job = Job(ranks, SEQ)
        comm = Comm(world, mesh(Strategy(dp=ranks)))
        runs: dict[str, tuple[Step, int]] = {"DistributedDataParallel": (torch_step(spec, job, ddp), ranks)}
        for transport in ("native", "shm"):
            for zero in (0, 1):
                strategy = Strategy(dp=ranks, zero=zero)
                runs[f"zero={zero}, {transport}"] = (our_step(spec, job, world, strategy, transport), ranks)
        results = rounds(runs, torch.randint(spec.vocab, (1, SEQ + 1)), comm, ROUNDS, STEPS)
        if world.rank == 0:
            write_json(Path(arguments["out"]), results)

    run_rank(world, 300, work)


if __name__ == "__main__":
    main()
