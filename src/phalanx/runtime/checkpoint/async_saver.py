"""Saving beside the training: every rank copies what it owns, trains on, and writes the copy in a thread of its own.

    main thread      copy this rank's share to the host; go on
    writing thread   write, sync and checksum it; rank 0: when every rank has, make the checkpoint whole and name it

Ranks tell each other that they are done by files in the checkpoint's folder, on the file system that all of them see:
a thread that issued collectives beside the training could meet them in another order on another rank. One checkpoint
is written at a time; a rank that wants the next one earlier waits.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from phalanx.runtime.checkpoint import store
from phalanx.runtime.checkpoint.boxes import Part, pieces
from phalanx.runtime.checkpoint.manifest import CheckpointError, Chunk
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.process import world as worlds
from phalanx.runtime.process.failure import reason

_LOOK_EVERY_S = 0.02


class Saver:
    """Writes the checkpoints of a run into one folder, and keeps the last `keep`. Made by all ranks together."""

    def __init__(self, folder: Path, comm: Comm, keep: int) -> None:
        self.folder, self.comm, self.keep = folder, comm, keep
        self.rank, self.ranks = comm.world.rank, comm.world.size
        self._thread: threading.Thread | None = None
        self._error = ""
        if self.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            store.sweep(folder)
        # One name for this life of the run: what a rank of an earlier one left behind is never taken for ours.
        self._life = comm.gather_objects(uuid.uuid4().hex[:8], "world")[0]

    @torch.no_grad()
    def save(self, step: int, owned: Iterable[Part], about: dict[str, Any]) -> None:
        """Begin the checkpoint of a step, when the one before is there; `owned` may change as soon as this returns.
        All ranks together. Raises CheckpointError where the one before could not be written."""
        self.wait()
        chunks = []
        for part in owned:
            for (offsets, sizes), view in pieces(part):
                copy = view.to("cpu", copy=True)
                chunks.append(Chunk(part.name, part.shape, offsets, sizes, copy.dtype, copy.detach))
        self._thread = threading.Thread(target=self._write, args=(step, chunks, about), daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises CheckpointError where this rank could not write its part."""
        if self._error:
            raise CheckpointError(self._error)

    def wait(self) -> None:
        """That the last checkpoint is there, whole. All ranks together. Raises CheckpointError, on all of them."""
        thread = self._thread
        if thread is None:
            return
        together(self.comm, thread.join)
        self._thread = None
        for error in self.comm.gather_objects(self._error, "world"):
            if error:
                raise CheckpointError(error)

    def finish(self) -> None:
        """Give what is being written its time, when this rank is about to end for another reason."""
        if self._thread is not None:
            self._thread.join(worlds.timeout_s())

    def _write(self, step: int, chunks: list[Chunk], about: dict[str, Any]) -> None:
        part = self.folder / f".writing-{step:08d}-{self._life}"
        try:
            part.mkdir(exist_ok=True)
            store.write(part, self.rank, chunks)
            if self.rank == 0:
                self._await_all(part)
                store.commit(part, self.folder, step, self.ranks, about, self.keep)
        except BaseException as error:  # whatever it is, the training thread is told
            why = str(error) if isinstance(error, CheckpointError) else reason(error)
            self._error = f"the checkpoint of step {step} cannot be written: {why}"
            store.give_up(part, self.rank, why)

    def _await_all(self, part: Path) -> None:
        """That every rank has written its part; how long that takes is the disk's affair, as long as it grows."""
        size, limit = -1, 0.0
        while late := store.missing_ranks(part, self.ranks):
            now = sum(file.stat().st_size for file in part.glob("__*"))
            if now != size:
                size, limit = now, time.monotonic() + worlds.timeout_s()
            if time.monotonic() > limit:
                raise TimeoutError(
                    f"nothing came from rank {late[0]} for {worlds.timeout_s():g} s; do all ranks see the folder?"
                )
            time.sleep(_LOOK_EVERY_S)


def together(comm: Comm, work: Callable[[], object]) -> None:
    """Do work that may take any time, on all ranks: nobody waits in one collective for longer than its timeout. It
    must not raise."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    while True:
        thread.join(worlds.timeout_s() / 4)
        if not any(comm.gather_objects(thread.is_alive(), "world")):
            return


def agree_on_newest(folder: Path, comm: Comm, own: bool = True) -> int | None:
    """The newest step with an undamaged checkpoint, one for all ranks; None where nothing was ever saved. Each rank
    reads its share of the files. Newer ones are said and, where the run is our `own`, set aside. All ranks together.
    Raises CheckpointError where all are damaged."""
    rank, ranks = comm.world.rank, comm.world.size
    comm.status.now("reading the checkpoint")
    # Rank 0 decides: on a shared file system ranks may see another state of the folder for a while.
    steps = comm.gather_objects(store.written(folder) if rank == 0 else None, "world")[0]
    for step in reversed(steps):
        found: list[str | CheckpointError | None] = [None]

        def look(step: int = step, found: list[str | CheckpointError | None] = found) -> None:
            try:
                found[0] = store.damage_or_unread(folder, step, rank, ranks)
            except CheckpointError as error:
                found[0] = error

        together(comm, look)
        wrong = [w for w in comm.gather_objects(found[0], "world") if w is not None]
        if not wrong:
            return int(step)
        if isinstance(wrong[0], CheckpointError):
            raise wrong[0]
        if rank == 0:
            store.say_damaged(step, wrong[0])
        if rank == 0 and own:
            store.set_aside(folder, step)
    if steps:
        raise CheckpointError(f"{folder} holds no good checkpoint")
    return None
