"""Observing ranks in processes of their own, forked from this one, which exchange objects through it.

No rank sees what another has changed, and this process stays unchanged. Collectives have no content, but objects do:
torch.distributed.pipelining sends the shapes of activations from stage to stage. So a rank that receives an object
waits for it here, and the sender is started if it has not been.

Twice every rank reports what it did so far, as a hash: as the second micro-batch begins, and as the wanted step does.
A rank that pauses waits there until it is known whether another did the same, and continues if none did, or if
another rank waits for it: it receives the place up to which it may go, as a number, where objects are lists.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import traceback
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from phalanx.observation.program.parent import end_with_parent
from phalanx.observation.program.run import observe_rank
from phalanx.observation.rank_classes import (
    END,
    SECOND_MICRO_BATCH,
    WANTED_STEP,
    MatchedRank,
    observe_classes,
    peers_of,
    work,
)
from phalanx.observation.recorder.places import raised
from phalanx.observation.request import ObservationRequest
from phalanx.observation.unobservable import Unobservable, Unsteady, engine_has_run
from phalanx.schedule.observation import Observation, RankObservation
from phalanx.spec.errors import InputError


class PipePost:
    """A rank's side of the exchange of objects. The rank pauses at `until`, until it receives a later place."""

    def __init__(self, pipe: Connection, until: int) -> None:
        self.pipe, self.until = pipe, until

    def reached(self, place: int, so_far: RankObservation) -> None:
        """Report what this rank did until it reached a place, and wait there until it may continue."""
        digest = hashlib.sha256(repr((work(so_far), so_far.start)).encode()).hexdigest()
        self.pipe.send(("reached", place, (digest, peers_of(so_far))))
        while self.until <= place:
            self.until = self.pipe.recv()

    def send(self, to: int, objects: list[Any]) -> None:
        """Send objects to a rank."""
        self.pipe.send(("object", to, objects))

    def receive(self, sender: int) -> list[Any]:
        """Wait for the next objects from a rank."""
        self.pipe.send(("wants", sender, None))
        objects = self.pipe.recv()
        while isinstance(objects, int):  # sent before this rank reached its pause
            self.until = objects
            objects = self.pipe.recv()
        return list(objects)


