"""Files of tensors in the safetensors format, written tensor by tensor.

    8 bytes       N, the header's length, little-endian
    N bytes       JSON: {name: {"dtype": "BF16", "shape": [...], "data_offsets": [begin, end]}, "__metadata__": {...}}
    the rest      row-major little-endian tensors, without gaps; offsets count from here

(github.com/huggingface/safetensors, "Format".) The library saves dictionaries of tensors; here a writer holds one
tensor at a time, so that host memory can be counted.
"""

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Outgoing:
    """A tensor to write. `make` returns it; it is called when its turn comes, and the tensor is freed at once."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], Tensor]

    @property
    def bytes(self) -> int:
        """The size of its data."""
        return math.prod(self.shape) * self.dtype.itemsize


def write(path: Path, tensors: Sequence[Outgoing]) -> list[int]:
    """Write a file to disk, with one tensor in memory at a time; return the byte at which each tensor begins."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    ends = [0]
    for t in tensors:
        ends.append(ends[-1] + t.bytes)
        header[t.name] = {"dtype": CODES[t.dtype], "shape": list(t.shape), "data_offsets": ends[-2:]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at multiples of 8
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for t in tensors:
            value = t.make().detach().to("cpu", t.dtype).contiguous()
            assert value.shape == t.shape, f"{t.name}: {tuple(value.shape)} instead of {t.shape}"
            file.write(value.view(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())
    return [8 + len(text) + end for end in ends[:-1]]
