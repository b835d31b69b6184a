"""The table of model families: the fields that each fixes, so that a user writes only sizes, and the format of its
config.json.

Any field may be overridden. To add a family: a row here, its reader and writer in hugging_face/, the names of its
weights in nn/hugging_face/names.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from phalanx.spec.errors import InputError, nearest
from phalanx.spec.model.hugging_face import deepseek, experts, gpt, llama
from phalanx.spec.model.hugging_face.reading import Config, Fields
from phalanx.spec.model.spec import ModelSpec

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

Reader = Callable[[Config], Fields]
Writer = tuple[str, Callable[[ModelSpec], Fields]]


@dataclass(frozen=True)
class Family:
    """Every fact about one family. No field has a default: a row that lacks a fact cannot be made."""

    fields: Fields
    """Fields of ModelSpec that the family fixes."""
    routing: Fields
    """Default routing of tokens: fields of Experts."""
    needs: tuple[str, ...]
    """Mechanisms that the family requires: experts, latent."""
    read: Reader | None
    """Reader of its config.json; None: `transformers` has no such family."""
    write: Writer | None
    """(Class of `transformers`, writer of its config.json); None: its weights are not exported."""


FAMILIES: dict[str, Family] = {
    "llama": Family(_LLAMA, {}, (), llama.read_llama, ("LlamaForCausalLM", llama.write_llama)),
    "mistral": Family(_LLAMA, {}, (), llama.read_mistral, ("MistralForCausalLM", llama.write_mistral)),
    "qwen2": Family(
        _LLAMA | {"norm_eps": 1e-6, "qkv_bias": True, "rope_theta": 1e6},
        {},
        (),
        llama.read_qwen2,
        ("Qwen2ForCausalLM", llama.write_qwen2),
    ),
    "qwen3": Family(
        _LLAMA | {"norm_eps": 1e-6, "qk_norm": True, "rope_theta": 1e6},
        {},
        (),
        llama.read_qwen3,
        ("Qwen3ForCausalLM", llama.write_qwen3),
    ),
    "gpt2": Family(_GPT2, {}, (), gpt.read_gpt2, ("GPT2LMHeadModel", gpt.write_gpt2)),
    "gpt_neox": Family(
        _GPT2 | {"position": "rotary", "activation": "gelu", "tied": False, "residual": "parallel"},
        {},
        (),
        gpt.read_gpt_neox,
        ("GPTNeoXForCausalLM", gpt.write_gpt_neox),
    ),
    # Chowdhery et al. 2022, section 2: no bias anywhere, one head of keys and values, one norm for both branches.
    # Their logits are divided by sqrt(hidden), ours are not.
    "palm": Family(
        _LLAMA | {"norm": "layer", "norm_bias": False, "residual": "parallel_one_norm", "kv_heads": 1, "tied": True},
        {},
        (),
        None,
        None,
    ),
    "mixtral": Family(
        _LLAMA | {"rope_theta": 1e6},
        {"normalized": True},
        ("experts",),
        experts.read_mixtral,
        ("MixtralForCausalLM", experts.write_mixtral),
    ),
    "qwen3_moe": Family(
        _LLAMA | {"norm_eps": 1e-6, "qk_norm": True, "rope_theta": 1e6},
        {"normalized": True},
        ("experts",),
        experts.read_qwen3_moe,
        ("Qwen3MoeForCausalLM", experts.write_qwen3_moe),
    ),
    "deepseek_v2": Family(
        _LLAMA | {"norm_eps": 1e-6},
        {},
        ("experts", "latent"),
        deepseek.read_deepseek_v2,
        ("DeepseekV2ForCausalLM", deepseek.write_deepseek_v2),
    ),
    "deepseek_v3": Family(
        _LLAMA | {"norm_eps": 1e-6},
        # balance_bias: DeepSeek-AI 2024b, section 4.2; no config.json has it.
        {"score": "sigmoid", "normalized": True, "group_score": "top2", "balance_bias": 0.001},
        ("experts", "latent"),
        deepseek.read_deepseek_v3,
        ("DeepseekV3ForCausalLM", deepseek.write_deepseek_v3),
    ),
    "gpt_oss": Family(
        _LLAMA
        | {
            "activation": "swiglu_clamped",
            "qkv_bias": True,
            "out_bias": True,
            "sinks": True,
            "rope_theta": 150_000.0,
        },
        {},
        ("experts",),
        experts.read_gpt_oss,
        None,
    ),
}


def family_of(name: object) -> Family:
    """Return the row of a family. Raises InputError for an unknown one."""
    if not isinstance(name, str) or name not in FAMILIES:
        raise InputError("model.family", name, "is not a family that Phalanx knows", nearest(str(name), FAMILIES))
    return FAMILIES[name]


def complete(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Complete the fields of a ModelSpec with those fixed by `family`, and with sizes derived from others.

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
    # What the family requires and fixes.
    row = family_of(family)
    for name in row.needs:
        if not fields.get(name):
            raise InputError(f"model.{name}", None, f"is missing: family {family} needs it")
    full = {**row.fields, **fields}
    if isinstance(full.get("experts"), Mapping):
        full["experts"] = {**row.routing, **full["experts"]}
    # Sizes that follow from others.
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
