"""Parts and boxes: a rank's run of a logical tensor's flattened elements, cut into boxes of the tensor.

Engines shard flat buffers, so shard boundaries fall anywhere inside a matrix; a checkpoint's container stores boxes
(offsets and sizes along each dimension). A flat run is at most 2 d - 1 boxes of a d-dimensional tensor, each of them
contiguous in the run.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from torch import Tensor

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(Offsets, sizes) along each dimension."""


@dataclass(frozen=True)
class TensorPart:
    """A run of elements, from `start` on, of the logical tensor `name` with the global `shape`, flattened. If
    `within` is set, the run is of that box of the tensor, flattened. `data` (elements,) is a view of live memory."""

    name: str
    shape: tuple[int, ...]
    start: int
    data: Tensor
    within: Box | None = None


def full_part(name: str, tensor: Tensor) -> TensorPart:
    """Return the part that covers a whole contiguous tensor."""
    return TensorPart(name, tuple(tensor.shape), 0, tensor.detach().view(-1))


def share(parts: Iterable[TensorPart], index: int, count: int) -> Iterator[TensorPart]:
    """Yield the `index`-th of `count` equal shares of parts that replicas hold alike, so that each writes one."""
    parts = list(parts)
    total = sum(p.data.numel() for p in parts)
    low, high = total * index // count, total * (index + 1) // count
    offset = 0
    for p in parts:
        n = p.data.numel()
        first, last = max(low - offset, 0), min(high - offset, n)
        if first < last:
            yield replace(p, start=p.start + first, data=p.data[first:last])
        offset += n


def boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """Return the boxes that make up elements [start, stop) of a flattened tensor, in order."""
    if len(shape) < 2:
        return [((start,), (stop - start,))] if shape else [((), ())]
    row = math.prod(shape[1:])
    result: list[Box] = []
    while start < stop:
        at, inside = divmod(start, row)
        rows = 0 if inside else (stop - start) // row
        if rows:
            result.append(((at, *(0 for _ in shape[1:])), (rows, *shape[1:])))
            start += rows * row
        else:
            end = min(stop, (at + 1) * row)
            inner = boxes(shape[1:], inside, end - at * row)
            result += [((at, *offsets), (1, *sizes)) for offsets, sizes in inner]
            start = end
    return result


def pieces(part: TensorPart) -> Iterator[tuple[Box, Tensor]]:
    """Yield each box of a part with its elements: a view of the part's data in the shape of the box."""
    offset = 0
    origin, shape = part.within or ((0,) * len(part.shape), part.shape)
    for inside, sizes in boxes(shape, part.start, part.start + part.data.numel()):
        n = math.prod(sizes)
        offsets = tuple(o + i for o, i in zip(origin, inside, strict=True))
        yield (offsets, sizes), part.data[offset : offset + n].view(sizes)
        offset += n
