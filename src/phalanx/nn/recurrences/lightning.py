"""Lightning attention (Qin et al. 2024) in chunks: linear attention with a fixed decay for each head.

    S_t = exp(-a) S_{t-1} + k_t v_tᵀ        y_t = S_tᵀ q_t        q, k, v through SiLU

Head h of H, from 1, in layer i of L, from 0, decays by a = 2^(-8 h / H) (1 - i / (L - 1 + 1e-5) + 1e-5) a token
(transformers 5.23, models/minimax/modeling_minimax.py:147). Inside a chunk of tokens, with l = -a (1, 2, ..):

    y = (q kᵀ ∘ exp(l_i - l_j)) v + exp(l) q S        S' = exp(l_last) S + (exp(l_last - l) k)ᵀ v

    q, k, v, y   (batch, seq, heads x n)
    state        (batch, heads, n, n), fp32, or fp64 in fp64 runs

Layouts inside a chunk: chunked.py, and (G, n, width) of G = batch x heads.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, bmm

from phalanx.nn.recurrences.chunked import ChunkDecays, ChunkedScan, Convolved, RecurrenceSizes


@dataclass(frozen=True)
class Lightning(RecurrenceSizes):
    """Sizes of one rank's part of the recurrence: its heads are those from number `first` on, of `all_heads`."""

    heads: int
    head_dim: int
    chunk: int
    first: int = 0
    all_heads: int = 0
    scale: float = 1.0
    """The layer's factor of all decays."""

    @property
    def scan(self) -> Callable[..., ChunkedScan]:
        return _LightningScan


@dataclass(frozen=True)
class _Chunk(ChunkDecays):
    """A chunk's tokens as the recurrence reads them. Tensors are (G, n, ...), `over` (G,)."""

    read: list[Convolved]
    q: Tensor
    k: Tensor
    v: Tensor
    within: Tensor
    """The decay between two tokens."""


class _LightningScan(ChunkedScan):
    """Lightning attention over q, k and v."""

    writes = False

    def __init__(
        self, s: Lightning, parts: Sequence[Tensor], filters: object, gates: object, past: int, begins: Tensor | None
    ) -> None:
        super().__init__(parts, (), past, s.heads, s.heads, s.head_dim, s.head_dim, s.chunk, begins)
        number = torch.arange(s.first + 1, s.first + s.heads + 1, device=parts[0].device, dtype=self.wide)
        self.a = torch.exp2(number * (-8 / s.all_heads)).mul_(-s.scale).repeat(self.batch)  # (G,)

    def chunk(self, low: int, high: int) -> _Chunk:
        """Return tokens low..high as the recurrence reads them."""
        read = self.convolved(low, high)
        q, k, v = (F.silu(x).view(high - low, self.G, self.n).transpose(0, 1) for x, _ in read)
        at = torch.arange(1, high - low + 1, device=q.device)
        log, begins = self.a.unsqueeze(-1) * at, self.begins_of(low, high)
        left, since, over = self.decays(log, begins)
        return _Chunk(left.unsqueeze(-1), since.unsqueeze(-1), over, read, q, k, v, self.within(log, begins))

    def after(self, t: _Chunk, state: Tensor) -> Tensor:
        """Return the state after a chunk."""
        return self.decayed(state, t.over).add_(bmm((t.k * t.left).mT, t.v))

    def step(self, low: int, high: int, state: Tensor, y: Tensor) -> Tensor:
        t = self.chunk(low, high)
        out = bmm(t.q, state).mul_(t.since)
        out.add_(bmm(bmm(t.q, t.k.mT).mul_(t.within), t.v))
        y.unflatten(2, (-1, self.p)).copy_(out.unflatten(0, (self.batch, -1)).transpose(1, 2))
        return self.after(t, state)

    def written(self, low: int, high: int, state: Tensor) -> tuple[Tensor, Tensor]:
        return state, self.after(self.chunk(low, high), state)

    def back(self, low: int, high: int, state: Tensor, written: Tensor, g: Tensor, d_state: Tensor) -> Tensor:
        t = self.chunk(low, high)
        g = self.chunk_of(g).squeeze(2).transpose(0, 1)
        d_scores = bmm(g, t.v.mT).mul_(t.within)
        d_q = bmm(g, state.mT).mul_(t.since).add_(bmm(d_scores, t.k))
        d_k = bmm(t.v, d_state.mT).mul_(t.left).add_(bmm(d_scores.mT, t.q))
        d_v = bmm(t.k, d_state).mul_(t.left).add_(bmm(bmm(t.q, t.k.mT).mul_(t.within).mT, g))
        before = self.decayed(d_state, t.over).add_(bmm((t.q * t.since).mT, g))
        self.convolved_back(low, high, t.read, [d.transpose(0, 1) for d in (d_q, d_k, d_v)])
        return before

    def finished(self) -> tuple[list[Tensor], list[Tensor]]:
        return [], []
