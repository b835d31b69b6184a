"""The container of a checkpoint: a safetensors file for each rank that wrote, and an index of their boxes.

A rank holds flat shards, whose boundaries fall anywhere in a matrix: a tensor's boxes lie in several files. A box
that is only part of a tensor is named after its place, as in `parameters.a[0:3,2:4]`.

The index has the location of every box of every tensor, as JSON:

    tensors.json    {name: {"shape": [...], "dtype": "F32", "boxes": [[file, begin, offsets, sizes], ...]}}

`begin` counts bytes from the file's start; a box's elements lie there row by row. An index is not trusted: it is
refused unless its boxes lie inside their tensors and files, and cover the tensors in full.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.runtime.checkpoint.boxes import Box, TensorPart, pieces
from phalanx.runtime.checkpoint.manifest import CheckpointError, Chunk, open_manifest, path_of
from phalanx.runtime.checkpoint.regular_files import open_regular, read_json, require_plain
from phalanx.runtime.checkpoint.tensor_file import CODES, DTYPES, Outgoing, write

INDEX = "tensors.json"
_LARGEST = 2**30


@dataclass(frozen=True)
class StoredBox:
    """A box of a tensor: its offsets and sizes along each dimension, and the byte of a file where it begins."""

    file: str
    begin: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint: the global shape, the stored type, and the boxes that it is made of."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[StoredBox, ...]


def read_index(path: Path, files: Mapping[str, int]) -> dict[str, StoredTensor]:
    """Return the tensors of a checkpoint's folder, by name, given its `files` and their sizes. Raises ValueError if
    the index is malformed, or inconsistent with itself or the files; OSError."""
    rows = read_json(path / INDEX, _LARGEST)
    try:
        stored = {str(name): _tensor(row) for name, row in rows.items()}
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise ValueError(f"{INDEX} cannot be understood ({error!r})") from None
    return require_consistent(stored, files)


def _tensor(row: Any) -> StoredTensor:
    boxes = tuple(StoredBox(file, begin, tuple(o), tuple(s)) for file, begin, o, s in row["boxes"])
    return StoredTensor(tuple(row["shape"]), DTYPES[row["dtype"]], boxes)


def require_consistent(stored: dict[str, StoredTensor], files: Mapping[str, int]) -> dict[str, StoredTensor]:
    """Return the tensors if they are consistent with each other and with the `files`' sizes. Raises ValueError."""
    claimed = dict.fromkeys(files, 0)  # bytes of each file that boxes claim
    for name, tensor in stored.items():
        _require_counts(name, tensor.shape)
        for box in tensor.boxes:
            _require_counts(name, (box.begin, *box.offsets, *box.sizes))
            if require_plain(box.file) not in files:
                raise ValueError(f"{name} lies in {box.file!r}, which the checkpoint does not have")
            if not len(box.offsets) == len(box.sizes) == len(tensor.shape) or any(
                o + s > n for o, s, n in zip(box.offsets, box.sizes, tensor.shape, strict=True)
            ):
                raise ValueError(f"a box of {name} lies outside its shape {list(tensor.shape)}")
            size = math.prod(box.sizes) * tensor.dtype.itemsize
            claimed[box.file] += size
            if box.begin + size > files[box.file] or claimed[box.file] > files[box.file]:
                raise ValueError(f"{name} lies beyond the end of {box.file}")
        if sum(math.prod(box.sizes) for box in tensor.boxes) != math.prod(tensor.shape):
            raise ValueError(f"the boxes of {name} do not make up its shape {list(tensor.shape)}")
    return stored


def _require_counts(name: str, numbers: tuple[Any, ...]) -> None:
    """Require at most 200 integers from 0 to 2^63 - 1. Raises ValueError."""
    if not all(type(n) is int and 0 <= n < 2**63 for n in numbers) or len(numbers) > 200:
        raise ValueError(f"{name} has a place or shape that is none")


