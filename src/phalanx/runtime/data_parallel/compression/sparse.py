"""Sparse compressors: the largest elements (topk), random ones (randk, the same on all ranks), those above a
magnitude (threshold).

Elements travel as their values, then their indices in the bucket (int32; not for randk). Contributions are added in
the order of the ranks, so that all replicas get the same bits.
References: Aji & Heafield 2017; Lin et al. 2018, "Deep Gradient Compression"; Stich et al. 2018, "Sparsified SGD with
Memory".
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.comm.transport import Handle
from phalanx.runtime.data_parallel.bucket_buffers import FlatBucket
from phalanx.runtime.data_parallel.compression.full_bucket import FullBucketCompressor
from phalanx.runtime.data_parallel.compression.over import ReductionAxes
from phalanx.runtime.tracing import host_values
from phalanx.schedule.gradients.buckets import slot_sizes, slots
from phalanx.spec.strategy.compressors import PLACE_BYTES, Compression, elements_sent, max_elements

_PIECE = 1 << 14  # elements compared with a threshold at a time
_SAMPLE = 1 << 15  # elements from which the threshold is estimated


class _Sparse(FullBucketCompressor):
    """Common base of the three on top of `FullBucketCompressor`: memory used by neighbouring buckets in turn."""

    def __init__(
        self, c: Compression, over: ReductionAxes, buckets: Sequence[FlatBucket], comm: Comm, dtype: torch.dtype
    ) -> None:
        super().__init__(c, over, buckets, comm, dtype)
        self.p, self.me = comm.size(self.axis), comm.ranks(self.axis).index(comm.world.rank)
        sizes = [b.padded for b in buckets]
        self._slot = dict(zip((b.name for b in buckets), slots(sizes), strict=True))
        self._sizes = slot_sizes(sizes)

    def _keep(self, b: FlatBucket, x: Tensor, places: Tensor) -> None:
        """Set the residual to `x` without the elements at `places`, and zero `x`."""
        if self.c.feedback:
            x.index_fill_(0, places, 0)
            self._kept[b.name].copy_(x)
        x.zero_()

    def _fields(self, messages: Tensor, rank: int, count: int) -> tuple[Tensor, Tensor]:
        """Return views of (values, places) in a rank's message, `count` elements each."""
        size = count * (self.dtype.itemsize + PLACE_BYTES)
        message = messages[rank * size : (rank + 1) * size]
        values, places = message[: count * self.dtype.itemsize], message[count * self.dtype.itemsize :]
        return values.view(self.dtype), places.view(torch.int32)

    def _message_bytes(self, count: int) -> int:
        return self.p * count * (self.dtype.itemsize + PLACE_BYTES)


