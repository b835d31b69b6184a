"""A rank of a parity examination, whose argument is JSON: {"tables", "out", "steps", "dtype", "collectives"}."""

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import torch

from phalanx.observation.parity.compression_error import examine_compressed
from phalanx.observation.parity.parity import examine
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.process.environment import ALONE, external_world
from phalanx.runtime.process.rank import run_rank
from phalanx.spec.cluster.collective_choice import Choice
from phalanx.spec.files import job_file
from phalanx.spec.files.plan import write_json
from phalanx.spec.optimizers import OPTIMIZERS
from phalanx.spec.strategy.mesh import mesh


def main() -> None:
    """Examine a strategy as one rank; rank 0 writes the result to `out`."""
    args = json.loads(sys.argv[1])
    world = external_world() or ALONE
    file = job_file.from_tables(args["tables"], Path())
    strategy = file.strategy
    assert strategy is not None
    choices = [job_file.build(Choice, c, "choices.collectives") for c in args["collectives"]]
    torch.set_num_threads(file.train.threads)

    def work() -> None:
        comm = Comm(world, mesh(strategy), choices)
        how = args["dtype"], args["steps"], _say if world.rank == 0 else _keep_silent
        # A residual's rounding turns the last digits of fp32 into other codes.
        exact = strategy.local > 0 and args["dtype"] == "float64"
        plain = strategy if exact else replace(strategy, compression="none")
        # One that needs whole matrices takes as long as all others together: where the job has it.
        examined = [name for name, row in OPTIMIZERS.items() if not row.whole or name == file.job.optimizer.name]
        deviations = [examine(file.model, file.job, plain, file.train, comm, name, *how) for name in examined]
        compressed = None
        if strategy.compressor is not None:
            compressed = examine_compressed(file.model, file.job, strategy, file.train, comm, *how)
        if world.rank == 0:
            content = {
                "optimizers": [asdict(d) for d in deviations if d is not None],
                "compression": asdict(compressed) if compressed else None,
            }
            write_json(Path(args["out"]), content)

    run_rank(world, file.train.timeout_s, work)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _keep_silent(_: str) -> None:
    pass


if __name__ == "__main__":
    main()
