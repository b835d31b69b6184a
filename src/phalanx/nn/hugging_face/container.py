"""Files in the safetensors format, read by ranges (runtime/checkpoint/tensor_file.py draws the format and writes it).

The library memory-maps files; here a reader holds only what it requested, so that host memory can be counted.
"""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.spec.errors import InputError

FIELD = "weights"
"""Placeholder field of errors; nn/weight_files.py replaces it with the setting that names the weights."""
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
LONGEST_HEADER = 100_000_000  # the library's own limit


@dataclass(frozen=True)
class FileTensor:
    """A tensor in a file: `begin` and `end` in bytes from the file's start; `code`: its type as the file spells
    it."""

    name: str
    file: Path
    code: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def dtype(self) -> torch.dtype:
        """The torch type. Raises InputError for a type that parameters cannot have."""
        if self.code not in DTYPES:
            reason = f"{self.name} is stored as {self.code}, not as one of {', '.join(DTYPES)}"
            raise InputError(FIELD, str(self.file), reason, "convert it to one of them first")
        return DTYPES[self.code]

    def read(self, start: int, stop: int) -> Tensor:
        """Read elements start..stop, flat, at least one. Raises InputError if the file was cut short meanwhile."""
        size = self.dtype.itemsize
        memory = bytearray((stop - start) * size)
        with self.file.open("rb", buffering=0) as file:
            _fill(file.fileno(), memory, self.begin + start * size, self)
        return torch.frombuffer(memory, dtype=self.dtype)

    def read_columns(self, start: int, stop: int) -> Tensor:
        """Read columns start..stop of a matrix: (rows, stop - start). Raises InputError."""
        rows, width = self.shape
        size = self.dtype.itemsize
        memory = bytearray(rows * (stop - start) * size)
        view = memoryview(memory)
        part = (stop - start) * size
        with self.file.open("rb", buffering=0) as file:
            for r in range(rows):
                _fill(file.fileno(), view[r * part : (r + 1) * part], self.begin + (r * width + start) * size, self)
        return torch.frombuffer(memory, dtype=self.dtype).view(rows, stop - start)


def _fill(descriptor: int, memory: bytearray | memoryview, offset: int, stored: FileTensor) -> None:
    view, done = memoryview(memory), 0
    while done < len(view):
        got = os.preadv(descriptor, [view[done:]], offset + done)
        if not got:
            raise InputError(FIELD, str(stored.file), f"ends within {stored.name}", "the file was cut short")
        done += got


def contents(path: Path) -> dict[str, FileTensor]:
    """List the tensors of a safetensors file by name; reads only the header, and checks it against the file's size.
    Raises InputError if it is not a safetensors file, is cut short, or has an inconsistent header."""
    # Read the header, of bounded size.
    try:
        if not path.is_file():  # opening a pipe would block
            raise InputError(FIELD, str(path), "is not a regular file")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 2 <= length <= LONGEST_HEADER:
                raise InputError(FIELD, str(path), "is not a safetensors file")
            if 8 + length > size:
                raise InputError(FIELD, str(path), f"is cut short: {size} bytes, its header alone has {8 + length}")
            header = json.loads(file.read(length))
    except OSError as error:
        raise InputError(FIELD, str(path), f"cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(FIELD, str(path), "is not a safetensors file (its header is not JSON)") from None
    try:
        # Parse it.
        tensors = {
            name: _stored(name, path, about, 8 + length) for name, about in header.items() if name != "__metadata__"
        }
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(FIELD, str(path), f"has a header that cannot be read ({error!r})") from None
    # Tensors must fill the file without gaps.
    end = 8 + length
    for stored in sorted(tensors.values(), key=lambda s: (s.begin, s.end)):
        if stored.begin != end:
            raise InputError(FIELD, str(path), f"{stored.name} begins at byte {stored.begin}, expected {end}")
        end = stored.end
    if end != size:
        reason = f"is cut short: {size} bytes of {end}" if size < end else f"has {size - end} bytes too many"
        raise InputError(FIELD, str(path), reason, "copy or download it again")
    return tensors


def _stored(name: str, path: Path, about: dict[str, Any], data: int) -> FileTensor:
    shape, (begin, end) = tuple(int(n) for n in about["shape"]), about["data_offsets"]
    stored = FileTensor(name, path, str(about["dtype"]), shape, data + int(begin), data + int(end))
    size = stored.end - stored.begin
    needed = math.prod(shape) * DTYPES[stored.code].itemsize if stored.code in DTYPES else size
    if min((*shape, size)) < 0 or size != needed:
        reason = f"{name} has {size} bytes, its shape {list(shape)} in {stored.code} needs {needed}"
        raise InputError(FIELD, str(path), reason, "copy or download it again")
    return stored
