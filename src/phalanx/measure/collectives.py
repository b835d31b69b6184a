"""Timing of collectives between ranks: every operation, transport and algorithm.

Rounds are interleaved, so that other load on the machine disturbs all equally; buffers are rewritten in every round,
as in a training step. A round lasts from when the last rank begins until the last one is done; between hosts, whose
clocks differ, as long as the slowest rank takes after a barrier. Rounds in which a virtual machine's host took its
processors (steal_time.py) are dropped if there are others.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.measure.fit import robust_line
from phalanx.measure.kernels import synchronize
from phalanx.measure.steal_time import TimedRounds, stolen_s, stolen_share
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.comm.p2p import tiers
from phalanx.runtime.comm.transport import Call
from phalanx.runtime.process import world as worlds
from phalanx.schedule.collectives.registry import ALGORITHMS, build
from phalanx.spec.cluster.collective_choice import Choice
from phalanx.spec.cluster.spec import CollectiveFit
from phalanx.spec.job import Transport

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
_SIZES = tuple(2**k for k in range(10, 25, 2))  # 1 KiB .. 16 MiB, as Event counts bytes
_ROUNDS = 7
# Between hosts: links are slower, and steadier.
_SIZES_BETWEEN, _ROUNDS_BETWEEN = (2**10, 2**14, 2**16, 2**18, 2**20, 2**21, 2**22), 5
_QUICK_ROUNDS = 2
_RETRIES = 2  # of disturbed measurements
_LEAD_S = 1e-3  # for Gloo's threads to go back to sleep


@dataclass(frozen=True)
class TransportAlgorithm:
    """A transport, and its algorithm if it has several, that can run an operation."""

    transport: Transport
    algorithm: str = ""

    def __str__(self) -> str:
        return f"{self.transport} {self.algorithm}".strip()


SHARED = tuple(Choice(op, 0, 0, "shm") for op in OPS)
"""Choices that only make a Comm place its buffers in shared memory."""


def candidates(op: str, ranks: tuple[int, ...], comm: Comm) -> Iterator[TransportAlgorithm]:
    """Yield every transport and algorithm for an operation; of algorithms with equal schedules for these ranks, only
    the first."""
    yield TransportAlgorithm("native")
    if comm.shares(ranks):
        yield TransportAlgorithm("shm")
    seen: set[tuple[bytes, ...]] = set()
    inside = tiers(ranks, comm.world.local_size)
    for algorithm in ALGORITHMS[op]:
        s = build(op, algorithm, len(ranks), 4 * len(ranks), tiers=inside)
        content = tuple(c.tobytes() for c in (s.round, s.source, s.destination, s.offset, s.length))
        if content not in seen:  # on one host, for example, a hierarchy has the schedule of another algorithm
            seen.add(content)
            yield TransportAlgorithm("p2p", algorithm)


def tensors(op: str, size: int, ranks: int, make: Callable[[int], Tensor]) -> tuple[Tensor, Tensor]:
    """Return (source, target), flat float32, of a collective of `size` bytes; `make(n)` allocates n elements.

    If ranks have parts, the size is rounded down to equal parts.
    """
    n = size // 4
    if op == "all_reduce":
        buffer = make(n)
        return buffer, buffer
    n = n // ranks * ranks
    if op == "all_gather":
        return make(n // ranks), make(n)
    return make(n), make(n // ranks if op == "reduce_scatter" else n)


def _together(ranks: tuple[int, ...]) -> None:
    """Return on all ranks at the same moment of their host's clock, after busy-waiting."""
    moment = torch.tensor([time.perf_counter() + _LEAD_S], dtype=torch.float64)
    dist.all_reduce(moment, dist.ReduceOp.MAX, group=worlds.group(ranks))
    while time.perf_counter() < float(moment):
        pass


def rounds(comm: Comm, tried: dict[str, tuple[Call, TransportAlgorithm]], count: int) -> dict[str, TimedRounds]:
    """Return `count` timed rounds of each of the `tried` candidates, after one to warm up; the same on all ranks.
    Candidates with too few undisturbed rounds are measured up to two times more.
    """
    result = _rounds(comm, tried, count, warm=False)
    for _ in range(_RETRIES):
        disturbed = {name: call for name, call in tried.items() if not result[name].settled}
        if not disturbed:
            break
        more = _rounds(comm, disturbed, count, warm=True)
        result |= {name: result[name] + timed for name, timed in more.items()}
    return result


