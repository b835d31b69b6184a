"""Every element in fewer bits: an all-to-all of codes, summed in full precision, and where every rank needs the sum
an all-gather of its codes. Each element is rounded at most twice, however many ranks there are.

Reference: Wang et al. 2023, "ZeRO++", section 3.3 (qgZ); Tang et al. 2021, "1-bit Adam", for the two residuals.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.comm.transport import Handle
from phalanx.runtime.data_parallel.bucket_buffers import FlatBucket
from phalanx.runtime.data_parallel.compression.codec import Code
from phalanx.runtime.tracing import host_values
from phalanx.schedule.gradients.buckets import slot_sizes, slots
from phalanx.spec.strategy.compressors import Compression
from phalanx.spec.strategy.spec import Strategy


class _Exchange:
    """A tensor's reduction in codes over an axis of p ranks. `gathers`: every rank needs the full sum.

    first     (n,), the residual of this rank's contribution
    second    (n / p,), the residual of its part of the sum, if it is gathered
    """

    def __init__(
        self, code: Code, numel: int, comm: Comm, axis: str, gathers: bool, memory: tuple[Tensor, Tensor]
    ) -> None:
        self.code, self.comm, self.axis, self.gathers = code, comm, axis, gathers
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
        yield comm.all_to_all(self.receive, self.send, self.axis, unit=unit, phase="B", micro_batch=micro_batch)
        local.zero_()
        for message in host_values.rounds(self.receive.chunk(self.p)):
            code.add(message, local)
        if not self.gathers:
            return
        if feedback:
            local.add_(self.second)
        mine = self.send.chunk(self.p)[self.me]
        code.write(local, mine, self.second if feedback else None)
        yield comm.all_gather(self.send, mine, self.axis, unit=unit, phase="B", micro_batch=micro_batch)
        for part, message in host_values.rounds(list(zip(parts, self.send.chunk(self.p), strict=True))):
            code.read(message, part)

    def residual(self) -> Tensor:
        """Return both residuals in one tensor, (n,)."""
        kept = self.first.clone()
        if self.gathers:
            self.own(kept).add_(self.second)
        return kept

    def set_residual(self, kept: Tensor) -> None:
        """Set the residual, (n,)."""
        self.first.copy_(kept)
        self.second.zero_()


class Quantised:
    """fp16, bf16, int8, int4. With zero >= 1 a rank gets its shard of the sum, which is then reduced over the
    replicas of the shard in the same way. Implements Compressor."""

    def __init__(
        self, c: Compression, strategy: Strategy, buckets: Sequence[FlatBucket], comm: Comm, dtype: torch.dtype
    ) -> None:
        self.c, self.draws = c, 0
        self.code = Code(c, dtype, comm.world.device)
        self._rank = comm.world.rank
        sharded, grid = strategy.shards > 1, comm.mesh
        axis = grid.shard_axis if sharded else grid.gradient_axis
        p = comm.size(axis)
        sizes = [p * self.code.bytes(b.padded // p) for b in buckets]
        # At most two neighbouring buckets are in flight.
        memory = [(comm.buffer(n, torch.uint8), comm.buffer(n, torch.uint8)) for n in slot_sizes(sizes)]
        self._reduces = {
            b.name: _Exchange(self.code, b.padded, comm, axis, not sharded, memory[slot])
            for b, slot in zip(buckets, slots(sizes), strict=True)
        }
        self._across: dict[str, _Exchange] = {}
        if sharded and strategy.dp_replicate > 1:
            for b in buckets:  # all of them are in flight at the end of the step
                n = strategy.dp_replicate * self.code.bytes(b.part // strategy.dp_replicate)
                buffers = comm.buffer(n, torch.uint8), comm.buffer(n, torch.uint8)
                self._across[b.name] = _Exchange(self.code, b.part, comm, "dp_replicate", True, buffers)

    def _seed(self) -> None:
        if self.c.stochastic:
            self.code.generator.manual_seed(self.draws << 20 | self._rank)
        self.draws += 1

    def reduce(self, b: FlatBucket, micro_batch: int | None) -> Iterator[Handle]:
        assert b.sent is not None
        self._seed()
        return self._reduces[b.name].run(b.sent, b.name, micro_batch)

    def across(self, b: FlatBucket, micro_batch: int | None) -> Iterator[Handle]:
        assert b.shard is not None
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

    def kept(self, b: FlatBucket) -> list[Tensor]:
        exchanges = [self._reduces[b.name], *([self._across[b.name]] if b.name in self._across else [])]
        return [t for e in exchanges for t in (e.first, e.second) if t.numel()]

    def forget(self) -> None:
        for exchange in (*self._reduces.values(), *self._across.values()):
            exchange.first.zero_()
            exchange.second.zero_()

    def factors(self, b: FlatBucket) -> dict[str, Tensor]:
        return {}
