"""Multi-head latent attention (DeepSeek-AI 2024a, "DeepSeek-V2", section 2.1): keys and values of all heads are
computed from `kv_rank` numbers per token, queries from `q_rank`.

    q_down, kv_down   of x, the same on every tp rank; the last `rope_dim` numbers of kv_down are rotated by position
                      and are part of every head's keys
    q_norm, kv_norm   of the two latents, without those
    q_up, kv_up       of the normed latents: this rank's heads only, so that its gradients of everything before
                      are terms of sums over tp

The core knows one width, that of keys: tensors with fewer dimensions, mostly values, are padded with zeros, which
also travel around a ring of context parallelism. A cache holds the normed latent and the rotated keys, not heads;
decoding attends to these directly.

Lifetimes, in order; t tokens (all, with sequence parallelism too), n heads of this rank, w the width. Tensors with a
star are kept for the backward pass, by the operation named behind them:

    *x           (t, hidden)             columns; with sequence parallelism own rows
    *down        (t, q_rank)             q_norm, with a number per token; without q_rank: q
    *latent      (t, kv_rank + rope_dim) kv_norm, with a number per token; all of it
    *normed q    (t, q_rank)             q_up
     q           (t, n head_dim)         until it is rotated
    *rotated q   (t, n w)                core
    *normed kv   (t, kv_rank)            kv_up
     rope        (t, rope_dim)           rotated, until keys are computed
     up          (t, n (nope_dim + v_dim))  until keys and values are computed
    *k, v        (t, n w) each           core
    *out         (t, n w)                core, with a number per token and head
    *result      (t, n v_dim)            o; it is `out` where values have the full width

Queries are padded to w after kv_norm, whose temporaries are the peak where latents are wide. Selective recomputation
keeps rotated q, k and v in place of what follows them; full keeps the block's input.

The lightning indexer (DeepSeek-AI 2025, "DeepSeek-V3.2", equation 1): which keys a query attends to.

    score_ts = Σ_h w_th relu(q_th · k_s)        the `top` keys with the highest scores, of those that t may see

    q      (batch, seq, heads, dim) of the latent of queries, k (batch, keys, dim) of the token, normed; both turned
           by position in their first numbers, in pairs half of these apart
    w      (batch, seq, heads) of the token

It is whole on every tp rank, and has no gradients: it is trained by a loss of its own, which we do not compute, so
its parameters stay unchanged. Ties, such as of keys that no head scores, go to the earlier key.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from phalanx.nn import functional
from phalanx.nn.attention import Angles, Cache, CausalAttention
from phalanx.nn.functional import accumulate_dtype
from phalanx.nn.norms import LayerNorm, RMSNorm
from phalanx.runtime.autograd import deferred_weight_grads, recompute
from phalanx.runtime.autograd.deferred_weight_grads import Owners
from phalanx.runtime.model_parallel import tensor
from phalanx.runtime.model_parallel.context import ContextParallel
from phalanx.runtime.model_parallel.tensor import TensorParallel
from phalanx.spec.model.blocks.block import Sublayer
from phalanx.spec.model.blocks.operators import Index
from phalanx.spec.model.spec import ModelSpec

_EPS = 1e-6
"""The epsilon of the norms of latents, and of the indexer's keys, regardless of the model's other norms
(modeling_deepseek.py of DeepSeek-V2 and V3; deepseek-ai/DeepSeek-V3.2-Exp, inference/model.py, Indexer)."""


class _KeysAndValues(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, up: Tensor, rope: Tensor, nope_dim: int, width: int) -> tuple[Tensor, Tensor]:
        v_dim, head_dim = up.shape[-1] - nope_dim, nope_dim + rope.shape[-1]
        ctx.sizes = nope_dim, head_dim, v_dim
        k, v = (up.new_empty(*up.shape[:-1], width) for _ in range(2))
        k[..., :nope_dim], k[..., nope_dim:head_dim] = up[..., :nope_dim], rope
        v[..., :v_dim] = up[..., nope_dim:]
        for padded, used in ((k, head_dim), (v, v_dim)):
            if used < width:
                padded[..., used:] = 0
        return k, v

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_k: Tensor, d_v: Tensor) -> tuple[Tensor, Tensor, None, None]:
        nope_dim, head_dim, v_dim = ctx.sizes
        d_up = torch.cat([d_k[..., :nope_dim], d_v[..., :v_dim]], -1)
        return d_up, d_k[..., nope_dim:head_dim].sum(2, keepdim=True), None, None


def keys_and_values(up: Tensor, rope: Tensor, nope_dim: int, width: int) -> tuple[Tensor, Tensor]:
    """Build keys and values, both (batch, tokens, heads, width), from the per-head part `up`, (batch, tokens, heads,
    nope_dim + v_dim), and the keys' part that all heads share, (batch, tokens, 1, rope_dim). Keeps nothing."""
    return _KeysAndValues.apply(up, rope, nope_dim, width)  # type: ignore[no-any-return]


