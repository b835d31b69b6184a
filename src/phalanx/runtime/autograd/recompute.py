"""Activation recomputation: a region of a model keeps its inputs alone (Chen et al. 2016, "Training Deep Nets with
Sublinear Memory Cost").

    forward    without a graph; the inputs are kept
    backward   the forward pass once more, now with a graph, and the backward pass through that

What the repeated pass would end with, nobody reads: matrix products, their sum over ranks, the addition to the
stream. Their gradients need what goes in and not what comes out. So with `made=False` a region ends in tensors of the
right shape that have one element of memory; nothing is computed or sent for them.

Parameters' gradients reach their hooks from within, one after the other, in the order of one whole graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from phalanx.runtime.autograd import deferred_weight_grads
from phalanx.runtime.autograd.deferred_weight_grads import Owners
from phalanx.runtime.autograd.layer_comm import Inner

Region = Callable[..., Tensor]
"""(made, *inputs) -> output."""


class _Repeated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, region: Region, inner: Inner, *inputs: Tensor | None) -> Tensor:
        ctx.region, ctx.inner = region, inner
        ctx.save_for_backward(*inputs)
        return region(True, *inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        out, inputs = again(partial(ctx.region, False), ctx.inner, ctx.saved_tensors, ctx.needs_input_grad[2:])
        torch.autograd.backward(out, g)
        return (None, None, *(None if t is None else t.grad for t in inputs))


def again(
    region: Callable[..., Tensor], inner: Inner, given: Sequence[Tensor | None], wanted: Sequence[bool]
) -> tuple[Tensor, list[Tensor | None]]:
    """The output of a region, and the inputs that it was made of, with a graph between: of those whose gradients are
    `wanted`."""
    inputs = [t.detach().requires_grad_() if w and t is not None else t for t, w in zip(given, wanted, strict=True)]
    inner.again = True
    try:
        with torch.enable_grad():
            return region(*inputs), inputs
    finally:
        inner.again = False


def repeated(region: Region, inner: Inner, *inputs: Tensor | None) -> Tensor:
    """The region's output. Keeps the inputs."""
    return _Repeated.apply(region, inner, *inputs)  # type: ignore[no-any-return]


def pays(x: Tensor) -> bool:
    """Whether there will be a backward pass, to keep something for."""
    return torch.is_grad_enabled() and x.requires_grad


def nothing(like: Tensor, shape: Sequence[int]) -> Tensor:
    """A tensor of that shape, of which nobody reads anything."""
    return like.new_empty_strided(shape, (0,) * len(shape))


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, owners: Owners, made: bool, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.owners, ctx.biased = owners, bias is not None
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias) if made else nothing(x, (*x.shape[:-1], weight.shape[0]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        g = g.reshape(-1, g.shape[-1])
        d_x, rows = g.mm(weight).view(x.shape), x.view(-1, x.shape[-1])
        put_off = deferred_weight_grads.now(ctx.owners)
        if put_off is not None:
            put_off.product(ctx.owners, g, rows)
            return None, None, d_x, None, None
        return None, None, d_x, deferred_weight_grads.beside(ctx.owners, g, rows), g.sum(0) if ctx.biased else None


def product(x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None = None, made: bool = False) -> Tensor:
    """x Wᵀ + b, if `made`. Keeps x and W. Puts gradients off (weight_gradients.py)."""
    # Through views, as in tensor_parallel.columns: gradients come in order.
    views = weight.view_as(weight), None if bias is None else bias.view_as(bias)
    return _Product.apply(deferred_weight_grads.owners(weight, bias), made, x, *views)  # type: ignore[no-any-return]


def linear(layer: nn.Linear, x: Tensor, made: bool = True) -> Tensor:
    """x Wᵀ + b."""
    if made and not deferred_weight_grads.owners(layer.weight):
        return layer(x)  # type: ignore[no-any-return]
    return product(x, layer.weight, layer.bias, made)


class _NoSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        return nothing(a, a.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        return g, g


def add(a: Tensor, b: Tensor, made: bool) -> Tensor:
    """a + b. Keeps neither."""
    return a + b if made else _NoSum.apply(a, b)  # type: ignore[no-any-return]
