"""Bytes of the KV cache: keys and values of every token and block, or their latents.

grouped-query attention   2 kv_heads head_dim numbers per token and block; with tp, only for a rank's key heads,
                          with copies on neighbouring ranks if tp exceeds the key heads
latent attention          kv_rank + rope_dim, the same on every tp rank (DeepSeek-AI 2024a, table 1)
"""

from __future__ import annotations

from phalanx.spec.model.spec import ModelSpec


def per_token(local: ModelSpec) -> int:
    """Return the number of elements that a rank caches per token and block. `local`: its part of the model."""
    a = local.latent
    return 2 * local.kv_width if a is None else a.kv_rank + a.rope_dim


def cache_bytes(local: ModelSpec, tokens: int, e: int) -> int:
    """Return the bytes of a rank's cache with room for `tokens` tokens, in elements of `e` bytes."""
    return per_token(local) * len(local.held_blocks) * tokens * e