class TopK(_Sparse):
    """topk: the share of the bucket with the largest magnitudes, exactly. On the CPU a sample gives a lower bound of
    their magnitude; selecting among the few above it is several times as fast as among all."""

    def __init__(
        self, c: Compression, over: ReductionAxes, buckets: Sequence[FlatBucket], comm: Comm, dtype: torch.dtype
    ) -> None:
        super().__init__(c, over, buckets, comm, dtype)
        device = comm.world.device
        self._messages = [comm.buffer(self._message_bytes(elements_sent(c, n)), torch.uint8) for n in self._sizes]
        largest = max(b.padded for b in buckets)
        count = elements_sent(c, largest)
        self._magnitude = torch.empty(largest, dtype=dtype, device=device)
        self._top = torch.empty(count, dtype=dtype, device=device)
        self._places = torch.empty(count, dtype=torch.int64, device=device)
        self._sampled = device.type == "cpu"
        self._above = torch.empty(2 * count, dtype=torch.int64, device=device)
        self._above_values = torch.empty(2 * count, dtype=dtype, device=device)

    def _find(self, x: Tensor, k: int) -> Tensor:
        """Return the places of the k largest magnitudes, (k,)."""
        n, magnitudes, places = x.numel(), self._top[:k], self._places[:k]
        size = torch.abs(x, out=self._magnitude[:n])
        sample = size[:: n // _SAMPLE | 1]
        expected = k * len(sample) / n
        rank = int(1.2 * expected + 3 * expected**0.5) + 1  # the bound is then almost surely below the k largest
        if self._sampled and n >= 4 * _SAMPLE and 3 * rank < len(sample):
            (bar,) = host_values.read(torch.topk(sample, rank).values[-1:], [0.0])
            count = _places_above(size, bar, self._above)
            if count is not None and count >= k:
                above, values = self._above[:count], self._above_values[:count]
                torch.topk(torch.index_select(size, 0, above, out=values), k, sorted=False, out=(magnitudes, places))
                return places.copy_(above[places])
        torch.topk(size, k, sorted=False, out=(magnitudes, places))
        return places

    def _run(self, b: FlatBucket, x: Tensor, micro_batch: int | None) -> Iterator[Handle]:
        count = elements_sent(self.c, b.padded)
        k = min(count, b.padded)
        messages = self._messages[self._slot[b.name]][: self._message_bytes(count)]
        values, places = self._fields(messages, self.me, count)
        at = self._find(x, k)
        torch.index_select(x, 0, at, out=values[:k])
        values[k:], places[k:] = 0, 0
        places[:k].copy_(at)
        self._keep(b, x, at)
        own = messages.chunk(self.p)[self.me]
        yield self.comm.all_gather(messages, own, self.axis, unit=b.name, phase=self.phase, micro_batch=micro_batch)
        for rank in host_values.rounds(range(self.p)):
            values, places = self._fields(messages, rank, count)
            x.index_add_(0, places, values)


class RandomK(_Sparse):
    """randk: one random element of each of k runs of neighbours. Without error feedback it is scaled to represent its
    run, so that the result is unbiased."""

    def __init__(
        self, c: Compression, over: ReductionAxes, buckets: Sequence[FlatBucket], comm: Comm, dtype: torch.dtype
    ) -> None:
        super().__init__(c, over, buckets, comm, dtype)
        device, counts = comm.world.device, [elements_sent(c, n) for n in self._sizes]
        self._values = [comm.buffer(n, dtype) for n in counts]
        self._places = [torch.empty(n, dtype=torch.int64, device=device) for n in counts]
        self._drawn = torch.empty(max(counts), dtype=torch.float64, device=device)
        self._generator = torch.Generator(device)

    def _draw(self, at: Tensor, numel: int) -> None:
        """Draw k distinct places below `numel` into `at`, ascending, the same on all ranks: one in each of k runs,
        the first of which are longer by one if the lengths cannot be equal."""
        k, drawn = len(at), self._drawn[: len(at)]
        length, longer = divmod(numel, k)
        edge = longer * (length + 1)
        torch.arange(0, edge, length + 1, out=at[:longer])
        torch.arange(edge, numel, length, out=at[longer:])
        self._generator.manual_seed(self.draws)
        torch.rand(k, generator=self._generator, out=drawn)
        drawn[:longer].mul_(length + 1)
        drawn[longer:].mul_(length)
        at.copy_(drawn.floor_().add_(at))

    def _run(self, b: FlatBucket, x: Tensor, micro_batch: int | None) -> Iterator[Handle]:
        slot, count = self._slot[b.name], elements_sent(self.c, b.padded)
        k = min(count, b.padded)
        at, values = self._places[slot][:k], self._values[slot][:count]
        self._draw(at, b.padded)
        torch.index_select(x, 0, at, out=values[:k])
        values[k:] = 0
        values[:1].add_(x.sum().mul_(0))  # NaN and infinities always show, drawn or not
        if not self.c.feedback:
            values.mul_(b.padded / k)
        self._keep(b, x, at)
        yield self.comm.all_reduce(values, self.axis, unit=b.name, phase=self.phase, micro_batch=micro_batch)
        x.index_copy_(0, at, values[:k])


class Threshold(_Sparse):
    """threshold: all elements of at least a given magnitude, or the largest if there are too many. The host reads
    their number, which on CUDA makes it wait."""

    def __init__(
        self, c: Compression, over: ReductionAxes, buckets: Sequence[FlatBucket], comm: Comm, dtype: torch.dtype
    ) -> None:
        super().__init__(c, over, buckets, comm, dtype)
        device, limits = comm.world.device, [max_elements(n, self.p) for n in self._sizes]
        self._messages = [comm.buffer(self._message_bytes(n), torch.uint8) for n in limits]
        self._counts = [comm.buffer(self.p if n else 0, torch.int64) for n in limits]
        self._values = [torch.empty(n, dtype=dtype, device=device) for n in limits]
        self._places = [torch.empty(n, dtype=torch.int64, device=device) for n in limits]
        self._magnitude = torch.empty(max(b.padded for b in buckets), dtype=dtype, device=device)

    def _find(self, x: Tensor, slot: int) -> tuple[Tensor, Tensor]:
        """Return (places, values) of the elements to send; NaNs are always sent."""
        size = torch.abs(x, out=self._magnitude[: x.numel()])
        limit = max_elements(x.numel(), self.p)
        values, places = self._values[slot][:limit], self._places[slot][:limit]
        n = _places_above(size, self.c.value, places)
        if n is None:
            torch.topk(size, limit, sorted=False, out=(values, places))
            n = limit
        torch.index_select(x, 0, places[:n], out=values[:n])
        return places[:n], values[:n]

    def _run(self, b: FlatBucket, x: Tensor, micro_batch: int | None) -> Iterator[Handle]:
        slot = self._slot[b.name]
        at, sent = self._find(x, slot)
        self._keep(b, x, at)
        counts = self._counts[slot]
        counts[self.me] = len(at)
        own = counts[self.me : self.me + 1]
        yield self.comm.all_gather(counts, own, self.axis, unit=b.name, phase=self.phase, micro_batch=micro_batch)
        number = host_values.read(counts, [len(at)] * self.p)
        longest = max(2, max(number) + max(number) % 2)  # even, so that what follows is aligned
        messages = self._messages[slot][: self._message_bytes(longest)]
        values, places = self._fields(messages, self.me, longest)
        values[: len(at)].copy_(sent)
        places[: len(at)].copy_(at)
        own = messages.chunk(self.p)[self.me]
        yield self.comm.all_gather(messages, own, self.axis, unit=b.name, phase=self.phase, micro_batch=micro_batch)
        for rank, n in host_values.rounds(list(enumerate(number))):
            values, places = self._fields(messages, rank, longest)
            x.index_add_(0, places[:n], values[:n])


def _places_above(size: Tensor, bar: float, places: Tensor) -> int | None:
    """Write to `places` where elements are not below a bar, NaNs included. Returns their number, or None if they do
    not fit (always None during verification)."""
    n = 0
    for low, piece in zip(range(0, size.numel(), _PIECE), size.split(_PIECE), strict=True):
        here = torch.nonzero(torch.logical_not(piece < bar)).view(-1)
        if n + len(here) > len(places):
            return None
        torch.add(here, low, out=places[n : n + len(here)])
        n += len(here)
    return n
