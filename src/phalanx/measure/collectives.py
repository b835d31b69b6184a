"""Collectives between ranks, timed: every operation, transport and algorithm.

Rounds are interleaved, so that whatever else the machine does falls on all alike; buffers are rewritten in every
round, as a step does. A round lasts from the moment when the last rank begins until the last one is done; between
hosts, whose clocks have nothing in common, as long as the slowest rank takes after all have met. Rounds in which a
virtual machine's host had its processors (stolen.py) are left out while there are others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.measure.fit import robust_line
from phalanx.measure.steal_time import Rounds, stolen_s, stolen_share
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.comm.p2p import tiers
from phalanx.runtime.comm.transport import Call
from phalanx.runtime.process import world as worlds
from phalanx.schedule.collectives.registry import ALGORITHMS, build
from phalanx.spec.cluster.collective_choice import Choice, Transport
from phalanx.spec.cluster.spec import CollectiveFit

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
_SIZES = tuple(2**k for k in range(10, 25, 2))  # 1 KiB .. 16 MiB, as Event counts bytes
_ROUNDS = 7
# Of several hosts: links are slower, and steadier.
_SIZES_BETWEEN, _ROUNDS_BETWEEN = (2**10, 2**14, 2**16, 2**18, 2**20, 2**21, 2**22), 5
_AGAIN = 2  # times that disturbed rounds are repeated
_LEAD_S = 1e-3  # for Gloo's own threads to fall asleep again


@dataclass(frozen=True)
class Way:
    """One way to serve an operation."""

    transport: Transport
    algorithm: str = ""

    def __str__(self) -> str:
        return f"{self.transport} {self.algorithm}".strip()


SHARED = tuple(Choice(op, 0, 0, "shm") for op in OPS)
"""Choices that make a Comm place its buffers in shared memory, and decide nothing."""


def ways(op: str, ranks: tuple[int, ...], comm: Comm) -> Iterator[Way]:
    """Everything that could serve an operation; of algorithms that are the same for these ranks, the first."""
    yield Way("native")
    if comm.shares(ranks):
        yield Way("shm")
    seen = set()
    inside = tiers(ranks, comm.world.local_size)
    for algorithm in ALGORITHMS[op]:
        s = build(op, algorithm, len(ranks), 4 * len(ranks), tiers=inside)
        same = tuple(c.tobytes() for c in (s.round, s.source, s.destination, s.offset, s.length))
        if same not in seen:  # one host has no hierarchy
            seen.add(same)
            yield Way("p2p", algorithm)


def tensors(op: str, size: int, ranks: int, make: Callable[[int], Tensor]) -> tuple[Tensor, Tensor]:
    """(source, target) in float32 of a collective of `size` bytes; `make` gives memory of so many elements."""
    n = size // 4
    if op == "all_reduce":
        whole = make(n)
        return whole, whole
    if op == "all_gather":
        return make(n // ranks), make(n)
    return make(n), make(n // ranks if op == "reduce_scatter" else n)


def _together(ranks: tuple[int, ...]) -> None:
    """Wait until all ranks are there and awake, by the host's one clock."""
    moment = torch.tensor([time.perf_counter() + _LEAD_S], dtype=torch.float64)
    dist.all_reduce(moment, dist.ReduceOp.MAX, group=worlds.group(ranks))
    while time.perf_counter() < float(moment):
        pass


def rounds(comm: Comm, tried: dict[str, tuple[Call, Way]], count: int) -> dict[str, Rounds]:
    """`count` rounds of every way, the same on all ranks, after one that warms up; up to three times as many where
    too few of them are the machine's own."""
    found = _rounds(comm, tried, count, warm=False)
    for _ in range(_AGAIN):
        disturbed = {name: call for name, call in tried.items() if not found[name].settled}
        if not disturbed:
            break
        more = _rounds(comm, disturbed, count, warm=True)
        found |= {name: found[name] + timed for name, timed in more.items()}
    return found


def _rounds(comm: Comm, tried: dict[str, tuple[Call, Way]], count: int, warm: bool) -> dict[str, Rounds]:
    names = list(tried)
    ranks = next(iter(tried.values()))[0].ranks
    one_clock = comm.world.size == comm.world.local_size
    cold = 0 if warm else 1
    times = torch.zeros(3, len(names), count + cold, dtype=torch.float64)  # of beginning, of end; share stolen
    for i in range(count + cold):
        for k in [*range(i % len(names), len(names)), *range(i % len(names))]:
            call, way = tried[names[k]]
            if one_clock:
                _together(ranks)
            else:
                comm.barrier()
            call.source.fill_(i)
            before = stolen_s()
            if call.source.is_cuda:
                torch.cuda.synchronize(call.source.device)
            times[0, k, i] = time.perf_counter()
            comm.start(call, way.transport, way.algorithm).wait()
            if call.source.is_cuda:
                torch.cuda.synchronize(call.source.device)
            times[1, k, i] = time.perf_counter()
            times[2, k, i] = stolen_share(stolen_s() - before, float(times[1, k, i] - times[0, k, i]))
    if not one_clock:
        times = torch.stack([torch.zeros_like(times[0]), times[1] - times[0], times[2]])
        ranks = tuple(range(comm.world.size))  # groups side by side are timed together
    dist.all_reduce(times, dist.ReduceOp.MAX, group=worlds.group(ranks))
    seconds, stolen = (times[1] - times[0])[:, cold:].tolist(), times[2, :, cold:].tolist()
    return {name: Rounds(tuple(seconds[k]), tuple(stolen[k])) for k, name in enumerate(names)}


def measure_collectives(comm: Comm, axis: str) -> list[CollectiveFit]:
    """Time every operation along an axis, every way, and fit α + β n to each. `comm` places its buffers in shared
    memory (SHARED)."""
    ranks = comm.ranks(axis)
    found = []
    hosts = comm.hosts(ranks)
    several = comm.world.size > comm.world.local_size
    sizes, count = (_SIZES_BETWEEN, _ROUNDS_BETWEEN) if several else (_SIZES, _ROUNDS)
    for op in OPS:
        seconds: dict[Way, list[float]] = {way: [] for way in ways(op, ranks, comm)}
        for size in sizes:
            source, target = tensors(op, size, len(ranks), lambda n: comm.buffer(n, torch.float32))
            call = Call(op, ranks, ranks.index(comm.world.rank), source, target, label="a measurement")
            timed = rounds(comm, {str(way): (call, way) for way in seconds}, count)
            for way, seen in seconds.items():
                seen.append(median(timed[str(way)].quiet))
        found += [_fit(op, len(ranks), way, sizes, seen, hosts) for way, seen in seconds.items()]
    return found


def _fit(op: str, ranks: int, way: Way, sizes: Sequence[int], seconds: list[float], hosts: int) -> CollectiveFit:
    # A larger buffer cannot take less: what was disturbed is recognised by that.
    seconds = np.minimum.accumulate(seconds[::-1])[::-1].tolist()
    points = tuple(zip(sizes, seconds, strict=True))
    line = robust_line(sizes, seconds)
    return CollectiveFit(
        op=op,
        group_size=ranks,
        alpha_s=line.alpha,
        beta_s_per_byte=line.beta,
        residual=line.residual,
        transport=way.transport,
        algorithm=way.algorithm,
        points=points,
        hosts=hosts,
        alpha_range=line.alpha_range,
        beta_range=line.beta_range,
    )
