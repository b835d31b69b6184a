"""Activation recomputation: a region of a model keeps only its inputs.

    forward    without a graph; the inputs are kept
    backward   the forward pass again, now with a graph, and the backward pass through that

The outputs of the repeated pass are never read: the last matrix products, their sum over ranks, the addition to the
residual stream. Gradients need the inputs of these operations, not their outputs. So with `needed=False` a region
ends in tensors of the right shape with one element of memory; nothing is computed or sent for them.

The parameters' gradients reach their hooks during the inner backward pass, in the same order as without
recomputation. Reference: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost".
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from phalanx.runtime.autograd import deferred_weight_grads, narrow_product
from phalanx.runtime.autograd.deferred_weight_grads import Owners
from phalanx.runtime.autograd.layer_comm import LayerComm
from phalanx.spec.number_formats import NumberFormat

Region = Callable[..., Tensor]
"""(needed, *inputs) -> output. With `needed` false, only the output's shape matters."""


class _Repeated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, region: Region, inner: LayerComm, *inputs: Tensor | None) -> Tensor:
        ctx.region, ctx.inner = region, inner
        ctx.save_for_backward(*inputs)
        return region(True, *inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        out, inputs = repeat(partial(ctx.region, False), ctx.inner, ctx.saved_tensors, ctx.needs_input_grad[2:])
        torch.autograd.backward(out, g)
        return (None, None, *(None if t is None else t.grad for t in inputs))


def repeat(
    region: Callable[..., Tensor], inner: LayerComm, saved: Sequence[Tensor | None], wanted: Sequence[bool]
) -> tuple[Tensor, list[Tensor | None]]:
    """Repeat a region on saved inputs, with a graph; return its output and the graph's inputs. The inputs whose
    gradients are `wanted` are detached copies that require gradients."""
    inputs = [t.detach().requires_grad_() if w and t is not None else t for t, w in zip(saved, wanted, strict=True)]
    inner.again = True
    try:
        with torch.enable_grad():
            return region(*inputs), inputs
    finally:
        inner.again = False


def recomputed(region: Region, inner: LayerComm, *inputs: Tensor | None) -> Tensor:
    """Run a region and return its output. Keeps only the inputs, and repeats the region in the backward pass."""
    return _Repeated.apply(region, inner, *inputs)  # type: ignore[no-any-return]


def needs_backward(x: Tensor) -> bool:
    """Whether there will be a backward pass through x, for which tensors must be kept."""
    return torch.is_grad_enabled() and x.requires_grad


def placeholder(like: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a placeholder of that shape with one element of memory, whose content is never read."""
    return like.new_empty_strided(shape, (0,) * len(shape))


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        owners: Owners,
        needed: bool,
        operands: NumberFormat | None,
        narrow: narrow_product.NarrowWeight | None,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        ctx.owners, ctx.operands, ctx.narrow, ctx.biased = owners, operands, narrow, bias is not None
        ctx.save_for_backward(x, weight)
        if not needed:
            return placeholder(x, (*x.shape[:-1], weight.shape[0]))
        return narrow_product.results(x, narrow_product.forward_operand(weight, narrow), bias, operands)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        g = g.reshape(-1, g.shape[-1])
        by = narrow_product.backward_operand(weight, ctx.narrow)
        d_x = narrow_product.product(g, by, ctx.operands, gradient=True).view(x.shape)
        del by
        rows = x.view(-1, x.shape[-1])
        deferred_gradients = deferred_weight_grads.deferral(ctx.owners)
        if deferred_gradients is not None:
            deferred_gradients.product(ctx.owners, g, rows, ctx.operands)
            return None, None, None, None, d_x, None, None
        d_weight = deferred_weight_grads.weight_gradient(ctx.owners, g, rows, ctx.operands)
        return None, None, None, None, d_x, d_weight, g.sum(0) if ctx.biased else None


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, needed: bool = False, operands: NumberFormat | None = None
) -> Tensor:
    """Return x Wᵀ + b, or a `placeholder` of its shape if not `needed`; by products of a narrow format unless
    `operands` is None (narrow_product.py). Keeps x and W. Defers weight gradients if asked to
    (deferred_weight_grads.py)."""
    # Through views, as in model_parallel/tensor.py, so that gradients arrive in order.
    views = weight.view_as(weight), None if bias is None else bias.view_as(bias)
    owners = deferred_weight_grads.owners(weight, bias)
    return _Product.apply(owners, needed, operands, narrow_product.narrow_weight(weight), x, *views)  # type: ignore[no-any-return]


def linear(layer: nn.Linear, x: Tensor, needed: bool = True) -> Tensor:
    """Return x Wᵀ + b of a layer, or a `placeholder` of its shape if not `needed`."""
    # torch's stubs call a layer's parameters tensors.
    weight, bias = cast(nn.Parameter, layer.weight), cast("nn.Parameter | None", layer.bias)
    operands = operands_of(layer)
    if needed and operands is None and not deferred_weight_grads.owners(weight):
        return layer(x)  # type: ignore[no-any-return]
    return product(x, weight, bias, needed, operands)


def operands_of(layer: nn.Module) -> NumberFormat | None:
    """Return the narrow format of a layer's products; None for the compute type."""
    return layer.__dict__.get("operands")


class _NoSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        return placeholder(a, a.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        return g, g


def add(a: Tensor, b: Tensor, needed: bool) -> Tensor:
    """Return a + b, or a `placeholder` of its shape if not `needed`. Keeps neither."""
    return a + b if needed else _NoSum.apply(a, b)
