"""Bytes of the KV cache: keys and values of every token and block, or the latents that they are computed from.

grouped-query attention   2 kv_heads head_dim numbers a token and block; with tp, those of a rank's key heads, of
                          which neighbouring ranks hold copies where tp is more than the key heads
latent attention          kv_rank + rope_dim, the same on every tp rank (DeepSeek-AI 2024a, table 1)
"""

from __future__ import annotations

from phalanx.spec.model.spec import ModelSpec


def per_token(local: ModelSpec) -> int:
    """Return the numbers that a rank caches of one token in one block. `local`: its part of the model."""
    a = local.latent
    return 2 * local.kv_width if a is None else a.kv_rank + a.rope_dim


def cache_bytes(local: ModelSpec, tokens: int, e: int) -> int:
    """Return the bytes of a rank's cache with room for `tokens` tokens, in elements of `e` bytes."""
    return per_token(local) * len(local.held_blocks) * tokens * e
