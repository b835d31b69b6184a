"""Sequence parallelism: between the regions that tensor parallelism splits, each tp rank has a part of the tokens
(Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models").

    columns   forward: all-gather of the input, of which own rows alone are kept; backward: the same once more, for
              the gradients of the weights; reduce-scatter of the input's gradient
    rows      forward: reduce-scatter of the output; backward: all-gather of its gradient

Products are made chunk by chunk: while one is computed, the other's rows are on their way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from phalanx.runtime.inner import Inner
from phalanx.runtime.transport import Handle
from phalanx.schedule.event import Phase
from phalanx.schedule.tensor_parallel import chunks


class Rows:
    """Which rows of the flattened (batch x seq) tokens this rank has: of every chunk, one after the other, the
    `index`-th of `ranks` equal parts. So a chunk is contiguous among all rows, and a rank's part of it among its own:
    what is gathered or scattered lies where it is read, and nothing is copied."""

    def __init__(self, inner: Inner, ranks: int, index: int, batch: int, seq: int) -> None:
        self.inner, self.index, self.batch, self.seq = inner, index, batch, seq
        self.tokens, self.own = batch * seq, batch * seq // ranks
        self.chunks = int(chunks(self.tokens, ranks))
        self._ranks = ranks

    def of(self, whole: Tensor) -> Tensor:
        """This rank's, (own, ...), of what there is of all tokens, (tokens, ...)."""
        parts = whole.view(self.chunks, self._ranks, -1, *whole.shape[1:])
        return parts[:, self.index].flatten(0, 1)

    def per_chunk(self, *given: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """The rows of each chunk, of tensors of all tokens or of own ones."""
        return zip(*(tensor.chunk(self.chunks) for tensor in given), strict=True)

    def memory(self, width: int, like: Tensor) -> Tensor:
        """(tokens, width), where what is to be scattered may lie."""
        return self.inner.comm.buffer(self.tokens * width, like.dtype, zeroed=False).view(-1, width)

    def gather(self, own: Tensor, unit: str, phase: Phase) -> tuple[Tensor, list[Handle]]:
        """Start to bring all ranks' rows together: (tokens, width), of which a chunk is there when its handle says
        so."""
        own = own.contiguous()
        whole = own.new_empty(self.tokens, own.shape[-1])
        started = [
            self.inner.all_gather(into.view(-1), mine.view(-1), "tp", unit, phase)
            for into, mine in self.per_chunk(whole, own)
        ]
        return whole, started

    def scatter(self, into: Tensor, chunk: Tensor, unit: str, phase: Phase) -> Handle:
        """Start to add up the ranks' terms of a chunk; own rows of the sum come `into` theirs."""
        return self.inner.reduce_scatter(into.view(-1), chunk.view(-1), "tp", unit, phase)


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Rows, unit: str, x: Tensor, biased: bool, *given: Tensor) -> Any:
        weights = given[::2] if biased else given
        biases = given[1::2] if biased else (None,) * len(weights)
        ctx.rows, ctx.unit, ctx.biased = rows, unit, biased
        ctx.save_for_backward(x, *weights)
        whole, arriving = rows.gather(x, unit, "F")
        outs = [x.new_empty(rows.batch, rows.seq, len(w)) for w in weights]
        by_token = [out.view(rows.tokens, -1) for out in outs]
        for handle, (here, *into) in zip(arriving, rows.per_chunk(whole, *by_token), strict=True):
            handle.wait()
            for out, weight, bias in zip(into, weights, biases, strict=True):
                if bias is None:
                    torch.mm(here, weight.t(), out=out)
                else:
                    torch.addmm(bias, here, weight.t(), out=out)
        return tuple(outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *given: Tensor) -> Any:
        rows: Rows = ctx.rows
        x, *weights = ctx.saved_tensors
        g = [part.reshape(-1, part.shape[-1]) for part in given]
        whole, arriving = rows.gather(x, ctx.unit, "B")
        d_x = torch.empty_like(x)
        underway = []
        terms = rows.memory(x.shape[-1], x)
        for into, term, first, *others in rows.per_chunk(d_x, terms, *g):
            torch.mm(first, weights[0], out=term)
            for part, weight in zip(others, weights[1:], strict=True):
                torch.addmm(term, part, weight, out=term)
            underway.append(rows.scatter(into, term, ctx.unit, "B"))
        for handle in arriving:
            handle.wait()
        d_given = [
            d for part in g for d in ((part.t().mm(whole), part.sum(0)) if ctx.biased else (part.t().mm(whole),))
        ]
        for handle in underway:
            handle.wait()
        return (None, None, d_x, None, *d_given)


def columns(rows: Rows, unit: str, x: Tensor, biased: bool, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """x Wᵀ + b of all tokens, each (batch, seq, out), of weights that stand in `given`, each before its bias; of x
    every rank has its own rows, (own, in)."""
    return _Columns.apply(rows, unit, x, biased, *given)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Factors:
    """What a rank's term of a sum over the ranks is the product of, x Wᵀ: it is made as it is sent. `bias` is added
    to the sum."""

    x: Tensor  # (batch, seq, in)
    weight: Tensor
    bias: Tensor | None


def factors(x: Tensor, layer: nn.Linear) -> Factors:
    """Through views of the parameters, whose nodes in the graph are in order (see tensor_parallel.columns)."""
    weight = layer.weight.view_as(layer.weight)
    return Factors(x, weight, None if layer.bias is None else layer.bias.view_as(layer.bias))


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Rows, unit: str, *given: Tensor | None) -> Tensor:
        x = [part.reshape(rows.tokens, -1) for part in given[::3] if part is not None]
        weights = [w for w in given[1::3] if w is not None]
        ctx.rows, ctx.unit, ctx.biased = rows, unit, [bias is not None for bias in given[2::3]]
        ctx.save_for_backward(*x, *weights)
        out = x[0].new_empty(rows.own, len(weights[0]))
        terms = rows.memory(out.shape[-1], out)
        underway = []
        for into, term, first, *others in rows.per_chunk(out, terms, *x):
            torch.mm(first, weights[0].t(), out=term)
            for part, weight in zip(others, weights[1:], strict=True):
                torch.addmm(term, part, weight.t(), out=term)
            underway.append(rows.scatter(into, term, unit, "F"))
        for handle in underway:
            handle.wait()
        for bias in given[2::3]:
            if bias is not None:
                out.add_(bias)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        rows: Rows = ctx.rows
        saved = ctx.saved_tensors
        x, weights = saved[: len(saved) // 2], saved[len(saved) // 2 :]
        whole, arriving = rows.gather(g, ctx.unit, "B")
        d_x = [part.new_empty(part.shape) for part in x]
        for handle, (here, *into) in zip(arriving, rows.per_chunk(whole, *d_x), strict=True):
            handle.wait()
            for part, weight in zip(into, weights, strict=True):
                torch.mm(here, weight, out=part)
        d_bias = g.sum(0) if any(ctx.biased) else None
        d_given: list[Tensor | None] = []
        for d, part, biased in zip(d_x, x, ctx.biased, strict=True):
            d_given += [d.view(rows.batch, rows.seq, -1), whole.t().mm(part), d_bias if biased else None]
        return (None, None, *d_given)


def summed(rows: Rows, unit: str, terms: Sequence[Factors]) -> Tensor:
    """This rank's rows, (own, out), of the sum over the ranks of all their terms; and the biases, once."""
    given = [part for term in terms for part in (term.x, term.weight, term.bias)]
    return _Summed.apply(rows, unit, *given)  # type: ignore[no-any-return]
