"""Common base of topk, randk, threshold and powersgd: they reduce a full bucket over all replicas, and have one
residual for each bucket."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.comm.transport import Handle
from phalanx.runtime.data_parallel.bucket_buffers import FlatBucket
from phalanx.runtime.data_parallel.compression.over import ReductionAxes
from phalanx.spec.strategy.compressors import Compression


class FullBucketCompressor:
    """A compressor of full buckets; subclasses define `_run`. Implements Compressor."""

    def __init__(
        self, c: Compression, over: ReductionAxes, buckets: Sequence[FlatBucket], comm: Comm, dtype: torch.dtype
    ) -> None:
        self.c, self.comm, self.dtype, self.draws = c, comm, dtype, 0
        self.axis, self.phase = over.axis, over.phase
        self._device = comm.world.device
        sizes = {b.name: b.padded if c.feedback else 0 for b in buckets}
        self._kept = {name: torch.zeros(n, dtype=dtype, device=self._device) for name, n in sizes.items()}

    def reduce(self, b: FlatBucket, micro_batch: int | None) -> Iterator[Handle]:
        assert b.sent is not None
        self.draws += 1
        if self.c.feedback:
            b.sent.add_(self._kept[b.name])
        return self._run(b, b.sent, micro_batch)

    @abstractmethod
    def _run(self, b: FlatBucket, x: Tensor, micro_batch: int | None) -> Iterator[Handle]:
        """Sum `x`, (padded,), over the ranks in place; the part that is not sent becomes the residual."""
        ...

    def across(self, b: FlatBucket, micro_batch: int | None) -> Iterator[Handle]:
        return iter(())  # `reduce` spans all replicas

    def residual(self, b: FlatBucket) -> Tensor | None:
        return self._kept[b.name].clone() if self.c.feedback else None

    def set_residual(self, b: FlatBucket, kept: Tensor) -> None:
        self._kept[b.name].copy_(kept)

    def settle(self, b: FlatBucket) -> None:
        pass  # there is one

    def kept(self, b: FlatBucket) -> list[Tensor]:
        return [self._kept[b.name]] if self.c.feedback else []

    def forget(self) -> None:
        for kept in self._kept.values():
            kept.zero_()

    def factors(self, b: FlatBucket) -> dict[str, Tensor]:
        return {}
