"""Gates that a token opens or closes: of the norm after a recurrence, and, by a sigmoid, after attention."""

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from phalanx.nn.functional import accumulate_dtype
from phalanx.runtime.autograd import deferred_weight_grads
from phalanx.schedule.event import Phase

Gate = Literal["before", "after", "sigmoid", "none"]
"""Whether silu(z) multiplies the norm's input (before) or its result (after), sigmoid(z) its result, or nothing."""
Sum = Callable[[Tensor, Phase], Tensor]
"""Adds up the numbers (..., groups) of the ranks that share a group; the second argument is the pass."""


class _GatedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        z: Tensor | None,
        weight: Tensor,
        groups: int,
        eps: float,
        gate: Gate,
        width: int,
        total: Any,
    ) -> Tensor:
        wide = accumulate_dtype(y.dtype)
        open_ = None if z is None else _gate_values(_wide(z, wide), gate, inplace=True)
        out = open_.mul_(y) if open_ is not None and gate == "before" else _wide(y, wide)
        normed = out.unflatten(-1, (groups, -1))
        squares = torch.linalg.vector_norm(normed, dim=-1, dtype=wide).square_()
        if total is not None:
            squares = total(squares, "F")
        r = squares.div_(width).add_(eps).rsqrt_()  # (..., groups)
        normed.mul_(r.unsqueeze(-1))
        _weighted(out, weight.to(wide))
        if open_ is not None and gate != "before":
            out.mul_(open_)
        ctx.save_for_backward(y, z, weight, r)
        ctx.rest = groups, gate, width, total
        ctx.owners = deferred_weight_grads.owners(weight)
        return torch.empty_like(y).copy_(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        y, z, weight, r = ctx.saved_tensors
        groups, gate, width, total = ctx.rest
        g, wide_weight = _wide(g, r.dtype), weight.to(r.dtype)
        wide_z = None if z is None else _wide(z, r.dtype)
        open_ = None if wide_z is None else _gate_values(wide_z, gate)
        x_hat = y * open_ if gate == "before" else _wide(y, r.dtype)
        unit = x_hat.unflatten(-1, (groups, -1)).mul_(r.unsqueeze(-1))
        d_open: Tensor | None = None
        if open_ is not None and gate != "before":
            d_open = _weighted(x_hat.clone(), wide_weight).mul_(g)
            g.mul_(open_)
        d_weight: Tensor | None = (g * x_hat).view(-1, len(weight)).sum(0).to(weight.dtype)
        # dx = r (g w - x̂ mean(g w x̂)), x̂ = x r
        d_y = _weighted(g, wide_weight).unflatten(-1, (groups, -1))
        along = (d_y * unit).sum(-1)
        if total is not None:
            along = total(along, "B")
        d_y.addcmul_(unit, along.div_(width).unsqueeze(-1), value=-1).mul_(r.unsqueeze(-1))
        if open_ is not None and gate == "before":
            d_open = g * y
            g.mul_(open_)
        d_z: Tensor | None = None
        if d_open is not None:
            if gate == "sigmoid":
                torch.ops.aten.sigmoid_backward.grad_input(d_open, open_, grad_input=d_open)
            else:
                torch.ops.aten.silu_backward.grad_input(d_open, wide_z, grad_input=d_open)
            d_z = torch.empty_like(y).copy_(d_open)
        (d_weight,) = deferred_weight_grads.deliver(ctx.owners, d_weight)
        return torch.empty_like(y).copy_(g), d_z, d_weight, None, None, None, None, None


def _gate_values(z: Tensor, gate: Gate, inplace: bool = False) -> Tensor:
    if gate == "sigmoid":
        return z.sigmoid_() if inplace else z.sigmoid()
    return F.silu(z, inplace)


def _wide(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a copy of x in a type, even if that is its own: always one more tensor."""
    return torch.empty_like(x, dtype=dtype).copy_(x)


def _weighted(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply x (..., channels), in place, by the weight of all channels, or of one head for all heads; return x."""
    x.view(*x.shape[:-1], -1, len(weight)).mul_(weight)
    return x


def gated_rms_norm(
    y: Tensor,
    z: Tensor,
    weight: Tensor,
    groups: int,
    eps: float,
    gate: Gate,
    ranks: int = 1,
    total: Sum | None = None,
) -> Tensor:
    """Return the RMS norm of y, (..., channels), over each of `groups` parts of the channels, with a gate: silu(z)
    multiplies y before the norm (Mamba-2), or its result (gated delta net), or sigmoid(z) does. Keeps y, z and one
    number for each token and group.

    weight: (channels,), or (channels of a head,) for all heads. `ranks`: how many have a part of one group; `total`
    adds up their sums of squares, and backward their sums of products.
    """
    width = y.shape[-1] // groups * ranks
    return _GatedRMSNorm.apply(y, z, weight, groups, eps, gate, width, total)  # type: ignore[no-any-return]


def rms_norm_over_ranks(x: Tensor, weight: Tensor, eps: float, ranks: int, total: Sum) -> Tensor:
    """Return the RMS norm of x, (..., channels), over the channels of all of `ranks` ranks, of which this one has a
    part. Keeps x and one number for each token."""
    width = x.shape[-1] * ranks
    return _GatedRMSNorm.apply(x, None, weight, 1, eps, "none", width, total)  # type: ignore[no-any-return]


class _Sigmoid(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, gate: Tensor) -> Tensor:
        ctx.save_for_backward(y, gate)
        return gate.sigmoid() * y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        y, gate = ctx.saved_tensors
        open_ = gate.sigmoid()
        d_y = g * open_
        d_gate = (1 - open_) * (d_y * y).sum_to_size(gate.shape)
        return d_y, d_gate


def sigmoid_gate(y: Tensor, gate: Tensor) -> Tensor:
    """Return y sigmoid(gate). Keeps both. y: (..., channels); gate: like y, or one number a token, (..., 1)."""
    return _Sigmoid.apply(y, gate)  # type: ignore[no-any-return]
