"""A benchmark rank: ring attention over all ranks compared with one process, on one long causal sequence.

The work is a training step of a small model, most of it attention. CPU-seconds are summed over ranks; activations are
the peak live bytes of a step minus those at its beginning.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from benchmarks.interleaved import Step, rounds
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.process.environment import ALONE, external_world
from phalanx.runtime.process.rank import run_rank
from phalanx.runtime.tracing.instrument import instrument
from phalanx.spec.files.job_file import build
from phalanx.spec.files.plan import write_json
from phalanx.spec.job import Job
from phalanx.spec.model.families import complete
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy
from phalanx.training.training_step import Training

SEQ = 16384
SIZES = {
    "family": "llama",
    "vocab": 1024,
    "hidden": 128,
    "layers": 1,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 32,
    "ffn": 256,
    "max_seq": SEQ,
}
ROUNDS, STEPS = 3, 1


def model() -> ModelSpec:
    return build(ModelSpec, complete(SIZES), "model")


def strategies(ranks: int) -> dict[str, Strategy]:
    return {
        "ring": Strategy(cp=ranks),
        "ring x ulysses": Strategy(cp=ranks, ulysses=2),
        "ulysses": Strategy(cp=ranks, ulysses=ranks),
    }


def main() -> None:
    arguments = json.loads(sys.argv[1])
    world = external_world() or ALONE
    torch.set_num_threads(1)

    def work() -> None:
        spec, job = model(), Job(1, SEQ)
        comm = Comm(world, mesh(Strategy(dp=world.size)))
        tokens = torch.randint(spec.vocab, (1, SEQ + 1), generator=torch.Generator().manual_seed(0))
        programs = {
            name: Training(spec, job, s, Comm(world, mesh(s)), 0) for name, s in strategies(world.size).items()
        }
        programs["one process"] = Training(spec, job, Strategy(), Comm(ALONE, mesh(Strategy())), 0)

        def step(training: Training) -> Step:
            return lambda batch: training.step([training.context.cut(batch)], 1e-3)

        runs = {
            name: (step(training), 1 if name == "one process" else world.size) for name, training in programs.items()
        }
        results = rounds(runs, tokens, comm, ROUNDS, STEPS)
        for name, training in programs.items():
            held = 0
            if name != "one process" or world.rank == 0:
                recorder, mine = training.comm.recorder, training.context.cut(tokens)
                with instrument(training.model.units(), recorder, lambda t=training: t.current) as tracker:  # type: ignore[misc]
                    training.step([mine], 1e-3)
                held = tracker.peak - tracker.start
            by_rank = comm.gather_objects(held, "world")
            if world.rank == 0:
                results[name]["activation_bytes"] = [float(n) for n in by_rank if n]
        if world.rank == 0:
            write_json(Path(arguments["out"]), results)

    run_rank(world, 600, work)


if __name__ == "__main__":
    main()