def rank_file(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"rank-{rank:05d}.safetensors"


def write_chunks(part: Path, rank: int, chunks: Sequence[Chunk]) -> dict[str, Any]:
    """Write the chunks of one rank into the folder `part`; return their rows of the index, by tensor. One chunk at a
    time is fetched and held."""
    begins = write(part / rank_file(rank), [Outgoing(_label(c), c.dtype, c.sizes, c.fetch) for c in chunks])
    rows: dict[str, Any] = {}
    for c, begin in zip(chunks, begins, strict=True):
        row = rows.setdefault(c.name, {"shape": c.shape, "dtype": CODES[c.dtype], "boxes": []})
        row["boxes"].append([rank_file(rank), begin, c.offsets, c.sizes])
    return rows


def _label(chunk: Chunk) -> str:
    if chunk.sizes == chunk.shape:
        return chunk.name
    return f"{chunk.name}[{','.join(f'{o}:{o + s}' for o, s in zip(chunk.offsets, chunk.sizes, strict=True))}]"


def write_index(part: Path, stored: Sequence[dict[str, Any]]) -> str:
    """Write the index of a checkpoint into the folder `part`, given the rows of every rank; return its file name."""
    rows: dict[str, Any] = {}
    for of_rank in stored:
        for name, row in of_rank.items():
            rows.setdefault(name, {**row, "boxes": []})["boxes"] += row["boxes"]
    with (part / INDEX).open("w") as file:
        json.dump(rows, file, separators=(",", ":"))
        file.flush()
        os.fsync(file.fileno())
    return INDEX


class Reader:
    """An open checkpoint: `contents` is the (shape, type) of every tensor in it, by name. Raises CheckpointError."""

    def __init__(self, folder: Path, step: int) -> None:
        manifest = open_manifest(folder, step)
        self.path = path_of(folder, step)
        sizes = {name: size for name, (size, _) in manifest["files"].items()}
        with self._explained():
            self._stored = read_index(self.path, sizes)
        self.contents = {name: (t.shape, t.dtype) for name, t in self._stored.items()}

    def fill(self, parts: Iterable[TensorPart], optional: str | None = None) -> None:
        """Fill parts in place, by name. Only what the parts cover is read, of one stored box at a time. A part whose
        name begins with `optional` and is not in the checkpoint is left unchanged. Raises CheckpointError."""
        with self._explained(), ExitStack() as stack:
            opened: dict[str, int] = {}
            for target in parts:
                if target.name not in self.contents:
                    if optional is None or not target.name.startswith(optional):
                        raise ValueError(f"{target.name} is not in the checkpoint")
                    continue
                shape = self.contents[target.name][0]
                if shape != target.shape:
                    raise ValueError(f"{target.name} has shape {shape} in the checkpoint, not {target.shape}")
                for box, place in pieces(target):
                    missing = place.numel()
                    for stored in self._stored[target.name].boxes:
                        if stored.file not in opened:
                            opened[stored.file] = open_regular(self.path / stored.file)
                            stack.callback(os.close, opened[stored.file])
                        missing -= self._copy(target.name, opened[stored.file], stored, box, place)
                    if missing:
                        raise ValueError(f"{missing} elements of {target.name} are not in the checkpoint")

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Read elements [start, stop) of a flattened tensor, (stop - start,), in its stored type. Raises
        CheckpointError."""
        shape, dtype = self.contents[name]
        elements = torch.empty(stop - start, dtype=dtype)
        self.fill([TensorPart(name, shape, start, elements)])
        return elements

    def _copy(self, name: str, descriptor: int, stored: StoredBox, box: Box, place: Tensor) -> int:
        """Copy the overlap of a stored box and `box` to `place`, the elements of `box`; return the number of
        elements. Of the stored box, the rows along its first dimension are read in which the two overlap."""
        overlap = _overlap(box, stored)
        if overlap is None:
            return 0
        dtype = self.contents[name][1]
        row = math.prod(stored.sizes[1:]) * dtype.itemsize
        low, high = (n - stored.offsets[0] for n in overlap[0]) if overlap else (0, 1)
        rows = torch.frombuffer(_read(descriptor, stored.begin + low * row, (high - low) * row), dtype=dtype)
        source = rows.view((high - low, *stored.sizes[1:]) if overlap else ())
        for dim, (start, stop) in enumerate(overlap):
            place = place.narrow(dim, start - box[0][dim], stop - start)
            if dim:
                source = source.narrow(dim, start - stored.offsets[dim], stop - start)
        place.copy_(source)
        return place.numel()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn errors of reading into a CheckpointError with one line of reason."""
        try:
            yield
        except (OSError, ValueError) as error:
            raise CheckpointError(f"checkpoint {self.path} cannot be loaded: {error}") from None


def _overlap(box: Box, stored: StoredBox) -> list[tuple[int, int]] | None:
    """Return the (start, stop) along each dimension in which two boxes of a tensor overlap, None if they do not."""
    bounds = zip(*box, stored.offsets, stored.sizes, strict=True)
    overlap = [(max(a, b), min(a + m, b + n)) for a, m, b, n in bounds]
    return overlap if all(start < stop for start, stop in overlap) else None


def _read(descriptor: int, begin: int, size: int) -> bytearray:
    """Read `size` bytes from `begin` on. Raises ValueError if the file ends before."""
    memory = bytearray(size)
    view, done = memoryview(memory), 0
    while done < size:
        got = os.preadv(descriptor, [view[done:]], begin + done)
        if not got:
            raise ValueError("a file was cut short")
        done += got
    return memory
