"""The executor: runs one rank's part of a collective schedule over torch.distributed's sends and receives.

Rounds order a rank's messages; a message waits only for the data that it carries. Long messages travel in segments,
so that one is reduced while the next is under way:
    receives  are posted rounds ahead, as far as staging memory allows: otherwise the sender would ask first, and wait
              until its question had passed everything queued on the link, and for the answer
    sends     each segment leaves as soon as the data that it carries is there
    staging   a segment that is reduced, or that would overwrite data still to be read, arrives in staging memory
Gloo needs receives to be posted before sends; NCCL needs a round's sends and receives in one group.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.runtime.comm.reductions import Combine
from phalanx.runtime.comm.transport import Handle, combine
from phalanx.schedule.collectives.rank_program import Piece, RankStep
from phalanx.schedule.event import Reduction

SEGMENT = 1 << 20  # bytes: longer messages are sent in segments of this size
_STAGING_BYTES = 1 << 22  # bytes of staging memory for receives that are not needed yet
_ROUNDS = 8  # by which receives are posted ahead, at most
_STAGING_SIZES = 16  # sizes of staging memory that are kept for reuse
_TAG = 7  # for our messages; messages between two ranks arrive in the order in which they were sent

Memory = Callable[[int, int], Tensor]
"""Returns the tensor in which this rank keeps the elements [low, high)."""


@dataclass(frozen=True, eq=False)
class _Moving:
    """A segment under way in round `number`; `staged` is its staging memory, None if it needs none."""

    number: int
    pieces: tuple[Piece, ...]
    work: Handle
    staged: Tensor | None
    reduces: bool = False


def _overlap(a: Sequence[Piece], b: Sequence[Piece]) -> bool:
    return any(low < other_high and other_low < high for low, high in a for other_low, other_high in b)


def _segments(pieces: Sequence[Piece], most: int) -> Iterator[tuple[Piece, ...]]:
    """Group the pieces of a message into segments of at most `most` elements, cutting pieces where needed."""
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


class _Staging:
    """Memory for segments under way, kept for reuse."""

    def __init__(self) -> None:
        self._spare: dict[tuple[torch.dtype, int], list[Tensor]] = {}

    def acquire(self, pieces: Sequence[Piece], like: Tensor) -> Tensor:
        numel = sum(high - low for low, high in pieces)
        spare = self._spare.get((like.dtype, numel))
        return spare.pop() if spare else torch.empty(numel, dtype=like.dtype, device=like.device)

    def release(self, staged: Tensor) -> None:
        if len(self._spare) > _STAGING_SIZES:  # varying sizes would accumulate
            self._spare.clear()
        self._spare.setdefault((staged.dtype, staged.numel()), []).append(staged)

    def pack(self, pieces: Sequence[Piece], memory: Memory, like: Tensor) -> Tensor:
        into = self.acquire(pieces, like)
        torch.cat([memory(low, high) for low, high in pieces], out=into)
        return into


class Executor:
    """Runs schedules on one rank of the group `over`; `grouped`: a round at a time, as NCCL needs it."""

    def __init__(self, over: dist.ProcessGroup, grouped: bool) -> None:
        self._over, self._grouped, self._staging = over, grouped, _Staging()

    def run(self, steps: Sequence[RankStep], memory: Memory, reduction: Reduction | Combine, like: Tensor) -> None:
        """Run one rank's program to its end. `like` is a tensor of the type and device of the data."""
        if self._grouped:
            self._run_grouped(steps, memory, reduction, like)
            return
        flight = _Flight(self._over, self._staging, memory, reduction, like)
        posted = 0
        for i, step in enumerate(steps):
            flight.make_room(i)
            while posted < min(len(steps), i + _ROUNDS) and (posted <= i or flight.has_room(steps[posted])):
                unsent = [piece for s in steps[i : posted + 1] for message in s.sends for piece in message.pieces]
                flight.post(posted, steps[posted], unsent)
                posted += 1
            flight.send(i, step)
        flight.land()

    def _run_grouped(
        self, steps: Sequence[RankStep], memory: Memory, reduction: Reduction | Combine, like: Tensor
    ) -> None:
        staging = self._staging
        for step in steps:
            arriving = [(m, staging.acquire(m.pieces, like)) for m in step.receives]
            leaving = [(m, staging.pack(m.pieces, memory, like)) for m in step.sends]
            works = dist.batch_isend_irecv(
                [dist.P2POp(dist.irecv, into, group=self._over, group_peer=m.peer) for m, into in arriving]
                + [dist.P2POp(dist.isend, data, group=self._over, group_peer=m.peer) for m, data in leaving]
            )
            for work in works:
                work.wait()
            for message, into in arriving:
                _place(message.pieces, into, message.reduces, memory, reduction)
            for _, used in (*arriving, *leaving):
                staging.release(used)


