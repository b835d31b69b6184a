"""The gated delta rule (Yang et al. 2024, "Gated Delta Networks") in chunks, with the causal convolution and the L2
norm of what it reads.

    S_t = exp(g_t) S_{t-1} + k_t (beta_t (v_t - exp(g_t) S_{t-1}ᵀ k_t))ᵀ        y_t = S_tᵀ q_t / sqrt(n)

q, k and v after the convolution, q and k of length one. Inside a chunk of tokens, with l the sum of g from its start:

    new = (I + A)⁻¹ beta (v - exp(l) k S)      A = beta k kᵀ ∘ exp(l_i - l_j), below the diagonal
    y   = (q kᵀ ∘ exp(l_i - l_j)) new + exp(l) q S      S' = exp(l_last) S + (exp(l_last - l) k)ᵀ new

    q, k         (batch, seq, key heads x n): each key head serves heads / key heads value heads
    v, y         (batch, seq, heads x p)
    beta, alpha  (batch, seq, heads), before the sigmoid; g = -exp(a_log) softplus(alpha + dt_bias)
    dt_bias, a_log   (heads,)
    state        (batch, key heads, n, heads / key heads x p), fp32, or fp64 in fp64 runs

Sums are in the state's type. Chunks run one after another: in addition to inputs and results there is one
chunk's work, and backward a state and `new` for each chunk.
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

EPS = 1e-6
"""Added to the squared length of queries and keys."""


@dataclass(frozen=True)
class DeltaRule:
    """Sizes of one rank's part of the recurrence."""

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    chunk: int


@dataclass(frozen=True)
class _Chunk:
    """What a chunk's tokens become. Logs of decay are sums from the chunk's start."""

    pre: tuple[Tensor, Tensor, Tensor]
    """q, k and v before SiLU, (batch, tokens, channels)."""
    q: Tensor
    """(batch, key heads, tokens, n), of length 1 / sqrt(n)."""
    k: Tensor
    """(batch, key heads, tokens, n), of length 1."""
    lengths: tuple[Tensor, Tensor]
    """1 / length of q and k before their norm, (batch, key heads, tokens, 1)."""
    v: Tensor
    """(batch, heads, tokens, p)."""
    beta: Tensor
    """(batch, heads, tokens, 1)."""
    log: Tensor
    """(batch, heads, tokens)."""
    begins: Tensor | None = None
    """(batch, tokens): the place of each token in its document."""

    @property
    def left(self) -> Tensor:
        """The decay from each token to the chunk's end, (batch, heads, tokens, 1)."""
        return documents.to_end((self.log[..., -1:] - self.log).exp_(), self.begins).unsqueeze(-1)

    @property
    def since(self) -> Tensor:
        """The decay from the chunk's start to each token, (batch, heads, tokens, 1)."""
        return documents.from_start(self.log.exp(), self.begins).unsqueeze(-1)

    @property
    def over(self) -> Tensor:
        """The decay from the chunk's start to its end, (batch, heads)."""
        return documents.across(self.log[..., -1].exp(), self.begins)

    def within(self) -> Tensor:
        """Return the decay between two tokens, (batch, heads, tokens, tokens), zero above the diagonal."""
        return documents.between((self.log.unsqueeze(-1) - self.log.unsqueeze(-2)).exp_().tril_(), self.begins)


