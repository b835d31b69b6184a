"""Tensor parallelism: a layer's matrices over the tp ranks of a replica, with explicit collectives in both passes.

    columns   outputs are split. Forward: nothing. Backward: an all-reduce of the input's gradient, overlapped with
              the gradients of the weights
    rows      inputs are split. Forward: an all-reduce of the output. Backward: nothing

So each sub-layer (attention, MLP) has one all-reduce forward and one backward (Shoeybi et al. 2019, "Megatron-LM").
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from phalanx.runtime.autograd import deferred_weight_grads, narrow_product, recompute
from phalanx.runtime.autograd.deferred_weight_grads import Owners
from phalanx.runtime.autograd.layer_comm import LayerComm
from phalanx.runtime.comm.transport import DONE, Handle
from phalanx.runtime.model_parallel import sequence
from phalanx.runtime.model_parallel.sequence import Narrow, RankRows
from phalanx.schedule.event import Phase, Reduction
from phalanx.spec.model.blocks.block import Sublayer
from phalanx.spec.model.blocks.lowering import architecture
from phalanx.spec.number_formats import NumberFormat
from phalanx.spec.strategy.split import Split


class TensorParallel:
    """A rank's place among the tp ranks of its replica; one object for all layers. `rounds`: with sequence
    parallelism, products of 8-bit floats gather tokens in 8 bits."""

    def __init__(self, inner: LayerComm, split: Split, rounds: bool = False) -> None:
        self.inner, self.split, self.rounds = inner, split, rounds
        self.rows: RankRows | None = None
        """The tokens whose rows of the stream this rank has in the current pass (sequence parallelism); None: all."""

    def begin(self, batch: int, seq: int) -> None:
        """Begin a forward pass over (batch, seq) tokens. If they do not divide evenly, as at the end of an
        evaluation, every rank has all of them in this pass."""
        split = self.split
        even = split.sp and batch * seq % split.tp == 0
        self.rows = RankRows(self.inner, split.tp, split.index, batch, seq, self.rounds) if even else None

    def copies_of(self, fqn: str) -> int:
        """Return the number of neighbouring ranks that hold the same box of a parameter."""
        return self.split.box(fqn).copies

    def sublayer(self, block: int, name: str) -> Sublayer:
        """Return a sublayer as all ranks together have it."""
        return next(s for s in architecture(self.split.spec).blocks[block].sublayers if s.name == name)

    def all_reduce(self, tensor: Tensor, unit: str, phase: Phase, reduction: Reduction = "sum") -> Handle:
        """Start reducing a contiguous tensor in place over the tp ranks."""
        return self.inner.all_reduce(tensor, "tp", unit, phase, reduction)


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tp: TensorParallel | None,
        unit: str,
        owners: Owners,
        operands: NumberFormat | None,
        narrow: Narrow,
        x: Tensor,
        *parameters: Tensor | None,
    ) -> Any:
        weights, biases = cast("tuple[Tensor, ...]", parameters[::2]), parameters[1::2]
        ctx.tp, ctx.unit, ctx.owners, ctx.operands, ctx.narrow = tp, unit, owners, operands, narrow
        ctx.biased = [bias is not None for bias in biases]
        ctx.save_for_backward(x, *weights)
        each = zip(weights, narrow, biases, strict=True)
        return tuple(narrow_product.results(x, narrow_product.forward_operand(w, n), b, operands) for w, n, b in each)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *d_outs: Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        rows = x.view(-1, x.shape[-1])
        g = [part.reshape(-1, part.shape[-1]) for part in d_outs]
        d_x = narrow_product.product(
            g[0], narrow_product.backward_operand(weights[0], ctx.narrow[0]), ctx.operands, gradient=True
        )
        for part, weight, narrow in zip(g[1:], weights[1:], ctx.narrow[1:], strict=True):
            narrow_product.product(
                part, narrow_product.backward_operand(weight, narrow), ctx.operands, True, d_x, add=True
            )
        underway = ctx.tp.all_reduce(d_x, ctx.unit, "B") if ctx.tp is not None else DONE
        d_parameters: list[Tensor | None] = [None] * (2 * len(weights))
        deferred = deferred_weight_grads.deferral(ctx.owners)
        if deferred is not None:
            for owners, part in zip(deferred_weight_grads.by_layer(ctx.owners, ctx.biased), g, strict=True):
                deferred.product(owners, part, rows, ctx.operands)
        else:
            # Overlapped with the all-reduce. Without tp the engine computes the products where it takes gradients.
            by_layer = deferred_weight_grads.by_layer(() if ctx.tp is not None else ctx.owners, ctx.biased)
            for i, (part, owners, biased) in enumerate(zip(g, by_layer, ctx.biased, strict=True)):
                d_parameters[2 * i] = deferred_weight_grads.weight_gradient(owners, part, rows, ctx.operands)
                d_parameters[2 * i + 1] = part.sum(0) if biased else None
        underway.wait()
        return (None, None, None, None, None, d_x.view(x.shape), *d_parameters)


def columns(tp: TensorParallel | None, unit: str, x: Tensor, layers: Sequence[nn.Linear]) -> tuple[Tensor, ...]:
    """Compute x Wᵀ + b of layers that hold rows of W and b and read the same x: (..., in), which all ranks have, or
    with sequence parallelism this rank's rows of it. Without tp, the layers run by themselves unless they defer
    gradients."""
    parameters = [p for layer in layers for p in (layer.weight, layer.bias)]
    owners = deferred_weight_grads.owners(*parameters)
    if tp is None and not owners:
        return tuple(layer(x) for layer in layers)
    # Gradients of all parameters arrive at once; views, whose graph nodes are in order, make them reach the engine in
    # the order in which it fills its buckets.
    views = [None if p is None else p.view_as(p) for p in parameters]
    narrow = [narrow_product.narrow_weight(layer.weight) for layer in layers]
    if tp is not None and tp.rows is not None:
        return sequence.columns(tp.rows, unit, owners, recompute.operands_of(layers[0]), narrow, x, views)
    operands = recompute.operands_of(layers[0])
    return _Columns.apply(tp, unit, owners, operands, narrow, x, *views)  # type: ignore[no-any-return]


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


def copy_to_ranks(tp: TensorParallel, unit: str, x: Tensor) -> Tensor:
    """Return x, which all ranks have and use differently; backward all-reduces its gradient over the ranks."""
    return _Copied.apply(tp, unit, x)  # type: ignore[no-any-return]


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tp: TensorParallel, unit: str, owners: Owners, needed: bool, y: Tensor, *biases: Tensor
    ) -> Tensor:
        if needed:
            tp.all_reduce(y, unit, "F").wait()
            for bias in biases:
                y.add_(bias)
        ctx.owners, ctx.biases = owners, len(biases)
        ctx.mark_dirty(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        deferred = deferred_weight_grads.deferral(ctx.owners)
        d_bias = None
        if deferred is not None:
            for bias in ctx.owners:
                deferred.sum(bias, g.reshape(-1, g.shape[-1]))
        elif ctx.biases:
            d_bias = g.reshape(-1, g.shape[-1]).sum(0)
        return (None, None, None, None, g, *(d_bias for _ in range(ctx.biases)))


def rows(x: Tensor, layer: nn.Linear, needed: bool = True) -> Tensor:
    """Compute this rank's term of x Wᵀ, to be added up by `sum_terms`: the layer holds columns of W, and all of b.
    `needed`: whether the value is used (autograd/recompute.py)."""
    operands = recompute.operands_of(layer)
    if needed and operands is None and not deferred_weight_grads.owners(layer.weight):
        return F.linear(x, layer.weight)
    return recompute.product(x, layer.weight, needed=needed, operands=operands)


def sum_terms(
    tp: TensorParallel, unit: str, terms: Sequence[Any], layers: Sequence[nn.Linear], needed: bool = True
) -> Tensor:
    """Add up the ranks' terms of the outputs of `layers`, in one all-reduce, and add the biases once. With sequence
    parallelism terms are `ProductTerm`, and the result this rank's rows of the sum, by reduce-scatter."""
    if tp.rows is not None:
        return sequence.sum_terms(tp.rows, unit, terms, needed)
    y = terms[0]
    for other in terms[1:]:
        y = y.add_(other) if needed else recompute.add(y, other, needed)
    biases = [layer.bias for layer in layers if layer.bias is not None]
    return _Sum.apply(tp, unit, deferred_weight_grads.owners(*biases), needed, y, *biases)  # type: ignore[no-any-return]
