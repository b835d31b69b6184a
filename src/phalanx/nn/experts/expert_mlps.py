"""The MLPs of a rank's experts, over rows ordered by expert: one matrix product per expert, over its rows only, or on
some GPUs one for all experts (runtime/autograd/grouped_product.py). An expert without rows takes no time, and its
gradient is zero."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from phalanx.runtime.autograd import deferred_weight_grads, grouped_product, narrow_product, recompute
from phalanx.runtime.autograd.deferred_weight_grads import GroupedProduct, Owners
from phalanx.spec.number_formats import NumberFormat


def product(
    x: Tensor,
    weights: Tensor,
    counts: Sequence[int],
    out: Tensor | None = None,
    add: bool = False,
    operands: NumberFormat | None = None,
    gradient: bool = False,
    narrow: narrow_product.NarrowWeight | None = None,
    offsets: grouped_product.RowEnds | None = None,
) -> Tensor:
    """Compute x W_e for the rows of each expert e: (rows, n), from x (rows, m), of which expert e has counts[e] rows,
    and W (experts, m, n). Written to `out` if given, or with `add` added to it. `operands`, `gradient`: as for
    products of a narrow format (runtime/autograd/narrow_product.py); `narrow`: the weights in 8 bits, if they are
    gathered in 8 bits. `offsets`: the row offsets on the device, if one kernel can multiply all experts."""
    if offsets is not None and not grouped_product.fits(x):
        offsets = None
    if offsets is not None and out is None:
        return grouped_product.multiply_all(x, weights, offsets)
    y = x.new_empty(len(x), weights.shape[-1]) if out is None else out
    for e, here, into in _expert_rows(counts, x, y):
        if offsets is not None:  # no second matrix of all rows
            one = grouped_product.multiply_expert(here, weights[e], e, offsets)
            into.add_(one) if add else into.copy_(one)
            continue
        by: narrow_product.Operand = weights[e].t()
        if narrow is not None:
            by = narrow.columns(e) if gradient else narrow.rows(e)
        narrow_product.product(here, by, operands, gradient, into, add)
    return y


def _expert_rows(counts: Sequence[int], x: Tensor, y: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield (expert, rows of x, rows of y) of every expert that has rows."""
    begins = 0
    for e, rows in enumerate(counts):
        if rows:
            here = slice(begins, begins + rows)
            yield e, x[here], y[here]
        begins += rows


def _row_ends(
    counts: Sequence[int], operands: NumberFormat | None, *weights: Tensor
) -> grouped_product.RowEnds | None:
    """Return the experts' row offsets on the device, sent once per pass; None if no kernel multiplies all experts."""
    return None if operands is not None else grouped_product.row_ends(counts, *weights)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        owners: Owners,
        counts: tuple[int, ...],
        operands: NumberFormat | None,
        narrow: Sequence[narrow_product.NarrowWeight | None],
        x: Tensor,
        gate: Tensor,
        up: Tensor,
        down: Tensor,
    ) -> Tensor:
        ctx.owners, ctx.counts, ctx.operands, ctx.narrow = owners, counts, operands, narrow
        multiply = partial(
            product, counts=counts, operands=operands, offsets=_row_ends(counts, operands, gate, up, down)
        )
        g, u = (multiply(x, w.mT, narrow=n) for w, n in zip((gate, up), narrow[:2], strict=True))
        ctx.save_for_backward(x, g, u, gate, up, down)
        return multiply(nn.functional.silu(g).mul_(u), down.mT, narrow=narrow[2])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> Any:
        x, g, u, gate, up, down = ctx.saved_tensors
        counts, d_y = ctx.counts, d_y.contiguous()
        where = _row_ends(counts, ctx.operands, gate, up, down)
        multiply = partial(product, counts=counts, operands=ctx.operands, gradient=True, offsets=where)
        gradient = _WeightGradient(ctx.owners, counts, ctx.operands, where)
        of_gate, of_up, of_down = ctx.narrow
        d_a = multiply(d_y, down, narrow=of_down)
        a = nn.functional.silu(g)
        d_u = d_a * a
        d_a.mul_(u)
        d_g = torch.ops.aten.silu_backward(d_a, g)
        del d_a
        d_down = gradient(2, d_y, a.mul_(u))
        del a
        d_x = multiply(d_g, gate, narrow=of_gate)
        multiply(d_u, up, out=d_x, add=True, narrow=of_up)
        d_up, d_gate = gradient(1, d_u, x), gradient(0, d_g, x)
        return None, None, None, None, d_x, d_gate, d_up, d_down


