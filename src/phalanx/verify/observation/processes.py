"""Ranks observed in processes of their own, forked from this one, that exchange objects through it.

No rank sees what another has changed, and this process stays as it was. Collectives have no content, but objects do:
torch.distributed.pipelining sends the shapes of activations from stage to stage. So a rank that receives an object
waits for it here, and the rank that sends it is started if it has not been.

Before the wanted step, every rank says what it did in the step before, as a hash. A rank that pauses waits there
until it is known whether another did the same, and goes on if none did, or if another rank waits for it.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import signal
import sys
import traceback
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

from phalanx.schedule.observation import RankObservation
from phalanx.spec.errors import InputError
from phalanx.verify.observation.rank_classes import Alike, peers_of, work
from phalanx.verify.observation.run import Unobservable, observe_rank, place_of

_GO_ON = None
"""What a rank that pauses is sent; objects are lists."""
_PARENT_DIED = 1  # prctl's PR_SET_PDEATHSIG


def end_with_parent() -> None:
    """Let Linux end this process when its parent dies."""
    ctypes.CDLL(None).prctl(_PARENT_DIED, signal.SIGKILL)


class Post:
    """A rank's side of the exchange of objects."""

    def __init__(self, pipe: Connection, pausing: bool) -> None:
        self.pipe, self.pausing = pipe, pausing

    def before(self, earlier: RankObservation) -> None:
        """Say what this rank did in the step before the wanted one, and wait until it may go on."""
        self.pipe.send(("before", hashlib.sha256(repr(work(earlier)).encode()).hexdigest(), peers_of(earlier)))
        if self.pausing:
            self.pipe.recv()

    def send(self, to: int, objects: list[Any]) -> None:
        """Send objects to a rank."""
        self.pipe.send(("object", to, objects))

    def receive(self, sender: int) -> list[Any]:
        """Wait for the next objects from a rank."""
        self.pipe.send(("wants", sender, None))
        objects = self.pipe.recv()
        if objects is _GO_ON:  # said before this rank came to its pause
            self.pausing = False
            objects = self.pipe.recv()
        return list(objects)


@dataclass
class Processes:
    """Observes ranks of one program. `device` and `axes` are what its ranks said so far."""

    program: Callable[[], object]
    world: int
    per_node: int
    axes: dict[str, int]
    step: int = 2
    device: str = "cpu"
    _pipes: dict[int, Connection] = field(default_factory=dict)
    _children: dict[int, int] = field(default_factory=dict)
    _done: dict[int, RankObservation] = field(default_factory=dict)
    _objects: dict[tuple[int, int], deque[list[Any]]] = field(default_factory=lambda: defaultdict(deque))
    _waiting: dict[int, int] = field(default_factory=dict)
    _pausing: set[int] = field(default_factory=set)
    """Ranks that pause before the wanted step, and have not been told to go on."""
    _before: dict[int, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    """What ranks did in the step before the wanted one, as a hash, and their peers in it."""

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *args: object) -> None:
        for rank in list(self._children):
            os.kill(self._children[rank], signal.SIGKILL)
            self._ended(rank)

    def start(self, rank: int, pausing: bool = False) -> None:
        """Start to observe a rank, if that has not been done; up to the wanted step if it is to pause there."""
        if rank in self._done or rank in self._children:
            return
        if pausing:
            self._pausing.add(rank)
        ours, theirs = Pipe()
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            ours.close()
            end_with_parent()
            try:
                theirs.send(("done", *self._observe(rank, Post(theirs, pausing))))
            except KeyboardInterrupt:
                pass
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(0)
        theirs.close()
        self._pipes[rank], self._children[rank] = ours, child

    def _observe(self, rank: int, post: Post) -> tuple[str, Any]:
        try:
            return "", observe_rank(
                self.program,
                rank,
                self.world,
                self.per_node,
                self.axes,
                self.step,
                post.send,
                post.receive,
                post.before,
            )
        except (Unobservable, InputError) as error:
            return str(error), None
        except Exception as error:
            if "device_ready_queues_" in str(
                error
            ):  # torch/csrc/autograd/engine.cpp: started with the devices of then
                return (
                    "a backward pass has run in this process; observe before any backward pass, or in another",
                    None,
                )
            lines = str(error).strip().splitlines() or ["no message"]
            return f"{type(error).__name__}: {lines[0]}, at {place_of(error)} (rank {rank} of the program)", None

    def observe(self, rank: int) -> RankObservation:
        """Return what a rank did, once it has ended. Raises Unobservable."""
        self.start(rank)
        self._go_on(rank)
        while rank not in self._done:
            self._read()
        return self._done[rank]

    def observe_or_match(self, rank: int) -> RankObservation | Alike:
        """Return what a rank did; or, where it did in the step before the wanted one what a rank did that has ended,
        that it is like that rank. Raises Unobservable."""
        self.start(rank, pausing=True)
        while rank not in self._done:
            if rank in self._pausing and rank in self._before:
                did, peers = self._before[rank]
                for other in self._done:
                    if self._before.get(other, ("",))[0] == did:
                        return Alike(other, peers)
                self._go_on(rank)
            self._read()
        return self._done[rank]

    def _go_on(self, rank: int) -> None:
        if rank in self._pausing:
            self._pausing.remove(rank)
            if rank in self._pipes:
                self._pipes[rank].send(_GO_ON)

    def _read(self) -> None:
        """Read what ranks send until one has sent something."""
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
                self.start(value, pausing=sender in self._pausing)
            elif kind == "before":
                self._before[sender] = (value, content)
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
            elif sender in self._pausing and sender in self._before:
                self._go_on(sender)
            elif sender in self._done:
                raise Unobservable(f"rank {rank} waits for an object that rank {sender} does not send")

    def _ended(self, rank: int) -> int:
        self._pipes.pop(rank).close()
        return os.waitpid(self._children.pop(rank), 0)[1]
