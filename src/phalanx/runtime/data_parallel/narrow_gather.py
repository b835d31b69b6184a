"""Shards of parameters in 8 bits, which ZeRO-3 gathers (schedule/gradients/narrow.py says what and why).

    after the optimizer   all-reduce of all matrices' largest magnitudes, and of what is no matrix; shards are rounded
    gather of a unit      all-gather of bytes, into the upper half of the unit's memory
    arrival               the bytes become numbers of the compute type, in the same memory, from the front to the back

Scales are powers of two, so that the numbers that arrive have the compute type exactly, and rounding them again for a
product changes nothing (runtime/autograd/float8.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from phalanx.runtime.autograd import float8
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.data_parallel.bucket_buffers import FlatBucket, Piece
from phalanx.schedule.gradients.narrow import SCALES, scales

_REST = 4096
"""Elements at the end of a unit's memory that take their way over other memory: too few to be worth a kernel of
their own for each halving."""


class NarrowShards:
    """The rounded shards of buckets that are gathered over the same ranks. `memories`: the flat memory of each, of
    the compute type, in which it is gathered; it is free when `round` is called."""

    def __init__(self, flats: Sequence[FlatBucket], memories: Sequence[Tensor], comm: Comm) -> None:
        self._flats, self._memories, self._comm = flats, memories, comm
        self.shards = {flat.name: comm.buffer(flat.part, torch.uint8) for flat in flats}
        """(part,) of each bucket, the bytes of 8-bit floats."""
        every = [p for flat in flats for p in flat.bucket.parameters]
        # By parameter: where its numbers are in what ranks reduce. Scales are together, before all else.
        self._places: dict[str, slice] = {}
        begins = 0
        for p in sorted(every, key=lambda p: not scales(p)):
            self._places[p.fqn] = slice(begins, begins + (scales(p) or p.numel))
            begins = self._places[p.fqn].stop
        self._numbers = comm.buffer(begins, torch.float32)
        self._largest = self._numbers[: sum(map(scales, every))]
        self._back = self._largest.to(memories[0].dtype)  # of each matrix, what its bytes have to be multiplied by

    def round(self) -> None:
        """Find the scales, all ranks together, and round this rank's shards."""
        dtype = self._back.dtype
        self._numbers.fill_(-math.inf)
        for flat in self._flats:
            self._announce(flat, dtype)
        first = self._flats[0]
        unit = first.bucket.kind(SCALES)
        self._comm.all_reduce(self._numbers, first.axis, unit=unit, phase="opt", reduction="max").wait()
        scale = float8.scale_of(self._largest, float8.E4M3)
        self._back.copy_(scale.reciprocal())
        scale = scale.to(dtype)
        for flat, memory in zip(self._flats, self._memories, strict=True):
            assert flat.master is not None
            narrow = self.shards[flat.name].view(float8.E4M3)
            for piece, at in self._of_matrices(flat):
                wide = memory[: piece.stop - piece.start]  # rounded to the compute type before, as a product reads it
                wide.copy_(piece.of(flat.master))
                torch.mul(wide, scale[at], out=piece.of(narrow))

    def _announce(self, flat: FlatBucket, dtype: torch.dtype) -> None:
        """Write what this rank has of a bucket: largest magnitudes in its parts of matrices, and what is none."""
        assert flat.master is not None
        matrices = list(self._of_matrices(flat))
        if matrices:  # one after the other, and so are their scales
            largest = torch.stack(torch._foreach_norm([piece.of(flat.master) for piece, _ in matrices], math.inf))
            begins = matrices[0][1]
            self._numbers[begins : begins + len(matrices)].copy_(largest.to(dtype))
        for piece in flat.pieces():
            if not scales(piece.parameter):
                begins = self._places[piece.parameter.fqn].start
                self._numbers[begins + piece.start : begins + piece.stop].copy_(piece.of(flat.master).to(dtype))

    def _of_matrices(self, flat: FlatBucket) -> Iterator[tuple[Piece, int]]:
        """Yield the parts that this rank has of a bucket's matrices, cut by scale: (piece, place of its scale)."""
        for piece in flat.pieces():
            count = scales(piece.parameter)
            size = piece.parameter.numel // max(count, 1)
            for number in range(piece.start // size, -(-piece.stop // size)) if count else ():
                start, stop = max(piece.start, number * size), min(piece.stop, (number + 1) * size)
                part = Piece(piece.parameter, start, stop, piece.at + start - piece.start)
                yield part, self._places[piece.parameter.fqn].start + number

    def bytes_of(self, memory: Tensor) -> Tensor:
        """Return the half of a unit's memory, (n,) of the compute type, in which its n bytes arrive."""
        return memory.view(torch.uint8)[-len(memory) :]

    def widen(self, flat: FlatBucket, memory: Tensor) -> None:
        """Make numbers of the compute type of a bucket's bytes, in its memory."""
        narrow, n = self.bytes_of(memory).view(float8.E4M3), len(memory)
        begins = 0
        for p in flat.bucket.parameters:
            ends = begins + p.numel
            here, place = memory[begins:ends], self._places[p.fqn]
            begins = ends
            if not scales(p):
                here.copy_(self._numbers[place])
                continue
            for start, stop in _halves(ends - p.numel, ends, n):
                part = narrow[start:stop]
                memory[start:stop].copy_(part.clone() if 2 * stop > n + start else part)
            here.view(scales(p), -1).mul_(self._back[place, None])


def _halves(start: int, stop: int, n: int) -> Iterator[tuple[int, int]]:
    """Cut the elements from `start` to `stop` so that those of a part, of two bytes each from the front of 2n bytes
    on, end where its bytes begin in the last n, or before; the last few elements of all do not."""
    while start < stop:
        end = min(stop, start + (n - start) // 2) if n - start > _REST else stop
        yield start, end
        start = end
