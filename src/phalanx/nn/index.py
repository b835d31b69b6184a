"""The lightning indexer (DeepSeek-AI 2025, "DeepSeek-V3.2", equation 1): which keys a query attends to.

    score_ts = Σ_h w_th relu(q_th · k_s)        the `top` keys with the highest scores, of those that t may see

    q      (batch, seq, heads, dim) of the latent of queries, k (batch, keys, dim) of the token, normed; both turned
           by position in their first numbers, in pairs half of these apart
    w      (batch, seq, heads) of the token

Whole on every tp rank, and without gradients: what trains it is a loss of its own, which is not part of ours, so its
parameters stay unchanged. Ties, such as of keys that no head scores, go to the earlier key.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from phalanx.nn import functional
from phalanx.nn.attention import Angles
from phalanx.nn.functional import accumulate_dtype
from phalanx.nn.norms import LayerNorm
from phalanx.runtime.autograd import deferred_weight_grads
from phalanx.runtime.autograd.deferred_weight_grads import Owners
from phalanx.spec.model.blocks.operators import Index

_EPS = 1e-6
"""The epsilon of the keys' norm (deepseek-ai/DeepSeek-V3.2-Exp, inference/model.py, Indexer)."""


class _Unlearned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, owners: Owners, x: Tensor, *others: Tensor) -> Tensor:
        ctx.owners, ctx.shapes = owners, [other.shape for other in others]
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        zeros = [g.new_zeros(shape) for shape in ctx.shapes]
        deferred = deferred_weight_grads.now(ctx.owners)
        if deferred is not None:
            held = len(zeros) - len(ctx.owners)
            for owner, zero in zip(ctx.owners, zeros[held:], strict=True):
                deferred.deliver_later(owner, zero)
            zeros[held:] = [None] * len(ctx.owners)  # type: ignore[list-item]
        return None, g, *zeros


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
        """Return x. Its backward pass gives products with results `outs`, and what is not in a product, gradients of
        zero, so that every parameter has one."""
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
        q = nn.functional.linear(latent, self.q.weight)
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