class _Unlearned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, owners: Owners, x: Tensor, *others: Tensor) -> Tensor:
        ctx.owners, ctx.shapes = owners, [other.shape for other in others]
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        zeros = [g.new_zeros(shape) for shape in ctx.shapes]
        results = len(zeros) - len(ctx.owners)  # the results of products come first
        return None, g, *zeros[:results], *deferred_weight_grads.deliver(ctx.owners, *zeros[results:])


class Indexer(nn.Module):
    """The products of an index, and its choice."""

    def __init__(self, op: Index) -> None:
        super().__init__()
        self.op = op
        of_q, of_k, of_weights = op.into
        self.q = nn.Linear(of_q, op.heads * op.each, bias=False)
        self.k = nn.Linear(of_k, op.each, bias=False)
        self.k_norm = LayerNorm(op.each, _EPS, True)
        self.weights = nn.Linear(of_weights, op.heads, bias=False)

    def attached(self, x: Tensor, *outs: Tensor) -> Tensor:
        """Return x. Its backward pass gives gradients of zero to `outs`, the results of the index's other products,
        and to its remaining parameters, so that every parameter has a gradient."""
        inside = (self.q.weight, self.k_norm.weight, self.k_norm.bias)
        views = [p.view_as(p) for p in inside]
        return _Unlearned.apply(deferred_weight_grads.owners(*inside), x, *outs, *views)  # type: ignore[no-any-return]

    @torch.no_grad()
    def keys(self, k: Tensor, angles: Angles) -> Tensor:
        """Return the keys of tokens, (batch, tokens, dim), of the product's result."""
        return self._turned(self.k_norm(k).unsqueeze(2), angles).squeeze(2)

    @torch.no_grad()
    def queries(self, latent: Tensor, angles: Angles) -> Tensor:
        """Return the queries, (batch, seq, heads, dim), of their latent."""
        q = F.linear(latent, self.q.weight)
        return self._turned(q.unflatten(2, (self.op.heads, self.op.each)), angles)

    def _turned(self, x: Tensor, angles: Angles) -> Tensor:
        assert angles is not None
        return functional.rotary(x, *angles)

    @torch.no_grad()
    def chosen(self, q: Tensor, k: Tensor, weights: Tensor, mask: Tensor | None) -> Tensor | None:
        """Return the mask of attention, (batch, 1, queries, keys), where keys that were not chosen are hidden too;
        `mask` as it is where there are no more keys than may be chosen. `mask`: None: queries are the last tokens,
        and see themselves and all before."""
        keys, wide = k.shape[1], accumulate_dtype(q.dtype)
        if keys <= self.op.top:
            return mask
        scores = torch.zeros(*q.shape[:2], keys, dtype=wide, device=q.device)
        for head in range(self.op.heads):
            of_head = (q[:, :, head] @ k.mT).relu_().to(wide)
            scores.addcmul_(of_head, weights[..., head : head + 1].to(wide))
        hidden = mask
        if hidden is None:
            hidden = torch.full((q.shape[1], keys), -math.inf, dtype=q.dtype, device=q.device)
            hidden = hidden.triu_(keys - q.shape[1] + 1)[None, None]
        best = scores.add_(hidden[:, 0]).sort(stable=True, dim=-1, descending=True).indices[..., : self.op.top]
        others = torch.full(scores.shape, -math.inf, dtype=q.dtype, device=q.device).scatter_(-1, best, 0.0)
        return others.unsqueeze(1) + hidden


