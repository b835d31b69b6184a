"""An examined rank: `python -m phalanx.verify.worker '{"plan": ..., "out": ..., "steps": ..., "dtype": ...}'`."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from phalanx.runtime import world as worlds
from phalanx.runtime.comm import Comm
from phalanx.runtime.launch import last_words
from phalanx.spec import jobfile
from phalanx.spec.mesh import mesh
from phalanx.spec.plan import write_json
from phalanx.verify.parity import examine


def main() -> None:
    given = json.loads(sys.argv[1])
    world = worlds.external() or worlds.ALONE
    try:
        file = jobfile.from_tables(given["tables"], Path())
        assert file.strategy is not None
        torch.set_num_threads(file.train.threads)
        worlds.join(world, file.train.timeout_s)
        comm = Comm(world, mesh(file.strategy))
        found = [
            examine(file.model, file.job, file.strategy, file.train, comm, name, given["dtype"], given["steps"])
            for name in ("sgd", "adamw")
        ]
        if world.rank == 0:
            write_json(Path(given["out"]), [asdict(d) for d in found if d is not None])
        worlds.leave()
    except Exception as error:
        last_words(world.rank, error)
        os._exit(1)


if __name__ == "__main__":
    main()
