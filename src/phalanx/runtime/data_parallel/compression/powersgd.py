"""PowerSGD: the gradient of a matrix as a product of rank r, by one step of power iteration from the last factor.

    M = G + E               the gradient plus the residual, (n, m)
    P = M Q                 all-reduced, (n, r); then its columns are orthonormalized: P̂
    Qᵀ = P̂ᵀ M               all-reduced, (r, m)
    result = P̂ Qᵀ           E = M - P̂ Qᵀ with this rank's own Q, before the all-reduce

Vectors, and matrices too small to gain, travel uncompressed together with P.
Reference: Vogels, Karimireddy, Jaggi 2019, "PowerSGD: Practical Low-Rank Gradient Compression", algorithms 1 and 2.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.comm.transport import Handle
from phalanx.runtime.data_parallel.bucket_buffers import FlatBucket
from phalanx.runtime.data_parallel.compression.full_bucket import FullBucketCompressor
from phalanx.runtime.data_parallel.compression.over import ReductionAxes
from phalanx.spec.strategy.compressors import Compression, Factors, factors


@dataclass(frozen=True)
class _Parts:
    """A bucket's compressed matrices and its other parameters, with their places in the messages: `left` holds the P
    of all matrices and then the other parameters (`plain`), `right` the Q."""

    matrices: tuple[Factors, ...]
    rest: tuple[str, ...]
    left: Tensor
    right: Tensor
    p: tuple[Tensor, ...]
    q: tuple[Tensor, ...]  # (m, r)
    plain: dict[str, Tensor]


class PowerSGD(FullBucketCompressor):
    """powersgd: two all-reduces of factors for every bucket."""

    def __init__(
        self, c: Compression, over: ReductionAxes, buckets: Sequence[FlatBucket], comm: Comm, dtype: torch.dtype
    ) -> None:
        super().__init__(c, over, buckets, comm, dtype)
        self._parts = {b.name: self._divide(b) for b in buckets}
        self._seeds = {b.name: b.bucket.index for b in buckets}
        self._draw()

    def _divide(self, b: FlatBucket) -> _Parts:
        matrices, rest = factors(self.c, b.bucket.parameters)
        left_sizes = [f.n * f.r for f in matrices] + [p.numel for p in rest]
        left = self.comm.buffer(sum(left_sizes), self.dtype)
        right = self.comm.buffer(sum(f.m * f.r for f in matrices), self.dtype)
        pieces = left.split(left_sizes)
        p = tuple(t.view(f.n, f.r) for t, f in zip(pieces, matrices, strict=False))
        q = tuple(t.view(f.m, f.r) for t, f in zip(right.split([f.m * f.r for f in matrices]), matrices, strict=True))
        names = tuple(p.fqn for p in rest)
        return _Parts(matrices, names, left, right, p, q, dict(zip(names, pieces[len(matrices) :], strict=True)))

    def _draw(self) -> None:
        """Draw the initial factors, the same on all ranks."""
        for name, parts in self._parts.items():
            generator = torch.Generator(self._device).manual_seed(self._seeds[name])
            for q in parts.q:
                q.normal_(generator=generator)

    def forget(self) -> None:
        super().forget()
        self._draw()

    def _run(self, b: FlatBucket, x: Tensor, micro_batch: int | None) -> Iterator[Handle]:
        parts, views = self._parts[b.name], b.views(x)
        matrices = [views[f.parameter.fqn].view(f.n, f.m) for f in parts.matrices]
        with self.comm.recorder.uncounted():  # not counted: a step's FLOPs are only the model's
            for m, p, q in zip(matrices, parts.p, parts.q, strict=True):
                torch.mm(m, q, out=p)
        for name, place in parts.plain.items():
            place.copy_(views[name].view(-1))
        yield self.comm.all_reduce(parts.left, self.axis, unit=b.name, phase=self.phase, micro_batch=micro_batch)
        for name, place in parts.plain.items():
            views[name].view(-1).copy_(place)
        if not matrices:
            return
        with self.comm.recorder.uncounted():
            for m, p, q in zip(matrices, parts.p, parts.q, strict=True):
                p.copy_(torch.linalg.qr(p).Q)
                torch.mm(m.T, p, out=q)
            if self.c.feedback:
                kept = b.views(self._kept[b.name])
                for f, m, p, q in zip(parts.matrices, matrices, parts.p, parts.q, strict=True):
                    torch.addmm(m, p, q.T, alpha=-1, out=kept[f.parameter.fqn].view(f.n, f.m))
        yield self.comm.all_reduce(parts.right, self.axis, unit=b.name, phase=self.phase, micro_batch=micro_batch)
        with self.comm.recorder.uncounted():
            for m, p, q in zip(matrices, parts.p, parts.q, strict=True):
                torch.mm(p, q.T, out=m)

    def factors(self, b: FlatBucket) -> dict[str, Tensor]:
        parts = self._parts[b.name]
        return {f.parameter.fqn: q for f, q in zip(parts.matrices, parts.q, strict=True)}
