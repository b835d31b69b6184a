"""The real wire, which links.py times: exchanges over torch.distributed, additions on this rank's device."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from phalanx.measure.steal_time import TimedRounds, stolen_s, stolen_share
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.comm.transport import combine

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
                self._settle()
                start = time.perf_counter()
                place = pair.index(mine)
                comm.wire.exchange(pair, place, place, source, target, None).wait()
                self._settle()
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
            self._settle()
            start = time.perf_counter()
            combine("sum", a, a, b)
            self._settle()
            times.append(time.perf_counter() - start)
        return times[1:]

    def _settle(self) -> None:
        if self.comm.world.device.type == "cuda":
            torch.cuda.synchronize(self.comm.world.device)


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
