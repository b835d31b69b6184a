"""The interface of every transport: it takes a Call and returns a Handle.

The transports are native (torch.distributed's own collectives), p2p (our schedules over sends and receives), and shm
(ranks of one host through shared memory). Tensors are flat and contiguous.
"""

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from phalanx.runtime.comm.reductions import Combine
from phalanx.schedule.event import Reduction


class Handle(Protocol):
    """An operation under way; `wait` returns when it is complete (on CUDA: when the stream waits for it)."""

    def wait(self) -> object: ...


class Done:
    """The handle of an operation that is complete, or had nothing to do."""

    def wait(self) -> None:
        """Return at once."""


DONE = Done()


class Watch(Protocol):
    """Observes when a call's work really happens; called by the transport, from the thread that does the work."""

    def begins(self, transport: str) -> None:
        """The transport begins to work on the call."""
        ...

    def over(self) -> None:
        """The call is complete."""
        ...


@dataclass(frozen=True)
class Call:
    """One collective on one rank, over the group `ranks` (global ranks, ascending).

    all_reduce, broadcast    source is target, (n,); a broadcast comes from the group's first rank
    all_gather               source (n,), target (p n,); source may be this rank's part of target
    reduce_scatter           source (p n,), whose content is undefined afterwards; target (n,), maybe a part of it
    all_to_all               source and target in consecutive parts, `sends[j]` elements to rank j and `receives[j]`
                             from it; equal parts if both are empty

    `me` is this rank's index in the group, `label` names the call in messages. Raises ValueError if the tensors do
    not fit the operation.
    """

    op: str
    ranks: tuple[int, ...]
    me: int
    source: Tensor
    target: Tensor
    reduction: Reduction = "sum"
    sends: tuple[int, ...] = ()
    receives: tuple[int, ...] = ()
    label: str = ""
    watch: Watch | None = field(default=None, compare=False, repr=False)

    @property
    def sent(self) -> list[int]:
        """The elements that an all-to-all sends to each rank."""
        p = len(self.ranks)
        return list(self.sends) or [self.source.numel() // p] * p

    @property
    def received(self) -> list[int]:
        """The elements that an all-to-all receives from each rank."""
        p = len(self.ranks)
        return list(self.receives) or [self.target.numel() // p] * p

    def __post_init__(self) -> None:
        for tensor in (self.source, self.target):
            if tensor.ndim != 1 or not tensor.is_contiguous():
                raise ValueError(f"{self}: needs flat contiguous tensors, got {tuple(tensor.shape)}")
        if self.op == "all_to_all":
            for name, parts, tensor in (("sends", self.sent, self.source), ("receives", self.received, self.target)):
                if len(parts) != len(self.ranks) or sum(parts) != tensor.numel():
                    raise ValueError(f"{self}: {name} {parts}, but there are {tensor.numel()} elements")
        if self.op in ("all_gather", "reduce_scatter"):
            full, part = (self.target, self.source) if self.op == "all_gather" else (self.source, self.target)
            p, n = len(self.ranks), part.numel()
            if full.numel() != p * n:
                raise ValueError(f"{self}: {full.numel()} elements are not {p} times {n}")
            if n and p > 1 and _overlap(full, part) and not same_place(full[self.me * n :], part):
                raise ValueError(f"{self}: the part overlaps the buffer, but not at this rank's place")
        if self.source.dtype != self.target.dtype:
            raise ValueError(f"{self}: the target has type {self.target.dtype}")
        if self.reduction == "avg" and not self.source.is_floating_point():
            raise ValueError(f"{self}: integers cannot be averaged")

    def __str__(self) -> str:
        of = f" of {self.label}" if self.label else ""
        return describe_collective(
            self.op + of, self.source.nbytes, self.source.dtype, self.reduction, bool(self.sends)
        )


def describe_collective(op: str, size: int, dtype: torch.dtype, reduction: Reduction, uneven: bool) -> str:
    """Describe a collective in words, for messages."""
    how = f", {reduction}" if "reduce" in op else ""
    return f"{op} ({size} bytes of {str(dtype).removeprefix('torch.')}{how}{', uneven' if uneven else ''})"


def same_place(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors begin at the same element of the same storage. Works for meta tensors too, whose addresses
    are all equal."""
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata and a.storage_offset() == b.storage_offset()


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two flat tensors of one type have elements in common."""
    if a.untyped_storage()._cdata != b.untyped_storage()._cdata:
        return False
    low, high = sorted((a, b), key=lambda t: t.storage_offset())
    return low.storage_offset() + low.numel() > high.storage_offset()


def combine(reduction: Reduction | Combine, out: Tensor, a: Tensor, b: Tensor) -> None:
    """Compute out = a (+) b elementwise; an average is a sum until `finish_reduction`."""
    if callable(reduction):
        out.copy_(reduction(a, b))
    elif reduction in ("sum", "avg"):
        torch.add(a, b, out=out)
    elif reduction == "min":
        torch.minimum(a, b, out=out)
    elif reduction == "max":
        torch.maximum(a, b, out=out)
    else:
        torch.mul(a, b, out=out)


def finish_reduction(reduction: Reduction, out: Tensor, ranks: int) -> None:
    """Finish a reduction in place once every rank's contribution is in `out`: divide an average by `ranks`."""
    if reduction == "avg":
        out.div_(ranks)
