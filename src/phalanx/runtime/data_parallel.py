"""The data-parallel engine (zero=0): gradients in flat buckets, reduced while the backward pass still runs.

Communication of a step, in phases:
    backward of the last micro-batch   one all-reduce per bucket over the data axis, as soon as it is full
    finish()                           buckets of unused parameters, then waits for all

Buckets are issued in their fixed order, never in order of readiness, so that every rank issues alike.
Reference: Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training".
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from phalanx.runtime.comm import DTYPES, Comm, Handle
from phalanx.schedule.buckets import Bucket
from phalanx.spec.job import Precision


class _FlatBucket:
    """The gradients of a bucket as one flat tensor of the accumulate type, each a view of it."""

    def __init__(self, bucket: Bucket, precision: Precision, comm: Comm) -> None:
        self.name, self.bucket = bucket.name, bucket
        self.flat = comm.buffer(bucket.numel, DTYPES[precision.accumulate_dtype])
        narrow = precision.reduce_dtype != precision.accumulate_dtype
        self.sent = comm.buffer(bucket.numel, DTYPES[precision.reduce_dtype]) if narrow else self.flat
        parts = self.flat.split([p.numel for p in bucket.parameters])
        self.views = {p.fqn: part.view(p.shape) for p, part in zip(bucket.parameters, parts, strict=True)}
        self.missing = 0
        self.handle: Handle | None = None


def _call(hook: weakref.WeakMethod[Callable[[str, nn.Parameter], None]], name: str, p: nn.Parameter) -> None:
    method = hook()
    if method is not None:
        method(name, p)


class DataParallel:
    """Sums the gradients of a module's parameters over the data axis. The caller divides by the token count.

    Between `begin` and `finish` each micro-batch is announced by `micro_batch`; a plain backward pass calls
    `grad_ready` through hooks. After `finish`, `gradients` holds sums over all micro-batches and replicas.
    """

    def __init__(self, module: nn.Module, buckets: tuple[Bucket, ...], precision: Precision, comm: Comm) -> None:
        self.comm, self.axis = comm, comm.mesh.gradient_axis
        self.parameters = dict(module.named_parameters())
        self.buckets = [_FlatBucket(b, precision, comm) for b in buckets]
        self._bucket_of = {name: b for b in self.buckets for name in b.views}
        # A gradient of the bucket's own type is accumulated by autograd right where it is reduced.
        same = precision.compute == precision.accumulate_dtype
        self._in_place = same
        self._last, self._micro_batch, self._next = False, 0, 0
        # The parameter holds its hook outside Python's sight: a strong reference back would never be collected.
        hook = weakref.WeakMethod(self._hook)
        for name, p in self.parameters.items():
            p.register_post_accumulate_grad_hook(partial(_call, hook, name))
        for tensor in (*self.parameters.values(), *module.buffers()):
            comm.broadcast(tensor.detach(), self.axis)

    @property
    def flats(self) -> list[Tensor]:
        return [b.flat for b in self.buckets]

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """(name, gradient) of every parameter, views into the buckets."""
        for bucket in self.buckets:
            yield from bucket.views.items()

    def begin(self) -> None:
        """Start a step: gradients zero, nothing issued."""
        torch._foreach_zero_(self.flats)
        self._next = 0
        for bucket in self.buckets:
            bucket.missing = len(bucket.views)
            if self._in_place:
                for name, view in bucket.views.items():
                    self.parameters[name].grad = view

    def micro_batch(self, index: int, last: bool) -> None:
        """Announce the micro-batch whose backward pass comes next; gradients leave with the last one."""
        self._micro_batch, self._last = index, last

    def _hook(self, name: str, parameter: nn.Parameter) -> None:
        if not self._in_place:
            assert parameter.grad is not None
            self._bucket_of[name].views[name].add_(parameter.grad)
            parameter.grad = None
        self.grad_ready(name)

    def grad_ready(self, name: str) -> None:
        """A parameter's gradient of this micro-batch is complete."""
        if not self._last:
            return
        self._bucket_of[name].missing -= 1
        while self._next < len(self.buckets) and self.buckets[self._next].missing == 0:
            self._issue()

    def _issue(self) -> None:
        bucket = self.buckets[self._next]
        if bucket.sent is not bucket.flat:
            bucket.sent.copy_(bucket.flat)
        bucket.handle = self.comm.all_reduce(
            bucket.sent, self.axis, unit=bucket.name, phase="B", micro_batch=self._micro_batch
        )
        self._next += 1

    def finish(self) -> None:
        """Reduce what is left, parameters without a gradient among it, and wait for everything."""
        while self._next < len(self.buckets):
            self._issue()
        for bucket in self.buckets:
            if bucket.handle is not None:
                bucket.handle.wait()
                bucket.handle = None
            if bucket.sent is not bucket.flat:
                bucket.flat.copy_(bucket.sent)

    def gradient_norm(self) -> Tensor:
        """The global 2-norm of the summed gradients, fp64."""
        return torch.stack([torch.linalg.vector_norm(f).double() for f in self.flats]).norm()

    def scale(self, factor: float) -> None:
        """Multiply every gradient."""
        if factor != 1.0:
            torch._foreach_mul_(self.flats, factor)