class _WeightGradient:
    """Returns gradients of weights in the backward pass, or hands their factors to the engine or a deferred pass."""

    def __init__(
        self,
        owners: Owners,
        counts: tuple[int, ...],
        operands: NumberFormat | None,
        where: grouped_product.RowEnds | None,
    ) -> None:
        self._owners, self._counts, self._operands, self._where = owners, counts, operands, where
        self._deferred = deferred_weight_grads.deferral(owners)

    def __call__(self, which: int, g: Tensor, x: Tensor) -> Tensor | None:
        gradient = GroupedProduct(g, x.detach(), self._counts, self._operands, self._where)
        if self._deferred is not None:
            self._deferred.deliver_later(self._owners[which], gradient)
            return None
        return deferred_weight_grads.leave_to_owner(self._owners[which:], gradient)


def swiglu(
    x: Tensor,
    counts: Sequence[int],
    gate: nn.Parameter,
    up: nn.Parameter,
    down: nn.Parameter,
    operands: NumberFormat | None = None,
) -> Tensor:
    """(silu(x gateᵀ) * (x upᵀ)) downᵀ of each expert, (rows, hidden). x: (rows, hidden), of which expert e has
    counts[e]; gate, up: (experts, ffn, hidden); down: (experts, hidden, ffn). Keeps x and two products of it."""
    # Views make gradients come in order, as in runtime/model_parallel/tensor.columns.
    views = [p.view_as(p) for p in (gate, up, down)]
    narrow = [narrow_product.narrow_weight(p) for p in (gate, up, down)]
    return _SwiGLU.apply(deferred_weight_grads.owners(gate, up, down), tuple(counts), operands, narrow, x, *views)  # type: ignore[no-any-return]


class _ReLU2(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        owners: Owners,
        counts: tuple[int, ...],
        operands: NumberFormat | None,
        narrow: Sequence[narrow_product.NarrowWeight | None],
        x: Tensor,
        up: Tensor,
        down: Tensor,
    ) -> Tensor:
        ctx.owners, ctx.counts, ctx.operands, ctx.narrow = owners, counts, operands, narrow
        multiply = partial(product, counts=counts, operands=operands, offsets=_row_ends(counts, operands, up, down))
        u = multiply(x, up.mT, narrow=narrow[0])
        ctx.save_for_backward(x, u, up, down)
        return multiply(u.relu().square_(), down.mT, narrow=narrow[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> Any:
        x, u, up, down = ctx.saved_tensors
        counts, d_y = ctx.counts, d_y.contiguous()
        where = _row_ends(counts, ctx.operands, up, down)
        multiply = partial(product, counts=counts, operands=ctx.operands, gradient=True, offsets=where)
        gradient = _WeightGradient(ctx.owners, counts, ctx.operands, where)
        of_up, of_down = ctx.narrow
        d_u = multiply(d_y, down, narrow=of_down)
        positive = u.relu()
        d_u.mul_(positive).mul_(2)
        d_down = gradient(1, d_y, positive.square_())
        del positive
        d_x = multiply(d_u, up, narrow=of_up)
        return None, None, None, None, d_x, gradient(0, d_u, x), d_down


def relu2(
    x: Tensor, counts: Sequence[int], up: nn.Parameter, down: nn.Parameter, operands: NumberFormat | None = None
) -> Tensor:
    """relu(x upᵀ)² downᵀ of each expert, as `swiglu` without a gate. Keeps x and its product."""
    views = [p.view_as(p) for p in (up, down)]
    narrow = [narrow_product.narrow_weight(p) for p in (up, down)]
    return _ReLU2.apply(deferred_weight_grads.owners(up, down), tuple(counts), operands, narrow, x, *views)  # type: ignore[no-any-return]


class _Matrices(nn.Module):
    """The matrices of all local experts in one parameter, (experts, out, in)."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))


class ExpertMLPs(nn.Module):
    """The MLPs of the local experts."""

    operands: NumberFormat | None = None
    """Narrow format of the products' operands; None: the compute type."""

    def __init__(self, here: int, hidden: int, ffn: int, gated: bool) -> None:
        super().__init__()
        if gated:
            self.gate = _Matrices(here, ffn, hidden)
        self.up = _Matrices(here, ffn, hidden)
        self.down = _Matrices(here, hidden, ffn)

    def forward(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Return each expert's MLP of its rows, of which it has counts[expert]."""
        up, down, operands = self.up.weight, self.down.weight, recompute.operands_of(self)
        if hasattr(self, "gate"):
            return swiglu(x, counts, self.gate.weight, up, down, operands)
        return relu2(x, counts, up, down, operands)