@dataclass
class Processes:
    """Observes ranks of one program. `device` and `axes`: as its ranks reported them so far."""

    program: Callable[[], object]
    request: ObservationRequest
    device: str = "cpu"
    axes: dict[str, int] = field(init=False)
    _pipes: dict[int, Connection] = field(default_factory=dict)
    _children: dict[int, int] = field(default_factory=dict)
    _done: dict[int, RankObservation] = field(default_factory=dict)
    _objects: dict[tuple[int, int], deque[list[Any]]] = field(default_factory=lambda: defaultdict(deque))
    _waiting: dict[int, int] = field(default_factory=dict)
    _until: dict[int, int] = field(default_factory=dict)
    """By rank: the place up to which it may go."""
    _reached: dict[tuple[int, int], tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    """By rank and place: the hash of what the rank did until there, and its peers."""

    def __post_init__(self) -> None:
        self.axes = dict(self.request.axes)

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *args: object) -> None:
        for rank in list(self._children):
            os.kill(self._children[rank], signal.SIGKILL)
            self._ended(rank)

    def start(self, rank: int, until: int = END) -> None:
        """Start to observe a rank, unless it was started, up to the place where it must pause."""
        if rank in self._done or rank in self._children:
            return
        self._until[rank] = until
        ours, theirs = Pipe()
        sys.stdout.flush()
        parent = os.getpid()
        child = os.fork()
        if child == 0:
            ours.close()
            end_with_parent(parent)
            own = os.getpid()
            os.register_at_fork(after_in_child=theirs.close)  # what the program forks is not the rank
            try:
                theirs.send(("done", *self._observe(rank, PipePost(theirs, until))))
            except Unsteady:
                theirs.send(("unsteady", rank, None))
            except KeyboardInterrupt:
                pass
            except BaseException:
                if os.getpid() == own:
                    traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(0)
        theirs.close()
        self._pipes[rank], self._children[rank] = ours, child

    def _observe(self, rank: int, post: PipePost) -> tuple[str, Any]:
        try:
            request = replace(self.request, axes=self.axes)
            return "", observe_rank(self.program, rank, request, post)
        except (Unobservable, InputError) as error:
            return str(error), None
        except Exception as error:
            if engine_has_run(error):
                why = "a backward pass has run in this process; observe before any backward pass, or in another"
                return why, None
            lines = str(error).strip().splitlines() or ["no message"]
            return f"{type(error).__name__}: {lines[0]}, at {raised(error)} (rank {rank} of the program)", None

    def observe(self, rank: int) -> RankObservation:
        """Wait for a rank to end, and return what it did. Raises Unobservable."""
        self.start(rank)
        self._continue(rank, END)
        while rank not in self._done:
            self._read()
        return self._done[rank]

    def observe_or_match(self, rank: int, like: int | None = None) -> RankObservation | MatchedRank:
        """Return what a rank did, or MatchedRank if its step before the wanted one equals that of a rank that has
        ended. If its first micro-batch equals rank `like`'s, so does its step. Raises Unobservable."""
        self.start(rank, SECOND_MICRO_BATCH if like is not None else WANTED_STEP)
        while rank not in self._done:
            for place, others in ((SECOND_MICRO_BATCH, [like]), (WANTED_STEP, list(self._done))):
                if (rank, place) not in self._reached:
                    continue
                digest, peers = self._reached[rank, place]
                for other in others:
                    if other is not None and self._reached.get((other, place), ("",))[0] == digest:
                        return MatchedRank(other, peers)
                self._continue(rank, place + 1)
            self._read()
        return self._done[rank]

    def _continue(self, rank: int, until: int) -> None:
        if self._until[rank] < until:
            self._until[rank] = until
            if rank in self._pipes:
                self._pipes[rank].send(until)

    def _read(self) -> None:
        """Read from the ranks until one has sent something."""
        for pipe in wait(list(self._pipes.values())):
            sender = next(r for r, p in self._pipes.items() if p is pipe)
            try:
                kind, value, content = self._pipes[sender].recv()
            except EOFError:
                status = self._ended(sender)
                how = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else "no result"
                raise Unobservable(f"the process of rank {sender} ended with {how}") from None
            if kind == "object":
                self._objects[sender, value].append(content)
            elif kind == "wants":
                self._waiting[sender] = value
                self.start(value, END if self._until[sender] == END else SECOND_MICRO_BATCH)
            elif kind == "reached":
                self._reached[sender, value] = content
            elif kind == "unsteady":
                raise Unsteady
            elif value:
                raise Unobservable(value)
            else:
                self._done[sender], self.device, named = content
                self.axes.update(named)
                self._ended(sender)
        self._deliver()

    def _deliver(self) -> None:
        for rank, sender in list(self._waiting.items()):
            if self._objects[sender, rank]:
                del self._waiting[rank]
                self._pipes[rank].send(self._objects[sender, rank].popleft())
            elif pauses := [p for p in range(self._until[sender], END) if (sender, p) in self._reached]:
                self._continue(sender, pauses[-1] + 1)
            elif sender in self._done:
                raise Unobservable(f"rank {rank} waits for an object that rank {sender} does not send")

    def _ended(self, rank: int) -> int:
        self._pipes.pop(rank).close()
        return os.waitpid(self._children.pop(rank), 0)[1]


def observe_program(name: str, program: Callable[[], object], request: ObservationRequest) -> Observation:
    """Observe some ranks of a program, or one of each class. Raises Unobservable.

    Where a pipeline's micro-batches do not represent those that were not executed, a second attempt executes all.
    """
    try:
        with Processes(program, request) as p:
            if request.ranks is None:
                seen = observe_classes(p, request.world)
            else:
                seen = tuple(map(p.observe, request.ranks))
            return Observation(name, request.world, p.axes, p.device, torch.__version__, seen)
    except Unsteady:
        return observe_program(name, program, replace(request, every_micro_batch=True))