class LatentAttention(CausalAttention):
    """Latent attention. Communicates over tp as Attention does: the gradient of x, and the sum of `o`."""

    def __init__(
        self,
        spec: ModelSpec,
        sublayer: Sublayer,
        block: int,
        tp: TensorParallel | None,
        cp: ContextParallel | None = None,
    ) -> None:
        super().__init__(sublayer, block, tp, cp)
        assert spec.latent is not None
        self.sizes = a = spec.latent
        self.v_dim, self.width = a.v_dim, spec.core_dim
        self.scale = spec.head_dim**-0.5 * (spec.rope_scaling.logits if spec.rope_scaling is not None else 1.0)
        if a.q_rank is None:
            self.q = nn.Linear(spec.hidden, spec.q_width, bias=False)
        else:
            self.q_down = nn.Linear(spec.hidden, a.q_rank, bias=spec.qkv_bias)
        self.kv_down = nn.Linear(spec.hidden, a.kv_rank + a.rope_dim, bias=spec.qkv_bias)
        if a.q_rank is not None:
            self.q_norm = RMSNorm(a.q_rank, _EPS)
            self.q_up = nn.Linear(a.q_rank, spec.q_width, bias=False)
        self.kv_norm = RMSNorm(a.kv_rank, _EPS)
        self.kv_up = nn.Linear(a.kv_rank, spec.heads * (a.nope_dim + a.v_dim), bias=False)
        op = sublayer.first(Index)
        self.index = None if op is None else Indexer(op)
        self.o = nn.Linear(spec.heads * a.v_dim, spec.hidden, bias=spec.out_bias)

    def heads(self, x: Tensor, angles: Angles, mask: Tensor | None = None) -> tuple[Tensor | None, ...]:
        q, latent, rope, *of_index = self._latents(x, angles)
        if self.index is not None:
            asked, keys, weights = of_index
            mask = self.index.chosen(asked, keys, weights, mask)
        if self.width > self.head_dim:
            q = F.pad(q, (0, self.width - self.head_dim))
        return q, *self._expanded(latent, rope), mask

    def _latents(self, x: Tensor, angles: Angles) -> tuple[Tensor, ...]:
        """Return rotated queries, (batch, seq, heads, head_dim); normed latents, (batch, seq, kv_rank); the rotated
        part of the keys, (batch, seq, 1, rope_dim); with an index its queries, keys and weights."""
        a = self.sizes
        of_index: tuple[Tensor, ...] = ()
        layers = [self.q if a.q_rank is None else self.q_down, self.kv_down]
        if self.index is not None:
            layers += [self.index.k, self.index.weights]
        q, latent, *rest = tensor.columns(self.tp, self.unit, x, layers)
        if self.index is not None:
            latent = self.index.attached(latent, *rest)
        if a.q_rank is not None:
            normed = self.q_norm(q)
            if self.index is not None:
                of_index = self.index.queries(normed, angles), self.index.keys(rest[0], angles), rest[1].detach()
            q = recompute.linear(self.q_up, normed)
            del normed
        q = q.view(*q.shape[:2], -1, self.head_dim)
        if angles is not None:
            q = functional.rotary(q, *angles, a.nope_dim, a.interleaved)
        latent, rope = latent.split([a.kv_rank, a.rope_dim], -1)
        latent, rope = self.kv_norm(latent), rope.unsqueeze(2)
        if angles is not None:
            rope = functional.rotary(rope, *angles, 0, a.interleaved)
        return q, latent, rope, *of_index

    def _expanded(self, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values, both (batch, tokens, heads, width)."""
        a, up = self.sizes, recompute.linear(self.kv_up, latent)
        return keys_and_values(up.view(*up.shape[:2], -1, a.nope_dim + a.v_dim), rope, a.nope_dim, self.width)

    def cached(self, x: Tensor, angles: Angles, cache: Cache) -> Tensor:
        q, latent, rope, *of_index = self._latents(x, angles)
        own_keys = of_index[1:2]
        cache.extend(self.block, torch.cat([latent, rope.squeeze(2), *own_keys], -1))
        parts = []
        for read in cache.reads(self.window):
            own = q[:, read.rows].view(read.slots, -1, *q.shape[2:])
            (seen,) = cache.read(self.block, read)  # (slots, keys, kv_rank + rope_dim), then the index's keys
            mask = read.mask
            if self.index is not None:
                seen, keys = seen.split([seen.shape[2] - self.index.op.each, self.index.op.each], 2)
                asked, _, weights = (
                    part[:, read.rows].flatten(0, 1).unflatten(0, own.shape[:2]) for part in of_index
                )
                mask = self.index.chosen(asked, keys, weights, mask)
            out = (self._in_latents if read.decodes else self._in_heads)(own, seen, mask)
            parts.append(out.reshape(1, -1, self.o.in_features))
        return torch.cat(parts, 1)

    def _in_heads(self, q: Tensor, seen: Tensor, mask: Tensor | None) -> Tensor:
        """Attend with keys and values of every head, for many queries: (slots, new, heads x v_dim)."""
        if self.width > self.head_dim:
            q = F.pad(q, (0, self.width - self.head_dim))
        latent, rope = seen.split([self.sizes.kv_rank, self.sizes.rope_dim], -1)
        return self._core(q, *self._expanded(latent, rope.unsqueeze(2)), mask)

    def _in_latents(self, q: Tensor, seen: Tensor, mask: Tensor | None) -> Tensor:
        """Attend in the space of the latents, for one query each: key matrices are absorbed into the query, value
        matrices into the result, and all heads share the cached latent as key (section 2.1.2). Returns (slots, 1,
        heads x v_dim)."""
        a, up = self.sizes, self.kv_up.weight
        of_keys, of_values = up.view(-1, a.nope_dim + a.v_dim, a.kv_rank).split([a.nope_dim, a.v_dim], 1)
        nope, rope = q.transpose(1, 2).split([a.nope_dim, a.rope_dim], -1)  # (slots, heads, 1, dim)
        q = torch.cat([torch.einsum("shqd,hdr->shqr", nope, of_keys), rope], -1)
        one = seen.unsqueeze(1)  # (slots, 1, keys, kv_rank + rope_dim)
        out = F.scaled_dot_product_attention(q, one, one, attn_mask=mask, enable_gqa=True, scale=self.scale)
        return torch.einsum("shqr,hvr->shqv", out[..., : a.kv_rank], of_values).transpose(1, 2).flatten(2)
