"""Sequence parallelism: between the regions that tensor parallelism splits, each tp rank has a part of the tokens
(Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models").

    columns   forward: all-gather of the input; autograd keeps this rank's rows only. Backward: the all-gather again,
              for the gradients of the weights, and a reduce-scatter of the input's gradient
    rows      forward: reduce-scatter of the output. Backward: all-gather of its gradient

Products are computed chunk by chunk, overlapped with the communication of the next chunk. Where they are of a narrow
format (autograd/narrow_product.py), weights are rounded once a pass, and a chunk when it is there. Or each rank
rounds its rows before they are gathered, with the scale of all tokens (job.precision.gather = "float8"): ranks reduce
their largest magnitudes to the maximum, and the gathered rows are bitwise equal to rounding after the gather.
Weights' gradients read the same numbers. (As in torchao, torchao/float8/float8_tensor_parallel.py.)
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from phalanx.runtime.autograd import deferred_weight_grads, narrow_product, recompute
from phalanx.runtime.autograd.deferred_weight_grads import Deliver, Owners
from phalanx.runtime.autograd.layer_comm import LayerComm
from phalanx.runtime.comm.transport import Handle
from phalanx.schedule.event import Phase
from phalanx.schedule.layers.collectives import chunks
from phalanx.spec.number_formats import NumberFormat

Narrow = Sequence[narrow_product.NarrowWeight | None]
"""Weights in 8 bits; None for a weight that is not gathered in 8 bits."""


class RankRows:
    """The rows of the flattened (batch x seq) tokens that this rank has: the `index`-th of `ranks` equal parts of
    every chunk. So a chunk is contiguous among all rows, and a rank's part of it among its own: collectives read and
    write in place, without copies. `rounds`: products of 8-bit floats gather their rows in 8 bits."""

    def __init__(self, inner: LayerComm, ranks: int, index: int, batch: int, seq: int, rounds: bool = False) -> None:
        self.inner, self.index, self.batch, self.seq, self.rounds = inner, index, batch, seq, rounds
        self.tokens, self.own = batch * seq, batch * seq // ranks
        self.chunks = int(chunks(self.tokens, ranks))
        self._ranks = ranks

    def of(self, unsharded: Tensor) -> Tensor:
        """Return this rank's rows, (own, ...), of a tensor of all tokens, (tokens, ...)."""
        parts = unsharded.view(self.chunks, self._ranks, -1, *unsharded.shape[1:])
        return parts[:, self.index].flatten(0, 1)

    def per_chunk(self, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yield the rows of each chunk, from tensors of all tokens or of this rank's."""
        return zip(*(tensor.chunk(self.chunks) for tensor in tensors), strict=True)

    def memory(self, width: int, like: Tensor) -> Tensor:
        """Return communication memory, (tokens, width), from which the transport can scatter."""
        return self.inner.comm.buffer(self.tokens * width, like.dtype, zeroed=False).view(-1, width)

    def gather(self, own: Tensor, unit: str, phase: Phase) -> tuple[Tensor, list[Handle]]:
        """Start to gather all ranks' rows. Returns ((tokens, width), a handle for each chunk)."""
        own = own.contiguous()
        gathered = own.new_empty(self.tokens, own.shape[-1])
        started = [
            self.inner.all_gather(into.view(-1), mine.view(-1), "tp", unit, phase)
            for into, mine in self.per_chunk(gathered, own)
        ]
        return gathered, started

    def gather_rounded(
        self, local: Tensor, dtype: torch.dtype, unit: str, phase: Phase, back: Tensor | None = None
    ) -> tuple[narrow_product.RoundedOperand, list[Handle]]:
        """Start to gather all ranks' rows in 8 bits, with one scale for all. `back`: the inverse scale from an
        earlier gather of the same rows; None: ranks compute it."""
        if back is None:
            largest = torch.linalg.vector_norm(local, math.inf, dtype=torch.float32)
            self.inner.all_reduce(largest, "tp", unit, phase, "max").wait()
            back = narrow_product.scale_of(largest, dtype).reciprocal()
        scale = back.reciprocal().to(local.dtype)  # exactly: it is a power of two
        numbers = torch.empty(self.tokens, local.shape[-1], dtype=dtype, device=local.device)
        started = []
        for into, rows in self.per_chunk(numbers, local):
            mine = into.chunk(self._ranks)[self.index]
            torch.mul(rows, scale, out=mine)
            source, target = (part.view(torch.uint8).view(-1) for part in (mine, into))
            started.append(self.inner.all_gather(target, source, "tp", unit, phase))
        return narrow_product.RoundedOperand(numbers, back), started

    def scatter(self, into: Tensor, chunk: Tensor, unit: str, phase: Phase) -> Handle:
        """Start to add up the ranks' terms of a chunk; this rank's rows of the sum are written to `into`."""
        return self.inner.reduce_scatter(into.view(-1), chunk.view(-1), "tp", unit, phase)


def _gather(
    rows: RankRows,
    local: Tensor,
    unit: str,
    phase: Phase,
    operands: NumberFormat | None,
    back: Tensor | None = None,
    gradient: bool = False,
) -> tuple[narrow_product.Operand, list[Handle]]:
    """Start to gather all ranks' rows as products of a format read them. `back`: as in `gather_rounded`."""
    if rows.rounds and operands is not None and operands.gathers:
        return rows.gather_rounded(local, narrow_product.E5M2 if gradient else narrow_product.E4M3, unit, phase, back)
    return rows.gather(local, unit, phase)


def _arrived(
    rows: RankRows, gathered: narrow_product.Operand, arriving: Sequence[Handle], *tensors: Tensor
) -> Iterator[tuple[Any, ...]]:
    """Yield each chunk of the gathered rows, once it has arrived, and of `tensors`."""
    numbers = gathered if isinstance(gathered, Tensor) else gathered.numbers
    for handle, (here, *parts) in zip(arriving, rows.per_chunk(numbers, *tensors), strict=True):
        handle.wait()
        yield here if isinstance(gathered, Tensor) else narrow_product.RoundedOperand(here, gathered.back), *parts


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: RankRows,
        unit: str,
        owners: Owners,
        operands: NumberFormat | None,
        narrow: Narrow,
        x: Tensor,
        *parameters: Any,
    ) -> Any:
        weights, biases = parameters[::2], parameters[1::2]
        ctx.rows, ctx.unit, ctx.owners, ctx.operands, ctx.narrow = rows, unit, owners, operands, narrow
        ctx.biased = [bias is not None for bias in biases]
        ctx.save_for_backward(x, *weights)
        gathered, arriving = _gather(rows, x, unit, "F", operands)
        ctx.back = None if isinstance(gathered, Tensor) else gathered.back
        outs = [x.new_empty(rows.batch, rows.seq, len(w)) for w in weights]
        by_token = [out.view(rows.tokens, -1) for out in outs]
        held = [
            narrow_product.operand(narrow_product.forward_operand(w, n), operands)
            for w, n in zip(weights, narrow, strict=True)
        ]
        for here, *into in _arrived(rows, gathered, arriving, *by_token):
            _linear_outputs(here, held, into, operands, biases)
        return tuple(outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *d_outs: Tensor) -> Any:
        rows: RankRows = ctx.rows
        x, *weights = ctx.saved_tensors
        g = [part.reshape(-1, part.shape[-1]) for part in d_outs]
        deferred = deferred_weight_grads.deferral(ctx.owners)
        if deferred is None:
            # Gather the input for weight gradients, unless those are deferred.
            gathered, arriving = _gather(rows, x, ctx.unit, "B", ctx.operands, ctx.back)
        # The input's gradient, scattered chunk by chunk.
        d_x = torch.empty_like(x)
        underway = []
        terms = rows.memory(x.shape[-1], x)
        right = [narrow_product.backward_operand(w, n) for w, n in zip(weights, ctx.narrow, strict=True)]
        for into, term in _chunk_by_chunk(rows, d_x, terms, g, right, ctx.operands, True):
            underway.append(rows.scatter(into, term, ctx.unit, "B"))
        del right
        # The weights' gradients, while the last chunks travel.
        d_given: list[Tensor | None] = [None] * (2 * len(weights))
        if deferred is None:
            for handle in arriving:
                handle.wait()
            d_weights = _products(g, gathered, ctx.operands)
            d_given = [
                d
                for part, d_weight, biased in zip(g, d_weights, ctx.biased, strict=True)
                for d in (d_weight, part.sum(0) if biased else None)
            ]
        else:
            deferred.leave(
                ctx.owners[-1],
                partial(
                    _weight_gradients, rows, ctx.unit, ctx.owners, ctx.biased, ctx.operands, ctx.back, g, x.detach()
                ),
            )
        for handle in underway:
            handle.wait()
        return (None, None, None, None, None, d_x, *d_given)


