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

Sums are in the state's type. Layouts inside a chunk: chunked.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, bmm

from phalanx.nn.recurrences.chunked import ChunkDecays, ChunkedScan, Convolved, RecurrenceSizes, softplus
from phalanx.nn.recurrences.convolution import Filter

EPS = 1e-6
"""Added to the squared length of queries and keys."""


@dataclass(frozen=True)
class DeltaRule(RecurrenceSizes):
    """Sizes of one rank's part of the recurrence."""

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    chunk: int

    @property
    def scan(self) -> Callable[..., ChunkedScan]:
        return _DeltaScan


@dataclass(frozen=True)
class _Chunk(ChunkDecays):
    """A chunk's tokens as the recurrence reads them. `left` and `since`: (G r, n, 1); `over`: (G r,)."""

    convolved: list[Convolved]
    q: Tensor
    """(G, n, width), of length 1 / sqrt(width)."""
    k: Tensor
    """(G, n, width), of length 1."""
    lengths: tuple[Tensor, Tensor]
    """1 / length of q and k before their norm, (G, n, 1)."""
    v: Tensor
    """(G r, n, p)."""
    beta: Tensor
    """(G r, n, 1)."""
    within: Tensor
    """The decay between two tokens, (G r, n, n)."""


class _DeltaScan(ChunkedScan):
    writes = True

    def __init__(
        self,
        s: DeltaRule,
        parts: Sequence[Tensor],
        filters: Sequence[Filter],
        gates: Sequence[Tensor],
        past: int,
        begins: Tensor | None,
    ) -> None:
        super().__init__(parts[:3], filters, past, s.key_heads, s.heads, s.key_dim, s.value_dim, s.chunk, begins)
        dt_bias, a_log = gates
        self.beta, self.steps = self.per_head(parts[3]).sigmoid_(), softplus(self.per_head(parts[4]), dt_bias)
        self.a = -a_log.to(self.wide).exp().repeat(self.batch)  # (G r,)

    def chunk(self, low: int, high: int) -> _Chunk:
        """Return tokens low..high as the recurrence reads them."""
        convolved = self.convolved(low, high)
        q, k, v = (F.silu(pre) for _, pre in convolved)
        q, k = (part.view(high - low, self.G, self.n).transpose(0, 1) for part in (q, k))
        of_q, of_k = inverse_lengths(q), inverse_lengths(k)
        q, k = q * (of_q * self.n**-0.5), k * of_k
        v = self.headed(v.view(-1, self.G, self.r, self.p))
        log = (self.steps[:, low:high] * self.a.unsqueeze(-1)).cumsum(-1)
        begins, beta = self.begins_of(low, high), self.beta[:, low:high].unsqueeze(-1)
        left, since, over = self.decays(log, begins)
        within = self.within(log, begins)
        return _Chunk(left.unsqueeze(-1), since.unsqueeze(-1), over, convolved, q, k, (of_q, of_k), v, beta, within)

    def headed(self, x: Tensor) -> Tensor:
        """Turn (n, G, r, p) into (G r, n, p)."""
        turned = x.new_empty(self.G * self.r, len(x), self.p)
        self.of_heads(turned).copy_(x)
        return turned

    def tokened(self, x: Tensor) -> Tensor:
        """Turn (G r, n, p) into (G, n, r p)."""
        turned = x.new_empty(x.shape[1], self.G, self.r, self.p)
        return self.grouped(turned.copy_(self.of_heads(x)))

    def read(self, of_group: Tensor, state: Tensor) -> Tensor:
        """Return the values, (G r, n, p), that keys or queries, (G, n, width), read from a state."""
        return self.headed(self.of_groups(bmm(of_group, state)))

    def after(self, t: _Chunk, new: Tensor, state: Tensor) -> Tensor:
        """Return the state after a chunk."""
        return self.decayed(state, t.over).add_(bmm(t.k.mT, self.tokened(new * t.left)))

    def new(self, t: _Chunk, state: Tensor) -> Tensor:
        """Return the values that the chunk's tokens write into the state, (G r, n, p)."""
        system = self.shared(bmm(t.k, t.k.mT), t.within).mul_(t.beta)
        right = (t.v - self.read(t.k, state).mul_(t.since)).mul_(t.beta)
        return solve_system(system, right)

    def step(self, low: int, high: int, state: Tensor, y: Tensor) -> Tensor:
        t = self.chunk(low, high)
        new = self.new(t, state)
        mixed = self.shared(bmm(t.q, t.k.mT), t.within)
        out = self.read(t.q, state).mul_(t.since).add_(bmm(mixed, new))
        of_tokens = self.of_heads(out).unflatten(1, (self.batch, -1))
        y.unflatten(2, (-1, self.r, self.p)).copy_(of_tokens.transpose(0, 1))
        return self.after(t, new, state)

    def written(self, low: int, high: int, state: Tensor) -> tuple[Tensor, Tensor]:
        t = self.chunk(low, high)
        new = self.new(t, state)
        return new, self.after(t, new, state)

    def back(self, low: int, high: int, state: Tensor, written: Tensor, g: Tensor, d_state: Tensor) -> Tensor:
        t, new = self.chunk(low, high), written
        g = self.headed(self.chunk_of(g))
        # y = (q kᵀ ∘ decay) new + exp(l) q S;  S' = decay S + kᵀ (left new)
        mixed = self.shared(bmm(t.q, t.k.mT), t.within)
        d_left = self.read(t.k, d_state).mul_(t.left)
        d_new = bmm(mixed.mT, g).add_(d_left)
        d_mixed = bmm(g, new.mT).tril_()
        # new = (I + A)⁻¹ R;  R = beta (v - exp(l) k S)
        system = self.shared(bmm(t.k, t.k.mT), t.within)
        d_right = solve_system(system * t.beta, d_new, turned=True)
        d_a = bmm(d_right, new.mT).tril_(-1).neg_()
        seen = self.read(t.k, state).mul_(t.since)
        d_seen = d_right * -t.beta
        by_beta = (d_a * system).sum(-1).add_((d_right * (t.v - seen)).sum(-1))
        # A row of logs decays what it multiplies, and a column the reverse.
        d_a.mul_(t.beta)
        through = mixed.mul_(d_mixed).addcmul_(d_a, system)
        d_log = through.sum(-1).sub_(through.sum(-2))
        read = self.read(t.q, state).mul_(t.since)
        d_log += read.mul_(g).addcmul_(d_seen, seen).sum(-1)
        d_ends = (d_left * new).sum(-1)
        d_log -= d_ends
        decayed = self.decayed(d_state, t.over)
        d_log[:, -1] += d_ends.sum(-1)
        d_log[:, -1] += (decayed * state).unflatten(2, (self.r, self.p)).sum((1, 3)).flatten()
        # Queries, keys and the state.
        d_qk, d_kk = self.summed(d_mixed.mul_(t.within)), self.summed(d_a.mul_(t.within))
        g_since, seen_since = self.tokened(g * t.since), self.tokened(d_seen * t.since)
        d_q = bmm(d_qk, t.k).add_(bmm(g_since, state.mT))
        d_k = bmm(d_qk.mT, t.q).add_(bmm(d_kk + d_kk.mT, t.k)).add_(bmm(seen_since, state.mT))
        d_k.add_(bmm(self.tokened(new * t.left), d_state.mT))
        before = decayed.add_(bmm(t.q.mT, g_since)).add_(bmm(t.k.mT, seen_since))
        beta, steps = self.beta[:, low:high], self.steps[:, low:high]
        self.d_beta[:, low:high] = by_beta.mul_(beta).mul_(1 - beta)
        d_g = d_log.flip(-1).cumsum(-1).flip(-1).mul_(self.a.unsqueeze(-1))
        self.d_a_log += (d_g * steps).sum(-1)
        # softplus'(u) = sigmoid(u) = 1 - exp(-softplus(u))
        self.d_alpha[:, low:high] = d_g.mul_(-torch.expm1(-steps))
        # Norms, SiLU and convolution.
        d_q.mul_(self.n**-0.5)
        d_q = length_gradient(d_q, t.q * self.n**0.5, t.lengths[0])
        d_k = length_gradient(d_k, t.k, t.lengths[1])
        d_v = self.of_heads(d_right.mul_(t.beta))
        self.convolved_back(low, high, t.convolved, (d_q.transpose(0, 1), d_k.transpose(0, 1), d_v))
        return before

    def gradients(self, g: Tensor) -> tuple[list[Tensor], list[Tensor | None]]:
        self.d_beta, self.d_alpha = torch.empty_like(self.beta), torch.empty_like(self.beta)
        self.d_a_log = torch.zeros_like(self.a)
        return super().gradients(g)

    def finished(self) -> tuple[list[Tensor], list[Tensor]]:
        gates = [gate.view(self.batch, -1).sum(0) for gate in (self.d_alpha.sum(-1), self.d_a_log)]
        return [self.per_token(self.d_beta), self.per_token(self.d_alpha)], gates


def solve_system(a: Tensor, right: Tensor, turned: bool = False) -> Tensor:
    """Return (I + A)⁻¹ R, or `turned` (I + Aᵀ)⁻¹ R; A is below the diagonal of `a`, whose other half is not read."""
    out: Tensor = torch.linalg.solve_triangular(a.mT if turned else a, right, upper=turned, unitriangular=True)
    return out


def inverse_lengths(x: Tensor) -> Tensor:
    """Return 1 / |x| of the last dimension, (..., 1)."""
    return x.square().sum(-1, keepdim=True).add_(EPS).rsqrt_()


def length_gradient(g: Tensor, unit: Tensor, inverse: Tensor) -> Tensor:
    """Return the gradient of x from that of x / |x|: `unit`; `inverse`: 1 / |x|."""
    return (g - unit * (g * unit).sum(-1, keepdim=True)) * inverse
