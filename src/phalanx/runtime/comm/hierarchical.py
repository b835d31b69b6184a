"""The hierarchical all-reduce over several hosts whose ranks share memory: only the necessary bytes cross the
network.

    inside    reduce-scatter through shared memory: each rank has one part of the host's sum
    across    all-reduce of that part with the ranks of the same local index on the other hosts, by messages
    inside    all-gather through shared memory

Between hosts it sends what the schedule of that name sends (schedule/collectives/algorithms.py); inside a host it
sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from phalanx.runtime.comm.shm import Shm
from phalanx.runtime.comm.shm_arena import Arena
from phalanx.runtime.comm.transport import Call
from phalanx.runtime.process import world as worlds
from phalanx.runtime.process.objects import gather_objects

Across = Callable[[Call], None]
"""Runs an all-reduce between hosts and returns when it is complete."""


@dataclass(frozen=True)
class Place:
    """A rank's position in a group over several hosts.

    `host`: the group's ranks on this rank's host. `column`: the ranks with this rank's local index, one on each host.
    """

    host: tuple[int, ...]
    column: tuple[int, ...]


class Hierarchical:
    """Hierarchical all-reduces of one rank.

    Call `meet` from the thread that issues collectives, `all_reduce` from the one that runs them.
    """

    def __init__(self, arena: Arena) -> None:
        # A separate queue: no other operation is completed between the two halves of an all-reduce.
        self._shm = Shm(worlds.timeout_s(), arena)
        self._places: dict[tuple[int, ...], Place | None] = {}

    def knows(self, ranks: tuple[int, ...]) -> bool:
        """Whether `meet` has been called for this group."""
        return ranks in self._places

    def meet(self, ranks: tuple[int, ...], rank: int, inside: int, say: Callable[[str], None]) -> None:
        """Agree within a group, with `inside` ranks on each host, whether all its hosts can share memory.

        Collective over the group; no collective may be under way.
        """
        first = ranks.index(rank) // inside * inside
        place = Place(ranks[first : first + inside], ranks[ranks.index(rank) % inside :: inside])
        worlds.group(place.column)
        here = self._shm.reaches(place.host, rank, say)
        everywhere = gather_objects(here, worlds.group(ranks))
        self._places[ranks] = place if all(everywhere) else None

    def serves(self, call: Call) -> bool:
        """Whether a call can be run hierarchically; the same answer on all ranks."""
        place = self._places.get(call.ranks)
        return call.op == "all_reduce" and place is not None and call.target.numel() % len(place.host) == 0

    def all_reduce(self, call: Call, across: Across) -> None:
        """Reduce call.target (n,) in place; an average is left as a sum."""
        place = self._places[call.ranks]
        assert place is not None
        target, rank = call.target, call.ranks[call.me]
        me, reduction = place.host.index(rank), "sum" if call.reduction == "avg" else call.reduction
        n = target.numel() // len(place.host)
        part = target[me * n : (me + 1) * n]
        inside = replace(call, ranks=place.host, me=me, watch=None, reduction=reduction)
        self._shm.start(replace(inside, op="reduce_scatter", target=part)).wait()
        across(replace(inside, ranks=place.column, me=place.column.index(rank), source=part, target=part))
        self._shm.start(replace(inside, op="all_gather", source=part)).wait()
