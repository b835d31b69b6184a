"""A mixture of experts in place of the MLP (Shazeer et al. 2017; Dai et al. 2024, "DeepSeekMoE").

    router     logits of every token of the rank; its experts and their weights (routing.py)
    leave      rows of the rank's tokens start to travel to their experts' ranks (runtime/model_parallel/expert.py)
    shared     the MLP that all tokens go through, overlapped with that
    experts    the MLPs of the rank's experts, over the rows that arrived
    give back, combine    results return; each token's rows are summed by their weights

A rank routes its own tokens: with sequence parallelism its rows of the stream. Where all tp ranks have all tokens,
each routes an equal part, and their usual sum over tp puts the parts together. Capacity and balance are per sequence:
ranks that share a sequence exchange their choices.

Experts' MLPs take rows ordered by expert: one matrix product per expert, over its rows only, or on some GPUs one for
all experts (runtime/autograd/grouped_product.py). An expert without rows takes no time, and its
gradient is zero.

As in functional.py, docstrings say which tensors are kept for the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from phalanx.nn import routing
from phalanx.nn.mlp import MLP
from phalanx.nn.routing import Losses
from phalanx.runtime.autograd import deferred_weight_grads, grouped_product, narrow_product, recompute
from phalanx.runtime.autograd.deferred_weight_grads import Grouped, Owners
from phalanx.runtime.model_parallel import expert, sequence, tensor
from phalanx.runtime.model_parallel.expert import ExpertParallel, Route
from phalanx.runtime.model_parallel.tensor import TensorParallel
from phalanx.runtime.model_parallel.token_sharding import SequenceTokens, Shape
from phalanx.schedule.layers.routing import balanced, most
from phalanx.spec.model.spec import ModelSpec
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
    offsets: grouped_product.Rows | None = None,
) -> Tensor:
    """Compute x W_e for the rows of each expert e: (rows, n), from x (rows, m), of which expert e has counts[e] rows,
    and W (experts, m, n). Written to `out` if given, or with `add` added to it. `operands`, `gradient`: as for
    products of a narrow format (runtime/autograd/narrow_product.py); `narrow`: the weights in 8 bits, if they are
    gathered in 8 bits. `offsets`: the row offsets on the device, if one kernel can multiply all experts."""
    if offsets is not None and not grouped_product.fits(x):
        offsets = None
    if offsets is not None and out is None:
        return grouped_product.all_at_once(x, weights, offsets)
    y = x.new_empty(len(x), weights.shape[-1]) if out is None else out
    for e, here, into in _each(counts, x, y):
        if offsets is not None:  # no second matrix of all rows
            one = grouped_product.of_rows(here, weights[e], e, offsets)
            into.add_(one) if add else into.copy_(one)
            continue
        by: narrow_product.Operand = weights[e].t()
        if narrow is not None:
            by = narrow.columns(e) if gradient else narrow.rows(e)
        narrow_product.product(here, by, operands, gradient, into, add)
    return y


def _each(counts: Sequence[int], x: Tensor, y: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield (expert, rows of x, rows of y) of every expert that has rows."""
    begins = 0
    for e, rows in enumerate(counts):
        if rows:
            here = slice(begins, begins + rows)
            yield e, x[here], y[here]
        begins += rows


def _where(counts: Sequence[int], operands: NumberFormat | None, *weights: Tensor) -> grouped_product.Rows | None:
    """Return the experts' row offsets on the device if one kernel can multiply all of them, else None. Sent once per
    pass."""
    return None if operands is not None else grouped_product.rows(counts, *weights)


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
            product, counts=counts, operands=operands, offsets=_where(counts, operands, gate, up, down)
        )
        g, u = (multiply(x, w.mT, narrow=n) for w, n in zip((gate, up), narrow[:2], strict=True))
        ctx.save_for_backward(x, g, u, gate, up, down)
        return multiply(nn.functional.silu(g).mul_(u), down.mT, narrow=narrow[2])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> Any:
        x, g, u, gate, up, down = ctx.saved_tensors
        counts, d_y = ctx.counts, d_y.contiguous()
        where = _where(counts, ctx.operands, gate, up, down)
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
    """Computes gradients of weights in the backward pass, or hands their factors to the engine or a deferred pass."""

    def __init__(
        self,
        owners: Owners,
        counts: tuple[int, ...],
        operands: NumberFormat | None,
        where: grouped_product.Rows | None,
    ) -> None:
        self._owners, self._counts, self._operands, self._where = owners, counts, operands, where
        self._deferred = deferred_weight_grads.now(owners)

    def __call__(self, which: int, g: Tensor, x: Tensor) -> Tensor | None:
        gradient = Grouped(g, x.detach(), self._counts, self._operands, self._where)
        if self._deferred is not None:
            self._deferred.deliver_later(self._owners[which], gradient)
            return None
        return deferred_weight_grads.taken(self._owners[which:], gradient)


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
    narrow = [narrow_product.gathered(p) for p in (gate, up, down)]
    return _SwiGLU.apply(deferred_weight_grads.owners(gate, up, down), tuple(counts), operands, narrow, x, *views)  # type: ignore[no-any-return]


