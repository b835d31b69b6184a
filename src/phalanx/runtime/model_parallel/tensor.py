"""Tensor parallelism: a layer's matrices over the tp ranks of a replica, with explicit collectives in both passes.

    columns   outputs are split: nothing forward; backward the gradient of the input is a sum over the ranks, which
              travels while the gradients of the weights are computed
    rows      inputs are split: forward the output is a sum over the ranks; backward nothing

So each sub-layer (attention; MLP) has one all-reduce forward and one backward (Shoeybi et al. 2019, "Megatron-LM").
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from phalanx.runtime.autograd import deferred_weight_grads, recompute
from phalanx.runtime.autograd.deferred_weight_grads import Owners
from phalanx.runtime.autograd.layer_comm import LayerComm
from phalanx.runtime.comm.transport import DONE, Handle
from phalanx.runtime.model_parallel import sequence
from phalanx.runtime.model_parallel.sequence import Rows
from phalanx.schedule.event import Phase, Reduction
from phalanx.spec.strategy.split import Split


class TensorParallel:
    """A rank's place among the tp ranks of its replica, given to its layers."""

    def __init__(self, inner: LayerComm, split: Split) -> None:
        self.inner, self.split = inner, split
        self.rows: Rows | None = None
        """Which tokens' rows of the stream this rank has in the pass that runs now; None: all."""

    def begin(self, batch: int, seq: int) -> None:
        """A forward pass over so many tokens begins. Where the ranks cannot have equal parts of them, as of the last
        sequences of an evaluation, each has all."""
        split = self.split
        even = split.sp and batch * seq % split.tp == 0
        self.rows = Rows(self.inner, split.tp, split.index, batch, seq) if even else None

    def all_reduce(self, tensor: Tensor, unit: str, phase: Phase, reduction: Reduction = "sum") -> Handle:
        """Start reducing a contiguous tensor in place over the tp ranks."""
        return self.inner.all_reduce(tensor, "tp", unit, phase, reduction)


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tp: TensorParallel | None, unit: str, owners: Owners, x: Tensor, *given: Tensor | None
    ) -> Any:
        weights, biases = given[::2], given[1::2]
        ctx.tp, ctx.unit, ctx.owners = tp, unit, owners
        ctx.biased = [bias is not None for bias in biases]
        ctx.save_for_backward(x, *weights)
        return tuple(F.linear(x, w, b) for w, b in zip(weights, biases, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *given: Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        rows = x.view(-1, x.shape[-1])
        g = [part.reshape(-1, part.shape[-1]) for part in given]
        d_x = g[0].mm(weights[0])
        for part, weight in zip(g[1:], weights[1:], strict=True):
            torch.addmm(d_x, part, weight, out=d_x)
        underway = ctx.tp.all_reduce(d_x, ctx.unit, "B") if ctx.tp is not None else DONE
        d_given: list[Tensor | None] = [None] * (2 * len(weights))
        put_off = deferred_weight_grads.now(ctx.owners)
        if put_off is not None:
            put_off.products(deferred_weight_grads.by_layer(ctx.owners, ctx.biased), g, rows)
        else:
            # While the sum over the ranks travels; one rank alone has whoever takes gradients make them.
            alone = deferred_weight_grads.by_layer(() if ctx.tp is not None else ctx.owners, ctx.biased)
            for i, (part, owners, biased) in enumerate(zip(g, alone, ctx.biased, strict=True)):
                d_given[2 * i] = deferred_weight_grads.beside(owners, part, rows)
                d_given[2 * i + 1] = part.sum(0) if biased else None
        underway.wait()
        return (None, None, None, d_x.view(x.shape), *d_given)


def columns(tp: TensorParallel | None, unit: str, x: Tensor, layers: Sequence[nn.Linear]) -> tuple[Tensor, ...]:
    """x Wᵀ + b of layers that hold rows of W and of b, and read one input x: (..., in), which all ranks have, or with
    sequence parallelism own rows of it. On one rank layers run on their own, but where they put gradients off."""
    parameters = [p for layer in layers for p in (layer.weight, layer.bias)]
    owners = deferred_weight_grads.owners(*parameters)
    if tp is None and not owners:
        return tuple(layer(x) for layer in layers)
    # Through views, whose nodes in the graph are in order: so their gradients, which come together, reach the engine
    # in the order in which it fills its buckets.
    given = [None if p is None else p.view_as(p) for p in parameters]
    if tp is not None and tp.rows is not None:
        return sequence.columns(tp.rows, unit, owners, x, given)
    return _Columns.apply(tp, unit, owners, x, *given)  # type: ignore[no-any-return]


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tp: TensorParallel, unit: str, x: Tensor) -> Tensor:
        ctx.tp, ctx.unit = tp, unit
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[None, None, Tensor]:
        g = g.contiguous()
        ctx.tp.all_reduce(g, ctx.unit, "B").wait()
        return None, None, g


def copied(tp: TensorParallel, unit: str, x: Tensor) -> Tensor:
    """x, which all ranks have, for each to make something else of: the gradient is summed over the ranks."""
    return _Copied.apply(tp, unit, x)  # type: ignore[no-any-return]


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tp: TensorParallel, unit: str, owners: Owners, made: bool, y: Tensor, *biases: Tensor
    ) -> Tensor:
        if made:
            tp.all_reduce(y, unit, "F").wait()
            for bias in biases:
                y.add_(bias)
        ctx.owners, ctx.biases = owners, len(biases)
        ctx.mark_dirty(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        put_off = deferred_weight_grads.now(ctx.owners)
        d_bias = None
        if put_off is not None:
            for bias in ctx.owners:
                put_off.sum(bias, g.reshape(-1, g.shape[-1]))
        elif ctx.biases:
            d_bias = g.reshape(-1, g.shape[-1]).sum(0)
        return (None, None, None, None, g, *(d_bias for _ in range(ctx.biases)))


def rows(x: Tensor, layer: nn.Linear, made: bool = True) -> Tensor:
    """This rank's term of x Wᵀ, whose sum over the ranks is `summed`: the layer holds columns of W, and all of b."""
    if made and not deferred_weight_grads.owners(layer.weight):
        return F.linear(x, layer.weight)
    return recompute.product(x, layer.weight, made=made)


def summed(
    tp: TensorParallel, unit: str, terms: Sequence[Any], layers: Sequence[nn.Linear], made: bool = True
) -> Tensor:
    """The sum over the ranks of their terms of some layers' outputs, in one all-reduce; or of the terms' factors, own
    rows of it in one reduce-scatter. And the biases, once."""
    if tp.rows is not None:
        return sequence.summed(tp.rows, unit, terms, made)
    y = terms[0]
    for other in terms[1:]:
        y = y.add_(other) if made else recompute.add(y, other, made)
    biases = [layer.bias for layer in layers if layer.bias is not None]
    return _Sum.apply(tp, unit, deferred_weight_grads.owners(*biases), made, y, *biases)  # type: ignore[no-any-return]
