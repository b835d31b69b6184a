"""A measuring rank: `python -m phalanx.measure.worker '{"out": ..., "dtype": ..., "threads": ...}'`.

Kernel rates are taken at every concurrency that a run on these ranks can have: 1, 2, 4, ... and all of them.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from phalanx.measure import kernels, links
from phalanx.runtime import world as worlds
from phalanx.runtime.comm import Comm
from phalanx.runtime.launch import run_rank
from phalanx.spec.cluster import CollectiveFit, KernelRates
from phalanx.spec.mesh import mesh
from phalanx.spec.plan import write_json
from phalanx.spec.strategy import Strategy

_TIMEOUT_S = 120


def levels(ranks: int) -> list[int]:
    """Concurrencies to measure: powers of two below the number of ranks, and that number."""
    return sorted({2**k for k in range(ranks.bit_length()) if 2**k <= ranks} | {ranks})


def _measure(given: dict[str, Any], comm: Comm) -> dict[str, Any]:
    dtype, rank, device = given["dtype"], comm.world.rank, comm.world.device
    found: list[KernelRates] = []
    fits: dict[int, CollectiveFit] = {}
    for concurrent in levels(comm.world.size):
        comm.barrier()
        if rank >= concurrent:
            continue  # waits, asleep, at the next level's barrier
        together = Comm(replace(comm.world, size=concurrent), mesh(Strategy(dp=concurrent)))
        if concurrent > 1:
            comm.status.now(f"measuring links of {concurrent} ranks")
            fits[concurrent] = links.measure_all_reduce(together, "world")
        comm.status.now(f"measuring kernels, {concurrent} at once")
        # Longest where it matters most: all at once is how a run goes.
        rounds = 6 if concurrent == comm.world.size else 3
        whole = kernels.Whole(dtype, together)
        points = kernels.measure_points(dtype, device, together.barrier, whole.run, rounds)
        forward, forward_error = kernels.fit(points, "F")
        backward, backward_error = kernels.fit(points, "B")
        found.append(
            KernelRates(
                dtype=dtype,
                concurrent=concurrent,
                threads=given["threads"],
                forward=forward,
                backward=backward,
                optimizer_per_byte=kernels.optimizer_per_byte(dtype, device, together.barrier),
                whole=whole.over_parts(forward, backward, fits.get(concurrent)),
                peak_flops_per_s=kernels.peak_flops(dtype, device, together.barrier),
                residual=max(forward_error, backward_error),
                origin="measured",
            )
        )
    comm.barrier()
    return {"kernels": [asdict(k) for k in found], "collectives": [asdict(f) for f in fits.values()]}


def main() -> None:
    given = json.loads(sys.argv[1])
    world = worlds.external() or worlds.ALONE
    torch.set_num_threads(given["threads"])

    def work() -> None:
        found = _measure(given, Comm(world, mesh(Strategy(dp=world.size))))
        if world.rank == 0:
            write_json(Path(given["out"]), found)

    run_rank(world, _TIMEOUT_S, work)


if __name__ == "__main__":
    main()
