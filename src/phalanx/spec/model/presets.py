"""Models by name, as their papers or published config.json files describe them, with the source beside each."""

from __future__ import annotations

from typing import Any

from phalanx.spec.errors import InputError, nearest


def _gpt(hidden: int, layers: int, heads: int, max_seq: int = 1024, vocab: int = 50257) -> dict[str, Any]:
    sizes = {"vocab": vocab, "hidden": hidden, "layers": layers, "heads": heads}
    return {"family": "gpt2", **sizes, "max_seq": max_seq, "ffn": 4 * hidden}


def _llama(vocab: int, h: int, layers: int, heads: int, kv: int, ffn: int, seq: int, **more: Any) -> dict[str, Any]:
    sizes = {"vocab": vocab, "hidden": h, "layers": layers, "heads": heads, "kv_heads": kv, "ffn": ffn}
    return {"family": "llama", **sizes, "max_seq": seq, **more}


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    sizes = _llama(201088, 2880, layers, 64, 8, 2880, 131072, head_dim=64)
    routed = {"count": experts, "top_k": 4, "ffn": 2880, "bias": True, "router_bias": True}
    yarn = {"kind": "yarn", "factor": 32.0, "original_max_seq": 4096, "truncate": False}
    windows = {"window": 128, "window_layers": list(range(0, layers, 2))}
    return sizes | windows | {"family": "gpt_oss", "experts": routed, "rope_scaling": yarn}


def _deepseek_yarn(mscale: float) -> dict[str, Any]:
    """YaRN with mscale = mscale_all_dim, so that their quotient, the factor of cos and sin, is 1."""
    scales = {"attention_factor": 1.0, "mscale_all_dim": mscale}
    return {"kind": "yarn", "factor": 40.0, "original_max_seq": 4096, **scales}


_LLAMA3 = {"rope_theta": 500_000.0}
_LLAMA31_ROPE = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_seq": 8192}

