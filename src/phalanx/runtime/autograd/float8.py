"""Matrix products of 8-bit floats: y = x Wᵀ, and in the backward pass dx = g W and dW = gᵀ x.

Each is of the form a bᵀ, with the rows of a and b along what is summed over. Both operands are scaled and rounded
just before, from their current values, and dropped just after; autograd keeps what it would keep without.

    float8        one scale a tensor; gradients g in e5m2, which has a wider range, all else in e4m3
    float8-row    one scale a row of a and of b; all in e4m3

A scale is the largest power of two with which the largest number still fits: so scaling is exact, and the only loss
is the rounding to 8 bits. Sums are in fp32, results in the compute type. A number that is not finite makes its result
so. torch._scaled_mm runs this on GPUs from compute capability 8.9 on, and on CPUs.
References: Micikevicius et al. 2022, "FP8 Formats for Deep Learning"; torchao's float8 recipes.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_EXPONENT = 0x7F800000  # the bits of a float32's exponent
_SMALLEST = 1e-12  # of zeros no scale can be found: they are taken for this


def rounded(x: Tensor, dtype: torch.dtype, rowwise: bool) -> tuple[Tensor, Tensor]:
    """Round x (rows, n), in any layout, to 8 bits. Returns (x in rows of `dtype`, what it has to be multiplied by: ()
    or (rows, 1), fp32)."""
    most = torch.finfo(dtype).max
    largest = torch.linalg.vector_norm(x, math.inf, -1 if rowwise else None, rowwise, dtype=torch.float32)
    scale = (most / largest.clamp_(min=_SMALLEST)).view(torch.int32).bitwise_and_(_EXPONENT).view(torch.float32)
    narrow = torch.empty(x.shape, dtype=dtype, device=x.device)
    torch.mul(x, scale.to(x.dtype), out=narrow)  # one pass: scaled, rounded, and in rows
    return narrow, scale.reciprocal()


def product(a: Tensor, b: Tensor, rowwise: bool, gradient: bool = False) -> Tensor:
    """Compute a bᵀ, (m, n), of a (m, k) and b (n, k) rounded to 8 bits. `gradient`: a is one, of a result."""
    narrow_a, of_a = rounded(a, E5M2 if gradient and not rowwise else E4M3, rowwise)
    narrow_b, of_b = rounded(b, E4M3, rowwise)
    # Adding up in the tensor cores' own, less precise way is faster, and good enough for results.
    return torch._scaled_mm(narrow_a, narrow_b.t(), of_a, of_b.t(), out_dtype=a.dtype, use_fast_accum=not gradient)


def results(x: Tensor, weight: Tensor, bias: Tensor | None, rowwise: bool) -> Tensor:
    """Return x Wᵀ + b, (..., out), of x (..., in)."""
    y = product(x.reshape(-1, x.shape[-1]), weight, rowwise)
    if bias is not None:
        y.add_(bias)
    # As F.linear returns it: a view made in here could not be changed in place by whoever adds up tp's terms.
    return torch.ops.aten._unsafe_view(y, (*x.shape[:-1], len(weight)))  # type: ignore[no-any-return]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, rowwise: bool, needed: bool) -> Tensor:
        ctx.rowwise, ctx.biased = rowwise, bias is not None
        ctx.save_for_backward(x, weight)
        shape = (*x.shape[:-1], len(weight))
        if not needed:
            return x.new_empty_strided(shape, (0,) * len(shape))  # recompute.nothing
        return results(x, weight, bias, rowwise)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        g = g.reshape(-1, g.shape[-1])
        d_x = product(g, weight.t(), ctx.rowwise, gradient=True).view(x.shape)
        d_weight = product(g.t(), x.reshape(-1, x.shape[-1]).t(), ctx.rowwise, gradient=True)
        return d_x, d_weight, g.sum(0) if ctx.biased else None, None, None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, rowwise: bool, needed: bool = True) -> Tensor:
    """Compute x Wᵀ + b by products of 8-bit floats; if not `needed`, return nothing of its shape (recompute.py).
    Keeps x and W."""
    return _Linear.apply(x, weight, bias, rowwise, needed)  # type: ignore[no-any-return]


class Float8Linear(nn.Linear):
    """A linear layer whose products are of 8-bit floats. `rowwise`: one scale a row, not a tensor."""

    rowwise: bool

    def forward(self, x: Tensor, needed: bool = True) -> Tensor:
        """Return x Wᵀ + b, or if not `needed`, nothing of its shape."""
        return linear(x, self.weight, self.bias, self.rowwise, needed)


def narrow_products(blocks: nn.Module, rowwise: bool) -> None:
    """Make the linear layers inside of `blocks` multiply 8-bit floats. Parameters and their names stay."""
    for layer in blocks.modules():
        if type(layer) is nn.Linear:
            layer.__class__ = Float8Linear
            cast(Float8Linear, layer).rowwise = rowwise
