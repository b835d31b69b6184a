"""Mamba-2's state-space recurrence (Dao & Gu 2024) in chunks, with the causal convolution of what it reads.

    S_t = exp(dt_t a) S_{t-1} + dt_t B_t x_tᵀ        y_t = S_tᵀ C_t + d x_t       x, B, C after the convolution

Inside a chunk of tokens, with l the sum of dt a from its start:

    y = (C Bᵀ ∘ exp(l_i - l_j)) (dt x) + exp(l) C S        S' = exp(l_last) S + (exp(l_last - l) B)ᵀ (dt x)

    x, y         (batch, seq, heads x p)
    b, c         (batch, seq, groups x n): each group serves heads / groups heads
    dt           (batch, seq, heads), before softplus and its bias
    dt_bias, a_log, d   (heads,); a = -exp(a_log)
    state        (batch, groups, n, heads / groups x p), fp32, or fp64 in fp64 runs

Sums are in the state's type. Chunks run one after another: in addition to inputs and results there is one
chunk's work, and backward one state for each chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from phalanx.nn import documents
from phalanx.nn.convolution import Filter, FilterGradient, Places, all_rows, own_rows, slices
from phalanx.nn.functional import accumulate_dtype
from phalanx.runtime.autograd import deferred_weight_grads
from phalanx.runtime.autograd.deferred_weight_grads import Owners


@dataclass(frozen=True)
class StateSpace:
    """Sizes of one rank's part of the recurrence."""

    heads: int
    head_dim: int
    groups: int
    state: int
    chunk: int


@dataclass(frozen=True)
class _Chunk:
    """What a chunk's tokens become. Logs of decay are sums from the chunk's start."""

    pre: tuple[Tensor, Tensor, Tensor]
    """x, B and C before SiLU, (batch, tokens, channels)."""
    x: Tensor
    """(batch, tokens, heads, p)."""
    b: Tensor
    """(batch, groups, tokens, n), as c."""
    c: Tensor
    dt: Tensor
    """(batch, tokens, heads)."""
    log: Tensor
    """(batch, heads, tokens)."""
    begins: Tensor | None = None
    """(batch, tokens): the place of each token in its document."""

    @property
    def stepped(self) -> Tensor:
        """The stepped tokens, dt x, (batch, tokens, heads, p)."""
        return self.x * self.dt.unsqueeze(-1)

    @property
    def left(self) -> Tensor:
        """The decay from each token to the chunk's end, (batch, tokens, heads, 1)."""
        return documents.to_end((self.log[..., -1:] - self.log).exp_(), self.begins).transpose(1, 2).unsqueeze(-1)

    @property
    def since(self) -> Tensor:
        """The decay from the chunk's start to each token, (batch, tokens, heads, 1)."""
        return documents.from_start(self.log.exp(), self.begins).transpose(1, 2).unsqueeze(-1)

    @property
    def over(self) -> Tensor:
        """The decay from the chunk's start to its end, (batch, heads)."""
        return documents.across(self.log[..., -1].exp(), self.begins)

    def within(self) -> Tensor:
        """Return the decay between two tokens, (batch, heads, tokens, tokens), zero above the diagonal."""
        return documents.between((self.log.unsqueeze(-1) - self.log.unsqueeze(-2)).exp_().tril_(), self.begins)


class _Recurrence:
    """The recurrence over given tokens, by chunks. `dt` is positive, in the state's type."""

    def __init__(
        self,
        s: StateSpace,
        x: Tensor,
        b: Tensor,
        c: Tensor,
        dt: Tensor,
        filters: Sequence[Filter],
        a: Tensor,
        begins: Tensor | None = None,
    ) -> None:
        self.s, self.parts, self.dt, self.filters, self.a, self.begins = s, (x, b, c), dt, filters, a, begins

    def chunk(self, low: int, high: int) -> _Chunk:
        """Return the tokens low..high, of x, B and C, as the recurrence reads them."""
        s, begins = self.s, None if self.begins is None else self.begins[:, low:high]
        pre = tuple(f.of_slice(part, low, high, begins) for f, part in zip(self.filters, self.parts, strict=True))
        x, b, c = (F.silu(part) for part in pre)
        batch, tokens = x.shape[:2]
        dt = self.dt[:, low:high]
        b, c = (part.view(batch, tokens, s.groups, s.state).transpose(1, 2) for part in (b, c))
        log = (dt * self.a).transpose(1, 2).cumsum(-1)
        return _Chunk(pre, x.view(batch, tokens, s.heads, s.head_dim), b, c, dt, log, begins)  # type: ignore[arg-type]

    def grouped(self, per_head: Tensor) -> Tensor:
        """View (batch, tokens, heads, p) as (batch, groups, tokens, heads of a group x p)."""
        return per_head.reshape(*per_head.shape[:2], self.s.groups, -1).transpose(1, 2)

    def by_head(self, grouped: Tensor) -> Tensor:
        """Undo `grouped`."""
        return grouped.transpose(1, 2).reshape(*grouped.shape[::2], self.s.heads, self.s.head_dim)

    def decayed(self, state: Tensor, t: _Chunk) -> Tensor:
        """Return a state decayed over a chunk."""
        by = t.over.view(len(state), self.s.groups, 1, -1, 1)
        return (state.view(*state.shape[:3], -1, self.s.head_dim) * by).flatten(-2)

    def after(self, t: _Chunk, stepped: Tensor, state: Tensor) -> Tensor:
        """Return the state after a chunk. `stepped`: dt x."""
        return self.decayed(state, t).add_(t.b.mT @ self.grouped(stepped * t.left))

    def mixed(self, t: _Chunk) -> tuple[Tensor, Tensor]:
        """Return (C Bᵀ ∘ decay, decay) of a chunk, (batch, heads, tokens, tokens)."""
        within = t.within()
        scores = (t.c @ t.b.mT).unsqueeze(2)
        return (within.unflatten(1, (self.s.groups, -1)) * scores).flatten(1, 2), within


