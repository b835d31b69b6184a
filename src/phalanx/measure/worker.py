"""A measuring rank: `python -m phalanx.measure.worker '{"out": ..., "dtype": ..., "threads": ...}'`.

Kernel rates are taken at every concurrency that a run on these ranks can have: 1, 2, 4, ... and all of them.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from phalanx.measure import kernels, links
from phalanx.runtime import world as worlds
from phalanx.runtime.comm import Comm
from phalanx.runtime.launch import last_words
from phalanx.spec.cluster import KernelRates
from phalanx.spec.mesh import mesh
from phalanx.spec.plan import write_json
from phalanx.spec.strategy import Strategy


def levels(ranks: int) -> list[int]:
    """Concurrencies to measure: powers of two below the number of ranks, and that number."""
    return sorted({2**k for k in range(ranks.bit_length()) if 2**k <= ranks} | {ranks})


def _measure(given: dict[str, Any], comm: Comm) -> dict[str, Any]:
    dtype, threads, rank = given["dtype"], given["threads"], comm.world.rank
    found: list[KernelRates] = []
    for concurrent in levels(comm.world.size):
        comm.barrier()
        if rank >= concurrent:
            continue  # waits, asleep, at the next level's barrier
        together = Comm(replace(comm.world, size=concurrent), mesh(Strategy(dp=concurrent)))
        comm.status.now(f"measuring kernels, {concurrent} at once")
        # The slowest rank sets a step's pace, but every rank is slowest at times: rank 0 stands for all.
        points = kernels.measure_points(dtype, comm.world.device, together.barrier)
        peak = kernels.peak_flops(dtype, comm.world.device, together.barrier)
        per_byte = kernels.optimizer_per_byte(dtype, comm.world.device, together.barrier)
        found.append(kernels.kernel_rates(points, dtype, concurrent, threads, per_byte, peak))
    comm.barrier()
    fits = []
    if comm.world.size > 1:
        comm.status.now("measuring links")
        fits.append(links.measure_all_reduce(comm, "world"))
    return {"kernels": [asdict(k) for k in found], "collectives": [asdict(f) for f in fits]}


def main() -> None:
    given = json.loads(sys.argv[1])
    world = worlds.external() or worlds.ALONE
    torch.set_num_threads(given["threads"])
    try:
        worlds.join(world, 120)
        found = _measure(given, Comm(world, mesh(Strategy(dp=world.size))))
        if world.rank == 0:
            write_json(Path(given["out"]), found)
        worlds.leave()
    except Exception as error:
        last_words(world.rank, error)
        os._exit(1)


if __name__ == "__main__":
    main()
