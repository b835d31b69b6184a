"""A benchmark rank: our ZeRO stages over Gloo and over shared memory, compared with torch's, on one model.

The model is that of the published baselines: GPT of 8 layers, d = 256, sequence 256, vocabulary 4,096, 2,048 tokens a
step.
Rounds are interleaved, so that other load on the machine affects all programs alike. One thread per rank.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from benchmarks.interleaved import Step, rounds
from benchmarks.programs import ddp, fsdp, our_step, torch_step
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
from phalanx.training.training_step import Training

ROUNDS, STEPS = 5, 2
SIZES = {"family": "gpt2", "vocab": 4096, "hidden": 256, "layers": 8, "heads": 8, "ffn": 1024, "max_seq": 256}
SEQ, BATCH = 256, 8


def main() -> None:
    arguments = json.loads(sys.argv[1])
    world = external_world() or ALONE
    torch.set_num_threads(1)
    spec = build(ModelSpec, complete(SIZES), "model")

    def work() -> None:
        ranks, size = world.size, BATCH // world.size
        job = Job(BATCH, SEQ)
        comm = Comm(world, mesh(Strategy(dp=ranks)))
        runs: dict[str, tuple[Step, int]] = {
            "DistributedDataParallel": (torch_step(spec, job, ddp), ranks),
            "fully_shard, keep": (torch_step(spec, job, fsdp(reshard=False)), ranks),
            "fully_shard, reshard": (torch_step(spec, job, fsdp(reshard=True)), ranks),
        }
        for transport in ("native", "shm"):
            for zero in (0, 2, 3):
                strategy = Strategy(dp=ranks, zero=zero, micro_batch=size)
                runs[f"zero={zero}, {transport}"] = (our_step(spec, job, world, strategy, transport), ranks)
        alone = Training(spec, Job(size, SEQ), Strategy(micro_batch=size), Comm(ALONE, mesh(Strategy())), 0)
        runs["one process"] = (lambda batch: alone.step([batch], 1e-3), 1)
        results = rounds(runs, torch.randint(spec.vocab, (size, SEQ + 1)), comm, ROUNDS, STEPS)
        if world.rank == 0:
            write_json(Path(arguments["out"]), results)

    run_rank(world, 300, work)


if __name__ == "__main__":
    main()
