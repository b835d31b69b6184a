"""A measuring rank: `python -m phalanx.measure.worker '{"out": ..., "dtype": ..., "threads": ...}'`.

Kernel rates are measured at every concurrency that a run on these ranks can have: 1, 2, 4, ... and all of them.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from phalanx.measure import collectives, kernels, microbenchmarks
from phalanx.measure.links import RealWire, measure_gamma
from phalanx.measure.microbenchmarks import measure_coding
from phalanx.measure.steal_time import Neighbours
from phalanx.measure.this_machine import PATIENCE_S
from phalanx.planning.auto.transport import choose
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.process import world as worlds
from phalanx.runtime.process.environment import ALONE, external_world
from phalanx.runtime.process.objects import broadcast_object
from phalanx.runtime.process.rank import run_rank
from phalanx.spec.cluster.collective_choice import Choice
from phalanx.spec.cluster.spec import CollectiveFit, Figure, KernelRates
from phalanx.spec.files.job_file import build
from phalanx.spec.files.plan import write_json
from phalanx.spec.job import DType
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy


def levels(ranks: int) -> list[int]:
    """Return the concurrencies to measure: powers of two below the number of ranks, and that number."""
    return sorted({2**k for k in range(ranks.bit_length()) if 2**k <= ranks} | {ranks})


def measure_host(
    comm: Comm,
    dtype: DType,
    threads: int,
    at_once: Sequence[int],
    quick: bool = False,
    cache: Path | None = None,
) -> dict[str, Any]:
    """Measure the kernels and collectives of one host's ranks, at each concurrency in `at_once`.

    `quick`: in few rounds, and without figures for people. `cache`: a file with the measurements before an
    interruption, to which new ones are added. Returns rows for the tables of a ClusterSpec (see `table_rows`).
    """
    rank = comm.world.rank
    rates, fits = _read(cache)
    known = {rate.concurrent for rate in rates}
    parts = _Parts(comm, sum(2 - (n == 1) for n in at_once if n not in known) + (not quick))
    ladder = kernels.Ladder(dtype, comm.world.device, quick)
    for concurrent in at_once:
        comm.barrier()
        if concurrent in known:
            continue
        if rank >= concurrent:
            continue  # sleeps in the next level's barrier
        world = replace(comm.world, size=concurrent, local_size=concurrent)
        together = Comm(world, mesh(Strategy(dp=concurrent)))
        if concurrent > 1:
            parts.begin(f"collectives of {concurrent} ranks")
            fits += collectives.measure_collectives(Comm(world, together.mesh, collectives.SHARED), "world", quick)
            # Passes are timed with the collectives that a run on these ranks will use: decided by rank 0.
            together = Comm(world, together.mesh, agreed_choices(fits, together))
        parts.begin(f"kernels, {concurrent} rank{'s' * (concurrent > 1)} at once")
        # Longest where it matters most: in a run, all ranks compute at once.
        most, fewer = (2, 1) if quick else (6, 3)
        rounds = most if concurrent == comm.world.size else fewer
        over = _all_reduce(fits, concurrent)
        rates.append(kernel_rates(together, ladder, threads, concurrent, over, rounds))
        if cache is not None and rank == 0:
            write_json(cache, table_rows(rates, fits, ()))
    comm.barrier()
    if quick:
        return table_rows(rates, fits, [measure_gamma(RealWire(comm))])
    parts.begin("products, attention and memory")
    return table_rows(rates, fits, measure_figures(comm, dtype))


def _read(kept: Path | None) -> tuple[list[KernelRates], list[CollectiveFit]]:
    """Return the results kept by an interrupted measurement; empty if there are no readable ones."""
    if kept is None or not kept.exists():
        return [], []
    try:
        rows = json.loads(kept.read_text())
        rates = [build(KernelRates, row, "kernels") for row in rows["kernels"]]
        return rates, [build(CollectiveFit, row, "collectives") for row in rows["collectives"]]
    except (OSError, ValueError, TypeError, KeyError):
        return [], []


class _Parts:
    """Counts the `count` parts of a measurement, and announces the start of each on the rank's status page and, on
    rank 0, as a line."""

    def __init__(self, comm: Comm, count: int) -> None:
        self.comm, self.count, self.begun = comm, count, 0

    def begin(self, part: str) -> None:
        """Announce the start of a part, by its name."""
        self.begun += 1
        self.comm.status.now(f"measuring {part}")
        if self.comm.world.rank == 0:
            print(f"measuring {part} ... ({self.begun} of {self.count})", file=sys.stderr, flush=True)


def kernel_rates(
    together: Comm, ladder: kernels.Ladder, threads: int, concurrent: int, over: list[CollectiveFit], rounds: int
) -> KernelRates:
    """Measure how fast all ranks of a Comm compute at once, `concurrent` of them on each host.

    `over`: the fits of their all-reduces, whose time is subtracted from full passes.
    """
    dtype, device, quick = ladder.dtype, ladder.device, ladder.quick
    full = kernels.FullPasses(dtype, together, 1 if quick else 2)
    neighbours = Neighbours(concurrent, threads)

    def enough() -> bool:
        return bool(neighbours.crowd if concurrent == 1 else first_rank_value(neighbours.crowd, together))

    points = ladder.points(together.barrier, full.run, rounds, enough)
    fused = device.type == "cuda"
    forward, forward_error = kernels.fit(points, "F", fused)
    backward, backward_error = kernels.fit(points, "B", fused)
    narrow = kernels.narrow_per_flop(dtype, device, together.barrier)
    forward, backward = (replace(rates, per_narrow_flop=narrow) for rates in (forward, backward))
    return KernelRates(
        dtype=dtype,
        concurrent=concurrent,
        threads=threads,
        forward=forward,
        backward=backward,
        optimizer_per_byte=kernels.optimizer_per_byte(dtype, device, together.barrier),
        pass_slowdown=full.over_parts(forward, backward, over),
        peak_flops_per_s=kernels.peak_flops(dtype, device, together.barrier),
        fit_error=max(forward_error, backward_error),
        origin="measured",
        compression_per_byte=measure_coding(dtype, together, quick) if together.world.size > 1 else {},
    )


def measure_figures(comm: Comm, dtype: DType) -> list[Figure]:
    """Measure the figures for people: products, attention, memory, launches, and γ."""
    return [*microbenchmarks.measure_figures(dtype, comm.world.device, comm.barrier), measure_gamma(RealWire(comm))]


def table_rows(
    rates: Sequence[KernelRates], fits: Sequence[CollectiveFit], figures: Sequence[Figure]
) -> dict[str, list[dict[str, Any]]]:
    """Return measurements as rows of a ClusterSpec's tables, by table."""
    parts: dict[str, Sequence[Any]] = {"kernels": rates, "collectives": fits, "figures": figures}
    return {name: [asdict(row) for row in rows] for name, rows in parts.items()}