class _Recurrence:
    """The recurrence over given tokens, by chunks. `beta` and `g`: (batch, seq, heads), in the state's type."""

    def __init__(
        self,
        s: DeltaRule,
        parts: tuple[Tensor, Tensor, Tensor],
        beta: Tensor,
        g: Tensor,
        filters: Sequence[Filter],
        begins: Tensor | None = None,
    ) -> None:
        self.s, self.parts, self.filters, self.begins = s, parts, filters, begins
        self.beta, self.g = beta.transpose(1, 2), g.transpose(1, 2)  # (batch, heads, seq)

    def chunk(self, low: int, high: int) -> _Chunk:
        """Return the tokens low..high, of q, k and v, as the recurrence reads them."""
        s, begins = self.s, None if self.begins is None else self.begins[:, low:high]
        pre = tuple(f.of_slice(part, low, high, begins) for f, part in zip(self.filters, self.parts, strict=True))
        q, k, v = (F.silu(part) for part in pre)
        q, k = (part.unflatten(2, (s.key_heads, s.key_dim)).transpose(1, 2) for part in (q, k))
        of_q, of_k = (part.square().sum(-1, keepdim=True).add_(EPS).rsqrt_() for part in (q, k))
        return _Chunk(
            pre,  # type: ignore[arg-type]
            q * (of_q * s.key_dim**-0.5),
            k * of_k,
            (of_q, of_k),
            v.unflatten(2, (s.heads, s.value_dim)).transpose(1, 2),
            self.beta[..., low:high].unsqueeze(-1),
            self.g[..., low:high].cumsum(-1),
            begins,
        )

    def by_key_head(self, per_head: Tensor) -> Tensor:
        """View (batch, heads, ...) as (batch, key heads, heads of a key head, ...)."""
        return per_head.view(len(per_head), self.s.key_heads, -1, *per_head.shape[2:])

    def grouped(self, per_head: Tensor) -> Tensor:
        """Turn (batch, heads, tokens, p) into (batch, key heads, tokens, heads of a key head x p)."""
        return self.by_key_head(per_head).transpose(2, 3).flatten(3)

    def by_head(self, grouped: Tensor) -> Tensor:
        """Undo `grouped`."""
        return grouped.view(*grouped.shape[:3], -1, self.s.value_dim).transpose(2, 3).flatten(1, 2)

    def shared(self, per_key_head: Tensor, per_head: Tensor) -> Tensor:
        """Multiply, each key head with all its heads: (batch, key heads, ...) and (batch, heads, ...)."""
        return (self.by_key_head(per_head) * per_key_head.unsqueeze(2)).flatten(1, 2)

    def summed(self, per_head: Tensor) -> Tensor:
        """Add up the heads of a key head."""
        return self.by_key_head(per_head).sum(2)

    def decayed(self, state: Tensor, t: _Chunk) -> Tensor:
        """Return a state decayed over a chunk."""
        by = t.over.view(len(state), self.s.key_heads, 1, -1, 1)
        return (state.view(*state.shape[:3], -1, self.s.value_dim) * by).flatten(-2)

    def after(self, t: _Chunk, new: Tensor, state: Tensor) -> Tensor:
        """Return the state after a chunk."""
        return self.decayed(state, t).add_(t.k.mT @ self.grouped(new * t.left))

    def seen(self, t: _Chunk, state: Tensor) -> Tensor:
        """Return exp(l) k S, (batch, heads, tokens, p)."""
        return self.by_head(t.k @ state) * t.since

    def system(self, t: _Chunk, within: Tensor) -> Tensor:
        """Return k kᵀ ∘ decay, of which beta times what is below the diagonal is A."""
        return self.shared(t.k @ t.k.mT, within)

    def new(self, t: _Chunk, within: Tensor, state: Tensor) -> Tensor:
        """Return what the chunk's tokens write, (batch, heads, tokens, p)."""
        return _solved(self.system(t, within).mul_(t.beta), t.beta * (t.v - self.seen(t, state)))


def _solved(a: Tensor, right: Tensor, turned: bool = False) -> Tensor:
    """Return (I + A)⁻¹ R, or `turned` (I + Aᵀ)⁻¹ R; A is below the diagonal of `a`, whose other half is not read."""
    out: Tensor = torch.linalg.solve_triangular(a.mT if turned else a, right, upper=turned, unitriangular=True)
    return out


