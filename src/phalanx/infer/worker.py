"""A rank of several that write a text: `python -m phalanx.infer.worker '{"run", "prompt", "how", "out"}'`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from phalanx.infer.generate import Sampling, generate
from phalanx.runtime import world as worlds
from phalanx.runtime.comm import Comm
from phalanx.runtime.launch import run_rank
from phalanx.spec.mesh import mesh
from phalanx.spec.plan import write_json
from phalanx.spec.strategy import Strategy

TIMEOUT_S = 300.0


def main() -> None:
    given = json.loads(sys.argv[1])
    world = worlds.external() or worlds.ALONE

    def work() -> None:
        comm = Comm(world, mesh(Strategy(tp=world.size)))
        comm.status.now("generation")
        text = generate(Path(given["run"]), given["prompt"], Sampling(**given["how"]), comm)
        if world.rank == 0:
            write_json(Path(given["out"]), {"text": text})

    run_rank(world, TIMEOUT_S, work)


if __name__ == "__main__":
    main()
