"""Small models of several families for products and gathers in 8 bits; every shard is a multiple of 16."""

from __future__ import annotations

from typing import Any

from phalanx.spec.job import Precision

NARROW = Precision("bfloat16", products="float8", gather="float8")
SIZES = {"vocab": 64, "hidden": 64, "layers": 2, "heads": 4, "kv_heads": 4, "ffn": 128, "max_seq": 64}
EXPERTS = {"count": 6, "top_k": 2, "ffn": 32, "shared_ffn": 32, "dense_layers": [1]}
LATENT = {"q_rank": 48, "kv_rank": 32, "rope_dim": 16, "nope_dim": 16, "v_dim": 32}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama"},
    "gpt2": {"family": "gpt2"},
    "palm": {"family": "palm"},
    "qwen3": {"family": "qwen3"},
    "experts": {"family": "llama", "experts": EXPERTS},
    "latent": {"family": "llama", "latent": LATENT},
}
