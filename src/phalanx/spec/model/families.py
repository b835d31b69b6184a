"""Model families: what each fixes, so that a user writes only sizes. Any field may be overridden."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phalanx.spec.errors import InputError, nearest

_LLAMA: dict[str, Any] = {
    "norm": "rms",
    "norm_eps": 1e-5,
    "position": "rotary",
    "activation": "swiglu",
    "qkv_bias": False,
    "out_bias": False,
    "mlp_bias": False,
    "tied": False,
}
_GPT2: dict[str, Any] = {
    "norm": "layer",
    "norm_eps": 1e-5,
    "position": "learned",
    "activation": "gelu_tanh",
    "qkv_bias": True,
    "out_bias": True,
    "mlp_bias": True,
    "tied": True,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA | {"norm_eps": 1e-6, "qkv_bias": True, "rope_theta": 1e6},
    "qwen3": _LLAMA | {"norm_eps": 1e-6, "qk_norm": True, "rope_theta": 1e6},
    "gpt2": _GPT2,
    "gpt_neox": _GPT2 | {"position": "rotary", "activation": "gelu", "tied": False, "residual": "parallel"},
    # Chowdhery et al. 2022, section 2: no bias anywhere, one head of keys and values, one norm for both branches.
    # Their logits are divided by sqrt(hidden), ours are not.
    "palm": _LLAMA
    | {"norm": "layer", "norm_bias": False, "residual": "parallel_one_norm", "kv_heads": 1, "tied": True},
    "mixtral": _LLAMA | {"rope_theta": 1e6},
    "qwen3_moe": _LLAMA | {"norm_eps": 1e-6, "qk_norm": True, "rope_theta": 1e6},
    "deepseek_v2": _LLAMA | {"norm_eps": 1e-6},
    "deepseek_v3": _LLAMA | {"norm_eps": 1e-6},
    "gpt_oss": _LLAMA
    | {"activation": "swiglu_clamped", "qkv_bias": True, "out_bias": True, "sinks": True, "rope_theta": 150_000.0},
}

# How a family routes tokens where the model does not say.
_ROUTING: dict[str, dict[str, Any]] = {
    "mixtral": {"normalized": True},
    "qwen3_moe": {"normalized": True},
    # balance_bias: DeepSeek-AI 2024b, section 4.2; no config.json has it.
    "deepseek_v3": {"score": "sigmoid", "normalized": True, "group_score": "top2", "balance_bias": 0.001},
}

_NEEDS = {
    "mixtral": ("experts",),
    "qwen3_moe": ("experts",),
    "deepseek_v2": ("experts", "latent"),
    "deepseek_v3": ("experts", "latent"),
    "gpt_oss": ("experts",),
}


def complete(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Complete the fields of a ModelSpec by what their `family` fixes, and by what follows from other sizes.

    Raises InputError for a missing or unknown family, a mechanism it needs, or heads that do not divide `hidden`.
    """
    family = fields.get("family")
    if family is None:
        raise InputError(
            "model",
            None,
            "needs a preset, a config, or a family with sizes",
            f"families: {', '.join(FAMILIES)}",
        )
    if not isinstance(family, str) or family not in FAMILIES:
        raise InputError("model.family", family, "is not a family that Phalanx knows", nearest(str(family), FAMILIES))
    for name in _NEEDS.get(family, ()):
        if not fields.get(name):
            raise InputError(f"model.{name}", None, f"is missing: family {family} needs it")
    full = {**FAMILIES[family], **fields}
    if isinstance(full.get("experts"), Mapping):
        full["experts"] = {**_ROUTING.get(family, {}), **full["experts"]}
    heads, hidden, latent = full.get("heads"), full.get("hidden"), full.get("latent")
    if isinstance(latent, Mapping) and all(isinstance(latent.get(d), int) for d in ("nope_dim", "rope_dim")):
        full.setdefault("head_dim", latent["nope_dim"] + latent["rope_dim"])
    if isinstance(heads, int):
        if heads < 1:
            raise InputError("model.heads", heads, "must be at least 1")
        full.setdefault("kv_heads", heads)
        if "head_dim" not in full and isinstance(hidden, int):
            if hidden % heads:
                raise InputError(
                    "model.heads", heads, f"does not divide hidden = {hidden}", "use a divisor, or give head_dim"
                )
            full["head_dim"] = hidden // heads
    if family == "gpt_neox" and isinstance(full.get("head_dim"), int):
        full.setdefault("rotary_dim", max(2, full["head_dim"] // 8 * 2))  # a quarter (Black et al. 2022)
    return full
