"""Kimi delta attention (Moonshot 2025, "Kimi Linear") in chunks: the gated delta rule (delta_rule.py) with a decay
for every channel of a key.

    S_t = D_t S_{t-1} + k_t (beta_t (v_t - (D_t S_{t-1})ᵀ k_t))ᵀ        y_t = S_tᵀ q_t / sqrt(n)
    D_t = diag(exp(g_t))        g = -exp(a_log) softplus(decay + dt_bias)

Inside a chunk of tokens, with l the sum of g from its start:

    P(a, b)_ij = Σ_d a_id b_jd exp(l_id - l_jd), j <= i
    new = (I + A)⁻¹ beta (v - (exp(l) k) S)      A = beta P(k, k) below the diagonal
    y   = P(q, k) new + (exp(l) q) S             S' = exp(l_last) S + (exp(l_last - l) k)ᵀ new

P of a chunk is made of products of later tokens with earlier ones, half a chunk with the other half, quarters with
quarters, and so on: the decay of each pair is that to the first of the later tokens times that from it, neither above
one, so that no decay overflows.

    q, k, v, decay, y   (batch, seq, heads x n)
    beta                (batch, seq, heads), before the sigmoid
    dt_bias             (heads x n,), a_log (heads,)
    state               (batch, heads, n, n), fp32, or fp64 in fp64 runs

Layouts inside a chunk: chunked.py, and (G, n, width) of G = batch x heads.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, bmm

from phalanx.nn import documents
from phalanx.nn.recurrences.chunked import ChunkDecays, ChunkedScan, Convolved, RecurrenceSizes
from phalanx.nn.recurrences.convolution import Filter
from phalanx.nn.recurrences.delta_rule import inverse_lengths, length_gradient, solve_system
from phalanx.schedule.layers.halves import Halves, halves


@dataclass(frozen=True)
class ChannelDelta(RecurrenceSizes):
    """Sizes of one rank's part of the recurrence."""

    heads: int
    head_dim: int
    chunk: int

    @property
    def scan(self) -> Callable[..., ChunkedScan]:
        return _ChannelDeltaScan


@dataclass(frozen=True)
class _Chunk(ChunkDecays):
    """A chunk's tokens as the recurrence reads them. Tensors are (G, n, ...), `over` (G, width, 1)."""

    convolved: list[Convolved]
    q: Tensor
    """Of length 1 / sqrt(width)."""
    k: Tensor
    """Of length 1."""
    lengths: tuple[Tensor, Tensor]
    """1 / length of q and k before their norm."""
    v: Tensor
    beta: Tensor
    steps: Tensor
    """softplus(decay + dt_bias)."""
    log: Tensor
    """The logarithm of the decay from the chunk's start."""


