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
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from phalanx.runtime import checkpoint
from phalanx.runtime import world as worlds
from phalanx.runtime.checkpoint import CheckpointError, Chunk
from phalanx.runtime.comm import Comm
from phalanx.runtime.part import Part, pieces
from phalanx.runtime.reason import reason

_LOOK_EVERY_S = 0.02


class Saver:
    """Writes the checkpoints of a run into one folder, and keeps the last `keep`. Made by all ranks together."""

    def __init__(self, folder: Path, comm: Comm, keep: int) -> None:
        self.folder, self.keep = folder, keep
        self.rank, self.ranks = comm.world.rank, comm.world.size
        self._thread: threading.Thread | None = None
        self._error: CheckpointError | None = None
        if self.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            checkpoint.sweep(folder)
        # One name for this life of the run: what a rank of an earlier one left behind is never taken for ours.
        self._life = comm.gather_objects(uuid.uuid4().hex[:8], "world")[0]

    @torch.no_grad()
    def save(self, step: int, owned: Iterable[Part], about: dict[str, Any]) -> None:
        """Begin the checkpoint of a step; `owned` may change as soon as this returns. Raises CheckpointError where
        the one before could not be written."""
        self.wait()
        chunks = []
        for part in owned:
            for (offsets, sizes), view in pieces(part):
                copy = view.to("cpu", copy=True)
                chunks.append(Chunk(part.name, part.shape, offsets, sizes, copy.dtype, copy.detach))
        self._thread = threading.Thread(target=self._write, args=(step, chunks, about), daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises CheckpointError where what is being written could not be."""
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """That this rank's part of the last checkpoint is written; on rank 0, that all of it is. Raises
        CheckpointError."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def _write(self, step: int, chunks: list[Chunk], about: dict[str, Any]) -> None:
        part = self.folder / f".writing-{step:08d}-{self._life}"
        try:
            part.mkdir(exist_ok=True)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                checkpoint.write(part, self.rank, chunks)
                if self.rank == 0:
                    self._await_all(part)
                    checkpoint.commit(part, self.folder, step, self.ranks, about, self.keep)
        except BaseException as error:  # whatever it is, the training thread is told
            checkpoint.discard(part, self.rank)
            self._error = CheckpointError(f"the checkpoint of step {step} cannot be written: {reason(error)}")

    def _await_all(self, part: Path) -> None:
        limit = time.monotonic() + worlds.timeout_s()
        while late := checkpoint.missing_ranks(part, self.ranks):
            if time.monotonic() > limit:
                raise TimeoutError(
                    f"after {worlds.timeout_s():.0f} s rank {late[0]} has not written its part; "
                    f"do all ranks see {self.folder.absolute()}?"
                )
            time.sleep(_LOOK_EVERY_S)


def newest_good(folder: Path, comm: Comm, own: bool = True) -> int:
    """The newest step with an undamaged checkpoint; each rank reads its share of the files. Newer ones are said and,
    where the run is our `own`, set aside. All ranks together. Raises CheckpointError where there is none."""
    rank, ranks = comm.world.rank, comm.world.size
    comm.status.now("reading the checkpoint")

    def damage(step: int) -> str | None:
        found = comm.gather_objects(checkpoint.damage(folder, step, rank, ranks), "world")
        return next((wrong for wrong in found if wrong is not None), None)

    def skipped(step: int, wrong: str) -> None:
        if rank == 0:
            checkpoint.say_damaged(step, wrong)
        if rank == 0 and own:
            checkpoint.set_aside(folder, step)

    return checkpoint.newest_good(folder, damage, skipped)
