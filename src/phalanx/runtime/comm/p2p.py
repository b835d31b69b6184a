"""Transport p2p: collectives by our own schedules, which one executor runs over sends and receives.

On CPU one thread runs the calls in the order of issue; on CUDA they are queued on the current stream. The executor is
schedule_executor.py.

The hierarchical all-reduce over several hosts whose ranks share memory: only the necessary bytes cross the
network.

    inside    reduce-scatter through shared memory: each rank has one part of the host's sum
    across    all-reduce of that part with the ranks of the same local index on the other hosts, by messages
    inside    all-gather through shared memory

Between hosts it sends what the schedule of that name sends (schedule/collectives/algorithms.py); inside a host it
sends nothing.
"""

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise
from queue import SimpleQueue

import numpy as np
import torch
from torch import Tensor

from phalanx.runtime.comm.schedule_executor import SEGMENT, Executor
from phalanx.runtime.comm.shm import Shm
from phalanx.runtime.comm.shm_arena import Arena
from phalanx.runtime.comm.transport import DONE, Call, Handle, finish_reduction
from phalanx.runtime.process import world as worlds
from phalanx.runtime.process.objects import gather_objects
from phalanx.runtime.process.world import group
from phalanx.schedule.collectives.ir import stagger
from phalanx.schedule.collectives.rank_program import RankStep, program
from phalanx.schedule.collectives.registry import build

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
    """Hierarchical all-reduces of one rank. Call `meet` from the thread that issues collectives, `all_reduce` from
    the one that runs them."""

    def __init__(self, arena: Arena) -> None:
        # A separate queue: no other operation is completed between the two halves of an all-reduce.
        self._shm = Shm(worlds.timeout_s(), arena)
        self._places: dict[tuple[int, ...], Place | None] = {}

    def knows(self, ranks: tuple[int, ...]) -> bool:
        """Whether `meet` has been called for this group."""
        return ranks in self._places

    def meet(self, ranks: tuple[int, ...], rank: int, inside: int) -> None:
        """Agree within a group, with `inside` ranks on each host, whether all its hosts can share memory. Collective
        over the group; no collective may be under way."""
        first = ranks.index(rank) // inside * inside
        place = Place(ranks[first : first + inside], ranks[ranks.index(rank) % inside :: inside])
        worlds.group(place.column)
        here = self._shm.reaches(place.host, rank)
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


def _build(
    op: str,
    algorithm: str,
    ranks: int,
    size: int,
    me: int,
    segments: int,
    splits: tuple[tuple[int, ...], ...] = (),
    tiers: tuple[int, ...] = (),
    long: int | None = None,
) -> tuple[RankStep, ...]:
    """Return a rank's program, round by round; a hierarchical one over tiers is pipelined in `segments` parts."""
    sizes = np.array(splits, dtype=np.int64) if splits else None
    schedule = partial(build, op, algorithm, ranks, tiers=tiers or None, splits=sizes, segments=segments)
    if len(tiers) < 2 or algorithm != "hierarchical":
        return program(schedule(size), me, long)
    edges = [size * i // segments for i in range(segments + 1)]
    return program(stagger([schedule(high - low) for low, high in pairwise(edges)]), me, long)


_program = lru_cache(maxsize=512)(_build)
_Work = Callable[[], None]


def _serve_all(calls: SimpleQueue[tuple[_Work, Future[None]] | None]) -> None:
    """Run calls one after the other until a None arrives: the body of the communication thread."""
    while (item := calls.get()) is not None:
        work, future = item
        error = None
        try:
            with torch.no_grad():
                work()
        except Exception as problem:
            error = problem
        del item, work  # release the call's tensors before its waiter is notified
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)