def _rounds(
    comm: Comm, tried: dict[str, tuple[Call, TransportAlgorithm]], count: int, warm: bool
) -> dict[str, TimedRounds]:
    names = list(tried)
    ranks = next(iter(tried.values()))[0].ranks
    one_clock = comm.world.size == comm.world.local_size
    cold = 0 if warm else 1
    times = torch.zeros(3, len(names), count + cold, dtype=torch.float64)  # begin, end, share stolen
    # Each round times all candidates, starting with another one.
    for i in range(count + cold):
        for k in [*range(i % len(names), len(names)), *range(i % len(names))]:
            call, way = tried[names[k]]
            if one_clock:
                _together(ranks)
            else:
                comm.barrier()
            call.source.fill_(i)
            before = stolen_s()
            synchronize(call.source.device)
            times[0, k, i] = time.perf_counter()
            comm.start(call, way.transport, way.algorithm).wait()
            synchronize(call.source.device)
            times[1, k, i] = time.perf_counter()
            times[2, k, i] = stolen_share(stolen_s() - before, float(times[1, k, i] - times[0, k, i]))
    # Without a common clock, compare durations instead of moments.
    if not one_clock:
        times = torch.stack([torch.zeros_like(times[0]), times[1] - times[0], times[2]])
        ranks = tuple(range(comm.world.size))  # the slowest of all groups counts
    dist.all_reduce(times, dist.ReduceOp.MAX, group=worlds.group(ranks))
    seconds, stolen = (times[1] - times[0])[:, cold:].tolist(), times[2, :, cold:].tolist()
    return {name: TimedRounds(tuple(seconds[k]), tuple(stolen[k])) for k, name in enumerate(names)}


def measure_collectives(comm: Comm, axis: str, quick: bool = False) -> list[CollectiveFit]:
    """Time every operation along an axis with every transport and algorithm, and fit α + β n to each. `quick`: at
    fewer sizes, in fewer rounds.

    `comm` must place its buffers in shared memory (SHARED). Collective.
    """
    ranks = comm.ranks(axis)
    fits: list[CollectiveFit] = []
    hosts = comm.hosts(ranks)
    several = comm.world.size > comm.world.local_size
    sizes, count = (_SIZES_BETWEEN, _ROUNDS_BETWEEN) if several else (_SIZES, _ROUNDS)
    if quick:
        sizes, count = sizes[::2], _QUICK_ROUNDS
    for op in OPS:
        comm.status.now(f"measuring {op} of {len(ranks)} ranks")
        seconds: dict[TransportAlgorithm, list[float]] = {way: [] for way in candidates(op, ranks, comm)}
        for size in sizes:
            source, target = tensors(op, size, len(ranks), lambda n: comm.buffer(n, torch.float32))
            call = Call(op, ranks, ranks.index(comm.world.rank), source, target, label="a measurement")
            timed = rounds(comm, {str(way): (call, way) for way in seconds}, count)
            for way, medians in seconds.items():
                medians.append(median(timed[str(way)].quiet))
        fits += [_fit(op, len(ranks), way, sizes, medians, hosts) for way, medians in seconds.items()]
    return fits


def _fit(
    op: str, ranks: int, way: TransportAlgorithm, sizes: Sequence[int], seconds: list[float], hosts: int
) -> CollectiveFit:
    # A larger buffer cannot take less time: a smaller one that took longer was disturbed.
    seconds = np.minimum.accumulate(seconds[::-1])[::-1].tolist()
    points = tuple(zip(sizes, seconds, strict=True))
    line = robust_line(sizes, seconds)
    return CollectiveFit(
        op=op,
        group_size=ranks,
        alpha_s=line.alpha,
        beta_s_per_byte=line.beta,
        fit_error=line.fit_error,
        transport=way.transport,
        algorithm=way.algorithm,
        points=points,
        hosts=hosts,
        alpha_range=line.alpha_range,
        beta_range=line.beta_range,
    )
