"""The gated short convolution of LFM2 (Liquid AI 2025): y = c ∘ conv(b ∘ x), with b, c and x projected from the
token, channels divided over tp.

Over cp, ranks give each other the last tokens of b ∘ x before their own (runtime/model_parallel/halo.py).

Kept for the backward pass: b, c and x, with cp those few tokens, and y by the last product. The convolution is
computed again, so that selective recomputation changes nothing.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from phalanx.nn.attention import Cache
from phalanx.nn.functional import accumulate_dtype
from phalanx.nn.recurrences.convolution import Filter, FilterGradient
from phalanx.nn.recurrences.recurrence import PastMixer, slot_tokens
from phalanx.runtime.autograd import deferred_weight_grads
from phalanx.runtime.autograd.deferred_weight_grads import Owners
from phalanx.runtime.model_parallel.context import ContextParallel
from phalanx.runtime.model_parallel.halo import Halo
from phalanx.runtime.model_parallel.tensor import TensorParallel
from phalanx.spec.model.blocks.block import Sublayer
from phalanx.spec.model.blocks.operators import Conv
from phalanx.spec.model.spec import ModelSpec


class _GatedConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        halo: Halo | None,
        owners: Owners,
        begins: Tensor | None,
        b: Tensor,
        c: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        f, u, y = Filter.of(weight, bias, accumulate_dtype(x.dtype)), b * x, torch.empty_like(c)
        before = None if halo is None else halo.before(u)
        for i, rows in _pieces(halo, u):
            _multiplied(_convolved(f, u, before, begins, i, rows), c, y, rows)
        ctx.halo, ctx.owners = halo, owners
        ctx.save_for_backward(begins, before, b, c, x, weight, bias)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        begins, before, b, c, x, weight, bias = ctx.saved_tensors
        f, u, halo = Filter.of(weight, bias, accumulate_dtype(x.dtype)), b * x, ctx.halo
        d, d_c, d_u = FilterGradient.zero(f), torch.empty_like(c), torch.zeros_like(u)
        d_before = None if before is None else torch.empty_like(before)
        for i, rows in _pieces(halo, u):
            _multiplied(_convolved(f, u, before, begins, i, rows), g, d_c, rows)
            _convolved_back(f, u, before, begins, i, rows, g, c, d_u, d_before, d)
        if halo is not None:
            halo.after(d_u, d_before)
        d_parameters = deferred_weight_grads.deliver(ctx.owners, *d.as_given(x.dtype))
        return None, None, None, d_u * x, d_c, d_u * b, *d_parameters


def _pieces(halo: Halo | None, u: Tensor) -> Iterator[tuple[int, slice]]:
    """Yield (number, tokens) of each piece of consecutive tokens; without cp there is one."""
    pieces, tokens = (1, u.shape[1]) if halo is None else (halo.pieces, u.shape[1] // halo.pieces)
    for i in range(pieces):
        yield i, slice(i * tokens, (i + 1) * tokens)


def _convolution_input(f: Filter, u: Tensor, before: Tensor | None, i: int, rows: slice) -> Tensor:
    """Return the tokens that the convolution of a piece reads, (early + tokens, batch, channels)."""
    own = u[:, rows]
    seen = f.seen(own, 0, own.shape[1])
    if before is not None:
        seen[: f.early] = before[i]
    return seen


def _begins(begins: Tensor | None, rows: slice) -> Tensor | None:
    return None if begins is None else begins[:, rows].t()


def _convolved(f: Filter, u: Tensor, before: Tensor | None, begins: Tensor | None, i: int, rows: slice) -> Tensor:
    """Return the convolution of piece `i`, (tokens, batch, channels)."""
    return f.forward(_convolution_input(f, u, before, i, rows), _begins(begins, rows))


def _multiplied(out: Tensor, factor: Tensor, into: Tensor, rows: slice) -> None:
    """Write a piece's product, which overwrites `out`, into its rows."""
    into[:, rows].copy_(out.mul_(factor[:, rows].transpose(0, 1)).transpose(0, 1))


def _convolved_back(
    f: Filter,
    u: Tensor,
    before: Tensor | None,
    begins: Tensor | None,
    i: int,
    rows: slice,
    g: Tensor,
    c: Tensor,
    d_u: Tensor,
    d_before: Tensor | None,
    d: FilterGradient,
) -> None:
    """Add the gradients of piece `i`: of u there, of the tokens before the piece, and of the filter."""
    seen = _convolution_input(f, u, before, i, rows)
    d_out = seen.new_empty(len(seen) - f.early, *seen.shape[1:])
    d_out.copy_(g[:, rows].transpose(0, 1)).mul_(c[:, rows].transpose(0, 1))
    d_seen = f.backward(seen, d_out, d, _begins(begins, rows))
    f.add_seen(d_u[:, rows], d_seen, 0, len(d_out))
    if d_before is not None:
        d_before[i] = d_seen[: f.early]


class ShortConvolution(PastMixer):
    """A gated short convolution."""

    def __init__(
        self,
        spec: ModelSpec,
        sublayer: Sublayer,
        block: int,
        tp: TensorParallel | None,
        cp: ContextParallel | None = None,
    ) -> None:
        super().__init__(spec, sublayer, block, tp)
        conv = sublayer.first(Conv)
        self.halo = Halo(cp, self.unit, conv.taps - 1) if cp is not None and conv is not None else None

    def mixed(self, parts: Mapping[str, Tensor], begins: Tensor | None) -> Tensor:
        (f,) = self.filters
        # Through views, as in model_parallel/tensor.py, so that gradients arrive in order.
        views = [None if p is None else p.view_as(p) for p in (f.weight, f.bias)]
        owners = deferred_weight_grads.owners(f.weight, f.bias)
        read = parts["b"], parts["c"], parts["x"]
        return _GatedConv.apply(self.halo, owners, begins, *read, *views)  # type: ignore[no-any-return]

    def generated(self, cache: Cache, parts: Mapping[str, Tensor]) -> Tensor:
        u, (filters,), results = parts["b"] * parts["x"], self.filters, []
        f = filters.of(accumulate_dtype(u.dtype))
        for slots in cache.continuations():
            inputs, _ = cache.recall(self.block, slots)
            seen = torch.cat([inputs, slot_tokens(u, slots)], 1)
            out = f.forward(seen.transpose(0, 1).to(f.weight.dtype)).transpose(0, 1)
            cache.keep(self.block, slots, seen[:, seen.shape[1] - f.early :])
            results.append(out.reshape(1, -1, out.shape[2]).to(u.dtype))
        return torch.cat(results, 1) * parts["c"]
