"""Every element in fewer bits: an all-to-all of codes, summed in full precision, and where every rank needs the sum
an all-gather of its codes. Each element is rounded at most twice, however many ranks there are.

Reference: Wang et al. 2023, "ZeRO++", section 3.3 (qgZ); Tang et al. 2021, "1-bit Adam", for the two residuals.

Codes are elements written in fewer bits, block by block with a scale s, and read back:

    fp16    x / s as fp16                      s: the largest magnitude of the block
    int8    x / s, rounded to -127 ... 127     s: the largest magnitude over 127
    int4    x / s, rounded to -7 ... 7         s: the largest magnitude over 7; two codes in a byte
    bf16    the first 16 bits of x, unscaled

A message is the scales of all blocks in fp32, then the codes. Elements are processed in pieces, through scratch
memory that stays in a core's cache.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.comm.transport import Handle
from phalanx.runtime.data_parallel.bucket_buffers import FlatBucket
from phalanx.runtime.data_parallel.compression.over import ReductionAxes
from phalanx.runtime.tracing import host_values
from phalanx.schedule.event import Phase
from phalanx.schedule.gradients.buckets import slot_sizes, slots
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


class _Exchange:
    """A tensor's reduction in codes over an axis of p ranks. `gathers`: every rank needs the full sum.

    first     (n,), the residual of this rank's contribution
    second    (n / p,), the residual of its part of the sum, if it is gathered
    """

    def __init__(
        self,
        code: Code,
        numel: int,
        comm: Comm,
        axis: str,
        phase: Phase,
        gathers: bool,
        memory: tuple[Tensor, Tensor],
    ) -> None:
        self.code, self.comm, self.axis, self.phase, self.gathers = code, comm, axis, phase, gathers
        self.p, self.me = comm.size(axis), comm.ranks(axis).index(comm.world.rank)
        self.part = numel // self.p
        size = self.p * code.bytes(self.part)
        self.send, self.receive = (m[:size] for m in memory)
        dtype, device, feedback = code.dtype, comm.world.device, code.c.feedback
        self.first = torch.zeros(numel if feedback else 0, dtype=dtype, device=device)
        self.second = torch.zeros(self.part if feedback and gathers else 0, dtype=dtype, device=device)

    def own(self, x: Tensor) -> Tensor:
        """Return a view of this rank's part."""
        return x[self.me * self.part : (self.me + 1) * self.part]

    def run(self, x: Tensor, unit: str, micro_batch: int | None) -> Iterator[Handle]:
        """Sum `x`, (n,), over the ranks in place: this rank's part, or all of it if `gathers`."""
        feedback, comm, code = self.code.c.feedback, self.comm, self.code
        parts, local = x.split(self.part), self.own(x)
        kept = self.first.split(self.part) if feedback else [None] * self.p
        if feedback:
            x.add_(self.first)
        for part, message, residual in host_values.rounds(
            list(zip(parts, self.send.chunk(self.p), kept, strict=True))
        ):
            code.write(part, message, residual)
        yield comm.all_to_all(
            self.receive, self.send, self.axis, unit=unit, phase=self.phase, micro_batch=micro_batch
        )
        local.zero_()
        for message in host_values.rounds(self.receive.chunk(self.p)):
            code.add(message, local)
        if not self.gathers:
            return
        if feedback:
            local.add_(self.second)
        mine = self.send.chunk(self.p)[self.me]
        code.write(local, mine, self.second if feedback else None)
        yield comm.all_gather(self.send, mine, self.axis, unit=unit, phase=self.phase, micro_batch=micro_batch)
        for part, message in host_values.rounds(list(zip(parts, self.send.chunk(self.p), strict=True))):
            code.read(message, part)

    def residual(self) -> Tensor:
        """Return both residuals in one tensor, (n,)."""
        kept = self.first.clone()
        if self.gathers:
            self.own(kept).add_(self.second)
        return kept

    def settle(self) -> None:
        """Move both residuals into the first."""
        if len(self.second):
            self.own(self.first).add_(self.second)
            self.second.zero_()

    def set_residual(self, kept: Tensor) -> None:
        """Set the residual, (n,)."""
        self.first.copy_(kept)
        self.second.zero_()


class Quantised:
    """fp16, bf16, int8, int4. With zero >= 1 a rank gets its shard of the sum, which is then reduced over the
    replicas of the shard in the same way. Implements Compressor."""

    def __init__(
        self, c: Compression, over: ReductionAxes, buckets: Sequence[FlatBucket], comm: Comm, dtype: torch.dtype
    ) -> None:
        self.c, self.draws = c, 0
        self.code = Code(c, dtype, comm.world.device)
        sharded = over.shards != ""
        axis = over.shards or over.axis
        p, phase = comm.size(axis), over.phase
        self._rank = comm.ranks(axis).index(comm.world.rank)
        sizes = [p * self.code.bytes(b.padded // p) for b in buckets]
        # At most two neighbouring buckets are in flight.
        memory = [(comm.buffer(n, torch.uint8), comm.buffer(n, torch.uint8)) for n in slot_sizes(sizes)]
        self._reduces = {
            b.name: _Exchange(self.code, b.padded, comm, axis, phase, not sharded, memory[slot])
            for b, slot in zip(buckets, slots(sizes), strict=True)
        }
        self._across: dict[str, _Exchange] = {}
        if over.replicas > 1:
            for b in buckets:  # all of them are in flight at the end of the step
                n = over.replicas * self.code.bytes(b.part // over.replicas)
                buffers = comm.buffer(n, torch.uint8), comm.buffer(n, torch.uint8)
                self._across[b.name] = _Exchange(self.code, b.part, comm, "dp_replicate", phase, True, buffers)

    def _seed(self) -> None:
        if self.c.stochastic:
            self.code.generator.manual_seed(self.draws << 20 | self._rank)
        self.draws += 1

    def reduce(self, b: FlatBucket, micro_batch: int | None) -> Iterator[Handle]:
        assert b.sent is not None
        self._seed()
        return self._reduces[b.name].run(b.sent, b.name, micro_batch)

    def across(self, b: FlatBucket, micro_batch: int | None) -> Iterator[Handle]:
        self._seed()
        return self._across[b.name].run(b.shard, b.name, micro_batch)

    def residual(self, b: FlatBucket) -> Tensor | None:
        if not self.c.feedback:
            return None
        kept = self._reduces[b.name].residual()
        if b.name in self._across:
            b.own(kept).add_(self._across[b.name].residual())
        return kept

    def set_residual(self, b: FlatBucket, kept: Tensor) -> None:
        self._reduces[b.name].set_residual(kept)
        if b.name in self._across:
            self._across[b.name].set_residual(torch.zeros_like(self._across[b.name].first))

    def settle(self, b: FlatBucket) -> None:
        self._reduces[b.name].settle()

    def kept(self, b: FlatBucket) -> list[Tensor]:
        exchanges = [self._reduces[b.name], *([self._across[b.name]] if b.name in self._across else [])]
        return [t for e in exchanges for t in (e.first, e.second) if t.numel()]

    def forget(self) -> None:
        for exchange in (*self._reduces.values(), *self._across.values()):
            exchange.first.zero_()
            exchange.second.zero_()

    def factors(self, b: FlatBucket) -> dict[str, Tensor]:
        return {}
