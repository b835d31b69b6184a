"""Transport shm: ranks of one host reduce each other's buffers in place.

Every rank keeps its buffers in its arena, which the others map. A collective has three steps on each rank:
    start   publish the buffer's place in the group's control block, and increment `arrived`
    wait    once all have arrived, do this rank's part, reading and writing the others' memory; increment `finished`;
            once all have finished, return
There is no background thread. With two ranks an all-reduce of S bytes reads 2 S and writes 2 S.

A buffer from `comm.buffer` lies in the arena; any other is copied into it first.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from collections import deque
from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from phalanx.runtime.comm.shm_arena import Address, Arena, ArenaNeighbour
from phalanx.runtime.comm.shm_kernels import Source, Step, copy, copy_others, work
from phalanx.runtime.comm.transport import Call, describe_collective
from phalanx.runtime.process import world as worlds
from phalanx.runtime.process.objects import gather_objects
from phalanx.schedule.event import Reduction

_CACHED = 512  # operations whose steps are cached, by their buffers
_RING = 32  # operations that may be published and unfinished at once
_LINE = 8  # words of a cache line
_SPINS = 300  # reads of a flag, yielding the core in between, before the first sleep
_NAP_S, _LONGEST_NAP_S = 50e-6, 1e-3
_NAPS = 32  # a longer wait naps for 1/32 of its duration so far, which bounds the delay to that share
_CHECK_ALIVE_S = 0.02  # between checks of whether the peer still lives
_OPS = {"all_reduce": 1, "all_gather": 2, "reduce_scatter": 3, "all_to_all": 4}
_DTYPES = {
    dtype: i
    for i, dtype in enumerate(
        (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8)
    )
}
_REDUCTIONS: dict[Reduction, int] = {"sum": 0, "avg": 1, "min": 2, "max": 3, "product": 4}

_ARRIVED, _FINISHED = 0, _LINE  # words of a control block; then _RING entries


@dataclass
class _Group:
    """A group of ranks whose arenas are mapped: the place of every control block, and this rank's progress."""

    ranks: tuple[int, ...]
    me: int
    control: int  # word at which our control block begins
    peers: list[tuple[int, ArenaNeighbour, int]]  # (index in the group, arena, word of its control block)
    issued: int = 0
    done: int = 0
    cached: dict[tuple[int, ...], list[Step]] = field(default_factory=dict)

    def entry(self, number: int) -> int:
        """Return the offset, in words, of an operation's entry in a control block. The entry holds code, bytes,
        offset in the arena, then the offsets of the parts of an all-to-all."""
        return 2 * _LINE + number % _RING * _entry_words(len(self.ranks))


