"""Transport p2p: one executor for every collective schedule, over torch.distributed's sends and receives.

Rounds give a rank's messages their order; a message waits only for the data that it carries. Long messages travel in
segments, so that one is added while the next is under way:
    a round   post its receives; send every segment as soon as what it carries is there
    a segment that is added, or that would overwrite what is still being sent, arrives in staging memory first
Gloo wants receives posted before sends; NCCL wants a round's sends and receives in one group.

On CPU the calls are served by one thread, in the order of issue; on CUDA they are queued on the current stream.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import lru_cache, partial
from queue import SimpleQueue

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.runtime.arena import Arena
from phalanx.runtime.hierarchical import Hierarchical
from phalanx.runtime.transport import DONE, Call, Handle, combine, conclude
from phalanx.runtime.world import group
from phalanx.schedule.collectives import build
from phalanx.schedule.event import Reduction
from phalanx.schedule.messages import Piece, Step, program

_SEGMENT = 1 << 20  # bytes, of a message that is sent in parts
_PIECE = 1 << 18  # bytes, of an algorithm's own segments
_KEPT = 16  # sizes of staging memory that are kept for the next time
_TAG = 7  # of our messages; those of a pair of ranks arrive in the order in which they were sent

Memory = Callable[[int, int], Tensor]
"""Where this rank keeps a piece."""


@dataclass
class _Moving:
    """A segment under way; of a received one `staged` is where it arrives, None if at its place."""

    pieces: tuple[Piece, ...]
    work: Handle
    staged: Tensor | None = None
    reduces: bool = False
    over: bool = False


def _overlap(a: Sequence[Piece], b: Sequence[Piece]) -> bool:
    return any(low < other_high and other_low < high for low, high in a for other_low, other_high in b)


def _segments(pieces: Sequence[Piece], most: int) -> Iterator[tuple[Piece, ...]]:
    """The pieces of a message in groups of at most `most` elements, each piece cut where it is longer."""
    now: list[Piece] = []
    size = 0
    for low, high in pieces:
        while low < high:
            stop = min(high, low + most - size)
            now.append((low, stop))
            size += stop - low
            low = stop
            if size == most:
                yield tuple(now)
                now, size = [], 0
    if now:
        yield tuple(now)


@dataclass
class Executor:
    """Runs schedules on one rank of a group. `grouped`: a round at a time, as NCCL wants it."""

    over: dist.ProcessGroup
    grouped: bool
    _spare: dict[tuple[torch.dtype, int], list[Tensor]] = field(default_factory=dict)

    def run(self, steps: Sequence[Step], memory: Memory, reduction: Reduction, like: Tensor) -> None:
        """Execute one rank's program. `like`: a tensor of the type and device of the data."""
        if self.grouped:
            self._run_grouped(steps, memory, reduction, like)
            return
        most = max(1, _SEGMENT // like.dtype.itemsize)
        before: list[_Moving] = []  # sends of the last round
        earlier: list[_Moving] = []  # receives of the last round
        for step in steps:
            arriving: list[_Moving] = []
            sending: list[_Moving] = list(before)
            leaving = [piece for message in step.sends for piece in message.pieces]
            for message in step.receives:
                for pieces in _segments(message.pieces, most):
                    self._complete(earlier, before, memory, reduction, pieces)
                    busy = _overlap(pieces, leaving) or any(_overlap(pieces, m.pieces) for m in before if not m.over)
                    direct = len(pieces) == 1 and not message.reduces and not busy
                    into = memory(*pieces[0]) if direct else self._staging(pieces, like)
                    work = self.over.recv([into], message.peer, _TAG)
                    arriving.append(_Moving(pieces, work, None if direct else into, message.reduces))
            for message in step.sends:
                for pieces in _segments(message.pieces, most):
                    self._complete(earlier, sending, memory, reduction, pieces)
                    staged = None if len(pieces) == 1 else self._pack(pieces, memory, like)
                    data = memory(*pieces[0]) if staged is None else staged
                    sending.append(_Moving(pieces, self.over.send([data], message.peer, _TAG), staged))
            # Staging is for two rounds at most: what the last one brought is put away.
            self._complete(earlier, sending, memory, reduction, None)
            for moving in before:
                self._wait_sent(moving)
            earlier, before = arriving, sending
        self._complete(earlier, before, memory, reduction, None)
        for moving in before:
            self._wait_sent(moving)

    def _complete(
        self,
        receives: list[_Moving],
        sending: list[_Moving],
        memory: Memory,
        reduction: Reduction,
        needed: tuple[Piece, ...] | None,
    ) -> None:
        """Wait for the receives that hold `needed` (None: for all), and put what they brought in its place."""
        for moving in receives:
            if moving.over or (needed is not None and not _overlap(moving.pieces, needed)):
                continue
            moving.work.wait()
            if moving.staged is not None:
                for out in sending:  # what is still being sent may not change
                    if not out.over and _overlap(out.pieces, moving.pieces):
                        self._wait_sent(out)
                _place(moving.pieces, moving.staged, moving.reduces, memory, reduction)
                self._give_back(moving.staged)
            moving.over = True

    def _wait_sent(self, moving: _Moving) -> None:
        if not moving.over:
            moving.work.wait()
            moving.over = True
            if moving.staged is not None:
                self._give_back(moving.staged)

    def _run_grouped(self, steps: Sequence[Step], memory: Memory, reduction: Reduction, like: Tensor) -> None:
        for step in steps:
            arriving = [(m, self._staging(m.pieces, like)) for m in step.receives]
            leaving = [(m, self._pack(m.pieces, memory, like)) for m in step.sends]
            works = dist.batch_isend_irecv(
                [dist.P2POp(dist.irecv, into, group=self.over, group_peer=m.peer) for m, into in arriving]
                + [dist.P2POp(dist.isend, data, group=self.over, group_peer=m.peer) for m, data in leaving]
            )
            for work in works:
                work.wait()
            for message, into in arriving:
                _place(message.pieces, into, message.reduces, memory, reduction)
            for _, used in (*arriving, *leaving):
                self._give_back(used)

    def _staging(self, pieces: Sequence[Piece], like: Tensor) -> Tensor:
        numel = sum(high - low for low, high in pieces)
        spare = self._spare.get((like.dtype, numel))
        return spare.pop() if spare else torch.empty(numel, dtype=like.dtype, device=like.device)

    def _give_back(self, staged: Tensor) -> None:
        if len(self._spare) > _KEPT:  # sizes that vary would pile up
            self._spare.clear()
        self._spare.setdefault((staged.dtype, staged.numel()), []).append(staged)

    def _pack(self, pieces: Sequence[Piece], memory: Memory, like: Tensor) -> Tensor:
        into = self._staging(pieces, like)
        torch.cat([memory(low, high) for low, high in pieces], out=into)
        return into


def _place(pieces: Sequence[Piece], staged: Tensor, reduces: bool, memory: Memory, reduction: Reduction) -> None:
    at = 0
    for low, high in pieces:
        here, part = memory(low, high), staged[at : at + high - low]
        if reduces:
            combine(reduction, here, here, part)
        else:
            here.copy_(part)
        at += high - low


@lru_cache(maxsize=512)
def _program(
    op: str,
    algorithm: str,
    ranks: int,
    size: int,
    me: int,
    segments: int,
    splits: tuple[tuple[int, ...], ...] = (),
    tiers: tuple[int, ...] = (),
    long: int | None = None,
) -> tuple[Step, ...]:
    given = np.array(splits, dtype=np.int64) if splits else None
    schedule = build(op, algorithm, ranks, size, tiers=tiers or None, splits=given, segments=segments)
    return program(schedule, me, long)


_Work = Callable[[], None]


def _serve_all(calls: SimpleQueue[tuple[_Work, Future[None]] | None]) -> None:
    """The communication thread: one call after the other, until there is None."""
    while (item := calls.get()) is not None:
        work, future = item
        error = None
        try:
            with torch.no_grad():
                work()
        except Exception as problem:
            error = problem
        del item, work  # nothing of a call outlives it, for whoever waits may be quick
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)


