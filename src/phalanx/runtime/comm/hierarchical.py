"""The hierarchical all-reduce over several hosts whose ranks share memory: only what must travel does.

    inside    reduce-scatter through shared memory: each rank has one part of the host's sum
    across    all-reduce of that part with the ranks of the same place on the other hosts, by messages
    inside    all-gather through shared memory

It sends what the schedule of that name sends between hosts (schedule/hierarchy.py), and nothing inside of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch.distributed as dist

from phalanx.runtime.comm.shm import Shm
from phalanx.runtime.comm.shm_arena import Arena
from phalanx.runtime.comm.transport import Call
from phalanx.runtime.process import world as worlds

Across = Callable[[Call], None]
"""Serves an all-reduce between hosts, and returns when it is done."""


@dataclass(frozen=True)
class Place:
    """Where a rank stands in a group over several hosts: its own host's ranks, and those of its place on each."""

    host: tuple[int, ...]
    column: tuple[int, ...]


class Hierarchical:
    """Of one rank. `meet` is for the thread that issues collectives, `all_reduce` for the one that serves them."""

    def __init__(self, arena: Arena) -> None:
        # Operations of their own queue: nobody else's wait comes between the two halves of one.
        self._shm = Shm(worlds.timeout_s(), arena)
        self._places: dict[tuple[int, ...], Place | None] = {}

    def knows(self, ranks: tuple[int, ...]) -> bool:
        return ranks in self._places

    def meet(self, ranks: tuple[int, ...], rank: int, inside: int, say: Callable[[str], None]) -> None:
        """Agree with a group, `inside` ranks of it on each host, whether memory is shared on all of them. Collective;
        nothing may be under way."""
        first = ranks.index(rank) // inside * inside
        place = Place(ranks[first : first + inside], ranks[ranks.index(rank) % inside :: inside])
        worlds.group(place.column)
        here = self._shm.reaches(place.host, rank, say)
        everywhere = [False] * len(ranks)
        dist.all_gather_object(everywhere, here, group=worlds.group(ranks))
        self._places[ranks] = place if all(everywhere) else None

    def serves(self, call: Call) -> bool:
        """Whether to serve this one; the same on all ranks."""
        place = self._places.get(call.ranks)
        return call.op == "all_reduce" and place is not None and call.target.numel() % len(place.host) == 0

    def all_reduce(self, call: Call, across: Across) -> None:
        """Sum, least, most or product in place; an average is a sum."""
        place = self._places[call.ranks]
        assert place is not None
        whole, rank = call.target, call.ranks[call.me]
        me, reduction = place.host.index(rank), "sum" if call.reduction == "avg" else call.reduction
        part = whole.split(whole.numel() // len(place.host))[me]
        inside = replace(call, ranks=place.host, me=me, watch=None, reduction=reduction)
        self._shm.start(replace(inside, op="reduce_scatter", target=part)).wait()
        across(replace(inside, ranks=place.column, me=place.column.index(rank), source=part, target=part))
        self._shm.start(replace(inside, op="all_gather", source=part)).wait()