def tiers(ranks: tuple[int, ...], local: int) -> tuple[int, ...]:
    """Return (ranks of the group on each host, hosts), for hosts with `local` ranks. A group on one host, with one
    rank on each, or with unequal numbers counts as a single tier: (ranks,)."""
    hosts = [rank // local for rank in ranks]
    inside = hosts.count(hosts[0])
    alike = all(hosts.count(host) == inside for host in hosts)
    return (inside, len(ranks) // inside) if alike and 1 < inside < len(ranks) else (len(ranks),)


class P2P:
    """Runs the calls of one rank, on a host with `local` ranks, which share memory if there is an arena."""

    def __init__(self, local: int = 1, arena: Arena | None = None) -> None:
        self._local = local
        self._hierarchical = Hierarchical(arena) if arena is not None else None
        self._executors: dict[tuple[int, ...], Executor] = {}
        self._calls: SimpleQueue[tuple[_Work, Future[None]] | None] | None = None

    def start(self, call: Call, algorithm: str) -> Handle:
        """Issue a collective; it runs after those issued before it."""
        self._executor(call.ranks, call.source.is_cuda)
        if call.source.is_cuda:
            self._serve(call, algorithm)
            return DONE
        shared, over = self._hierarchical, tiers(call.ranks, self._local)
        if algorithm == "hierarchical" and len(over) > 1 and shared is not None and not shared.knows(call.ranks):
            self._enqueue(lambda: None).result()  # wait until nothing is under way
            shared.meet(call.ranks, call.ranks[call.me], over[0])
        future = self._enqueue(partial(self._serve, call, algorithm))
        return _Queued(future, f"{algorithm} {call}")

    def _enqueue(self, work: _Work) -> Future[None]:
        if self._calls is None:
            self._calls = SimpleQueue()
            threading.Thread(target=_serve_all, args=(self._calls,), name="phalanx-p2p", daemon=True).start()
            weakref.finalize(self, self._calls.put, None)
        future: Future[None] = Future()
        self._calls.put((work, future))
        return future

    def _executor(self, ranks: tuple[int, ...], grouped: bool) -> Executor:
        if ranks not in self._executors:
            self._executors[ranks] = Executor(group(ranks), grouped)
        return self._executors[ranks]

    def _serve(self, call: Call, algorithm: str) -> None:
        if call.watch is not None:
            call.watch.begins("p2p")
        self._execute(call, algorithm)
        if call.watch is not None:
            call.watch.over()

    def _execute(self, call: Call, algorithm: str) -> None:
        if algorithm == "hierarchical" and self._hierarchical is not None and self._hierarchical.serves(call):
            # Between hosts: the fewest bytes, in as few rounds as that allows.
            hosts = len(call.ranks) // tiers(call.ranks, self._local)[0]
            across = "ring" if hosts & (hosts - 1) else "rabenseifner"
            self._hierarchical.all_reduce(call, partial(self._execute, algorithm=across))
            finish_reduction(call.reduction, call.target, len(call.ranks))
            return
        ranks, me, executor = len(call.ranks), call.me, self._executor(call.ranks, call.source.is_cuda)
        if call.op == "all_to_all":
            self._all_to_all(call, algorithm, executor)
            return
        if call.op == "all_gather":
            n = call.source.numel()
            mine = call.target[me * n : (me + 1) * n]
            if mine.data_ptr() != call.source.data_ptr():
                mine.copy_(call.source)
        buffer = call.source if call.op == "reduce_scatter" else call.target
        size, segments = buffer.numel(), _segments(algorithm, ranks, buffer.nbytes)
        over, long = tiers(call.ranks, self._local), SEGMENT // buffer.itemsize
        steps = _program(call.op, algorithm, ranks, size, me, segments, tiers=over, long=long)
        executor.run(steps, lambda low, high: buffer[low:high], call.reduction, buffer)
        if call.op == "reduce_scatter":
            n = call.target.numel()
            mine = buffer[me * n : (me + 1) * n]
            if mine.data_ptr() != call.target.data_ptr():
                call.target.copy_(mine)
        if call.op in ("all_reduce", "reduce_scatter"):
            finish_reduction(call.reduction, call.target, ranks)

    def _all_to_all(self, call: Call, algorithm: str, executor: Executor) -> None:
        """Run an all-to-all; blocks in transit to other ranks are kept in memory of their own."""
        ranks, me = len(call.ranks), call.me
        splits = self._splits(call, executor)
        sizes = np.array(splits or [call.sent] * ranks, dtype=np.int64)
        offsets = np.concatenate([[0], np.cumsum(sizes.ravel())])
        sends, receives = torch.split(call.source, call.sent), torch.split(call.target, call.received)
        receives[me].copy_(sends[me])
        homes = {int(offsets[me * ranks + j]): part for j, part in enumerate(sends) if part.numel()}
        homes |= {int(offsets[j * ranks + me]): part for j, part in enumerate(receives) if part.numel() and j != me}
        starts = offsets[:-1]

        def memory(low: int, high: int) -> Tensor:
            block = int(np.searchsorted(starts, low, side="right")) - 1
            begin = int(starts[block])
            if begin not in homes:
                homes[begin] = call.source.new_empty(int(sizes.flat[block]))
            return homes[begin][low - begin : high - begin]

        make = _build if splits else _program  # the splits of experts differ in nearly every call: not cached
        executor.run(make(call.op, algorithm, ranks, call.source.numel(), me, 1, splits), memory, "sum", call.source)

    def _splits(self, call: Call, executor: Executor) -> tuple[tuple[int, ...], ...]:
        """Return the elements that each rank sends to each, gathered from all ranks; empty if parts are equal."""
        p = len(call.ranks)
        if not call.sends:
            return ()
        mine = torch.tensor(call.sends, dtype=torch.int64, device=call.source.device)
        everyone = mine.new_empty(p * p)
        steps = _program("all_gather", "bruck", p, p * p, call.me, 1)
        everyone[call.me * p : (call.me + 1) * p] = mine
        executor.run(steps, lambda low, high: everyone[low:high], "sum", everyone)
        return tuple(tuple(row) for row in everyone.view(p, p).tolist())


def _segments(algorithm: str, ranks: int, size: int) -> int:
    """Return the number of segments in which a pipelined algorithm sends a buffer of `size` bytes. A hierarchical
    schedule's messages are a rank's part of a segment."""
    return max(1, min(64, size // (SEGMENT * ranks if algorithm == "hierarchical" else SEGMENT)))


class _Queued:
    """The handle of a call in the communication thread's queue."""

    def __init__(self, future: Future[None], what: str) -> None:
        self._future, self._what = future, what

    def wait(self) -> None:
        try:
            self._future.result()
        except Exception as error:
            raise RuntimeError(f"{self._what}: {error}") from None
