"""Mamba-2's state-space recurrence (Dao & Gu 2024) in chunks, with the causal convolution of what it reads.

    S_t = exp(dt_t a) S_{t-1} + dt_t B_t x_tᵀ        y_t = S_tᵀ C_t + d x_t       x, B, C after the convolution

Inside a chunk of tokens, with l the sum of dt a from its start:

    y = (C Bᵀ ∘ exp(l_i - l_j)) (dt x) + exp(l) C S        S' = exp(l_last) S + (exp(l_last - l) B)ᵀ (dt x)

    x, y         (batch, seq, heads x p)
    b, c         (batch, seq, groups x n): each group serves heads / groups heads
    dt           (batch, seq, heads), before softplus and its bias
    dt_bias, a_log, d   (heads,); a = -exp(a_log)
    state        (batch, groups, n, heads / groups x p), fp32, or fp64 in fp64 runs

Sums are in the state's type. Layouts inside a chunk: chunked.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, bmm

from phalanx.nn.recurrences.chunked import ChunkDecays, ChunkedScan, Convolved, RecurrenceSizes, softplus
from phalanx.nn.recurrences.convolution import Filter


@dataclass(frozen=True)
class StateSpace(RecurrenceSizes):
    """Sizes of one rank's part of the recurrence."""

    heads: int
    head_dim: int
    groups: int
    state: int
    chunk: int

    @property
    def scan(self) -> Callable[..., ChunkedScan]:
        return _StateSpaceScan


@dataclass(frozen=True)
class _Chunk(ChunkDecays):
    """A chunk's tokens as the recurrence reads them. `left` and `since`: (n, G, r, 1); `over`: (G r,)."""

    convolved: list[Convolved]
    x: Tensor
    """(n, G, r, p)."""
    b: Tensor
    """(G, n, state), as c."""
    c: Tensor
    dt: Tensor
    """(n, G, r, 1)."""
    within: Tensor
    """The decay between two tokens, (G r, n, n)."""


class _StateSpaceScan(ChunkedScan):
    writes = False

    def __init__(
        self,
        s: StateSpace,
        parts: Sequence[Tensor],
        filters: Sequence[Filter],
        gates: Sequence[Tensor],
        past: int,
        begins: Tensor | None,
    ) -> None:
        super().__init__(parts[:3], filters, past, s.groups, s.heads, s.state, s.head_dim, s.chunk, begins)
        dt_bias, a_log, d = gates
        self.steps = softplus(self.per_head(parts[3]), dt_bias)
        self.a = -a_log.to(self.wide).exp().repeat(self.batch)  # (G r,)
        self.skip = d.to(self.wide).repeat(self.batch).view(self.G, self.r, 1)

    def chunk(self, low: int, high: int) -> _Chunk:
        """Return tokens low..high as the recurrence reads them."""
        convolved = self.convolved(low, high)
        x, b, c = (F.silu(pre) for _, pre in convolved)
        b, c = (part.view(high - low, self.G, self.n).transpose(0, 1) for part in (b, c))
        dt = self.steps[:, low:high]
        log = (dt * self.a.unsqueeze(-1)).cumsum(-1)
        begins = self.begins_of(low, high)
        left, since, over = self.decays(log, begins)
        x = x.view(-1, self.G, self.r, self.p)
        within = self.within(log, begins)
        dt, left, since = (self.token_numbers(numbers) for numbers in (dt, left, since))
        return _Chunk(left, since, over, convolved, x, b, c, dt, within)

    def after(self, t: _Chunk, stepped: Tensor, state: Tensor) -> Tensor:
        """Return the state after a chunk. `stepped`: dt x."""
        return self.decayed(state, t.over).add_(bmm(t.b.mT, self.grouped(stepped * t.left)))

    def step(self, low: int, high: int, state: Tensor, y: Tensor) -> Tensor:
        t = self.chunk(low, high)
        stepped = t.x * t.dt
        mixed = self.shared(bmm(t.c, t.b.mT), t.within)
        inside, read = bmm(mixed, self.by_head(stepped)), bmm(t.c, state)
        out = (t.x * self.skip).add_(self.of_heads(inside)).addcmul_(self.of_groups(read), t.since)
        y.copy_(out.view(len(out), self.batch, -1).transpose(0, 1))
        return self.after(t, stepped, state)

    def written(self, low: int, high: int, state: Tensor) -> tuple[Tensor, Tensor]:
        t = self.chunk(low, high)
        return state, self.after(t, t.x * t.dt, state)

    def back(self, low: int, high: int, state: Tensor, written: Tensor, g: Tensor, d_state: Tensor) -> Tensor:
        t, g = self.chunk(low, high), self.chunk_of(g)
        stepped = t.x * t.dt
        g_heads, x_heads = self.by_head(g), self.by_head(stepped)
        mixed = self.shared(bmm(t.c, t.b.mT), t.within)
        # y = mixed (dt x) + since C S
        d_inside, inside, read = bmm(mixed.mT, g_heads), bmm(mixed, x_heads), bmm(t.c, state)
        y = self.of_groups(read).mul_(t.since).add_(self.of_heads(inside))
        d_scores = self.summed(bmm(g_heads, x_heads.mT).mul_(t.within))
        g_since = self.grouped(g * t.since)
        d_c = bmm(d_scores, t.b).add_(bmm(g_since, state.mT))
        # S' = decay S + Bᵀ (left dt x)
        d_b = bmm(d_scores.mT, t.c).add_(bmm(self.grouped(stepped * t.left), d_state.mT))
        d_left = self.of_groups(bmm(t.b, d_state)).mul_(t.left)
        decayed = self.decayed(d_state, t.over)
        d_last = (d_left * stepped).sum((0, 3))  # (G, r)
        d_last += (decayed * state).unflatten(2, (self.r, self.p)).sum((1, 3))
        d_stepped = self.of_heads(d_inside) + d_left
        before = decayed.add_(bmm(t.c.mT, g_since))
        # Each log of decay is in a row of what it multiplies, and with a minus in what it divides.
        d_log = (g * y).sub_(d_stepped * stepped).sum(-1)  # (n, G, r)
        d_log[-1] += d_last
        d_log = d_log.flip(0).cumsum(0).flip(0).flatten(1).t()  # (G r, n)
        dt = self.steps[:, low:high]
        self.d_a += (d_log * dt).sum(-1)
        d_dt = (d_stepped * t.x).sum(-1).flatten(1).t()
        # softplus'(u) = sigmoid(u) = 1 - exp(-softplus(u))
        self.d_steps[:, low:high] = torch.addcmul(d_dt, d_log, self.a.unsqueeze(-1)).mul_(-torch.expm1(-dt))
        self.d_skip += (g * t.x).sum((0, 3))
        d_x = torch.addcmul(g * self.skip, d_stepped, t.dt)
        self.convolved_back(low, high, t.convolved, (d_x, d_b.transpose(0, 1), d_c.transpose(0, 1)))
        return before

    def gradients(self, g: Tensor) -> tuple[list[Tensor], list[Tensor | None]]:
        self.d_steps = torch.empty_like(self.steps)
        self.d_a, self.d_skip = torch.zeros_like(self.a), torch.zeros_like(self.skip[..., 0])
        return super().gradients(g)

    def finished(self) -> tuple[list[Tensor], list[Tensor]]:
        gates = (self.d_steps.sum(-1), self.d_a.mul_(self.a), self.d_skip)
        return [self.per_token(self.d_steps)], [gate.view(self.batch, -1).sum(0) for gate in gates]
