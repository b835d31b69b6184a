"""Ranks observed in processes of their own, forked from this one, that exchange objects through it.

No rank sees what another has changed, and this process stays as it was. Collectives have no content, but objects do:
torch.distributed.pipelining sends the shapes of activations from stage to stage. So a rank that receives an object
waits for it here, and the rank that sends it is started if it has not been.
"""

from __future__ import annotations

import ctypes
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
from phalanx.verify.observation.run import Unobservable, observe_rank, place_of

_PARENT_DIED = 1  # prctl's PR_SET_PDEATHSIG


def end_with_parent() -> None:
    """Let Linux end this process when its parent dies."""
    ctypes.CDLL(None).prctl(_PARENT_DIED, signal.SIGKILL)


class Post:
    """A rank's side of the exchange of objects."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe

    def send(self, to: int, objects: list[Any]) -> None:
        """Send objects to a rank."""
        self.pipe.send(("object", to, objects))

    def receive(self, sender: int) -> list[Any]:
        """Wait for the next objects from a rank."""
        self.pipe.send(("wants", sender, None))
        return list(self.pipe.recv())


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

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *args: object) -> None:
        for rank in list(self._children):
            os.kill(self._children[rank], signal.SIGKILL)
            self._ended(rank)

    def start(self, rank: int) -> None:
        """Start to observe a rank, if that has not been done."""
        if rank in self._done or rank in self._children:
            return
        ours, theirs = Pipe()
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            ours.close()
            end_with_parent()
            try:
                theirs.send(("done", *self._observe(rank, Post(theirs))))
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
                self.program, rank, self.world, self.per_node, self.axes, self.step, post.send, post.receive
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
        while rank not in self._done:
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
                    self.start(value)
                elif value:
                    raise Unobservable(value)
                else:
                    self._done[sender], self.device, named = content
                    self.axes.update(named)
                    self._ended(sender)
            self._deliver()
        return self._done[rank]

    def _deliver(self) -> None:
        for rank, sender in list(self._waiting.items()):
            if self._objects[sender, rank]:
                del self._waiting[rank]
                self._pipes[rank].send(self._objects[sender, rank].popleft())
            elif sender in self._done:
                raise Unobservable(f"rank {rank} waits for an object that rank {sender} does not send")

    def _ended(self, rank: int) -> int:
        self._pipes.pop(rank).close()
        return os.waitpid(self._children.pop(rank), 0)[1]