def _products(g: Sequence[Tensor], x: narrow_product.Operand, operands: NumberFormat | None) -> list[Tensor]:
    """Compute the weight gradients gᵀ x, (out, in), of several g (tokens, out) and one x (tokens, in)."""
    read = narrow_product.operand(narrow_product.transposed(x), operands)
    return [narrow_product.product(part.t(), read, operands, gradient=True) for part in g]


def _weight_gradients(
    rows: RankRows,
    unit: str,
    owners: Owners,
    biased: list[bool],
    operands: NumberFormat | None,
    back: Tensor | None,
    g: list[Tensor],
    x: Tensor,
    deliver: Deliver,
) -> None:
    """Compute and deliver the weight gradients that `columns` deferred."""
    gathered, arriving = _gather(rows, x, unit, "W", operands, back)
    if operands is None:
        d_weights = [part.new_empty(part.shape[1], x.shape[1]) for part in g]
        for i, (here, *parts) in enumerate(_arrived(rows, gathered, arriving, *g)):
            for d_weight, part in zip(d_weights, parts, strict=True):
                torch.addmm(d_weight, part.t(), here, beta=min(i, 1), out=d_weight)
        del here
    else:  # scales over all tokens
        for handle in arriving:
            handle.wait()
        d_weights = _products(g, gathered, operands)
    del gathered
    for part, (weight, *bias) in reversed(list(zip(g, deferred_weight_grads.by_layer(owners, biased), strict=True))):
        if bias:
            deliver(bias[0], part.sum(0), [])
        deliver(weight, d_weights.pop(), [])


