"""Embedding and cross-entropy over a vocabulary that is split over the tp ranks: each rank has some rows of it, and
so some logits of every token. Full logits exist nowhere.

As in functional.py, docstrings say which tensors are kept for the backward pass, and cost/memory counts exactly that.
"""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from phalanx.nn.functional import accumulate_dtype, add_product, row_gradient, rows_at_once
from phalanx.runtime.autograd import deferred_weight_grads
from phalanx.runtime.model_parallel.sequence import RankRows
from phalanx.runtime.model_parallel.tensor import TensorParallel
from phalanx.runtime.tracing import host_values
from phalanx.schedule.event import Phase


def _local_index(tokens: Tensor, tp: TensorParallel) -> tuple[Tensor, Tensor]:
    """Return (the row of each token on this rank, or 0; whether it has none here), both (tokens,)."""
    index = tokens.reshape(-1) - tp.split.first_token
    elsewhere = (index < 0).logical_or_(index >= tp.split.tokens)
    return index.masked_fill_(elsewhere, 0), elsewhere


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tp: TensorParallel, tokens: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.tp, ctx.weight = tp, weight
        ctx.rows = tp.rows
        index, elsewhere = _local_index(tokens, tp)
        if tp.rows is not None:
            return _scattered(tp.rows, index, elsewhere, weight)
        out = weight[index].masked_fill_(elsewhere.unsqueeze(-1), 0)
        tp.all_reduce(out, "embed", "F").wait()
        return out.view(*tokens.shape, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[None, None, Tensor | None]:
        (tokens,) = ctx.saved_tensors
        deferred = deferred_weight_grads.deferral(deferred_weight_grads.owners(ctx.weight))
        if deferred is not None:
            deferred.rows(ctx.weight, partial(_gradient, ctx.tp, ctx.rows, tokens, g, "W"))
            return None, None, None
        index, rows = _gradient(ctx.tp, ctx.rows, tokens, g, "B")
        return None, None, row_gradient(ctx.weight, index, rows)


def _gradient(
    tp: TensorParallel, own: RankRows | None, tokens: Tensor, g: Tensor, phase: Phase
) -> tuple[Tensor, Tensor]:
    """Return (index, values) of the rows of the weight's gradient on this rank."""
    index, elsewhere = _local_index(tokens, tp)
    if own is None:
        return index, g.reshape(-1, g.shape[-1]).masked_fill(elsewhere.unsqueeze(-1), 0)
    rows, arriving = own.gather(g, "embed", phase)
    for handle in arriving:
        handle.wait()
    return index, rows.masked_fill_(elsewhere.unsqueeze(-1), 0)


def _scattered(rows: RankRows, index: Tensor, elsewhere: Tensor, weight: Tensor) -> Tensor:
    out = weight.new_empty(rows.own, weight.shape[1])
    terms = rows.memory(weight.shape[1], weight)
    underway = []
    for into, term, here, hidden in rows.per_chunk(out, terms, index, elsewhere):
        torch.index_select(weight, 0, here, out=term).masked_fill_(hidden.unsqueeze(-1), 0)
        underway.append(rows.scatter(into, term, "embed", "F"))
    for handle in underway:
        handle.wait()
    return out


def embedding(tp: TensorParallel, tokens: Tensor, weight: Tensor) -> Tensor:
    """Look up tokens in a table split over tp, with one all-reduce: (*tokens.shape, hidden); with sequence
    parallelism one reduce-scatter, returning this rank's tokens only, (rows, hidden). Keeps the tokens; the gradient
    is delivered as by functional.embedding."""
    return _Embedding.apply(tp, tokens, weight)  # type: ignore[no-any-return]


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tp: TensorParallel, logits: Tensor, targets: Tensor, masked: bool) -> Tensor:
        loss = _loss(tp, logits, targets, ctx.needs_input_grad[1], masked)
        if ctx.needs_input_grad[1]:
            ctx.save_for_backward(logits)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[None, Tensor, None, None]:
        (d_logits,) = ctx.saved_tensors
        return None, d_logits.mul_(g), None, None


def _loss(tp: TensorParallel, logits: Tensor, targets: Tensor, gradient: bool, masked: bool) -> Tensor:
    """Return the summed loss of logits (tokens, rows of this rank); with `gradient`, overwrite them by its
    gradient. `masked`: tokens whose target is negative have none."""
    wide = accumulate_dtype(logits.dtype)
    if tp.split.tokens < logits.shape[1]:
        logits[:, tp.split.tokens :] = -math.inf  # padding of the vocabulary
    top = logits.amax(-1).to(wide)
    tp.all_reduce(top, "head", "F", "max").wait()
    index, elsewhere = _local_index(targets, tp)
    sums = torch.empty(2, len(logits), dtype=wide, device=logits.device)  # of exponentials; target logit
    step = rows_at_once(logits)
    slices = [slice(low, low + step) for low in range(0, len(logits), step)]
    for rows in host_values.rounds(slices):
        _sums(logits[rows], top[rows], index[rows].unsqueeze(-1), sums[:, rows])
    sums[1].masked_fill_(elsewhere, 0)
    tp.all_reduce(sums, "head", "F").wait()
    total, chosen = sums.unbind()
    without = targets < 0 if masked else None
    if gradient:
        norm = total if without is None else total.masked_fill(without, math.inf)
        ones = elsewhere.logical_not_().to(logits.dtype).neg_()
        for rows in host_values.rounds(slices):
            _softmax(logits[rows], top[rows], norm[rows])
            logits[rows].scatter_add_(-1, index[rows].unsqueeze(-1), ones[rows].unsqueeze(-1))
    losses = total.log_() - chosen
    return (losses if without is None else losses.masked_fill_(without, 0)).sum()


