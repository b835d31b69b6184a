"""The core of attention, forward and backward as plain functions, for code that keeps, repeats or merges its results.

Along with its output, forward returns each query's log-sum-exp of logits, by which results over several blocks of
keys are merged (Dao et al. 2022, "FlashAttention").

    q, out, g  (batch, heads, queries, head_dim)
    k, v       (batch, kv_heads, keys, head_dim), kv_heads a divisor of heads (Ainslie et al. 2023)
    lse        (batch, heads, queries), fp32, or fp64 if q is fp64
    mask       added to the logits, broadcast to (batch, heads, queries, keys); if it may hide an entire row, use a
               very negative number instead of -inf: the row's lse is then negligible against any other
    causal     query i sees keys 0..i
    scale      of the logits q kᵀ, by default 1 / sqrt(head_dim)
"""

import math

import torch
from torch import Tensor

_aten = torch.ops.aten
Results = tuple[Tensor, Tensor]
Gradients = tuple[Tensor, Tensor, Tensor]


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False, scale: float | None = None
) -> Results:
    """Return (out, lse); shapes as in the module's docstring."""
    if q.device.type == "cpu":
        return _aten._scaled_dot_product_flash_attention_for_cpu(  # type: ignore[no-any-return]
            q, k, v, 0.0, causal, attn_mask=mask, scale=scale
        )
    if _flash(q, mask):
        return _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)[:2]  # type: ignore[no-any-return]
    return plain_forward(q, k, v, mask, causal, scale)


def backward(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> Gradients:
    """Return the gradients of q, k and v.

    `out` and `lse` may cover more keys than `k` holds: then the gradient of q is these keys' share of it, while the
    gradients of k and v are complete.
    """
    if q.device.type == "cpu":
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(  # type: ignore[no-any-return]
            g, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=scale
        )
    if _flash(q, mask):
        n, m, no_dropout = q.shape[2], k.shape[2], torch.empty(2, dtype=torch.uint64, device=q.device)
        lse = lse.contiguous()  # the kernel assumes contiguity, and a ring passes a slice
        return _aten._scaled_dot_product_flash_attention_backward(  # type: ignore[no-any-return]
            g, q, k, v, out, lse, None, None, n, m, 0.0, causal, no_dropout, no_dropout, scale=scale
        )
    return plain_backward(g, q, k, v, out, lse, mask, causal, scale)


def _flash(q: Tensor, mask: Tensor | None) -> bool:
    """Whether flash attention on a GPU supports these: 16-bit types, no mask, heads of at most 256 (a multiple of
    8)."""
    return mask is None and q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256


def plain_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False, scale: float | None = None
) -> Results:
    """Compute `forward` on any device by matrix products, with all logits in memory at once."""
    logits = _logits(q, k, mask, causal, _scale(q, scale))
    lse = logits.logsumexp(-1)
    out = _per_group(logits.sub_(lse.unsqueeze(-1)).exp_().to(v.dtype), v)
    return out.reshape(q.shape), lse.reshape(q.shape[:-1])


def plain_backward(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> Gradients:
    """Compute `backward` on any device by matrix products, with all logits in memory at once."""
    p = _logits(q, k, mask, causal, _scale(q, scale)).sub_(_grouped(lse, k).unsqueeze(-1)).exp_()
    g_grouped = _grouped(g, k)
    d_v = torch.einsum("bgrqk,bgrqd->bgkd", p.to(g.dtype), g_grouped)
    d_p = torch.einsum("bgrqd,bgkd->bgrqk", g_grouped, v).to(p.dtype)
    rows = (g * out).sum(-1, dtype=p.dtype)
    d_s = d_p.sub_(_grouped(rows, k).unsqueeze(-1)).mul_(p).mul_(_scale(q, scale)).to(q.dtype)
    return _per_group(d_s, k).reshape(q.shape), torch.einsum("bgrqk,bgrqd->bgkd", d_s, _grouped(q, k)), d_v


def _grouped(per_head: Tensor, k: Tensor) -> Tensor:
    """View (batch, heads, ...) as (batch, kv_heads, heads per kv_head, ...)."""
    return per_head.reshape(per_head.shape[0], k.shape[1], -1, *per_head.shape[2:])


def _per_group(p: Tensor, v: Tensor) -> Tensor:
    """Multiply each group of heads, (batch, kv_heads, group, queries, keys), with its kv head's v."""
    return torch.einsum("bgrqk,bgkd->bgrqd", p, v)


def _scale(q: Tensor, scale: float | None) -> float:
    return float(q.shape[-1] ** -0.5) if scale is None else scale


def _logits(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    """Return the masked logits, (batch, kv_heads, heads per kv_head, queries, keys)."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    s = torch.einsum("bgrqd,bgkd->bgrqk", _grouped(q, k), k).to(wide).mul_(scale)
    if mask is not None:
        s = s + _grouped(mask.expand(*q.shape[:3], k.shape[2]), k)
    if causal:
        later = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu_(1)
        s = s.masked_fill_(later, -math.inf)
    return s