def agreed_choices(fits: list[CollectiveFit], comm: Comm) -> tuple[Choice, ...]:
    """Return the collective choices that rank 0 derives from its fits, on every rank."""
    choices: tuple[Choice, ...] = first_rank_value(choose(fits), comm)
    return choices


def first_rank_value(value: Any, comm: Comm) -> Any:
    """Return the first rank's value, on every rank."""
    return broadcast_object(value, worlds.group(comm.ranks("world")))


def _all_reduce(fits: list[CollectiveFit], ranks: int) -> list[CollectiveFit]:
    return [f for f in fits if (f.op, f.group_size) == ("all_reduce", ranks)]


def main() -> None:
    """Run one measuring rank with the options in argv[1]."""
    options = json.loads(sys.argv[1])
    world = external_world() or ALONE
    torch.set_num_threads(options["threads"])

    def work() -> None:
        comm = Comm(world, mesh(Strategy(dp=world.size)))
        kept, quick = Path(options["kept"]), bool(options["quick"])
        at_once = levels(world.size)
        at_once = sorted({1, at_once[-1]}) if quick else at_once
        rows = measure_host(comm, options["dtype"], options["threads"], at_once, quick, kept)
        if world.rank == 0:
            write_json(Path(options["out"]), rows)

    run_rank(world, PATIENCE_S, work)


if __name__ == "__main__":
    main()
