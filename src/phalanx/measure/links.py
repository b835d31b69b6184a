"""Measurement of α and β of the links of each tier, by messages between pairs of ranks, and of γ, by additions.

A pair exchanges n bytes in both directions at once, in α + β n seconds. First one pair alone, for the rate of one
rank. Then all pairs of a host together, for the rate that they share. For a pair alone the best round counts, as no
disturbance makes a message faster. For pairs together the median of long messages counts: pairs that begin at
different moments have the link to themselves for a while.
"""

import time
from dataclasses import dataclass
from statistics import median
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist

from phalanx.measure.fit import FittedLine, robust_line
from phalanx.measure.kernels import synchronize, time_action
from phalanx.measure.steal_time import TimedRounds, stolen_s, stolen_share
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.comm.transport import combine
from phalanx.spec.cluster.spec import Figure, Tier

INSIDE, BETWEEN = "host", "network"
_ROUNDS = (4, 30)  # at least, and at most
_ENOUGH_S = 0.8  # for all rounds of one size, once there are enough of them; four times as long if disturbed


@dataclass(frozen=True)
class RealWire:
    """Times messages and additions. Every rank of `comm` must call the same methods in the same order.

    All ranks get the same times of an exchange: the slowest rank's.
    """

    comm: Comm

    def exchange(self, tier: str, size: int, together: bool) -> list[float]:
        """Return the seconds of exchanging `size` bytes over a tier: between all pairs if `together`, else one."""
        comm = self.comm
        world, device = comm.world, comm.world.device
        mine = partner(tier, world.rank, world.local_size, world.size)
        takes_part = mine is not None and (
            together or {world.rank, mine} == {0, partner(tier, 0, world.local_size, world.size)}
        )
        source = torch.ones(size // 4, device=device)
        target = torch.empty_like(source)
        timed, total_s = TimedRounds(), 0.0
        # Rounds, until there are enough undisturbed ones.
        for i in range(_ROUNDS[1] + 1):
            comm.barrier()
            spent, stolen = 0.0, stolen_s()
            if takes_part and mine is not None:
                pair = tuple(sorted((world.rank, mine)))
                source.fill_(i)
                synchronize(device)
                start = time.perf_counter()
                place = pair.index(mine)
                comm.wire.exchange(pair, place, place, source, target, None).wait()
                synchronize(device)
                spent = time.perf_counter() - start
            share = stolen_share(stolen_s() - stolen, spent) if spent else 0.0
            # All ranks get the slowest one's time.
            slowest = torch.tensor([spent, share], dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            spent, share = slowest.tolist()
            total_s += spent
            if i:  # the first round warms up
                timed += TimedRounds((spent,), (share,))
            if total_s > _ENOUGH_S and i >= _ROUNDS[0] and (timed.settled or total_s > 4 * _ENOUGH_S):
                break
        return timed.quiet

    def add(self, size: int) -> list[float]:
        """Return the seconds of adding `size` bytes of float32 to others on this rank."""
        device = self.comm.world.device
        a, b = torch.ones(size // 4, device=device), torch.ones(size // 4, device=device)
        times: list[float] = []
        for _ in range(_ROUNDS[0] + 1):
            self.comm.barrier()
            times.append(time_action(lambda: combine("sum", a, a, b), device))
        return times[1:]


def partner(tier: str, rank: int, local: int, size: int) -> int | None:
    """Return the rank with which `rank` exchanges messages over a tier, or None if it is left over.

    Inside a host that is its neighbour, between hosts the same local rank on the next host. `local` is the number of
    ranks on a host, `size` that of all ranks.
    """
    step = 1 if tier == INSIDE else local
    place = rank % local if tier == INSIDE else rank // local
    other = rank + step if place % 2 == 0 else rank - step
    last = (rank // local + 1) * local if tier == INSIDE else size
    return other if other < last else None


SIZES = tuple(2**k for k in range(10, 25))  # 1 KiB .. 16 MiB
_ENDS = 6  # how many of the sizes count as short, and as long
_SHARED = 0.8  # if pairs together get less than this share of the bandwidth of a pair alone, they share a link


class Wire(Protocol):
    """Interface for timing messages and additions of `size` bytes. Each method returns the seconds of every round."""

    def exchange(self, tier: str, size: int, together: bool) -> list[float]:
        """Exchange over a tier, between all pairs of ranks if `together`, or else the first pair alone."""
        ...

    def add(self, size: int) -> list[float]:
        """Add to a buffer of this rank."""
        ...


@dataclass(frozen=True)
class TierLines:
    """The lines fitted to one tier: for a pair alone, and for all `pairs` of a host together (None if only one)."""

    name: str
    pairs: int
    alone: FittedLine
    together: FittedLine | None
    points: tuple[tuple[int, float], ...]

    @property
    def uplink(self) -> float | None:
        """Bytes per second and direction that a host's pairs share; None if each has a link of its own."""
        if self.together is None or self.together.beta * _SHARED <= self.alone.beta:
            return None
        return self.pairs / self.together.beta

    def tier(self, ranks: int) -> Tier:
        """Return the tier as a ClusterSpec has it; it connects `ranks` ranks."""
        line = self.alone
        low, high = line.beta_range
        source = f"exchanges of 1 KiB to 16 MiB between pairs; median error {line.fit_error:.1%}"
        if low:
            source += f"; 90 % range {1e-9 / high:.4g} to {1e-9 / low:.4g} GB/s"
        return Tier(
            name=self.name,
            ranks=ranks,
            latency_s=line.alpha,
            bandwidth_bytes_per_s_per_gpu_per_direction=1 / line.beta if line.beta else 1e12,
            origin="measured",
            source=source,
            uplink_bandwidth_bytes_per_s_per_direction=self.uplink,
        )


def measure_tier(wire: Wire, name: str, pairs: int) -> TierLines:
    """Measure the links of one tier, which `pairs` pairs of a host's ranks can use together."""
    sizes = SIZES
    best = [min(wire.exchange(name, n, False)) for n in sizes]
    together = None
    if pairs > 1:
        long = sizes[-_ENDS:]
        together = robust_line(long, [median(wire.exchange(name, n, True)) for n in long])
    return TierLines(name, pairs, _link_line(sizes, best), together, tuple(zip(sizes, best, strict=True)))


def _link_line(sizes: tuple[int, ...], seconds: list[float]) -> FittedLine:
    """Fit β to long messages and α to short ones; medium ones fit into buffers, which accept them in a burst."""
    n, t = np.array(sizes, dtype=np.float64), np.array(seconds)
    long = robust_line(n[-_ENDS:], t[-_ENDS:])
    rest = np.maximum(t - long.beta * n, 0.0)[:_ENDS]
    alpha, (low, high) = float(np.median(rest)), np.percentile(rest, [5, 95])
    error = float(np.median(np.abs(alpha + long.beta * n - t) / t))
    return FittedLine(alpha, long.beta, error, (float(low), float(high)), long.beta_range)


def measure_gamma(wire: Wire) -> Figure:
    """Measure γ, the seconds per byte of an addition; the intercept of its line is the time to start an operation."""
    line = robust_line(SIZES, [min(wire.add(n)) for n in SIZES])
    low, high = line.beta_range
    note = f"adding 1 KiB to 16 MiB; {line.alpha * 1e6:.3g} µs to start; median error {line.fit_error:.1%}"
    return Figure("gamma", line.beta, "s/B", low, high, note)