def _entry_words(ranks: int) -> int:
    return -(-(3 + ranks + 1) // _LINE) * _LINE


@dataclass
class _Operation:
    """A published operation. `place`: the offset in the arena of its source or, if `staged`, of a copy of it."""

    group: _Group
    number: int
    call: Call
    code: int
    place: int
    staged: bool
    serial: int  # over all groups
    finished: bool = False


class Waiting:
    """The handle of a published operation."""

    def __init__(self, shm: Shm, operation: _Operation) -> None:
        self._shm, self._operation = shm, operation

    def wait(self) -> None:
        """Finish this operation and those issued before it."""
        self._shm.finish(self._operation)


class Shm:
    """This process's arena, and the groups whose ranks map each other's.

    `arena` is None if it cannot be created, for `reason`. Waits for a peer time out after `timeout_s` seconds.
    """

    def __init__(self, timeout_s: float, arena: Arena | None = None) -> None:
        self.timeout_s = timeout_s
        self.arena = arena
        self.reason = ""
        self.started = 0
        if platform.machine() not in ("x86_64", "AMD64"):
            self.reason = f"{platform.machine()} may reorder stores, and the flags rely on their order"
        elif arena is None:
            try:
                self.arena = Arena()
            except OSError as error:
                self.reason = str(error)
        self._neighbours: dict[int, ArenaNeighbour] = {}
        self._groups: dict[tuple[int, ...], _Group | None] = {}
        # In the order of issue over all groups: finished in any other order, two ranks could wait for each other.
        self._pending: deque[_Operation] = deque()

    def reaches(self, ranks: tuple[int, ...], rank: int) -> bool:
        """Whether all these ranks can map each other's arenas; the same answer on all of them. The first call for a
        group is collective. If they cannot, the group's first rank prints the reason to stderr."""
        if ranks not in self._groups:
            self.settle()
            self._groups[ranks] = self._meet(ranks, rank)
        return self._groups[ranks] is not None

    def _meet(self, ranks: tuple[int, ...], rank: int) -> _Group | None:
        group = worlds.group(ranks)
        address, control_block = self._control_block(len(ranks))
        blocks: list[tuple[Address | None, int]] = gather_objects((address, control_block), group)
        peers: list[tuple[int, ArenaNeighbour, int]] = []
        problem = f"rank {rank} has no shared memory ({self.reason})" if address is None else ""
        for i, (other, (where, control)) in enumerate(zip(ranks, blocks, strict=True)):
            if other == rank or where is None:
                continue
            try:
                if other not in self._neighbours:
                    self._neighbours[other] = ArenaNeighbour(other, where)
                peers.append((i, self._neighbours[other], control))
            except OSError as error:
                problem = f"rank {rank} cannot map the memory of rank {other} ({error})"
        problem = next((p for p in gather_objects(problem, group) if p), "")
        if problem:
            if rank == ranks[0]:
                text = f"note: {problem}; {len(ranks)} ranks use torch.distributed's own collectives instead"
                print(text, file=sys.stderr, flush=True)
            return None
        return _Group(ranks, ranks.index(rank), control_block, peers)

    def _control_block(self, ranks: int) -> tuple[Address | None, int]:
        """Allocate a control block; return the arena's address and the word at which the block begins."""
        if self.arena is None:
            return None, 0
        try:
            control = self.arena.allocate(8 * (2 * _LINE + _RING * _entry_words(ranks))) // 8
        except OSError as error:
            self.reason = str(error)
            return None, 0
        self.arena.words[control + _ARRIVED] = self.arena.words[control + _FINISHED] = 0
        return self.arena.address, control

    def maps(self, tensor: Tensor) -> bool:
        """Whether a tensor is a view of an entire arena; buffers have storage of their own."""
        storage = tensor.untyped_storage().data_ptr()
        ours = self.arena is not None and storage == self.arena.base
        return ours or any(storage == peer.base for peer in self._neighbours.values())

    def start(self, call: Call) -> Waiting:
        """Publish an operation over a group that `reaches` approved; its buffers are in use until `wait` returns."""
        group, arena = self._groups[call.ranks], self.arena
        assert group is not None
        assert arena is not None
        if group.issued - group.done == _RING:
            self.finish(next(o for o in self._pending if o.group is group))
        number, source = group.issued, call.source
        place, staged = arena.offset(source), False
        if place is None:
            place, staged = (_stage(call, arena), True) if source.numel() else (0, False)
        code = _code(call)
        words, at = arena.words, group.control + group.entry(number)
        words[at], words[at + 1], words[at + 2] = code, source.nbytes, place
        if call.sends:
            for j, offset in enumerate(accumulate(call.sends, initial=0)):
                words[at + 3 + j] = offset
        operation = _Operation(group, number, call, code, place, staged, self.started)
        group.issued = number + 1
        self.started += 1
        words[group.control + _ARRIVED] = number + 1
        self._pending.append(operation)
        return Waiting(self, operation)

    def settle(self) -> None:
        """Finish every operation that was started."""
        while self._pending:
            self._finish_first()

    def finish_before(self, serial: int) -> None:
        """Finish the operations that were started before the one with this serial number."""
        while self._pending and self._pending[0].serial < serial:
            self._finish_first()

    def finish(self, operation: _Operation) -> None:
        """Finish every operation up to this one, in the order of issue."""
        while not operation.finished:
            self._finish_first()

    def _finish_first(self) -> None:
        operation, arena = self._pending[0], self.arena
        assert arena is not None
        group, number, call, place = operation.group, operation.number, operation.call, operation.place
        if call.watch is not None:
            call.watch.begins("shm")
        entry = group.entry(number)
        key = [operation.code, call.source.nbytes, place, call.target.data_ptr()]
        for _, peer, control in group.peers:
            words = peer.words
            if words[control + _ARRIVED] <= number:
                self._wait_past(peer, control + _ARRIVED, number, call)
            at = control + entry
            if words[at] != key[0] or (words[at + 1] != key[1] and not call.sends):
                raise RuntimeError(_mismatch(call, peer, at))
            key.append(words[at + 2])
        # A buffer in an arena keeps its address: the cached steps are still valid.
        cached = None if operation.staged else group.cached.get(tuple(key))
        with np.errstate(all="ignore"):  # overflow is for the caller to detect
            for function, arguments in cached or self._steps(operation, key, arena):
                function(*arguments)
        arena.words[group.control + _FINISHED] = number + 1
        for _, peer, control in group.peers:
            if peer.words[control + _FINISHED] <= number:
                self._wait_past(peer, control + _FINISHED, number, call)
        if operation.staged:
            if call.op == "all_reduce":
                result = arena.tensor(place, call.source.numel(), call.source.dtype)
                for function, arguments in copy_others(call, call.target, result):
                    function(*arguments)
            arena.release(place, call.source.nbytes)
        group.done = number + 1
        operation.finished = True
        if call.watch is not None:
            call.watch.over()
        self._pending.popleft()

    def _steps(self, operation: _Operation, key: list[int], arena: Arena) -> list[Step]:
        """Return this rank's steps of an operation, and cache them under `key` if all buffers lie in arenas."""
        group, call = operation.group, operation.call
        entry = group.entry(operation.number) + 3
        sources: dict[int, Source] = {
            i: (peer, offset, control + entry)
            for (i, peer, control), offset in zip(group.peers, key[4:], strict=True)
        }
        target = arena.offset(call.target)
        if operation.staged or target is None or call.sends:
            return work(call, sources)
        if len(group.cached) >= _CACHED:
            group.cached.clear()
        # On new views: the cache must not keep the caller's tensors alive.
        source = arena.tensor(key[2], call.source.numel(), call.source.dtype)
        target_view = arena.tensor(target, call.target.numel(), call.target.dtype)
        steps = work(replace(call, source=source, target=target_view, watch=None), sources)
        group.cached[tuple(key)] = steps
        return steps

    def _wait_past(self, peer: ArenaNeighbour, word: int, number: int, call: Call) -> None:
        """Wait until a peer's counter exceeds `number`, spinning first, then sleeping between checks for ever longer,
        so that it leaves the core to ranks that compute. Raises RuntimeError if the peer dies or the timeout
        passes."""
        words = peer.words
        for _ in range(_SPINS):
            if words[word] > number:
                return
            os.sched_yield()
        now = start = time.monotonic()
        deadline, next_check = start + self.timeout_s, start + _CHECK_ALIVE_S
        while words[word] <= number:
            time.sleep(min(max(_NAP_S, (now - start) / _NAPS), _LONGEST_NAP_S))
            now = time.monotonic()
            if now < next_check:
                continue
            next_check = now + _CHECK_ALIVE_S
            if not peer.alive() and words[word] <= number:
                raise RuntimeError(f"rank {peer.rank} died while this rank waited for it in {call}")
            if now > deadline:
                raise RuntimeError(f"timed out after {self.timeout_s:g} s waiting for rank {peer.rank} in {call}")


def _stage(call: Call, arena: Arena) -> int:
    """Copy a source from outside the arena into it, except what no other rank reads; return its offset. Raises
    RuntimeError if the arena is full."""
    source = call.source
    try:
        place = arena.allocate(source.nbytes)
    except OSError as error:
        raise RuntimeError(f"no shared memory left for {call} ({error})") from None
    into = arena.tensor(place, source.numel(), source.dtype)
    reduces = call.op in ("all_reduce", "reduce_scatter")
    steps = copy_others(call, into, source) if reduces else copy(into.data_ptr(), source.data_ptr(), source.nbytes)
    for function, arguments in steps:
        function(*arguments)
    return place


def _code(call: Call) -> int:
    """Encode the properties, other than size, that must agree on all ranks: operation, reduction, unevenness,
    type."""
    kind = _OPS[call.op] + 8 * _REDUCTIONS[call.reduction] + (128 if call.sends else 0)
    return kind + 256 * _DTYPES[call.source.dtype]


def _mismatch(call: Call, peer: ArenaNeighbour, at: int) -> str:
    """Return the error for a peer that issued a different operation, the one whose entry begins at word `at`."""
    code, size = peer.words[at], peer.words[at + 1]
    op, reduction, dtype = list(_OPS)[code % 8 - 1], list(_REDUCTIONS)[code // 8 % 16], list(_DTYPES)[code // 256]
    theirs = describe_collective(op, size, dtype, reduction, bool(code & 128))
    return f"rank {peer.rank} issued a different operation, {theirs}, where this rank issued {call}"


_arenas: list[Shm] = []


def attach() -> Shm:
    """Return this process's only Shm: like the process group, it is created once."""
    if not _arenas:
        _arenas.append(Shm(worlds.timeout_s()))
    return _arenas[0]


def is_arena_view(tensor: Tensor) -> bool:
    """Whether a tensor is a view of an entire arena, ours or another rank's: it has no memory of its own."""
    return bool(_arenas) and _arenas[0].maps(tensor)