def _first_state(s: DeltaRule, like: Tensor, wide: torch.dtype) -> Tensor:
    return like.new_zeros(len(like), s.key_heads, s.key_dim, s.heads // s.key_heads * s.value_dim, dtype=wide)


def _gates(
    alpha: Tensor, beta: Tensor, dt_bias: Tensor, a_log: Tensor, wide: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (beta, softplus(alpha + dt_bias), -exp(a_log))."""
    return beta.to(wide).sigmoid(), F.softplus(alpha.to(wide) + dt_bias.to(wide)), -a_log.to(wide).exp()


def run(
    s: DeltaRule,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    alpha: Tensor,
    filters: Sequence[Filter],
    dt_bias: Tensor,
    a_log: Tensor,
    state: Tensor | None = None,
    past: int = 0,
    begins: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (y of the tokens after the first `past`, the state after the last). The first `past` tokens of q, k and
    v are only seen by the convolution; beta and alpha have none for them. `state`: before the tokens; None: zeros.
    `begins`: the place of each token in its document."""
    wide = accumulate_dtype(v.dtype)
    beta, steps, a = _gates(alpha, beta, dt_bias, a_log, wide)
    g = steps.mul_(a)
    if past:
        beta, g = (F.pad(part, (0, 0, past, 0)) for part in (beta, g))
    r = _Recurrence(s, (q, k, v), beta, g, filters, begins)
    y = v.new_empty(len(v), v.shape[1] - past, s.heads, s.value_dim)
    state = _first_state(s, v, wide) if state is None else state
    for low, high in slices(y.shape[1], s.chunk):
        t = r.chunk(low + past, high + past)
        within = t.within()
        new = r.new(t, within, state)
        inside = r.shared(t.q @ t.k.mT, within) @ new
        y[:, low:high] = (r.by_head(t.q @ state).mul(t.since).add_(inside)).transpose(1, 2)
        state = r.after(t, new, state)
    return y.flatten(2), state


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, s: DeltaRule, owners: Owners, places: Places, begins: Tensor | None, *tensors: Tensor
    ) -> Tensor:
        ctx.s, ctx.owners, ctx.places = s, owners, places
        ctx.save_for_backward(begins, *tensors)
        q, k, v, beta, alpha = tensors[:5]
        *weights, dt_bias, a_log = own_rows(tensors[5:], places)
        filters = _filters(weights, accumulate_dtype(v.dtype))
        return run(s, q, k, v, beta, alpha, filters, dt_bias, a_log, begins=begins)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        begins, *tensors = ctx.saved_tensors
        d_parts, d_own = _backward(ctx.s, [*tensors[:5], *own_rows(tensors[5:], ctx.places)], g, begins)
        d_parameters = all_rows(d_own, tensors[5:], ctx.places)
        deferred = deferred_weight_grads.now(ctx.owners)
        if deferred is None:
            return None, None, None, None, *d_parts, *d_parameters
        for owner, gradient in zip(ctx.owners, d_parameters, strict=True):
            deferred.deliver_later(owner, gradient)
        return None, None, None, None, *d_parts, *(None for _ in d_parameters)


def _filters(weights: Sequence[Tensor], wide: torch.dtype) -> list[Filter]:
    return [Filter.of(weight, None, wide) for weight in weights]


def _backward(
    s: DeltaRule, tensors: Sequence[Tensor], g: Tensor, begins: Tensor | None
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the gradients of (q, k, v, beta, alpha) and of the parameters: three filters, dt_bias, a_log."""
    q, k, v, raw_beta, alpha, *weights, dt_bias, a_log = tensors
    wide = accumulate_dtype(v.dtype)
    filters = _filters(weights, wide)
    beta, steps, a = _gates(alpha, raw_beta, dt_bias, a_log, wide)
    r = _Recurrence(s, (q, k, v), beta, steps * a, filters, begins)
    bounds = slices(v.shape[1], s.chunk)
    # The states before each chunk, and what each wrote, once more.
    before, written = [_first_state(s, v, wide)], []
    for low, high in bounds:
        t = r.chunk(low, high)
        written.append(r.new(t, t.within(), before[-1]))
        before.append(r.after(t, written[-1], before[-1]))
    before.pop()
    # Backward, the last chunk first.
    into = [torch.zeros_like(part) for part in (q, k, v)]
    d_filters = [FilterGradient.zero(f) for f in filters]
    d_beta, d_g = torch.empty_like(beta), torch.empty_like(beta)
    d_state = torch.zeros_like(before[0])
    for low, high in reversed(bounds):
        t, state, new = r.chunk(low, high), before.pop(), written.pop()
        within, since, left = t.within(), t.since, t.left
        g_y = g[:, low:high].unflatten(2, (s.heads, s.value_dim)).transpose(1, 2).to(wide)
        # y = (q kᵀ ∘ decay) new + exp(l) q S;  S' = decay S + kᵀ (left new)
        mixed = r.shared(t.q @ t.k.mT, within)
        d_left = r.by_head(t.k @ d_state) * left
        d_new = (mixed.mT @ g_y).add_(d_left)
        d_mixed = (g_y @ new.mT).tril_()
        # new = (I + A)⁻¹ R;  R = beta (v - exp(l) k S)
        system = r.system(t, within)
        d_right = _solved(system * t.beta, d_new, turned=True)
        d_a = (d_right @ new.mT).tril_(-1).neg_()
        seen = r.seen(t, state)
        d_seen = d_right * -t.beta
        by_beta = (d_a * system).sum(-1).add_((d_right * (t.v - seen)).sum(-1))
        # A row of logs decays what it multiplies, and a column the reverse.
        d_a.mul_(t.beta)
        through = (d_mixed * mixed).add_(d_a * system)
        d_log = through.sum(-1).sub_(through.sum(-2))
        del through, system, mixed
        read = r.by_head(t.q @ state).mul(since)
        d_log += (g_y * read).add_(d_seen * seen).sum(-1)
        d_ends = (d_left * new).sum(-1)
        d_log -= d_ends
        decayed = r.decayed(d_state, t)
        d_log[..., -1] += d_ends.sum(-1)
        d_log[..., -1] += (decayed * state).unflatten(-1, (-1, s.value_dim)).sum((2, 4)).flatten(1)
        # Queries, keys and the state.
        d_qk, d_kk = r.summed(d_mixed.mul_(within)), r.summed(d_a.mul_(within))
        g_since, seen_since = r.grouped(g_y * since), r.grouped(d_seen * since)
        d_q = (d_qk @ t.k).add_(g_since @ state.mT)
        d_k = (d_qk.mT @ t.q).add_((d_kk + d_kk.mT) @ t.k).add_(seen_since @ state.mT)
        d_k.add_(r.grouped(new * left) @ d_state.mT)
        d_state = decayed.add_(t.q.mT @ g_since).add_(t.k.mT @ seen_since)
        d_beta[:, low:high], d_g[:, low:high] = by_beta.mT, d_log.flip(-1).cumsum(-1).flip(-1).mT
        # Norms, SiLU and convolution.
        d_q.mul_(s.key_dim**-0.5)
        d_q = _through_length(d_q, t.q * s.key_dim**0.5, t.lengths[0])
        d_k = _through_length(d_k, t.k, t.lengths[1])
        gradients = [d.transpose(1, 2).flatten(2) for d in (d_q, d_k, d_right * t.beta)]
        for f, part, pre, gradient, place, of in zip(
            filters, (q, k, v), t.pre, gradients, into, d_filters, strict=True
        ):
            f.backward(part, low, high, torch.ops.aten.silu_backward(gradient, pre), place, of, t.begins)
    d_a_log = (d_g * steps).sum((0, 1)).mul_(a)
    d_alpha = d_g.mul_(a).mul_(-torch.expm1(-steps))  # softplus'(u) = sigmoid(u) = 1 - exp(-softplus(u))
    d_beta.mul_(beta).mul_(1 - beta)
    d_weights = [of.as_given(v.dtype)[0] for of in d_filters]
    gates = [d_alpha.sum((0, 1)).to(v.dtype), d_a_log.to(v.dtype)]
    return [*into, d_beta.to(v.dtype), d_alpha.to(v.dtype)], [*d_weights, *gates]


def _through_length(g: Tensor, unit: Tensor, inverse: Tensor) -> Tensor:
    """Return the gradient of x from that of x / |x|: `unit`; `inverse`: 1 / |x|."""
    return (g - unit * (g * unit).sum(-1, keepdim=True)) * inverse


def scan(
    s: DeltaRule,
    parts: Sequence[Tensor],
    filters: Sequence[Tensor],
    gates: Sequence[Tensor],
    places: Places = (),
    begins: Tensor | None = None,
) -> Tensor:
    """Return y of `parts`, the projected q, k, v, beta and alpha of whole sequences; `filters`: of q, k and v;
    `gates`: dt_bias and a_log; `places`: the rows of these parameters that the parts belong to; `begins` (batch,
    seq): the place of each token in its document. Keeps the five parts and the parameters, nothing else: convolution,
    norms, triangular systems and states are computed again in the backward pass, which holds a state and `new` a
    chunk."""
    parameters = (*filters, *gates)
    # Through views, as in model_parallel/tensor.py, so that gradients arrive in order.
    views = [p.view_as(p) for p in parameters]
    return _Scan.apply(s, deferred_weight_grads.owners(*parameters), places, begins, *parts, *views)  # type: ignore[no-any-return]