def _chunk_by_chunk(
    rows: RankRows,
    out: Tensor,
    terms: Tensor,
    left: Sequence[Tensor],
    right: Sequence[narrow_product.Operand],
    operands: NumberFormat | None,
    gradient: bool = False,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield for each chunk (where its sum over ranks belongs in `out`, the sum of the products a bᵀ of its rows of
    each a in `left` and of b in `right`, written to `terms`)."""
    held = [narrow_product.operand(b, operands) for b in right]
    for into, term, *parts in rows.per_chunk(out, terms, *left):
        for i, (part, b) in enumerate(zip(parts, held, strict=True)):
            narrow_product.product(part, b, operands, gradient, term, add=i > 0)
        yield into, term


def _linear_outputs(
    chunk: narrow_product.Operand,
    weights: Sequence[narrow_product.Operand],
    outs: Sequence[Tensor],
    operands: NumberFormat | None,
    biases: Sequence[Tensor | None] | None = None,
    gradient: bool = False,
) -> None:
    """Write x Wᵀ + b of a chunk's rows x to `outs`, for several W and b."""
    read = narrow_product.operand(chunk, operands, gradient)
    for out, weight, bias in zip(outs, weights, biases or [None] * len(outs), strict=True):
        if bias is not None and isinstance(weight, Tensor):
            assert isinstance(chunk, Tensor)
            torch.addmm(bias, chunk, weight.t(), out=out)
            continue
        narrow_product.product(read, weight, operands, gradient, out)
        if bias is not None:
            out.add_(bias)


def columns(
    rows: RankRows,
    unit: str,
    owners: Owners,
    operands: NumberFormat | None,
    narrow: Narrow,
    x: Tensor,
    parameters: Sequence[Tensor | None],
) -> tuple[Tensor, ...]:
    """Compute x Wᵀ + b of all tokens, (batch, seq, out), for each weight in `parameters`, which holds weights and
    biases (or None) in turn; x: this rank's rows, (own, in). `operands`: the narrow format of products; `narrow`:
    each weight in 8 bits, or None."""
    return _Columns.apply(rows, unit, owners, operands, narrow, x, *parameters)  # type: ignore[no-any-return]


Core = Callable[..., Tensor]


@dataclass(frozen=True)
class ProductTerm:
    """A rank's term x Wᵀ of a sum over the ranks, computed chunk by chunk as it is sent. x, (batch, seq, in), is the
    only one of `inputs`; or `core` computes it from them, and again in the backward pass, so that autograd keeps the
    inputs alone. `bias` is added to the sum."""

    inputs: tuple[Tensor | None, ...]
    weight: Tensor
    bias: Tensor | None
    core: Core | None = None
    inner: LayerComm | None = None
    owners: Owners = ()
    operands: NumberFormat | None = None
    """Narrow format of the products' operands; None: the compute type."""
    narrow: narrow_product.NarrowWeight | None = None
    """The weight in 8 bits, if it is gathered in 8 bits."""

    def x(self) -> Tensor:
        """Return the left factor, (batch, seq, in)."""
        x = self.inputs[0] if self.core is None else self.core(*self.inputs)
        assert x is not None
        return x


def factors(x: Tensor, layer: nn.Linear) -> ProductTerm:
    """Return the factors of a layer that holds columns of W. Parameters are views, so that gradients arrive in order
    (see tensor.columns)."""
    weight = layer.weight.view_as(layer.weight)
    bias: Tensor | None = layer.bias
    owners = deferred_weight_grads.owners(layer.weight, bias)
    bias = None if bias is None else bias.view_as(bias)
    narrow = narrow_product.narrow_weight(layer.weight)
    return ProductTerm((x,), weight, bias, owners=owners, operands=recompute.operands_of(layer), narrow=narrow)


def recomputed_factors(
    core: Core, inner: LayerComm, inputs: tuple[Tensor | None, ...], layer: nn.Linear
) -> ProductTerm:
    """Return factors whose x is computed by `core` from `inputs`, and again in the backward pass."""
    return replace(factors(layer.weight, layer), inputs=inputs, core=core, inner=inner)


class _Summed(torch.autograd.Function):
    """Sums terms over ranks; its tensors are the inputs, weight and bias of each term in turn."""

    @staticmethod
    def forward(
        ctx: Any, rows: RankRows, unit: str, terms: Sequence[ProductTerm], needed: bool, *tensors: Tensor | None
    ) -> Tensor:
        ctx.rows, ctx.unit = rows, unit
        ctx.save_for_backward(*tensors)
        # Without the tensors: ctx would keep them beyond the backward pass.
        ctx.terms = [(term.core, term.inner, len(term.inputs)) for term in terms]
        ctx.owners = [term.owners for term in terms]
        ctx.narrow = [term.narrow for term in terms]
        ctx.operands = operands = terms[0].operands
        width = len(terms[0].weight)
        if not needed:
            return recompute.placeholder(terms[0].weight, (rows.own, width))
        x = [term.x().reshape(rows.tokens, -1) for term in terms]
        out = x[0].new_empty(rows.own, width)
        memory = rows.memory(width, out)
        right = [narrow_product.forward_operand(term.weight, term.narrow) for term in terms]
        underway = [
            rows.scatter(into, part, unit, "F")
            for into, part in _chunk_by_chunk(rows, out, memory, x, right, operands)
        ]
        for handle in underway:
            handle.wait()
        for term in terms:
            if term.bias is not None:
                out.add_(term.bias)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        rows: RankRows = ctx.rows
        gathered, arriving = _gather(rows, g, ctx.unit, "B", ctx.operands, gradient=True)
        saved, wanted = list(ctx.saved_tensors), list(ctx.needs_input_grad[4:])
        terms: list[tuple[Tensor, list[Tensor | None], Tensor, Tensor | None]] = []  # x, inputs, weight, bias
        for core, inner, n in ctx.terms:
            inputs, (weight, bias) = saved[:n], saved[n : n + 2]
            x = inputs[0]
            if core is not None:
                x, inputs = recompute.repeat(core, inner, inputs, wanted[:n])
            del saved[: n + 2], wanted[: n + 2]
            terms.append((x, inputs, weight, bias))
        d_x = [x.new_empty(x.shape).view(rows.tokens, -1) for x, *_ in terms]
        by = [
            narrow_product.backward_operand(weight, n) for (_, _, weight, _), n in zip(terms, ctx.narrow, strict=True)
        ]
        held = [narrow_product.operand(b, ctx.operands) for b in by]
        for chunk, *into in _arrived(rows, gathered, arriving, *d_x):
            _linear_outputs(chunk, held, into, ctx.operands, gradient=True)
        del by, held
        d_bias = g.sum(0) if any(bias is not None for *_, bias in terms) else None
        d_weights: list[Tensor | None] = [None] * len(terms)
        deferred = deferred_weight_grads.deferral(ctx.owners[0])
        if deferred is None:
            g_columns = narrow_product.operand(narrow_product.transposed(gathered), ctx.operands, gradient=True)
            d_weights = [
                narrow_product.product(g_columns, x.detach().view(rows.tokens, -1).t(), ctx.operands, gradient=True)
                for x, *_ in terms
            ]
            del g_columns
        else:
            for owners, (x, *_) in zip(ctx.owners, terms, strict=True):
                for bias in owners[1:]:
                    deferred.deliver_later(bias, d_bias)
                deferred.product(owners[:1], gathered, x.detach().view(rows.tokens, -1), ctx.operands)
            d_bias = None
        del gathered, chunk  # frees memory for the repeated core passes
        d_given: list[Tensor | None] = []
        for d, d_weight, (x, inputs, _, bias), (core, *_) in zip(d_x, d_weights, terms, ctx.terms, strict=True):
            d_inputs: list[Tensor | None] = [d.view(x.shape)]
            if core is not None:
                torch.autograd.backward(x, d.view(x.shape))
                d_inputs = [None if part is None else part.grad for part in inputs]
            d_given += [*d_inputs, d_weight, None if bias is None else d_bias]
        return (None, None, None, None, *d_given)


def sum_terms(rows: RankRows, unit: str, terms: Sequence[ProductTerm], needed: bool = True) -> Tensor:
    """Add up all terms of all ranks, and the biases once. Returns this rank's rows, (own, out). `needed`: whether the
    value is used (autograd/recompute.py)."""
    tensors = [part for term in terms for part in (*term.inputs, term.weight, term.bias)]
    return _Summed.apply(rows, unit, terms, needed, *tensors)  # type: ignore[no-any-return]
