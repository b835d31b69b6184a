"""A benchmark rank: the quickstart's model under our engine, under DistributedDataParallel, and alone.

Rounds are interleaved, so that other load on the machine affects all programs alike. One thread per rank.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.interleaved import Step, rounds
from benchmarks.programs import initialise
from phalanx.nn.decoder import Decoder
from phalanx.nn.init import create
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.process.environment import ALONE, external_world
from phalanx.runtime.process.rank import run_rank
from phalanx.spec.files import job_file
from phalanx.spec.files.plan import write_json
from phalanx.spec.model.spec import parameters
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy
from phalanx.training.parallelize import make_optimizer
from phalanx.training.training_step import Training

ROUNDS, STEPS = 9, 6


def _ddp_step(file: job_file.JobFile) -> Step:
    """Return torch's own training step for the same model, as in its tutorials, with its best settings."""
    model: Decoder = create(file.model, torch.float32, torch.device("cpu"))
    initialise(model, file.model, 0)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    own: dict[str, Tensor] = dict(model.named_parameters())
    optimizer = make_optimizer(file.job.optimizer, own, parameters(file.model))
    for group in optimizer.param_groups:
        group["lr"] = 1e-3

    def step(batch: Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        loss = wrapped(batch[:, :-1], batch[:, 1:]) / (batch.shape[0] * (batch.shape[1] - 1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), file.job.clip)
        optimizer.step()
        loss.item()

    return step


def main() -> None:
    arguments = json.loads(sys.argv[1])
    world = external_world() or ALONE
    torch.set_num_threads(1)
    file = job_file.load(Path("examples/quickstart.toml"))

    def work() -> None:
        job, size = file.job, file.job.global_batch // world.size
        comm = Comm(world, mesh(Strategy(dp=world.size)))
        ours = Training(file.model, job, Strategy(dp=world.size, micro_batch=size), comm, 0)
        ddp = _ddp_step(file)
        half = replace(job, global_batch=size)
        alone = Training(file.model, half, Strategy(micro_batch=size), Comm(ALONE, mesh(Strategy())), 0)
        batch = torch.randint(file.model.vocab, (size, job.seq + 1))
        runs: dict[str, tuple[Step, int]] = {
            "phalanx": (lambda b: ours.step([b], 1e-3), world.size),
            "ddp": (ddp, world.size),
            "one process": (lambda b: alone.step([b], 1e-3), 1),
        }
        results = rounds(runs, batch, comm, ROUNDS, STEPS)
        if world.rank == 0:
            write_json(Path(arguments["out"]), results)

    run_rank(world, 120, work)


if __name__ == "__main__":
    main()