class _ChannelDeltaScan(ChunkedScan):
    """The recurrence over q, k, v, beta and decay."""

    writes = True

    def __init__(
        self,
        s: ChannelDelta,
        parts: Sequence[Tensor],
        filters: Sequence[Filter],
        gates: Sequence[Tensor],
        past: int,
        begins: Tensor | None,
    ) -> None:
        super().__init__(parts[:3], filters, past, s.heads, s.heads, s.head_dim, s.head_dim, s.chunk, begins)
        dt_bias, a_log = gates
        self.beta, self.decay = self.per_head(parts[3]).sigmoid_(), parts[4]
        self.bias = dt_bias.to(self.wide)
        self.a = -a_log.to(self.wide).exp().repeat(self.batch).view(-1, 1, 1)  # (G, 1, 1)

    def chunk(self, low: int, high: int) -> _Chunk:
        """Return tokens low..high as the recurrence reads them."""
        convolved = self.convolved(low, high)
        q, k, v = (self.headed(F.silu(pre)) for _, pre in convolved)
        of_q, of_k = inverse_lengths(q), inverse_lengths(k)
        q, k = q * (of_q * self.n**-0.5), k * of_k
        steps = self.headed(F.softplus(self.token_first(self.decay[:, low:high]).add_(self.bias)))
        log, begins = (steps * self.a).cumsum(1), self.begins_of(low, high)
        left, since = (
            documents.mask_to_end((log[:, -1:] - log).exp_(), begins),
            documents.mask_from_start(log.exp(), begins),
        )
        over = documents.mask_across(log[:, -1].exp(), begins).unsqueeze(-1)
        beta = self.beta[:, low:high].unsqueeze(-1)
        return _Chunk(left, since, over, convolved, q, k, (of_q, of_k), v, beta, steps, log)

    def headed(self, x: Tensor) -> Tensor:
        """Turn (n, batch, channels) into (G, n, width)."""
        return x.view(len(x), self.G, self.n).transpose(0, 1).contiguous()

    def pairs(self, t: _Chunk, low: int, high: int, *of: Tensor) -> list[Tensor]:
        """Return P(a, k) for each a in `of`: (G, n, n), zero above the diagonal."""
        n, begins = high - low, self.begins_of(low, high)
        results = [t.k.new_zeros(self.G, n, n) for _ in of]
        for a, result in zip(of, results, strict=True):
            result.diagonal(dim1=1, dim2=2).copy_((a * t.k).sum(-1))
        for at in halves(n):
            _add_pairs(at, t, of, results)
        return [documents.mask_between(result, begins) for result in results]

    def pairs_back(self, t: _Chunk, d_q: Tensor, d_k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, of k as P's first and of k as its second argument, from the gradients of P(q, k)
        and P(k, k)."""
        rows = [d.diagonal(dim1=1, dim2=2).unsqueeze(-1) * t.k for d in (d_q, d_k)]
        columns = d_q.diagonal(dim1=1, dim2=2).unsqueeze(-1) * t.q
        columns.addcmul_(d_k.diagonal(dim1=1, dim2=2).unsqueeze(-1), t.k)
        for at in halves(t.q.shape[1]):
            _add_gradients(at, t, (d_q, d_k), rows, columns)
        return rows[0], rows[1], columns

    def after(self, t: _Chunk, new: Tensor, state: Tensor) -> Tensor:
        """Return the state after a chunk."""
        return (state * t.over).add_(bmm((t.k * t.left).mT, new))

    def new(self, t: _Chunk, scores: Tensor, state: Tensor) -> Tensor:
        """Return the values that the chunk's tokens write into the state, (G, n, p). `scores`: P(k, k),
        overwritten."""
        return solve_system(scores.mul_(t.beta), (t.v - bmm(t.k * t.since, state)).mul_(t.beta))

    def step(self, low: int, high: int, state: Tensor, y: Tensor) -> Tensor:
        t = self.chunk(low, high)
        of_q, of_k = self.pairs(t, low, high, t.q, t.k)
        new = self.new(t, of_k, state)
        out = bmm(t.q * t.since, state).add_(bmm(of_q, new))
        y.unflatten(2, (-1, self.p)).copy_(out.unflatten(0, (self.batch, -1)).transpose(1, 2))
        return self.after(t, new, state)

    def written(self, low: int, high: int, state: Tensor) -> tuple[Tensor, Tensor]:
        t = self.chunk(low, high)
        (of_k,) = self.pairs(t, low, high, t.k)
        new = self.new(t, of_k, state)
        return new, self.after(t, new, state)

    def back(self, low: int, high: int, state: Tensor, written: Tensor, g: Tensor, d_state: Tensor) -> Tensor:
        t, new, begins = self.chunk(low, high), written, self.begins_of(low, high)
        g = self.chunk_of(g).squeeze(2).transpose(0, 1)
        # y = P(q, k) new + (exp(l) q) S;  S' = over S + (left k)ᵀ new
        of_q, of_k = self.pairs(t, low, high, t.q, t.k)
        d_new = bmm(of_q.mT, g).add_(bmm(t.k * t.left, d_state))
        d_of_q = documents.mask_between(bmm(g, new.mT).tril_(), begins)
        # new = (I + A)⁻¹ R;  R = beta (v - (exp(l) k) S)
        d_right = solve_system(of_k * t.beta, d_new, turned=True)
        d_of_k = documents.mask_between(bmm(d_right, new.mT).tril_(-1).neg_(), begins)
        by_beta = (d_of_k * of_k).sum(-1)
        by_beta += (d_right * (t.v - bmm(t.k * t.since, state))).sum(-1)
        d_of_k.mul_(t.beta)
        d_v = d_right * t.beta
        # Each decay is in what it multiplies, and with a minus in what it divides.
        d_q, d_k, d_columns = self.pairs_back(t, d_of_q, d_of_k)
        d_q.addcmul_(bmm(g, state.mT), t.since)
        d_k.addcmul_(bmm(d_v, state.mT), t.since, value=-1)
        d_left = bmm(new, d_state.mT).mul_(t.left)
        d_columns.add_(d_left)
        d_log = (d_q * t.q).addcmul_(d_k, t.k).addcmul_(d_columns, t.k, value=-1)
        decayed = d_state * t.over
        d_log[:, -1] += (d_left * t.k).sum(1).add_((decayed * state).sum(-1))
        before = decayed.add_(bmm((t.q * t.since).mT, g)).sub_(bmm((t.k * t.since).mT, d_v))
        beta = self.beta[:, low:high]
        self.d_beta[:, low:high] = by_beta.mul_(beta).mul_(1 - beta)
        d_g = d_log.flip(1).cumsum(1).flip(1).mul_(self.a)
        self.d_a_log += (d_g * t.steps).sum((1, 2))
        # softplus'(u) = sigmoid(u) = 1 - exp(-softplus(u))
        d_decay = d_g.new_empty(high - low, self.batch, self.heads * self.n)
        d_decay.view(high - low, self.G, self.n).copy_(d_g.mul_(-torch.expm1(-t.steps)).transpose(0, 1))
        self.d_bias += d_decay.sum((0, 1))
        self.d_decay[:, low:high] = d_decay.transpose(0, 1)
        # Norms, SiLU and convolution.
        d_q = length_gradient(d_q.mul_(self.n**-0.5), t.q * self.n**0.5, t.lengths[0])
        d_k = length_gradient(d_k.add_(d_columns), t.k, t.lengths[1])
        self.convolved_back(low, high, t.convolved, [d.transpose(0, 1) for d in (d_q, d_k, d_v)])
        return before

    def gradients(self, g: Tensor) -> tuple[list[Tensor], list[Tensor | None]]:
        self.d_beta, self.d_decay = torch.empty_like(self.beta), torch.empty_like(self.decay)
        self.d_a_log, self.d_bias = torch.zeros_like(self.a[:, 0, 0]), torch.zeros_like(self.bias)
        return super().gradients(g)

    def finished(self) -> tuple[list[Tensor], list[Tensor]]:
        return [self.per_token(self.d_beta), self.d_decay], [self.d_bias, self.d_a_log.view(self.batch, -1).sum(0)]


def _earlier(at: Halves, x: Tensor) -> Tensor:
    """View the earlier tokens of blocks, of (G, n, width), as (G, count, half, width)."""
    return _blocks(at, x)[:, :, : at.half]


def _later(at: Halves, x: Tensor) -> Tensor:
    """View the later tokens, as (G, count, rest, width)."""
    return _blocks(at, x)[:, :, at.half :]


def _blocks(at: Halves, x: Tensor) -> Tensor:
    out: Tensor = x[:, at.tokens].unflatten(1, (at.count, -1))
    return out


def _pairs(at: Halves, x: Tensor) -> Tensor:
    """View pairs (G, n, n) of a later and an earlier token, as (G, count, rest, half)."""
    blocks = _blocks(at, x[:, :, at.tokens]).unflatten(3, (at.count, -1)).diagonal(dim1=1, dim2=3)
    out: Tensor = blocks.movedim(-1, 1)[:, :, at.half :, : at.half]
    return out


def _decays(at: Halves, log: Tensor) -> tuple[Tensor, Tensor]:
    """Return the decays from the first of the later tokens to these, and to it from the earlier ones."""
    middle = _later(at, log)[:, :, :1]
    return (_later(at, log) - middle).exp_(), (middle - _earlier(at, log)).exp_()


def _add_pairs(at: Halves, t: _Chunk, of: Sequence[Tensor], results: Sequence[Tensor]) -> None:
    """Write the pairs of the blocks `at` of P(a, k), for each a in `of`, into its result (G, n, n)."""
    later, earlier = _decays(at, t.log)
    earlier.mul_(_earlier(at, t.k))
    for a, result in zip(of, results, strict=True):
        _pairs(at, result).copy_(torch.matmul(_later(at, a) * later, earlier.mT))


def _add_gradients(
    at: Halves, t: _Chunk, d_results: Sequence[Tensor], rows: Sequence[Tensor], columns: Tensor
) -> None:
    """Add the blocks' part of the gradients of q and k to their `rows`, and that of k as the second argument to
    `columns`. `d_results`: of P(q, k) and P(k, k)."""
    later, earlier = _decays(at, t.log)
    of_k = _earlier(at, t.k) * earlier
    for a, d, row in zip((t.q, t.k), d_results, rows, strict=True):
        of_d = _pairs(at, d)
        _later(at, row).addcmul_(torch.matmul(of_d, of_k), later)
        _earlier(at, columns).addcmul_(torch.matmul(of_d.mT, _later(at, a) * later), earlier)
