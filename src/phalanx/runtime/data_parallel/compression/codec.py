"""Codes: elements written in fewer bits, block by block with a scale s, and read back.

    fp16    x / s as fp16                      s: the largest magnitude of the block
    int8    x / s, rounded to -127 ... 127     s: the largest magnitude over 127
    int4    x / s, rounded to -7 ... 7         s: the largest magnitude over 7; two codes in a byte
    bf16    the first 16 bits of x, unscaled

A message is the scales of all blocks in fp32, then the codes. Elements are processed in pieces, through scratch
memory that stays in a core's cache.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from phalanx.runtime.tracing import host_values
from phalanx.schedule.gradients.compression import PIECE
from phalanx.spec.strategy.compressors import BLOCK, SCALE_BYTES, Compression

_TINY = 1e-38  # scale of a block of zeros


class Code:
    """Writes and reads messages of one kind on one device. Stochastic rounding draws from `generator`."""

    def __init__(self, c: Compression, dtype: torch.dtype, device: torch.device) -> None:
        self.c, self.row, self.dtype = c, c.codes, dtype
        self.generator = torch.Generator(device)
        self._x = torch.empty(PIECE, dtype=dtype, device=device)
        self._largest = torch.empty(PIECE // BLOCK, 1, dtype=dtype, device=device)
        self._drawn = torch.empty(PIECE if c.stochastic else 0, dtype=dtype, device=device)

    def bytes(self, numel: int) -> int:
        """Return the size of a message of `numel` elements."""
        return self.row.message_bytes(numel)

    def write(self, x: Tensor, message: Tensor, error: Tensor | None) -> None:
        """Encode `x`, (n,), into a message, (bytes(n),); write the error, x minus its decoded value, to `error`,
        (n,)."""
        for low, high, scales, codes in self._pieces(x.numel(), message):
            piece, y = x[low:high], self._x[: high - low]
            if self.row.scaled:
                rows, by_block = piece.view(-1, BLOCK), y.view(-1, BLOCK)
                largest = self._largest[: len(rows)]
                torch.amax(torch.abs(rows, out=by_block), 1, keepdim=True, out=largest)
                scales.copy_(largest.div_(self.row.largest).clamp_(min=_TINY))
                largest.copy_(scales)  # rounded to fp32, as it will be read
                torch.div(rows, largest, out=by_block)
                self._round(y)
            else:
                y.copy_(piece)
            self._pack(y, codes)
            if error is not None:
                self._read(y, scales, codes)
                torch.sub(piece, y, out=error[low:high])

    def add(self, message: Tensor, into: Tensor) -> None:
        """Add the message's elements to `into`, (n,)."""
        for low, high, scales, codes in self._pieces(into.numel(), message):
            y = self._x[: high - low]
            self._read(y, scales, codes)
            into[low:high].add_(y)

    def read(self, message: Tensor, into: Tensor) -> None:
        """Write the message's elements to `into`, (n,)."""
        for low, high, scales, codes in self._pieces(into.numel(), message):
            self._read(into[low:high], scales, codes)

    def _pieces(self, numel: int, message: Tensor) -> Iterator[tuple[int, int, Tensor, Tensor]]:
        """Yield (from, to, scales, codes) of every piece of a message."""
        begins = numel // BLOCK * SCALE_BYTES * self.row.scaled
        scales, codes = message[:begins].view(torch.float32).view(-1, 1), message[begins:]
        for low in host_values.rounds(range(0, numel, PIECE)):
            high = min(numel, low + PIECE)
            own = codes[low * self.row.bits // 8 : high * self.row.bits // 8]
            yield low, high, scales[low // BLOCK : high // BLOCK], own

    def _round(self, y: Tensor) -> None:
        if self.c.stochastic:
            drawn, most = self._drawn[: y.numel()], self.row.largest
            torch.rand(drawn.shape, generator=self.generator, out=drawn)
            y.add_(drawn).floor_().clamp_(-most, most)
        elif not TYPES[self.c.name].is_floating_point:
            y.round_()

    def _pack(self, y: Tensor, codes: Tensor) -> None:
        if self.c.name == "int4":  # 0 to 14; the first of a pair in the low bits
            pairs = y.add_(8).view(-1, 2)
            codes.copy_(torch.add(pairs[:, 0], pairs[:, 1], alpha=16))
        else:
            codes.view(TYPES[self.c.name]).copy_(y)

    def _read(self, y: Tensor, scales: Tensor, codes: Tensor) -> None:
        if self.c.name == "int4":
            pairs = y.view(-1, 2)
            pairs[:, 0].copy_(codes & 15)
            pairs[:, 1].copy_(codes >> 4)
            y.sub_(8)
        else:
            y.copy_(codes.view(TYPES[self.c.name]))
        if self.row.scaled:
            y.view(-1, BLOCK).mul_(scales)


TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "int8": torch.int8, "int4": torch.uint8}
"""The type of each compressor's codes in memory; two codes of int4 are in one element."""
