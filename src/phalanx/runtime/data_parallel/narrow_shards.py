"""Shards of parameters in 8 bits, which ZeRO-3 gathers (schedule/gradients/sharding.py says what and why).

    after the optimizer   all-reduce of all matrices' largest magnitudes, and of other parameters; shards are rounded
    gather of a unit      all-gather of its bytes; matrices lie there as autograd/narrow_product.py reads them

Other parameters are whole on every rank from one update to the next, and are not gathered with their unit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from phalanx.runtime.autograd import narrow_product
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.data_parallel.bucket_buffers import FlatBucket, Piece
from phalanx.schedule.gradients.buckets import SCALES, scales
from phalanx.spec.number_formats import NUMBER_FORMATS

_MULTIPLE = NUMBER_FORMATS["float8"].multiple


class NarrowShards:
    """The rounded shards of buckets that are gathered over the same ranks. `memories`: the bytes in which each is
    gathered, which are free when `round` is called. `dtype`: the compute type."""

    def __init__(
        self, flats: Sequence[FlatBucket], memories: Sequence[Tensor], dtype: torch.dtype, comm: Comm
    ) -> None:
        self._flats, self._memories, self._dtype, self._comm = flats, memories, dtype, comm
        self.shards = {flat.name: comm.buffer(flat.part, torch.uint8) for flat in flats}
        """Shard of each bucket, (part,), the bytes of 8-bit floats."""
        every = [p for flat in flats for p in flat.bucket.parameters]
        # By parameter: its place in the all-reduced tensor, where all scales come first.
        self._places: dict[str, slice] = {}
        begins = 0
        for p in sorted(every, key=lambda p: not scales(p)):
            self._places[p.fqn] = slice(begins, begins + (scales(p) or p.numel))
            begins = self._places[p.fqn].stop
        self._numbers = comm.buffer(begins, torch.float32)
        self._matrices = sum(map(scales, every))
        self._back = torch.empty_like(self._numbers[: self._matrices])
        """Scale by which each matrix's 8-bit floats are multiplied."""
        self._whole = torch.empty_like(self._numbers[self._matrices :], dtype=dtype)
        """Parameters that are not matrices."""

    def place(
        self, flat: FlatBucket, memory: Tensor, parameters: dict[str, nn.Parameter], arrive: narrow_product.Arrive
    ) -> None:
        """Point a bucket's parameters to their places in `memory`, in which it is gathered; `arrive` waits for the
        gather."""
        views = flat.views(memory.view(narrow_product.E4M3))
        for p in flat.bucket.parameters:
            place = self._places[p.fqn]
            if scales(p):
                back = self._back[place] if p.of_experts else self._back[place.start]
                aligned = views[p.fqn].storage_offset() % _MULTIPLE == 0  # others may lie before this one
                parameters[p.fqn].in_8_bits = narrow_product.NarrowWeight(views[p.fqn], back, arrive, aligned)  # type: ignore[attr-defined]
            else:
                begins, ends = place.start - self._matrices, place.stop - self._matrices
                parameters[p.fqn].data = self._whole[begins:ends].view(p.shape)

    def round(self) -> None:
        """Find the scales, all ranks together, and round this rank's shards."""
        self._numbers.fill_(-math.inf)
        for flat in self._flats:
            self._announce(flat)
        first = self._flats[0]
        unit = first.bucket.kind(SCALES)
        self._comm.all_reduce(self._numbers, first.axis, unit=unit, phase="opt", reduction="max").wait()
        scale = narrow_product.scale_of(self._numbers[: self._matrices], narrow_product.E4M3)
        torch.reciprocal(scale, out=self._back)
        self._whole.copy_(self._numbers[self._matrices :])
        scale = scale.to(self._dtype)
        for flat, memory in zip(self._flats, self._memories, strict=True):
            narrow, wide = self.shards[flat.name].view(narrow_product.E4M3), memory.view(self._dtype)
            for piece, at in self._of_matrices(flat):
                values, into = piece.of(flat.master), piece.of(narrow)
                for part, rounded in zip(values.split(len(wide)), into.split(len(wide)), strict=True):
                    here = wide[: len(part)].copy_(part)  # in the compute type, as products round it
                    torch.mul(here, scale[at], out=rounded)

    def _announce(self, flat: FlatBucket) -> None:
        """Write this rank's share of a bucket to the all-reduced tensor: largest magnitudes of its parts of matrices,
        and parts of other parameters."""
        matrices = list(self._of_matrices(flat))
        if matrices:  # one after the other, and so are their scales
            largest = torch.stack(torch._foreach_norm([piece.of(flat.master) for piece, _ in matrices], math.inf))
            begins = matrices[0][1]
            self._numbers[begins : begins + len(matrices)].copy_(largest.to(self._dtype))
        for piece in flat.pieces():
            if not scales(piece.parameter):
                begins = self._places[piece.parameter.fqn].start
                here = self._numbers[begins + piece.start : begins + piece.stop]
                here.copy_(piece.of(flat.master).to(self._dtype))

    def _of_matrices(self, flat: FlatBucket) -> Iterator[tuple[Piece, int]]:
        """Yield the parts that this rank has of a bucket's matrices, cut by scale: (piece, place of its scale)."""
        for piece in flat.pieces():
            count = scales(piece.parameter)
            size = piece.parameter.numel // max(count, 1)
            for number in range(piece.start // size, -(-piece.stop // size)) if count else ():
                start, stop = max(piece.start, number * size), min(piece.stop, (number + 1) * size)
                part = Piece(piece.parameter, start, stop, piece.at + start - piece.start)
                yield part, self._places[piece.parameter.fqn].start + number