class _Flight:
    """The messages of one rank's program that are under way: receives in the order of their rounds, and sends."""

    def __init__(
        self, over: dist.ProcessGroup, staging: _Staging, memory: Memory, reduction: Reduction | Combine, like: Tensor
    ) -> None:
        self._over, self._staging, self._memory, self._reduction, self._like = over, staging, memory, reduction, like
        self._most = max(1, SEGMENT // like.dtype.itemsize)
        self._receives: list[_Moving] = []
        self._sends: list[_Moving] = []

    def has_room(self, step: RankStep) -> bool:
        """Whether all receives of a round fit in staging memory along with the current ones."""
        incoming = sum(high - low for message in step.receives for low, high in message.pieces)
        return self._staged_bytes() + incoming * self._like.itemsize <= _STAGING_BYTES

    def make_room(self, number: int) -> None:
        """Finish receives of rounds before `number`, the oldest first, until staging memory is within its limit."""
        while self._receives and self._receives[0].number < number and self._staged_bytes() > _STAGING_BYTES:
            self._finish(self._receives[0])
        while self._sends and self._staged_bytes() > _STAGING_BYTES:
            self._wait_sent(self._sends[0])

    def _staged_bytes(self) -> int:
        """Return the bytes of staging memory in use."""
        return sum(m.staged.nbytes for m in (*self._receives, *self._sends) if m.staged is not None)

    def post(self, number: int, step: RankStep, unsent: Sequence[Piece]) -> None:
        """Post the receives of round `number`. A segment arrives at its final place, unless it is reduced there, or
        other data there is still to be written or read. `unsent`: the pieces that this round and those before it have
        yet to send."""
        for message in step.receives:
            for pieces in _segments(message.pieces, self._most):
                under_way = (*self._receives, *self._sends)
                busy = _overlap(pieces, unsent) or any(_overlap(pieces, m.pieces) for m in under_way)
                direct = len(pieces) == 1 and not message.reduces and not busy
                into = self._memory(*pieces[0]) if direct else self._staging.acquire(pieces, self._like)
                work = self._over.recv([into], message.peer, _TAG)
                staged = None if direct else into
                self._receives.append(_Moving(number, pieces, work, staged, message.reduces))

    def send(self, number: int, step: RankStep) -> None:
        """Send the messages of round `number`, each segment as soon as its data is there."""
        for message in step.sends:
            for pieces in _segments(message.pieces, self._most):
                self._finish_receives(pieces, number)
                staged = None if len(pieces) == 1 else self._staging.pack(pieces, self._memory, self._like)
                data = self._memory(*pieces[0]) if staged is None else staged
                self._sends.append(_Moving(number, pieces, self._over.send([data], message.peer, _TAG), staged))
        # Earlier sends are as good as complete: the list to search stays short.
        while self._sends and self._sends[0].number < number:
            self._wait_sent(self._sends[0])

    def land(self) -> None:
        """Wait for all messages."""
        while self._receives:
            self._finish(self._receives[0])
        while self._sends:
            self._wait_sent(self._sends[0])

    def _finish_receives(self, pieces: Sequence[Piece], number: int) -> None:
        """Finish, in order, the receives of rounds before `number` that overlap these pieces."""
        for moving in [m for m in self._receives if m.number < number and _overlap(m.pieces, pieces)]:
            self._finish_receives(moving.pieces, moving.number)  # the data that it is added to, or replaces
            self._finish(moving)

    def _finish(self, moving: _Moving) -> None:
        moving.work.wait()
        if moving.staged is not None:
            for out in [m for m in self._sends if _overlap(m.pieces, moving.pieces)]:
                self._wait_sent(out)  # data that is still being sent may not change
            _place(moving.pieces, moving.staged, moving.reduces, self._memory, self._reduction)
            self._staging.release(moving.staged)
        self._receives.remove(moving)

    def _wait_sent(self, moving: _Moving) -> None:
        moving.work.wait()
        if moving.staged is not None:
            self._staging.release(moving.staged)
        self._sends.remove(moving)


def _place(
    pieces: Sequence[Piece], staged: Tensor, reduces: bool, memory: Memory, reduction: Reduction | Combine
) -> None:
    at = 0
    for low, high in pieces:
        here, part = memory(low, high), staged[at : at + high - low]
        if reduces:
            combine(reduction, here, here, part)
        else:
            here.copy_(part)
        at += high - low
