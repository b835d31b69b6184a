"""Asynchronous saving: every rank copies its share to the host, trains on, and writes the copy in a thread.

    main thread      copy this rank's share to the host; go on
    writing thread   write, sync and checksum it; rank 0: once every rank has, complete the checkpoint and rename it

Ranks report completion through files in the checkpoint's folder, on the file system that all of them see: a thread
that issued collectives concurrently with training could do so in a different order on each rank. One checkpoint is
written at a time; a rank that wants to save the next one earlier waits.
"""

import threading
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

import torch

from phalanx.runtime.checkpoint import leftovers, store
from phalanx.runtime.checkpoint.boxes import TensorPart, pieces
from phalanx.runtime.checkpoint.manifest import CheckpointError, Chunk
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.process import world as worlds
from phalanx.runtime.process.failure import reason

_POLL_S = 0.02


class Saver:
    """Writes the checkpoints of a run into one folder and keeps the last `keep`. Creating it is collective."""

    def __init__(self, folder: Path, comm: Comm, keep: int) -> None:
        self.folder, self.comm, self.keep = folder, comm, keep
        self.rank, self.ranks = comm.world.rank, comm.world.size
        self._thread: threading.Thread | None = None
        self._error = ""
        self._step = 0  # step of the checkpoint begun last
        if self.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            leftovers.sweep(folder)
        # A name for this attempt: files that a rank of an earlier attempt left behind are never taken for ours.
        self._attempt = comm.gather_objects(uuid.uuid4().hex[:8], "world")[0]

    @torch.no_grad()
    def save(self, step: int, owned: Iterable[TensorPart], about: dict[str, Any]) -> None:
        """Begin to save a step, after the previous checkpoint is complete. Collective.

        `owned` are the parts that this rank writes; they may change as soon as this returns. Raises CheckpointError
        if the previous checkpoint could not be written.
        """
        self.wait()
        self._step = step
        chunks: list[Chunk] = []
        for part in owned:
            for (offsets, sizes), view in pieces(part):
                copy = view.to("cpu", copy=True)
                chunks.append(Chunk(part.name, part.shape, offsets, sizes, copy.dtype, copy.detach))
        self._thread = threading.Thread(target=self._write, args=(step, chunks, about), daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise CheckpointError if this rank could not write its part."""
        if self._error:
            self._fail(self._error)

    def wait(self) -> None:
        """Wait until the last checkpoint is complete. Collective. Raises CheckpointError on all ranks alike."""
        thread = self._thread
        if thread is None:
            return
        together(self.comm, thread.join)
        self._thread = None
        for error in self.comm.gather_objects(self._error, "world"):
            if error:
                self._fail(error)

    def _fail(self, error: str) -> NoReturn:
        """Raise the writing thread's error as a CheckpointError in this thread."""
        self.comm.status.now(f"saving of step {self._step}")
        raise CheckpointError(error)

    def finish(self) -> None:
        """Wait for a checkpoint in progress when this rank is about to exit for another reason."""
        if self._thread is not None:
            self._thread.join(worlds.timeout_s())

    def _write(self, step: int, chunks: list[Chunk], about: dict[str, Any]) -> None:
        partial = self.folder / f".writing-{step:08d}-{self._attempt}"
        try:
            partial.mkdir(exist_ok=True)
            store.write(partial, self.rank, chunks)
            if self.rank == 0:
                self._await_all(partial)
                store.commit(partial, self.folder, step, self.ranks, about, self.keep)
        except BaseException as error:  # of any kind: the training thread reports it
            why = str(error) if isinstance(error, CheckpointError) else reason(error)
            self._error = f"the checkpoint of step {step} cannot be written: {why}"
            store.give_up(partial, self.rank, why)

    def _await_all(self, part: Path) -> None:
        """Wait until every rank has written its part. It may take any time as long as the files grow. Raises
        TimeoutError if they stop growing."""
        size, limit = -1, 0.0
        while late := store.missing_ranks(part, self.ranks):
            now = sum(file.stat().st_size for file in part.glob("rank-*"))
            if now != size:
                size, limit = now, time.monotonic() + worlds.timeout_s()
            if time.monotonic() > limit:
                raise TimeoutError(
                    f"rank {late[0]} has written nothing for {worlds.timeout_s():g} s; do all ranks see the folder?"
                )
            time.sleep(_POLL_S)


def together(comm: Comm, work: Callable[[], object]) -> None:
    """Run `work` of any duration on all ranks, without a collective exceeding its timeout. Collective. `work` must
    not raise."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    while True:
        thread.join(worlds.timeout_s() / 4)
        if not any(comm.gather_objects(thread.is_alive(), "world")):
            return


def agree_on_newest(folder: Path, comm: Comm, set_aside: bool = True) -> int | None:
    """Return the newest step with an intact checkpoint, the same on all ranks; None if none was ever saved.
    Collective: each rank verifies its share of the files. Damaged newer ones are reported, and with `set_aside`
    renamed. Raises CheckpointError if all are damaged."""
    rank, ranks = comm.world.rank, comm.world.size
    comm.status.now("reading the checkpoint")
    # Rank 0 decides: on a shared file system ranks may see different states of the folder for a while.
    steps = comm.gather_objects(store.all_steps(folder) if rank == 0 else None, "world")[0]
    for step in reversed(steps):
        result: list[str | CheckpointError | None] = [None]

        def verify(step: int = step, result: list[str | CheckpointError | None] = result) -> None:
            try:
                result[0] = store.defect(folder, step, rank, ranks)
            except CheckpointError as error:
                result[0] = error

        together(comm, verify)
        problems = [w for w in comm.gather_objects(result[0], "world") if w is not None]
        if not problems:
            return int(step)
        if isinstance(problems[0], CheckpointError):
            raise problems[0]
        if rank == 0:
            store.report_damaged(step, problems[0])
        if rank == 0 and set_aside:
            store.set_aside(folder, step)
    if steps:
        raise CheckpointError(f"{folder} holds no intact checkpoint")
    return None
