"""Gradient compression in the engine: how a bucket is reduced when less than all of it travels.

A reduction is a generator of collectives: it yields each when it is under way, and is resumed when that is over.
Resumed in the order of issue, every rank issues everything in one fixed order. What a message cannot carry stays on
the rank that kept it back and joins its next gradient, so that

    sum of gradients + what was kept back  =  result + what is kept back now        (over all ranks, exactly)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.comm.transport import Handle
from phalanx.runtime.data_parallel.bucket_buffers import Flat
from phalanx.runtime.data_parallel.compression.powersgd import PowerSGD
from phalanx.runtime.data_parallel.compression.quantized import Quantised
from phalanx.runtime.data_parallel.compression.sparse import Above, Drawn, Largest
from phalanx.spec.strategy.compression import Compression
from phalanx.spec.strategy.spec import Strategy


class Compressor(Protocol):
    """Reduces buckets over the data axis in fewer bytes. `draws` counts reductions: the seed of what is drawn."""

    draws: int

    def reduce(self, b: Flat, micro_batch: int | None) -> Iterator[Handle]:
        """Sum `b.sent` over the ranks, in place: all of it, or at stages 1 to 3 at least this rank's part."""
        ...

    def across(self, b: Flat, micro_batch: int | None) -> Iterator[Handle]:
        """Sum `b.shard` over the replicas of this shard, in place (HSDP), where `reduce` has not done so."""
        ...

    def kept_back(self, b: Flat) -> Tensor | None:
        """(padded,), what this rank has kept back of a bucket; None without error feedback."""
        ...

    def put_back(self, b: Flat, kept: Tensor) -> None:
        """Go on from this, (padded,)."""
        ...

    def forget(self) -> None:
        """Begin anew, with nothing kept back: the reductions of this step held numbers that are not finite."""
        ...

    def factors(self, b: Flat) -> dict[str, Tensor]:
        """Whatever else the next reduction begins with, alike on all ranks: by the name of its parameter."""
        ...


class Underway:
    """A compressed reduction as a Handle. `advance` takes it one collective further."""

    def __init__(self, stages: Iterator[Handle]) -> None:
        self._stages = stages
        self._handle = next(stages, None)

    def advance(self) -> None:
        if self._handle is not None:
            self._handle.wait()
            self._handle = next(self._stages, None)

    def wait(self) -> None:
        while self._handle is not None:
            self.advance()


def compressor(
    c: Compression, strategy: Strategy, buckets: Sequence[Flat], comm: Comm, dtype: torch.dtype
) -> Compressor:
    """The compressor of a strategy, for gradients that accumulate in `dtype`."""
    if c.quantised:
        return Quantised(c, strategy, buckets, comm, dtype)
    kinds = {"topk": Largest, "randk": Drawn, "threshold": Above, "powersgd": PowerSGD}
    return kinds[c.name](c, buckets, comm, dtype)