PRESETS: dict[str, dict[str, Any]] = {
    # Radford et al. 2019; openai-community/gpt2*
    "gpt2": _gpt(768, 12, 12),
    "gpt2-medium": _gpt(1024, 24, 16),
    "gpt2-large": _gpt(1280, 36, 20),
    "gpt2-xl": _gpt(1600, 48, 25),
    # Brown et al. 2020, table 2.1
    "gpt3-175b": _gpt(12288, 96, 96, max_seq=2048),
    # Smith et al. 2022, section 2.2
    "mt-nlg-530b": _gpt(20480, 105, 128, max_seq=2048),
    # Narayanan et al. 2021, table 1, last row
    "gpt-1t": _gpt(25600, 128, 160, max_seq=2048, vocab=51200),
    # Black et al. 2022; EleutherAI/gpt-neox-20b
    "gpt-neox-20b": _gpt(6144, 44, 64, max_seq=2048, vocab=50432)
    | {"family": "gpt_neox", "rotary_dim": 24, "activation": "gelu_tanh"},
    # Chowdhery et al. 2022, table 1 and section 2; the vocabulary is "256k tokens"
    "palm-540b": _llama(256_000, 18432, 118, 48, 1, 73728, 2048, head_dim=256) | {"family": "palm"},
    # Touvron et al. 2023a, table 2, and the released params.json
    "llama-7b": _llama(32000, 4096, 32, 32, 32, 11008, 2048, norm_eps=1e-6),
    "llama-13b": _llama(32000, 5120, 40, 40, 40, 13824, 2048, norm_eps=1e-6),
    "llama-33b": _llama(32000, 6656, 60, 52, 52, 17920, 2048, norm_eps=1e-6),
    "llama-65b": _llama(32000, 8192, 80, 64, 64, 22016, 2048),
    # Touvron et al. 2023b; meta-llama/Llama-2-*
    "llama2-7b": _llama(32000, 4096, 32, 32, 32, 11008, 4096),
    "llama2-13b": _llama(32000, 5120, 40, 40, 40, 13824, 4096),
    "llama2-70b": _llama(32000, 8192, 80, 64, 8, 28672, 4096),
    # Grattafiori et al. 2024, table 3; meta-llama/Meta-Llama-3-*, Llama-3.1-405B
    "llama3-8b": _llama(128256, 4096, 32, 32, 8, 14336, 8192, **_LLAMA3),
    "llama3-70b": _llama(128256, 8192, 80, 64, 8, 28672, 8192, **_LLAMA3),
    "llama3-405b": _llama(128256, 16384, 126, 128, 8, 53248, 131072, **_LLAMA3, rope_scaling=_LLAMA31_ROPE),
    # Jiang et al. 2023; mistralai/Mistral-7B-v0.1
    "mistral-7b": _llama(32000, 4096, 32, 32, 8, 14336, 32768, window=4096) | {"family": "mistral"},
    # Yang et al. 2024; Qwen/Qwen2-7B
    "qwen2-7b": _llama(152064, 3584, 28, 28, 4, 18944, 131072) | {"family": "qwen2"},
    # Yang et al. 2025; Qwen/Qwen3-32B
    "qwen3-32b": _llama(151936, 5120, 64, 64, 8, 25600, 40960, head_dim=128) | {"family": "qwen3"},
    # Jiang et al. 2024; mistralai/Mixtral-8x7B-v0.1
    "mixtral-8x7b": _llama(32000, 4096, 32, 32, 8, 14336, 32768)
    | {"family": "mixtral", "experts": {"count": 8, "top_k": 2, "ffn": 14336, "balance_loss": 2 * 0.02}},
    # Yang et al. 2025; Qwen/Qwen3-30B-A3B
    "qwen3-30b-a3b": _llama(151936, 2048, 48, 32, 4, 6144, 40960, head_dim=128)
    | {"family": "qwen3_moe", "experts": {"count": 128, "top_k": 8, "ffn": 768, "balance_loss": 8 * 0.001}},
    # DeepSeek-AI 2024a; deepseek-ai/DeepSeek-V2
    "deepseek-v2": _llama(102400, 5120, 60, 128, 128, 12288, 163840)
    | {
        "family": "deepseek_v2",
        "latent": {"q_rank": 1536, "kv_rank": 512, "nope_dim": 128, "rope_dim": 64, "v_dim": 128},
        "experts": {"count": 160, "top_k": 6, "ffn": 1536, "shared_ffn": 2 * 1536, "dense_layers": [0]}
        | {"scale": 16.0, "groups": 8, "top_groups": 3, "balance_loss": 0.001},
        "rope_scaling": _deepseek_yarn(0.707),
    },
    # DeepSeek-AI 2024b; deepseek-ai/DeepSeek-V3, without its layer for predicting a second token
    "deepseek-v3": _llama(129280, 7168, 61, 128, 128, 18432, 163840)
    | {
        "family": "deepseek_v3",
        "latent": {"q_rank": 1536, "kv_rank": 512, "nope_dim": 128, "rope_dim": 64, "v_dim": 128},
        "experts": {"count": 256, "top_k": 8, "ffn": 2048, "shared_ffn": 2048, "dense_layers": [0, 1, 2]}
        | {"scale": 2.5, "groups": 8, "top_groups": 4, "balance_loss": 0.0001},
        "rope_scaling": _deepseek_yarn(1.0),
    },
    # OpenAI 2025; openai/gpt-oss-*
    "gpt-oss-20b": _gpt_oss(layers=24, experts=32),
    "gpt-oss-120b": _gpt_oss(layers=36, experts=128),
}


def preset(name: str) -> dict[str, Any]:
    """Return the fields of a preset; `families.complete` adds the rest. Raises InputError for unknown names."""
    if name not in PRESETS:
        raise InputError("model.preset", name, "is not a model that Phalanx knows", nearest(name, PRESETS))
    return dict(PRESETS[name])