T = TypeVar("T")


class _Matrices(nn.Module):
    """The matrices of all local experts in one parameter, (experts, out, in)."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))


class _Bank(nn.Module):
    """The MLPs of the local experts."""

    operands: NumberFormat | None = None
    """Narrow format of the products' operands; None: the compute type."""

    def __init__(self, here: int, hidden: int, ffn: int) -> None:
        super().__init__()
        self.gate = _Matrices(here, ffn, hidden)
        self.up = _Matrices(here, ffn, hidden)
        self.down = _Matrices(here, hidden, ffn)


class MoE(nn.Module):
    """Routed experts, along with shared ones, in place of a block's MLP."""

    balance: Tensor | None
    """(count,): the bias added to scores when experts are chosen; None without bias balancing."""
    noted: list[tuple[Tensor, Tensor | None]] | None = None
    """If set, receives (scores, balance bias) of every pass; the parity examination looks for near-ties in them."""

    def __init__(
        self,
        spec: ModelSpec,
        block: int,
        tp: TensorParallel | None,
        ep: ExpertParallel | None,
        tokens: SequenceTokens,
        shared: MLP | None,
    ) -> None:
        super().__init__()
        assert spec.experts is not None
        x = spec.experts
        self.x, self.block, self.tp, self.ep, self.tokens = x, block, tp, ep, tokens
        self.unit = f"blocks.{block}"
        self.router = nn.Linear(spec.hidden, x.count, bias=x.router_bias)
        if shared is not None:
            self.shared = shared
        self.experts = _Bank(x.here, spec.hidden, x.ffn)
        balance = None if x.balance_bias is None else torch.zeros(x.count)
        self.register_buffer("balance", balance)

    def forward(self, x: Tensor, needed: bool = True) -> Tensor:
        """Return what experts add to the stream, in the shape of x: (batch, seq, hidden), or with sequence
        parallelism own rows (own, hidden). `needed`: whether the value is used (runtime/autograd/recompute.py)."""
        tp = self.tp
        if tp is not None and tp.rows is not None:
            return self._own_rows(tp, x, needed)
        batch, seq, hidden = x.shape
        if tp is None:
            routed, shared = self._routed(x.view(-1, hidden), (batch, seq), self._shared(x, needed), needed)
            routed = routed.view(x.shape)
            return routed if shared is None else recompute.add(routed, shared, needed)
        # All tp ranks have all tokens: each routes a part of them, and has a part of the shared experts' width.
        x = tensor.copied(tp, self.unit, x)
        own = self.tokens.part(x.view(-1, hidden), tp)
        routed, term = self._routed(own, (batch, seq), self._shared(x, needed), needed)
        placed = self.tokens.placed(routed, (batch, seq), tp, needed)
        del routed
        term = placed if term is None else recompute.add(placed, term, needed)
        del placed
        layers = (self.shared.down,) if hasattr(self, "shared") else ()
        return tensor.summed(tp, self.unit, (term,), layers, needed)

    def _own_rows(self, tp: TensorParallel, x: Tensor, needed: bool) -> Tensor:
        assert tp.rows is not None
        shared = (lambda: self.shared(x, needed)) if hasattr(self, "shared") else None
        routed, factors = self._routed(x, (tp.rows.batch, tp.rows.seq), shared, needed)
        if factors is None:
            return routed
        return recompute.add(routed, sequence.summed(tp.rows, self.unit, (factors,), needed), needed)

    def _shared(self, x: Tensor, needed: bool = True) -> Callable[[], Tensor] | None:
        return (lambda: self.shared.term(x, needed)) if hasattr(self, "shared") else None

    def _routed(
        self, x: Tensor, shape: Shape, shared: Callable[[], T] | None, needed: bool
    ) -> tuple[Tensor, T | None]:
        """Return (the routed experts' output for this rank's tokens, x (tokens, hidden); the result of `shared`,
        which runs while rows travel). `shape`: (batch, seq) of the part that the ranks of tp divide."""
        weights, route = self._chosen(recompute.linear(self.router, x), shape)
        rows = expert.leave(self.ep, self.unit, route, x)
        shared_output = None if shared is None else shared()
        rows = expert.come(self.ep, self.unit, route, rows)
        bank = self.experts
        matrices = bank.gate.weight, bank.up.weight, bank.down.weight
        rows = swiglu(rows, route.rows_per_expert, *matrices, recompute.operands_of(bank))
        rows = expert.give_back(self.ep, self.unit, route, rows)
        return expert.combine(route, rows, weights, needed), shared_output

    def _chosen(self, logits: Tensor, shape: Shape) -> tuple[Tensor, Route]:
        """Choose experts for this rank's tokens by logits (tokens, count). Returns (weights, the route of their
        rows)."""
        x, tokens, width = self.x, len(logits), self.x.top_k
        losses = Losses(z=x.z_loss, seed=self.tokens.seed)
        with torch.no_grad():
            p = routing.scores(logits, x)
            if x.chooser == "tokens":
                chosen, key = self._by_tokens(p, shape, losses)
            else:
                chosen, width = None, x.count
                key = self._by_experts(p, shape)
            slots = key.argsort(stable=True)
            counts = _counts(key, x.count + 1)[: x.count]
        if self.ep is not None and self.ep.counting and not self.ep.inner.again:
            self._count(p, chosen, counts, logits, losses)
        weights = routing.weights(logits, p, chosen, x, losses)

        def otherwise(rank: int | None) -> list[int]:
            return balanced(tokens if rank is None else self.tokens.of(shape, rank), x)

        return weights, expert.route(self.ep, self.unit, slots, width, tokens, counts, otherwise, x)

    def _by_tokens(self, p: Tensor, shape: Shape, losses: Losses) -> tuple[Tensor, Tensor]:
        """Let tokens choose. Returns (experts of this rank's tokens, (tokens, top_k); the same flat, with `count` for
        dropped choices)."""
        x, seq = self.x, self.tokens.seq(shape)
        if self.noted is not None:
            self.noted.append((p, None if self.balance is None else self.balance.clone()))
        choices = routing.choose(p, x, self.balance)
        if self._even:
            choices = routing.evenly(len(p), x, p.device)
        limit = most(x, seq)
        if limit is None and not x.balance_loss:
            return choices, choices.flatten()
        everyone = self.tokens.gather(choices.int(), shape, self.unit).long()  # (batch, seq, top_k)
        if x.balance_loss:
            of = torch.arange(len(everyone), device=p.device).view(-1, 1, 1) * x.count
            share = _counts((everyone + of).flatten(), len(everyone) * x.count).view(-1, x.count) / (seq * x.top_k)
            losses.even = share.mul_(x.balance_loss * x.count).to(p.dtype)[self.tokens.sequence(shape, p.device)]
        if limit is None:
            return choices, choices.flatten()
        if self._even:
            kept = routing.fits(choices[None], x.count, most(x, len(p)) or 0)[0]
        else:
            kept = self.tokens.own(routing.fits(everyone, x.count, limit), shape)
        return choices, choices.masked_fill(kept.logical_not_(), x.count).flatten()

    def _by_experts(self, p: Tensor, shape: Shape) -> Tensor:
        """Let experts choose. Returns, for every pair of a token of this rank and an expert, flat, the expert if it
        takes the token, else `count`."""
        x, limit = self.x, most(self.x, self.tokens.seq(shape)) or 0
        taken = self.tokens.own(routing.take(self.tokens.gather(p, shape, self.unit), limit), shape)
        if self._even:
            taken = routing.in_turn(len(p), x, p.device)
        experts = torch.arange(x.count, device=p.device).expand(p.shape)
        return experts.masked_fill(taken.logical_not_(), x.count).flatten()

    @property
    def _even(self) -> bool:
        return self.ep is not None and self.ep.balanced

    @torch.no_grad()
    def _count(self, p: Tensor, chosen: Tensor | None, counts: Tensor, logits: Tensor, losses: Losses) -> None:
        """Add this rank's tokens to the layer's loads in the metrics."""
        assert self.ep is not None
        load = counts if chosen is None else _counts(chosen.flatten(), self.x.count)
        dropped = load.sum() - counts.sum()
        self.ep.count(self.block, load, dropped, routing.losses(logits, p, losses))


def _counts(key: Tensor, n: int) -> Tensor:
    """Count how often each of 0 .. n - 1 is in `key`: (n,)."""
    return torch.zeros(n, dtype=torch.int64, device=key.device).index_add_(0, key, torch.ones_like(key))
