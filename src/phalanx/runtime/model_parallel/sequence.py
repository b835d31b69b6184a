"""Sequence parallelism: between the regions that tensor parallelism splits, each tp rank has a part of the tokens
(Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models").

    columns   forward: all-gather of the input, of which own rows alone are kept; backward: the same once more, for
              the gradients of the weights; reduce-scatter of the input's gradient
    rows      forward: reduce-scatter of the output; backward: all-gather of its gradient

Products are made chunk by chunk: while one is computed, the other's rows are on their way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from phalanx.runtime.autograd import deferred_weight_grads, recompute
from phalanx.runtime.autograd.deferred_weight_grads import Deliver, Owners
from phalanx.runtime.autograd.layer_comm import LayerComm
from phalanx.runtime.comm.transport import Handle
from phalanx.schedule.event import Phase
from phalanx.schedule.layers.tensor import chunks


class Rows:
    """Which rows of the flattened (batch x seq) tokens this rank has: of every chunk, one after the other, the
    `index`-th of `ranks` equal parts. So a chunk is contiguous among all rows, and a rank's part of it among its own:
    what is gathered or scattered lies where it is read, and nothing is copied."""

    def __init__(self, inner: LayerComm, ranks: int, index: int, batch: int, seq: int) -> None:
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
    def forward(ctx: Any, rows: Rows, unit: str, owners: Owners, x: Tensor, *given: Any) -> Any:
        weights, biases = given[::2], given[1::2]
        ctx.rows, ctx.unit, ctx.owners = rows, unit, owners
        ctx.biased = [bias is not None for bias in biases]
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
        put_off = deferred_weight_grads.now(ctx.owners)
        if put_off is None:
            whole, arriving = rows.gather(x, ctx.unit, "B")
        d_x = torch.empty_like(x)
        underway = []
        terms = rows.memory(x.shape[-1], x)
        for into, term, first, *others in rows.per_chunk(d_x, terms, *g):
            torch.mm(first, weights[0], out=term)
            for part, weight in zip(others, weights[1:], strict=True):
                torch.addmm(term, part, weight, out=term)
            underway.append(rows.scatter(into, term, ctx.unit, "B"))
        d_given: list[Tensor | None] = [None] * (2 * len(weights))
        if put_off is None:
            for handle in arriving:
                handle.wait()
            d_given = [
                d
                for part, biased in zip(g, ctx.biased, strict=True)
                for d in (part.t().mm(whole), part.sum(0) if biased else None)
            ]
        else:
            put_off.leave(ctx.owners[-1], partial(_later, rows, ctx.unit, ctx.owners, ctx.biased, g, x.detach()))
        for handle in underway:
            handle.wait()
        return (None, None, None, d_x, *d_given)


def _later(
    rows: Rows, unit: str, owners: Owners, biased: list[bool], g: list[Tensor], x: Tensor, deliver: Deliver
) -> None:
    """The gradients that `columns` has put off."""
    whole, arriving = rows.gather(x, unit, "W")
    d_weights = [part.new_empty(part.shape[1], x.shape[1]) for part in g]
    for i, (handle, (here, *parts)) in enumerate(zip(arriving, rows.per_chunk(whole, *g), strict=True)):
        handle.wait()
        for d_weight, part in zip(d_weights, parts, strict=True):
            torch.addmm(d_weight, part.t(), here, beta=min(i, 1), out=d_weight)
    del whole, here
    for part, (weight, *bias) in reversed(list(zip(g, deferred_weight_grads.by_layer(owners, biased), strict=True))):
        if bias:
            deliver(bias[0], part.sum(0), [])
        deliver(weight, d_weights.pop(), [])


def columns(rows: Rows, unit: str, owners: Owners, x: Tensor, given: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """x Wᵀ + b of all tokens, each (batch, seq, out), of weights that stand in `given`, each before its bias or None;
    of x every rank has its own rows, (own, in)."""
    return _Columns.apply(rows, unit, owners, x, *given)  # type: ignore[no-any-return]


Core = Callable[..., Tensor]


@dataclass(frozen=True)
class Factors:
    """What a rank's term of a sum over the ranks is the product of, x Wᵀ: it is made as it is sent. x, (batch, seq,
    in), is the one of `inputs`; or `core` makes it of them, and once more in the backward pass, so that they alone
    are kept. `bias` is added to the sum."""

    inputs: tuple[Tensor | None, ...]
    weight: Tensor
    bias: Tensor | None
    core: Core | None = None
    inner: LayerComm | None = None
    owners: Owners = ()

    def x(self) -> Tensor:
        found = self.inputs[0] if self.core is None else self.core(*self.inputs)
        assert found is not None
        return found


def factors(x: Tensor, layer: nn.Linear) -> Factors:
    """Of a layer that holds columns of W. Through views of the parameters, whose nodes in the graph are in order (see
    tensor_parallel.columns)."""
    weight, bias = layer.weight.view_as(layer.weight), layer.bias
    owners = deferred_weight_grads.owners(layer.weight, bias)
    return Factors((x,), weight, None if bias is None else bias.view_as(bias), owners=owners)


def repeated(core: Core, inner: LayerComm, inputs: tuple[Tensor | None, ...], layer: nn.Linear) -> Factors:
    """The same, of what `core` makes of these inputs."""
    return replace(factors(layer.weight, layer), inputs=inputs, core=core, inner=inner)


class _Summed(torch.autograd.Function):
    """Of the tensors of all terms, one after the other: inputs, weight, bias."""

    @staticmethod
    def forward(
        ctx: Any, rows: Rows, unit: str, terms: Sequence[Factors], made: bool, *given: Tensor | None
    ) -> Tensor:
        ctx.rows, ctx.unit = rows, unit
        ctx.save_for_backward(*given)
        # Without the tensors, which would be kept past the backward pass.
        ctx.terms = [(term.core, term.inner, len(term.inputs)) for term in terms]
        ctx.owners = [term.owners for term in terms]
        width = len(terms[0].weight)
        if not made:
            return recompute.nothing(terms[0].weight, (rows.own, width))
        x = [term.x().reshape(rows.tokens, -1) for term in terms]
        out = x[0].new_empty(rows.own, width)
        memory = rows.memory(width, out)
        underway = []
        for into, part, first, *others in rows.per_chunk(out, memory, *x):
            torch.mm(first, terms[0].weight.t(), out=part)
            for other, term in zip(others, terms[1:], strict=True):
                torch.addmm(part, other, term.weight.t(), out=part)
            underway.append(rows.scatter(into, part, unit, "F"))
        for handle in underway:
            handle.wait()
        for term in terms:
            if term.bias is not None:
                out.add_(term.bias)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        rows: Rows = ctx.rows
        whole, arriving = rows.gather(g, ctx.unit, "B")
        saved, wanted = list(ctx.saved_tensors), list(ctx.needs_input_grad[4:])
        terms: list[tuple[Tensor, list[Tensor | None], Tensor, Tensor | None]] = []  # x, inputs, weight, bias
        for core, inner, n in ctx.terms:
            inputs, (weight, bias) = saved[:n], saved[n : n + 2]
            x = inputs[0]
            if core is not None:
                x, inputs = recompute.again(core, inner, inputs, wanted[:n])
            del saved[: n + 2], wanted[: n + 2]
            terms.append((x, inputs, weight, bias))
        d_x = [x.new_empty(x.shape).view(rows.tokens, -1) for x, *_ in terms]
        for handle, (here, *into) in zip(arriving, rows.per_chunk(whole, *d_x), strict=True):
            handle.wait()
            for part, (_, _, weight, _) in zip(into, terms, strict=True):
                torch.mm(here, weight, out=part)
        d_bias = g.sum(0) if any(bias is not None for *_, bias in terms) else None
        d_weights: list[Tensor | None] = [None] * len(terms)
        put_off = deferred_weight_grads.now(ctx.owners[0])
        if put_off is None:
            d_weights = [whole.t().mm(x.detach().view(rows.tokens, -1)) for x, *_ in terms]
        else:
            for owners, (x, *_) in zip(ctx.owners, terms, strict=True):
                for bias in owners[1:]:
                    put_off.made(bias, d_bias)
                put_off.product(owners[:1], whole, x.detach().view(rows.tokens, -1))
            d_bias = None
        del whole, here  # core passes need the room
        d_given: list[Tensor | None] = []
        for d, d_weight, (x, inputs, _, bias), (core, *_) in zip(d_x, d_weights, terms, ctx.terms, strict=True):
            d_inputs: list[Tensor | None] = [d.view(x.shape)]
            if core is not None:
                torch.autograd.backward(x, d.view(x.shape))
                d_inputs = [None if part is None else part.grad for part in inputs]
            d_given += [*d_inputs, d_weight, None if bias is None else d_bias]
        return (None, None, None, None, *d_given)


def summed(rows: Rows, unit: str, terms: Sequence[Factors], made: bool = True) -> Tensor:
    """This rank's rows, (own, out), of the sum over the ranks of all their terms; and the biases, once. `made`:
    whether anybody reads them (recompute.py)."""
    given = [part for term in terms for part in (*term.inputs, term.weight, term.bias)]
    return _Summed.apply(rows, unit, terms, made, *given)  # type: ignore[no-any-return]
