"""Attention's core in a sliding window, band by band (schedule/layers/windows.py)."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from phalanx.runtime.autograd import attention_core
from phalanx.schedule.layers.windows import bands, queries


def band_mask(window: int, like: Tensor) -> Tensor:
    """Return the mask of a band, (queries, queries + window - 1): -inf where a key is outside of the query's window,
    else 0. Its first key is window - 1 before its first query."""
    n = queries(window)
    key = torch.arange(n + window - 1, device=like.device)
    query = torch.arange(n, device=like.device).unsqueeze(-1)
    hidden = (key < query).logical_or_(key >= query + window)
    return torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden, -math.inf)


class _Windowed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, window: int, scale: float | None) -> Tensor:
        out, sums = torch.empty_like(q), []
        kept = q, k, v, out
        q, k, v, into = (t.transpose(1, 2) for t in kept)  # (batch, heads, seq, head_dim)
        for low, high, first in bands(q.shape[2], window):
            part, lse = attention_core.forward(
                q[:, :, low:high],
                k[:, :, first:high],
                v[:, :, first:high],
                _visible(mask, low, high, first, window),
                scale=scale,
            )
            into[:, :, low:high] = part
            sums.append(lse)
        ctx.rest = window, scale
        ctx.save_for_backward(*kept, torch.cat(sums, -1), mask)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        window, scale = ctx.rest
        *kept, lse, mask = ctx.saved_tensors
        q, k, v, out, g = (t.transpose(1, 2) for t in (*kept, g))
        d_q, d_k, d_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for low, high, first in bands(q.shape[2], window):
            rows, keys = slice(low, high), slice(first, high)
            d_query, d_key, d_value = attention_core.backward(
                g[:, :, rows],
                q[:, :, rows],
                k[:, :, keys],
                v[:, :, keys],
                out[:, :, rows],
                lse[:, :, rows],
                _visible(mask, low, high, first, window),
                scale=scale,
            )
            d_q[:, :, rows] = d_query
            d_k[:, :, keys] += d_key
            d_v[:, :, keys] += d_value
        return d_q.transpose(1, 2), d_k.transpose(1, 2), d_v.transpose(1, 2), None, None, None


def _visible(mask: Tensor, low: int, high: int, first: int, window: int) -> Tensor:
    """Return the part of a band's mask for its queries and keys."""
    before = low - window + 1  # the key of the mask's first column
    return mask[: high - low, first - before : high - before]


def window_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, window: int, scale: float | None = None
) -> Tensor:
    """Return attention of every query to its window, (batch, seq, heads, head_dim), like q; k, v (batch, seq,
    kv_heads, head_dim); `mask`: of a band. Keeps q, k, v, the result and its log-sum-exp, as attention over all
    tokens does."""
    return _Windowed.apply(q, k, v, mask, window, scale)  # type: ignore[no-any-return]
