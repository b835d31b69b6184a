"""A benchmark rank: every operation over every transport, interleaved, with buffers rewritten in every round."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from phalanx.measure.collectives import OPS, SHARED, TransportAlgorithm, candidates, rounds, tensors
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.comm.transport import Call
from phalanx.runtime.process.environment import ALONE, external_world
from phalanx.runtime.process.rank import run_rank
from phalanx.spec.files.plan import write_json
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy

SIZES = tuple(2**k for k in range(16, 25, 2))  # 64 KiB .. 16 MiB, as Event counts bytes
LARGE = 2**26
ROUNDS = 11
ORDINARY = "shm, ordinary memory"


def _copies(comm: Comm) -> list[float]:
    """Return bytes read and written per second, by round, when all ranks copy LARGE bytes at the same time."""
    source, target = torch.ones(LARGE // 4), torch.zeros(LARGE // 4)
    seconds = []
    for _ in range(ROUNDS):
        comm.barrier()
        begin = time.perf_counter()
        target.copy_(source)
        comm.barrier()
        seconds.append(time.perf_counter() - begin)
    return [2 * LARGE * comm.world.size / s for s in seconds]


def main() -> None:
    arguments = json.loads(sys.argv[1])
    world = external_world() or ALONE
    torch.set_num_threads(1)

    def work() -> None:
        ranks = tuple(range(world.size))
        comm = Comm(world, mesh(Strategy(dp=world.size)), SHARED)
        results: dict[str, Any] = {}
        for op in OPS:
            for size in (*SIZES, *([LARGE] if op == "all_reduce" else [])):
                own = tensors(op, size, world.size, lambda n: comm.buffer(n, torch.float32))
                ordinary = tensors(op, size, world.size, torch.zeros)
                calls = [Call(op, ranks, world.rank, *both) for both in (own, ordinary)]
                tried = {str(way): (calls[0], way) for way in candidates(op, ranks, comm)}
                if size == LARGE:
                    tried = {name: tried[name] for name in ("native", "shm")}
                tried["native"] = (
                    calls[1],
                    TransportAlgorithm("native"),
                )  # torch.distributed's default, on an ordinary buffer
                tried[ORDINARY] = (calls[1], TransportAlgorithm("shm"))
                timed = rounds(comm, tried, ROUNDS)
                results[f"{op} {size}"] = {name: list(t.seconds) for name, t in timed.items()}
        results["copy"] = _copies(comm)
        if world.rank == 0:
            write_json(Path(arguments["out"]), results)

    run_rank(world, 120, work)


if __name__ == "__main__":
    main()
