"""A training rank: `python -m phalanx.training.worker '{"folder": "runs/name", "resume": false}'`.

Started by Phalanx's launcher with local ranks, or called by the command line itself under torchrun and srun.
"""

import json
import sys
from pathlib import Path

import torch

from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.process.environment import ALONE, World, external_world
from phalanx.runtime.process.folder import cache_folder
from phalanx.runtime.process.rank import StopFlag, is_restarted, run_rank
from phalanx.spec.errors import InputError
from phalanx.spec.files import plan as plans
from phalanx.spec.strategy.mesh import mesh
from phalanx.training.data import prepare
from phalanx.training.trainer import Trainer


def train_rank(world: World, folder: Path, resume: bool, stop: StopFlag) -> bool:
    """Train as one rank of a world that has been joined; return whether a stop was requested. Raises InputError if
    the data are not those that the run was planned with."""
    plan = plans.read(folder / "plan.json")
    torch.set_num_threads(plan.train.threads)
    comm = Comm(world, mesh(plan.strategy), plan.collectives)
    comm.status.now("start-up")
    if world.local_rank == 0:
        prepare(plan.train, plan.model.vocab, cache_folder())
    comm.barrier()
    tokens = prepare(plan.train, plan.model.vocab, cache_folder())
    if tokens.digest != plan.choices["tokens"]:
        raise InputError("train.data", plan.train.data, "is not what this run was planned with")
    return Trainer(plan, tokens, folder, comm, resume).run(stop)


def main() -> None:
    """Train as one rank that a launcher started."""
    args = json.loads(sys.argv[1])
    world = external_world() or ALONE
    folder = Path(args["folder"])
    timeout_s = plans.read(folder / "plan.json").train.timeout_s
    resume = args["resume"] or is_restarted()  # a restarted run without a checkpoint starts from the beginning
    stop = StopFlag()
    run_rank(world, timeout_s, lambda: train_rank(world, folder, resume, stop), orderly=True)


if __name__ == "__main__":
    main()
