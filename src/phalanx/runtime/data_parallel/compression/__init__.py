"""Gradient compression in the engine: how a bucket is reduced with fewer bytes.

A reduction is a generator of collectives: it yields each one when it is in flight, and is resumed when that is
complete. The engine resumes them in order of issue, so that all ranks issue one fixed sequence. With error feedback,
the part that a message cannot carry stays on its rank as the residual, and is added to the next gradient:

    sum of gradients + old residuals  =  result + new residuals        (over all ranks, exactly)
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.comm.transport import Handle
from phalanx.runtime.data_parallel.bucket_buffers import FlatBucket
from phalanx.runtime.data_parallel.compression.over import ReductionAxes
from phalanx.runtime.data_parallel.compression.powersgd import PowerSGD
from phalanx.runtime.data_parallel.compression.quantized import TYPES, Quantised
from phalanx.runtime.data_parallel.compression.sparse import RandomK, Threshold, TopK
from phalanx.spec.strategy.compressors import Compression


class Compressor(Protocol):
    """Reduces buckets over the data axis in fewer bytes. `draws` counts reductions, and seeds random choices."""

    draws: int

    def reduce(self, b: FlatBucket, micro_batch: int | None) -> Iterator[Handle]:
        """Sum `b.sent` over the ranks, in place: all of it, or with zero >= 1 at least this rank's shard."""
        ...

    def across(self, b: FlatBucket, micro_batch: int | None) -> Iterator[Handle]:
        """Sum `b.shard` over the replicas of this shard, in place (HSDP), unless `reduce` has done so."""
        ...

    def residual(self, b: FlatBucket) -> Tensor | None:
        """Return this rank's residual of a bucket, (padded,); None without error feedback."""
        ...

    def set_residual(self, b: FlatBucket, kept: Tensor) -> None:
        """Set this rank's residual of a bucket, (padded,)."""
        ...

    def settle(self, b: FlatBucket) -> None:
        """Move all residuals of a bucket on this rank into the first one, (padded,)."""
        ...

    def kept(self, b: FlatBucket) -> list[Tensor]:
        """Return the tensors that hold this rank's residuals of a bucket, live; none without error feedback."""
        ...

    def forget(self) -> None:
        """Reset residuals and factors, after a step whose gradients were not finite."""
        ...

    def factors(self, b: FlatBucket) -> dict[str, Tensor]:
        """Return the factors from which the next reduction starts, the same on all ranks, by parameter name."""
        ...


class CompressedReduction:
    """A compressed reduction as a Handle."""

    def __init__(self, stages: Iterator[Handle]) -> None:
        self._stages = stages
        self._handle = next(stages, None)

    def advance(self) -> None:
        """Wait for the collective in flight and start the next one."""
        if self._handle is not None:
            self._handle.wait()
            self._handle = next(self._stages, None)

    def wait(self) -> None:
        """Complete the reduction."""
        while self._handle is not None:
            self.advance()


def compressor(
    c: Compression, over: ReductionAxes, buckets: Sequence[FlatBucket], comm: Comm, dtype: torch.dtype
) -> Compressor:
    """Make the compressor of buckets that are reduced `over` some axes, for gradients that accumulate in `dtype`."""
    return RUNTIME[c.name](c, over, buckets, comm, dtype)


RUNTIME: dict[str, Callable[[Compression, ReductionAxes, Sequence[FlatBucket], Comm, torch.dtype], Compressor]] = {
    **dict.fromkeys(TYPES, Quantised),
    "topk": TopK,
    "randk": RandomK,
    "threshold": Threshold,
    "powersgd": PowerSGD,
}
"""Implementation of each row of spec/strategy/compressors.py."""
