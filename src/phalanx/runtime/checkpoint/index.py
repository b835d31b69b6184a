"""The index of a checkpoint: the location of every box of every tensor, as JSON.

    tensors.json    {name: {"shape": [...], "dtype": "F32", "boxes": [[file, begin, offsets, sizes], ...]}}

`begin` counts bytes from the file's start; a box's elements lie there row by row. An index is not trusted: it is
refused unless its boxes lie inside their tensors and files, and cover the tensors in full.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from phalanx.runtime.checkpoint.regular_files import read_json, require_plain
from phalanx.runtime.checkpoint.tensor_file import DTYPES

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


def tensors(path: Path, files: Mapping[str, int]) -> dict[str, StoredTensor]:
    """Return the tensors of a checkpoint's folder, by name, given its `files` and their sizes.

    Raises ValueError if the index is malformed, or inconsistent with itself or the files; OSError.
    """
    rows = read_json(path / INDEX, _LARGEST)
    try:
        stored = {str(name): _tensor(row) for name, row in rows.items()}
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise ValueError(f"{INDEX} cannot be understood ({error!r})") from None
    return checked(stored, files)


def _tensor(row: Any) -> StoredTensor:
    boxes = tuple(StoredBox(file, begin, tuple(o), tuple(s)) for file, begin, o, s in row["boxes"])
    return StoredTensor(tuple(row["shape"]), DTYPES[row["dtype"]], boxes)


def checked(stored: dict[str, StoredTensor], files: Mapping[str, int]) -> dict[str, StoredTensor]:
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
    """Require integers from 0 to 2^63. Raises ValueError."""
    if not all(type(n) is int and 0 <= n < 2**63 for n in numbers) or len(numbers) > 200:
        raise ValueError(f"{name} has a place or shape that is none")
