"""Attention kernels (FlashAttention, Dao 2023), of prompts and in decoding, with latents too (DeepSeek-V2, 2024).

Prompts: tiles of 128 queries of a head against all keys that they see, on P processors, in waves:

    t = start + waves (P 2 x 128 keys (d + dv) / (share FLOP/s) + tile) + bytes / (share bytes/s)

Decoding: each request and key head reads its cache, cut into parts of some keys so that all processors read:

    t = start + waves tile + (read^p + compute^p)^(1/p)      read: bytes of cache / (share bytes/s)
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from phalanx.cost.hardware.columns import Column
from phalanx.cost.kernels.chip import KernelChip


@dataclass(frozen=True)
class Heads:
    """Heads of a rank: queries, keys, and their sizes. With latents: one key head, which includes the values."""

    heads: Column
    kv_heads: Column
    key_dim: Column
    value_dim: Column
    cached: Column
    """Elements of a token's cache: kv_heads x (key_dim + value_dim), or the latent's."""
    window: Column = 0.0
    """Window of keys visible to a query; 0: all before it."""


@dataclass(frozen=True)
class PromptConstants:
    """Rates of prompt attention on a generation of chips."""

    rate16: Column = 0.6
    """Share of the peak FLOP/s reached in 16 bits; `rate8`: in 8."""
    rate8: Column = 0.5
    memory: Column = 0.8
    idle: Column = 0.5
    """Share of the last wave's idle processors that stay idle."""
    tile_s: Column = 3e-6
    """Seconds of a tile in addition to its products: loading queries, rescaling, writing."""
    narrow: Column = 0.3
    """Exponent of heads under 128 wide: softmax is done per key, whatever the width."""
    wide: Column = 0.3
    """Exponent of heads over 128 wide, which need smaller tiles."""
    fill: Column = 300.0
    """Cost of starting and ending a tile's loop, in keys."""
    rows: Column = 64.0
    """Minimum rows computed per tile, even with fewer queries."""


@dataclass(frozen=True)
class DecodeConstants:
    """Rates of decoding attention on a generation of chips."""

    memory: Column = 0.8
    """Share of memory bandwidth."""
    parallel: Column = 0.3
    """Exponent of the rate's decrease if only some processors read."""
    tile_s: Column = 2e-6
    """Seconds of a part in addition to its reads."""
    keys: Column = 256.0
    """Minimum keys of a part."""
    idle: Column = 0.5
    rate16: Column = 0.4
    rows: Column = 16.0
    """Rows of a tensor core's tile: query heads of one key head are padded to them."""
    sharpness: Column = 2.0


@dataclass(frozen=True)
class AttentionLibrary:
    """Deviation of one library's kernels, as factors of the chip's constants."""

    start_s: Column = 6e-6
    """Seconds of launches, and of additional kernels."""
    rate: Column = 1.0
    """Factor of the 16-bit rate; in decoding, of memory bandwidth."""
    rate8: Column = 1.0
    tile: Column = 1.0
    """Factor of `tile_s`."""
    cache8_s: Column = 1e-6
    """Additional seconds with a cache in 8 bits."""
    cache8: Column = 1.0
    """Factor of the time with a cache in 8 bits."""


def _rounded_waves(waves: Any, idle: Any) -> Any:
    """Return waves with the last one rounded up by the share `idle` of its idle processors."""
    return waves + idle * (np.ceil(waves) - waves)


def query_key_pairs(tokens: Any, past: Any, window: Any) -> Any:
    """Return the query-key pairs of one prompt's `tokens` after `past` tokens, under a causal mask and a window."""
    w = np.where(window > 0, window, past + tokens)
    short = np.clip(w - past, 0, tokens)  # queries whose window covers all keys before them
    return short * past + short * (short + 1) / 2 + (tokens - short) * w


def prompt_attention_s(
    prompts: Any,
    tokens: Any,
    past: Any,
    x: Heads,
    chip: KernelChip,
    c: PromptConstants,
    lib: AttentionLibrary,
    bytes_: Any = (2.0, 2.0),
) -> Any:
    """Return seconds of `prompts` prompts of `tokens` tokens each, after `past` cached ones. `bytes_`: of an element
    of queries, and of the cache; queries of 8 bits are multiplied in 8."""
    query, cache = bytes_
    d = x.key_dim
    share = np.where(query < 2, c.rate8 * chip.fp8 * lib.rate8, c.rate16 * chip.half * lib.rate)
    share = share * np.where(d < 128, (d / 128) ** c.narrow, np.where(d > 128, (128 / d) ** c.wide, 1.0))
    both = d + x.value_dim
    waves = _rounded_waves(prompts * np.maximum(x.heads * np.ceil(tokens / 128), 1) / chip.processors, c.idle)
    keys = query_key_pairs(tokens, past, x.window) / tokens + c.fill * np.minimum(1, tokens / 128)
    tile = 2 * 128 * np.minimum(1, (tokens + c.rows) / (128 + c.rows)) * keys * both
    compute = waves * (chip.processors * tile / share + c.tile_s * lib.tile)
    moved = prompts * (cache * (past + tokens) * x.cached + 2 * tokens * x.heads * both)
    read = moved / (chip.memory_bytes_per_s * c.memory)
    narrow = cache < 2
    return lib.start_s + np.where(narrow, lib.cache8_s, 0.0) + (compute + read) * np.where(narrow, lib.cache8, 1.0)


def decode_attention_s(
    sequences: Any,
    context: Any,
    x: Heads,
    chip: KernelChip,
    c: DecodeConstants,
    lib: AttentionLibrary,
    cache: Any = 2.0,
) -> Any:
    """Return seconds of decoding one token for each of `sequences` sequences of `context` tokens. `cache`: bytes of a
    cached element."""
    seen = np.where(x.window > 0, np.minimum(x.window, context), context)
    moved = sequences * (seen * x.cached * cache + 2 * x.heads * (x.key_dim + x.value_dim))
    units = sequences * x.kv_heads
    parts = np.maximum(1.0, np.minimum(chip.processors / units, seen / c.keys))
    waves = units * parts / chip.processors
    lost = np.where(waves > 1, _rounded_waves(waves, c.idle) / waves, np.minimum(waves, 1.0) ** -c.parallel)
    narrow = cache < 2
    read = moved / (chip.memory_bytes_per_s * c.memory * lib.rate) * np.where(narrow, lib.cache8, 1.0) * lost
    rows = np.maximum(x.heads / x.kv_heads, c.rows)
    compute = 2 * units * rows * seen * (x.key_dim + x.value_dim) / (chip.half * c.rate16)
    body = (read**c.sharpness + compute**c.sharpness) ** (1 / c.sharpness)
    return lib.start_s + np.where(narrow, lib.cache8_s, 0.0) + c.tile_s * lib.tile * waves + body