def run(
    s: StateSpace,
    x: Tensor,
    b: Tensor,
    c: Tensor,
    dt: Tensor,
    filters: Sequence[Filter],
    dt_bias: Tensor,
    a_log: Tensor,
    d: Tensor,
    state: Tensor | None = None,
    past: int = 0,
    begins: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (y of the tokens after the first `past`, the state after the last). The first `past` tokens of x, b and
    c are only seen by the convolution; dt has none for them. `state`: before the tokens; None: zeros. `begins`: the
    place of each token in its document."""
    wide = accumulate_dtype(x.dtype)
    r = _Recurrence(s, x, b, c, _steps(dt, dt_bias, wide, past), filters, -a_log.to(wide).exp(), begins)
    y = x.new_empty(len(x), x.shape[1] - past, s.heads, s.head_dim)
    if state is None:
        state = x.new_zeros(len(x), s.groups, s.state, s.heads // s.groups * s.head_dim, dtype=wide)
    skip = d.to(wide).unsqueeze(-1)
    for low, high in slices(y.shape[1], s.chunk):
        t = r.chunk(low + past, high + past)
        stepped = t.stepped
        inside = r.mixed(t)[0] @ stepped.transpose(1, 2)  # (batch, heads, tokens, p)
        out = r.by_head(t.c @ state).mul_(t.since).add_(inside.transpose(1, 2)).addcmul_(t.x, skip)
        y[:, low:high] = out
        state = r.after(t, stepped, state)
    return y.flatten(2), state


def _steps(dt: Tensor, dt_bias: Tensor, wide: torch.dtype, past: int = 0) -> Tensor:
    """Return softplus(dt + dt_bias), preceded by `past` tokens that are not read."""
    steps = F.softplus(dt.to(wide) + dt_bias.to(wide))
    return F.pad(steps, (0, 0, past, 0)) if past else steps


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, s: StateSpace, owners: Owners, places: Places, begins: Tensor | None, *tensors: Tensor
    ) -> Tensor:
        ctx.s, ctx.owners, ctx.places = s, owners, places
        ctx.save_for_backward(begins, *tensors)
        x, b, c, dt = tensors[:4]
        p = own_rows(tensors[4:], places)
        wide = accumulate_dtype(x.dtype)
        dt_bias, a_log, d = p[6:]
        return run(s, x, b, c, dt, _filters(p, wide), dt_bias, a_log, d, begins=begins)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        begins, x, b, c, dt, *p = ctx.saved_tensors
        d_parts, d_own = _backward(ctx.s, x, b, c, dt, own_rows(p, ctx.places), g, begins)
        d_parameters = all_rows(d_own, p, ctx.places)
        deferred = deferred_weight_grads.now(ctx.owners)
        if deferred is not None:
            given = [gradient for gradient in d_parameters if gradient is not None]
            for owner, gradient in zip(ctx.owners, given, strict=True):
                deferred.deliver_later(owner, gradient)
            d_parameters = [None] * len(p)
        return None, None, None, None, *d_parts, *d_parameters


def _filters(p: Sequence[Tensor | None], wide: torch.dtype) -> list[Filter]:
    return [Filter.of(weight, bias, wide) for weight, bias in zip(p[:3], p[3:6], strict=True)]  # type: ignore[arg-type]


def _backward(
    s: StateSpace,
    x: Tensor,
    b: Tensor,
    c: Tensor,
    dt: Tensor,
    p: Sequence[Tensor],
    g: Tensor,
    begins: Tensor | None,
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return the gradients of (x, b, c, dt) and of the parameters: three filters, their biases, dt_bias, a_log, d."""
    wide = accumulate_dtype(x.dtype)
    filters, (dt_bias, a_log, d) = _filters(p, wide), p[6:]
    a, skip = -a_log.to(wide).exp(), d.to(wide).unsqueeze(-1)
    r = _Recurrence(s, x, b, c, _steps(dt, dt_bias, wide), filters, a, begins)
    bounds = slices(x.shape[1], s.chunk)
    # The states before each chunk, once more.
    state = x.new_zeros(len(x), s.groups, s.state, s.heads // s.groups * s.head_dim, dtype=wide)
    before = [state]
    for low, high in bounds[:-1]:
        t = r.chunk(low, high)
        before.append(r.after(t, t.stepped, before[-1]))
    # Backward, the last chunk first.
    into = [torch.zeros_like(part) for part in (x, b, c)]
    d_filters = [FilterGradient.zero(f) for f in filters]
    d_steps = torch.empty_like(r.dt)
    d_a, d_skip = torch.zeros_like(a), torch.zeros_like(a)
    d_state = torch.zeros_like(state)
    for low, high in reversed(bounds):
        t, state = r.chunk(low, high), before.pop()
        stepped, since, left = t.stepped, t.since, t.left
        g_y = g[:, low:high].unflatten(2, (s.heads, s.head_dim)).to(wide)
        g_heads, x_heads = g_y.transpose(1, 2), stepped.transpose(1, 2)  # (batch, heads, tokens, p)
        mixed, within = r.mixed(t)
        # y = mixed (dt x) + since C S
        d_stepped = (mixed.mT @ g_heads).transpose(1, 2)
        y = (mixed @ x_heads).transpose(1, 2) + r.by_head(t.c @ state).mul_(since)
        del mixed
        d_scores = (g_heads @ x_heads.mT).mul_(within).unflatten(1, (s.groups, -1)).sum(2)
        del within
        g_since = r.grouped(g_y * since)
        d_c = (d_scores @ t.b).add_(g_since @ state.mT)
        d_b = d_scores.mT @ t.c
        # S' = decay S + Bᵀ (left dt x)
        d_b.add_(r.grouped(stepped * left) @ d_state.mT)
        d_left = r.by_head(t.b @ d_state).mul_(left)
        d_last = (d_left * stepped).sum((1, 3))  # (batch, heads)
        decayed = r.decayed(d_state, t)
        d_last += (decayed * state).unflatten(-1, (-1, s.head_dim)).sum((2, 4)).flatten(1)
        d_stepped = d_stepped + d_left
        d_state = decayed.add_(t.c.mT @ g_since)
        # Each log of decay is in a row of what it multiplies, and with a minus in what it divides.
        d_log = (g_y * y).sub_(d_stepped * stepped).sum(-1)  # (batch, tokens, heads)
        d_log[:, -1] += d_last
        d_log = d_log.flip(1).cumsum(1).flip(1)
        d_a += (d_log * t.dt).sum((0, 1))
        d_steps[:, low:high] = (d_stepped * t.x).sum(-1).addcmul_(d_log, a)
        d_skip += (g_y * t.x).sum((0, 1, 3))
        d_x = d_stepped.mul_(t.dt.unsqueeze(-1)).addcmul_(g_y, skip)
        gradients = d_x.flatten(2), *(part.transpose(1, 2).flatten(2) for part in (d_b, d_c))
        for f, part, pre, gradient, place, of in zip(
            filters, (x, b, c), t.pre, gradients, into, d_filters, strict=True
        ):
            f.backward(part, low, high, torch.ops.aten.silu_backward(gradient, pre), place, of, t.begins)
    # softplus'(u) = sigmoid(u) = 1 - exp(-softplus(u))
    d_dt = d_steps.mul_(-torch.expm1(-r.dt))
    weights, biases = zip(*(of.as_given(x.dtype) for of in d_filters), strict=True)
    gates = (d_dt.sum((0, 1)), d_a.mul_(a), d_skip)
    return [*into, d_dt.to(dt.dtype)], [*weights, *biases, *(gate.to(x.dtype) for gate in gates)]


def scan(
    s: StateSpace,
    parts: Sequence[Tensor],
    filters: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    gates: Sequence[Tensor],
    places: Places = (),
    begins: Tensor | None = None,
) -> Tensor:
    """Return y of `parts`, the projected x, b, c and dt of whole sequences; `filters`, `biases`: of x, b and c;
    `gates`: dt_bias, a_log and d; `places`: the rows of these parameters that the parts belong to; `begins` (batch,
    seq): the place of each token in its document. Keeps the four parts and the parameters, nothing else: convolution
    and states are computed again in the backward pass, which holds one state a chunk."""
    parameters = (*filters, *biases, *gates)
    # Through views, as in model_parallel/tensor.py, so that gradients arrive in order.
    views = [None if p is None else p.view_as(p) for p in parameters]
    return _Scan.apply(s, deferred_weight_grads.owners(*parameters), places, begins, *parts, *views)  # type: ignore[no-any-return]
