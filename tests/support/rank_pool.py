"""Long-lived ranks for all distributed tests: torch imported once, one process group, groups cached.

Ranks are forked from one process that has imported what they need (support/preload.py) and does nothing else, so a
killed pool is back in a moment.
`Pool.run(n, function, *args)` calls `function(world, *args)` on the first n ranks and returns their results. If a
rank fails or does not answer, the error says which and what it was doing; then the pool is killed and started again.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.lab import hosts as lab

SIZE = 6
_GRACE_S = 2.0


@dataclass(frozen=True)
class Where:
    """The number of ranks and where they are: all on this host, or `local` on each host of a lab."""

    size: int
    local: int
    address: str = "localhost"
    namespaces: tuple[str, ...] = ()


class CaseFailed(AssertionError):
    """A case failed on a rank; the message names it."""


def _serve(rank: int, where: Where, port: int, folder: str, pipe: Connection) -> None:
    os.environ["PHALANX_STATUS"] = folder
    if where.namespaces:
        lab.enter(where.namespaces[rank // where.local])
    import torch
    import torch.distributed as dist

    from phalanx.runtime.process import world as worlds
    from phalanx.runtime.process.environment import World

    torch.set_num_threads(1)
    if not where.namespaces:  # hosts of a lab meet over the interface that is named to them
        _share_device()
    meeting = dist.TCPStore(where.address, port, where.size, is_master=rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=meeting, rank=rank, world_size=where.size)
    # Every group that a case could ask for, made together: ranks that took part in different cases before
    # would disagree on the name of a new one.
    for size in range(2, where.size + 1):
        for ranks in combinations(range(where.size), size):
            made = dist.new_group(list(ranks))
            if rank in ranks:
                worlds._groups[ranks] = made
    pipe.send(("ready", None))
    while True:
        try:
            function, ranks, args = pipe.recv()
        except EOFError:  # the tests were killed: nobody else is left to remove the status pages
            shutil.rmtree(folder, ignore_errors=True)
            return
        try:
            local = min(where.local, ranks)
            pipe.send(("done", function(World(rank, ranks, rank % local, local), *args)))
        except BaseException:
            pipe.send(("failed", traceback.format_exc()))


def _share_device() -> None:
    """Give all groups of this process one Gloo device. Each device has a thread that wakes a hundred times a second:
    with one for each of a rank's 32 groups, six idle ranks took 0.2 to 0.3 of a core."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    gloo = dist.ProcessGroupGloo
    device = gloo.create_default_device()

    class OnDevice(gloo):  # type: ignore[misc, valid-type]
        def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
            options = gloo._Options()
            options._devices, options._timeout = [device], timeout
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = OnDevice


@contextmanager
def importing_as_here() -> Iterator[None]:
    """Let processes that are started find modules where this one does."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


class Pool:
    def __init__(self, where: Where | None = None) -> None:
        self._where = where or Where(SIZE, SIZE)
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder = Path()

    def _start(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="phalanx-pool-"))
        context = get_context("forkserver")
        context.set_forkserver_preload(["support.preload"])
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            port = probe.getsockname()[1]
        for rank in range(self._where.size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self._where, port, str(self._folder), theirs), daemon=True
            )
            with importing_as_here():  # multiprocessing says so only after it has looked for the preloaded ones
                process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        self._collect(self._where.size, 120.0)

    def stop(self) -> None:
        if not self._processes:  # never started: there is no folder of its own to clear away
            return
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
        shutil.rmtree(self._folder, ignore_errors=True)

    def run(self, ranks: int, function: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
        """Call a function on the first ranks and return the results by rank. Raises CaseFailed."""
        assert ranks <= self._where.size
        if not self._processes:
            self._start()
        for pipe in self._pipes[:ranks]:
            pipe.send((function, ranks, args))
        return self._collect(ranks, timeout_s)

    def _collect(self, ranks: int, timeout_s: float) -> list[Any]:
        answers: dict[int, tuple[str, Any]] = {}
        deadline = time.monotonic() + timeout_s
        while len(answers) < ranks:
            waiting = {self._pipes[r]: r for r in range(ranks) if r not in answers}
            ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            for pipe in ready:
                rank = waiting[pipe]  # type: ignore[index]
                try:
                    answers[rank] = self._pipes[rank].recv()
                except EOFError:
                    answers[rank] = ("failed", f"died with exit code {self._processes[rank].exitcode}")
                if answers[rank][0] == "failed":
                    # The others may wait for it forever: give them a moment to say the same.
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
            if not ready:
                break
        problems = [f"rank {r}: {answer}" for r, (kind, answer) in sorted(answers.items()) if kind == "failed"]
        problems += [f"rank {r}: no answer, {self._doing(r)}" for r in range(ranks) if r not in answers]
        if problems:
            self.stop()
            raise CaseFailed("\n".join(problems))
        return [answers[r][1] for r in range(ranks)]

    def _doing(self, rank: int) -> str:
        from phalanx.runtime.process.status import read

        page = read(self._folder).get(rank)
        return f"last seen during {page.doing}" if page else "never started a case"