def tiers(ranks: tuple[int, ...], local: int) -> tuple[int, ...]:
    """(Ranks of a group on each host, hosts), of hosts with `local` ranks; as if on one where they are not alike."""
    hosts = [rank // local for rank in ranks]
    inside = hosts.count(hosts[0])
    alike = all(hosts.count(host) == inside for host in hosts)
    return (inside, len(ranks) // inside) if alike and 1 < inside < len(ranks) else (len(ranks),)


class P2P:
    """Serves the calls of one rank, on a host with `local` ranks, which share memory if there is an arena."""

    def __init__(self, local: int = 1, arena: Arena | None = None) -> None:
        self._local = local
        self._hierarchical = Hierarchical(arena) if arena is not None else None
        self._executors: dict[tuple[int, ...], Executor] = {}
        self._calls: SimpleQueue[tuple[_Work, Future[None]] | None] | None = None

    def start(self, call: Call, algorithm: str) -> Handle:
        """Issue a collective; it is served after those issued before it."""
        self._executor(call.ranks, call.source.is_cuda)
        if call.source.is_cuda:
            self._serve(call, algorithm)
            return DONE
        shared, over = self._hierarchical, tiers(call.ranks, self._local)
        if algorithm == "hierarchical" and len(over) > 1 and shared is not None and not shared.knows(call.ranks):
            self._put(lambda: None).result()  # nothing is under way then
            shared.meet(call.ranks, call.ranks[call.me], over[0], _say)
        future = self._put(partial(self._serve, call, algorithm))
        return _Served(future, f"{algorithm} {call}")

    def _put(self, work: _Work) -> Future[None]:
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
            # Between hosts: as few rounds as there can be for the fewest bytes.
            hosts = len(call.ranks) // tiers(call.ranks, self._local)[0]
            across = "ring" if hosts & (hosts - 1) else "rabenseifner"
            self._hierarchical.all_reduce(call, partial(self._execute, algorithm=across))
            conclude(call.reduction, call.target, len(call.ranks))
            return
        ranks, me, executor = len(call.ranks), call.me, self._executor(call.ranks, call.source.is_cuda)
        if call.op == "all_to_all":
            self._all_to_all(call, algorithm, executor)
            return
        if call.op == "all_gather":
            n = call.source.numel()
            own = call.target[me * n : (me + 1) * n]
            if own.data_ptr() != call.source.data_ptr():
                own.copy_(call.source)
        buffer = call.source if call.op == "reduce_scatter" else call.target
        size, segments = buffer.numel(), _pipelined(buffer.nbytes)
        over, long = tiers(call.ranks, self._local), _SEGMENT // buffer.itemsize
        steps = _program(call.op, algorithm, ranks, size, me, segments, tiers=over, long=long)
        executor.run(steps, lambda low, high: buffer[low:high], call.reduction, buffer)
        if call.op == "reduce_scatter":
            n = call.target.numel()
            own = buffer[me * n : (me + 1) * n]
            if own.data_ptr() != call.target.data_ptr():
                call.target.copy_(own)
        if call.op in ("all_reduce", "reduce_scatter"):
            conclude(call.reduction, call.target, ranks)

    def _all_to_all(self, call: Call, algorithm: str, executor: Executor) -> None:
        """Blocks that pass through on their way to others are kept in memory of their own."""
        ranks, me = len(call.ranks), call.me
        splits = self._splits(call, executor)
        sizes = np.array(splits or [call.sent] * ranks, dtype=np.int64)
        begins = np.concatenate([[0], np.cumsum(sizes.ravel())])
        sends, receives = call.source.split(call.sent), call.target.split(call.received)
        receives[me].copy_(sends[me])
        homes = {int(begins[me * ranks + j]): part for j, part in enumerate(sends) if part.numel()}
        homes |= {int(begins[j * ranks + me]): part for j, part in enumerate(receives) if part.numel() and j != me}
        starts = begins[:-1]

        def memory(low: int, high: int) -> Tensor:
            block = int(np.searchsorted(starts, low, side="right")) - 1
            begin = int(starts[block])
            if begin not in homes:
                homes[begin] = call.source.new_empty(int(sizes.flat[block]))
            return homes[begin][low - begin : high - begin]

        steps = _program(call.op, algorithm, ranks, call.source.numel(), me, 1, splits)
        executor.run(steps, memory, "sum", call.source)

    def _splits(self, call: Call, executor: Executor) -> tuple[tuple[int, ...], ...]:
        """Who sends how much to whom: everybody tells, where parts are not equal."""
        p = len(call.ranks)
        if not call.sends:
            return ()
        own = torch.tensor(call.sends, dtype=torch.int64, device=call.source.device)
        everyone = own.new_empty(p * p)
        steps = _program("all_gather", "bruck", p, p * p, call.me, 1)
        everyone[call.me * p : (call.me + 1) * p] = own
        executor.run(steps, lambda low, high: everyone[low:high], "sum", everyone)
        return tuple(tuple(row) for row in everyone.view(p, p).tolist())


def _pipelined(size: int) -> int:
    """In how many pieces the algorithms that send in segments do so."""
    return max(1, min(64, size // _PIECE))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class _Served:
    def __init__(self, future: Future[None], what: str) -> None:
        self._future, self._what = future, what

    def wait(self) -> None:
        try:
            self._future.result()
        except Exception as error:
            raise RuntimeError(f"{self._what}: {error}") from None