def _shifted(logits: Tensor, top: Tensor) -> Tensor:
    """Return logits - top, in place, or in new memory where sums have a wider type."""
    return (logits if logits.dtype == top.dtype else logits.to(top.dtype)).sub_(top.unsqueeze(-1))


def _sums(logits: Tensor, top: Tensor, index: Tensor, sums: Tensor) -> None:
    """Write to `sums`, (2, rows), the sum of exponentials and the logit at `index`, both relative to `top`. Leaves
    the exponentials in `logits` if types agree."""
    z = _shifted(logits, top)
    torch.sum(z.gather(-1, index), -1, out=sums[1])
    torch.sum(z.exp_(), -1, out=sums[0])


def _softmax(logits: Tensor, top: Tensor, total: Tensor) -> None:
    """Overwrite `logits`, as `_sums` left them, by the softmax; `total`: the sums of exponentials, (rows,)."""
    if logits.dtype == total.dtype:
        logits.div_(total.unsqueeze(-1))
    else:
        logits.copy_(_shifted(logits, top).exp_().div_(total.unsqueeze(-1)))


def cross_entropy(tp: TensorParallel, logits: Tensor, targets: Tensor, masked: bool = False) -> Tensor:
    """-Σ log softmax(logits)[target] over all tokens, the same on every rank, as functional.cross_entropy. Two
    all-reduces: of each token's largest logit; of its sum of exponentials and its target's logit. logits: (tokens,
    rows of this rank), OVERWRITTEN by the gradient. targets: (tokens,) int64, of the full vocabulary."""
    return _CrossEntropy.apply(tp, logits, targets, masked)  # type: ignore[no-any-return]


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tp: TensorParallel, x: Tensor, weight: Tensor, targets: Tensor, slices: int, masked: bool
    ) -> Tensor:
        wide, gradient = accumulate_dtype(x.dtype), any(ctx.needs_input_grad[1:3])
        gathered, arriving = (x, []) if tp.rows is None else tp.rows.gather(x, "head", "F")
        size = len(gathered) // max(1, len(arriving))  # tokens of a handle
        loss = torch.zeros((), dtype=wide, device=x.device)
        d_x = gathered
        if gradient:
            d_x = torch.empty_like(x) if tp.rows is None else tp.rows.memory(x.shape[1], x)
        d_weight = torch.empty(weight.shape if gradient else 0, dtype=wide, device=x.device)
        rows = len(gathered) // slices
        for low in range(0, len(gathered), rows):
            here = slice(low, low + rows)
            while arriving and low + rows > len(gathered) - size * len(arriving):
                arriving.pop(0).wait()
            d_logits = torch.mm(gathered[here], weight.t())  # (rows, rows of this rank), of the logits first
            loss += _loss(tp, d_logits, targets[here], gradient, masked)
            if gradient:
                torch.mm(d_logits, weight, out=d_x[here])
                add_product(d_weight, d_logits.t(), gathered[here], low == 0)
            del d_logits  # before the next slice
        if gradient:
            ctx.tp, ctx.rows = tp, tp.rows
            ctx.save_for_backward(d_x, d_weight)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[None, Tensor, Tensor, None, None, None]:
        d_x, d_weight = ctx.saved_tensors
        rows: RankRows | None = ctx.rows
        if rows is None:
            underway = [ctx.tp.all_reduce(d_x.mul_(g), "head", "B")]
        else:
            terms, d_x = d_x, d_x.new_empty(rows.own, d_x.shape[1])
            underway = [rows.scatter(into, term, "head", "B") for into, term in rows.per_chunk(d_x, terms.mul_(g))]
        d_weight = d_weight.mul_(g).to(d_x.dtype)  # meanwhile
        for handle in underway:
            handle.wait()
        return None, d_x, d_weight, None, None, None


def linear_cross_entropy(
    tp: TensorParallel, x: Tensor, weight: Tensor, targets: Tensor, slices: int, masked: bool = False
) -> Tensor:
    """cross_entropy(tp, x weightᵀ, targets), holding only one of `slices` equal slices of the logits at a time; each
    slice has two all-reduces. Keeps this rank's terms of the gradient of x, of all tokens, and the gradient of the
    weight in fp32 (fp64 in fp64 runs); the backward pass adds up the terms, in an all-reduce, or with sequence
    parallelism a reduce-scatter. Allows one backward pass only.

    x: (tokens, hidden), with sequence parallelism this rank's; weight: (rows of this rank, hidden); targets:
    (tokens,) int64, of the full vocabulary.
    """
    return _LinearCrossEntropy.apply(tp, x, weight, targets, slices, masked)  # type: ignore[no-any-return]


def gather_logits(tp: TensorParallel, logits: Tensor) -> Tensor:
    """Gather the full logits, (tokens, vocab), from each rank's, (tokens, rows of this rank)."""
    everyone = logits.new_empty(tp.split.tp, *logits.shape)
    tp.inner.all_gather(everyone.view(-1), logits.reshape(-1), "tp", "head", "F").wait()
    return everyone.transpose(0, 1).flatten(1)[:, : tp.split.spec.vocab]
