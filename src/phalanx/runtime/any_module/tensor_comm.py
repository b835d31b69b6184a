"""Sums and gathers over the tp ranks around split layers, with their gradients."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from phalanx.runtime.comm.communicator import Comm


def sum_over_tp(x: Tensor, comm: Comm, phase: Any) -> Tensor:
    """Return the sum over the tp ranks."""
    x = x.clone(memory_format=torch.contiguous_format)
    comm.all_reduce(x, "tp", unit="tp_plan", phase=phase).wait()
    return x


def gather_parts(x: Tensor, comm: Comm) -> tuple[Tensor, ...]:
    """Return the parts of all tp ranks."""
    tp, index = comm.mesh.size("tp"), comm.mesh.place(comm.world.rank)["tp"]
    parts = torch.zeros((tp, *x.shape), dtype=x.dtype, device=x.device)
    parts[index] = x
    comm.all_reduce(parts, "tp", unit="tp_plan", phase="F").wait()
    return tuple(parts)


class CopyInput(torch.autograd.Function):
    """Identity of an input that all ranks have and use differently; backward sums its gradient over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm) -> Tensor:
        ctx.comm = comm
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return sum_over_tp(g, ctx.comm, "B"), None


class SumTerms(torch.autograd.Function):
    """Sum of the ranks' terms; backward gives each term the whole gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm) -> Tensor:
        return sum_over_tp(x, comm, "F")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g, None


class GatherParts(torch.autograd.Function):
    """Concatenation of all ranks' parts along a dim; backward takes the gradient of this rank's part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm, dim: int) -> Tensor:
        ctx.comm, ctx.dim, ctx.size = comm, dim, x.shape[dim]
        return torch.cat(gather_parts(x, comm), dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        index = ctx.comm.mesh.place(ctx.comm.world.rank)["tp"]
        return g.narrow(ctx.dim, index * ctx.size, ctx.size).contiguous(), None, None
