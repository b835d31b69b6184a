"""Checkpoints by one process, tensor by tensor: written without holding a second one, read by the slice."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.planner import WriteItem

from phalanx.runtime import checkpoint
from phalanx.runtime.checkpoint import CheckpointError

Streamed = tuple[str, tuple[int, ...], torch.dtype, Callable[[], Tensor]]
"""(Name, shape, type, what makes it when its turn comes)."""


class _OneByOne(dcp.DefaultSavePlanner):
    """Tensors on `meta` stand for those that `make` makes."""

    def __init__(self, make: dict[str, Callable[[], Tensor]]) -> None:
        super().__init__()
        self._make = make

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._make[write_item.index.fqn]()


def write_whole(folder: Path, step: int, tensors: Iterable[Streamed], about: dict[str, Any], keep: int) -> Path:
    """Write a checkpoint; in memory is one tensor at a time. Keep the last `keep`."""
    given = list(tensors)
    shown = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape, dtype, _ in given}
    final, part = checkpoint._path(folder, step), folder / f".writing-{step:08d}-{os.getpid()}"
    part.mkdir(parents=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # A file for each: torch's writer holds on to the tensors of a file until it is written.
        writer = dcp.FileSystemWriter(part, single_file_per_rank=False)
        planner = _OneByOne({name: make for name, *_, make in given})
        dcp.save(shown, storage_writer=writer, planner=planner, no_dist=True)
    (part / "phalanx.json").write_text(json.dumps({"version": checkpoint.VERSION, "step": step, **about}))
    for file in part.iterdir():
        checkpoint._sync(file)
    os.replace(part, final)
    return final


class Reader:
    """An open checkpoint. `shapes`: of every tensor, its global shape and type."""

    def __init__(self, folder: Path, step: int) -> None:
        checkpoint.about(folder, step)
        self._path = checkpoint._path(folder, step)
        try:
            there = dcp.FileSystemReader(self._path).read_metadata().state_dict_metadata
        except (OSError, RuntimeError, ValueError, dcp.CheckpointException) as error:
            raise CheckpointError(f"checkpoint {self._path} cannot be read: {_first_line(error)}") from None
        self.shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            name: (tuple(about.size), about.properties.dtype)
            for name, about in there.items()
            if isinstance(about, dcp.TensorStorageMetadata)
        }
        self._last: tuple[str, Tensor] | None = None

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Elements start..stop of a flattened tensor, in its stored type."""
        if self._last is None or self._last[0] != name:
            self._last = None
            whole = self._whole(name)
            if (start, stop) == (0, len(whole)):
                return whole
            self._last = (name, whole)
        return self._last[1][start:stop].clone()

    def _whole(self, name: str) -> Tensor:
        shape, dtype = self.shapes[name]
        tensor = torch.empty(shape, dtype=dtype)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                dcp.load({name: tensor}, checkpoint_id=self._path, no_dist=True)
        except (OSError, RuntimeError, ValueError, dcp.CheckpointException) as error:
            raise CheckpointError(f"checkpoint {self._path} cannot be read: {_first_line(error)}") from None
        return tensor.view(-1)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@contextmanager
def open(folder: Path, step: int) -> Iterator[Reader]:
    """A checkpoint for reading by the slice. Raises CheckpointError."""
    yield Reader(folder, step)
