"""Read a model's shape from the `config.json` that Hugging Face's `transformers` keeps beside its weights.

What a config leaves out gets the default of `transformers` for its family. What it asks for and our decoder does not
do is refused by name, never dropped.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phalanx.spec.errors import InputError, nearest

Fields = dict[str, Any]


class _Config:
    """The keys of a config file, where null counts as missing. `path` is for messages."""

    def __init__(self, keys: Mapping[str, Any], path: Path) -> None:
        self.keys, self.path = keys, path

    def __call__(self, key: str, default: Any = None) -> Any:
        value = self.keys.get(key)
        return default if value is None else value

    def need(self, *names: str) -> Any:
        """The value of the first of these keys that is present. Raises InputError if none is."""
        for name in names:
            if self.keys.get(name) is not None:
                return self.keys[name]
        raise self.wrong(f"has no {names[0]!r}", "is this a Hugging Face config.json?")

    def wrong(self, reason: str, remedy: str = "") -> InputError:
        """An InputError that names the file."""
        return InputError("model.config", str(self.path), reason, remedy)

    def only(self, key: str, *usable: Any) -> None:
        """Raise InputError if the key is present with a value other than these."""
        value = self(key, usable[0])
        if value not in usable:
            raise self.wrong(f"{key} = {value!r} is not supported", f"use {' or '.join(map(str, usable))}")


def from_hugging_face(path: Path) -> tuple[Fields, list[str]]:
    """Return the fields of a ModelSpec from a Hugging Face `config.json`, and notes on keys that were ignored.

    Raises InputError naming the file if it is missing, is not JSON, or is of a family or asks for something that our
    decoder does not support.
    """
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise InputError("model.config", str(path), "no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError("model.config", str(path), f"cannot be read ({error})") from None
    except json.JSONDecodeError as error:
        raise InputError("model.config", str(path), f"is not JSON ({error})") from None
    if not isinstance(config, dict):
        raise InputError("model.config", str(path), "is not a JSON object")
    kind, c = config.get("model_type"), _Config(config, path)
    if not isinstance(kind, str) or kind not in _READERS:
        raise c.wrong(f"model_type {kind!r} is not supported", nearest(str(kind), _READERS))
    try:
        shape = {"family": kind, **_READERS[kind](c)}
    except (KeyError, TypeError, AttributeError, ValueError, ZeroDivisionError) as error:
        if isinstance(error, InputError):
            raise
        raise c.wrong(f"has a field that cannot be read ({error!r})") from None
    names = ("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop")
    dropouts = [k for k in names if config.get(k)]
    notes = [f"dropout set to 0 ({', '.join(dropouts)} in {path.name})"] if dropouts else []
    return shape, notes


def _sizes(c: _Config, max_seq: int, norm_eps: float = 1e-6, kv_heads: int | None = None) -> Fields:
    """The fields that all descendants of Llama share. `kv_heads` is the default of a config without that key."""
    c.only("hidden_act", "silu")
    heads = c.need("num_attention_heads")
    kv = c("num_key_value_heads", heads if "num_key_value_heads" in c.keys or kv_heads is None else kv_heads)
    return {
        "vocab": c.need("vocab_size"),
        "hidden": c.need("hidden_size"),
        "layers": c.need("num_hidden_layers"),
        "heads": heads,
        "kv_heads": kv,
        "ffn": c.need("intermediate_size"),
        "max_seq": c("max_position_embeddings", max_seq),
        "norm_eps": c("rms_norm_eps", norm_eps),
        "tied": c("tie_word_embeddings", False),
    }


def _head_dim(c: _Config, default: int | None = None) -> Fields:
    size = c("head_dim", default)
    return {"head_dim": size} if size else {}


def _biases(c: _Config, default: bool = False) -> Fields:
    bias = c("attention_bias", default)
    return {"qkv_bias": bias, "out_bias": bias}


def _rope(c: _Config, theta: float = 10_000.0, partial: bool = False, default: Fields | None = None) -> Fields:
    """Read rotary positions: transformers 5 writes `rope_parameters`, 4 wrote `rope_theta` and `rope_scaling`.

    `theta` and `default` stand for missing keys; `partial`: the family may rotate only a part of each head, which the
    caller reads.
    """
    rope = c("rope_parameters") or c("rope_scaling") or default or {}
    if not partial and rope.get("partial_rotary_factor", c("partial_rotary_factor", 1.0)) != 1.0:
        raise c.wrong("partial_rotary_factor is not supported in this family", "use gpt_neox")
    base: Fields = {"rope_theta": rope.get("rope_theta") or c("rope_theta", theta)}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return base
    if kind not in ("linear", "llama3", "yarn"):
        raise c.wrong(f"rope type {kind!r} is not supported", "use default, linear, llama3 or yarn")
    scaling: Fields = {"kind": kind, "factor": rope["factor"]}
    if kind != "linear":
        trained = c("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
        scaling["original_max_seq"] = trained or c.need("max_position_embeddings")
    if kind == "llama3":
        scaling |= {"low_freq_factor": rope["low_freq_factor"], "high_freq_factor": rope["high_freq_factor"]}
    if kind == "yarn":
        scaling |= {name: rope[name] for name in ("beta_fast", "beta_slow") if rope.get(name)}
        scaling |= {"truncate": rope.get("truncate", True), "attention_factor": _yarn_attention(rope)}
    return {**base, "rope_scaling": scaling}


def _yarn_attention(rope: Mapping[str, Any]) -> float | None:
    """The factor of cos and sin: as stated, or DeepSeek's quotient of two scales; None: YaRN's default."""
    factor = rope.get("attention_factor")
    if factor is None and rope.get("mscale") and rope.get("mscale_all_dim"):
        above, below = (0.1 * rope[k] * math.log(max(rope["factor"], 1)) + 1 for k in ("mscale", "mscale_all_dim"))
        factor = above / below
    return None if factor is None else float(factor)


def _windows(c: _Config, by_default: range | None = None) -> Fields:
    """The sliding window, in the layers that `layer_types` names, else in those `by_default` (None: all)."""
    window, kinds = c("sliding_window"), c("layer_types")
    if window is None:
        return {}
    if kinds is None:
        return {"window": window, "window_layers": list(by_default) if by_default is not None else None}
    for kind in kinds:
        if kind not in ("sliding_attention", "full_attention"):
            raise c.wrong(f"layer type {kind!r} is not supported", "use full_attention or sliding_attention")
    layers = [i for i, kind in enumerate(kinds) if kind == "sliding_attention"]
    return {"window": window, "window_layers": layers} if layers else {}


def _llama(c: _Config) -> Fields:
    fields = _sizes(c, 2048) | _head_dim(c) | _biases(c) | _rope(c)
    return fields | {"mlp_bias": c("mlp_bias", False)}


def _mistral(c: _Config) -> Fields:
    window = c("sliding_window") if "sliding_window" in c.keys else 4096
    return _sizes(c, 131072, kv_heads=8) | _head_dim(c) | _rope(c) | {"window": window}


def _qwen2(c: _Config) -> Fields:
    fields = _sizes(c, 32768, kv_heads=32) | _head_dim(c) | _rope(c)
    if c("use_sliding_window", False):
        fields |= _windows(c, range(c("max_window_layers", 28), fields["layers"]))
    return fields


def _qwen3(c: _Config) -> Fields:
    return _qwen2(c) | _head_dim(c, 128) | _biases(c)


def _gpt2(c: _Config) -> Fields:
    for key, wanted in (("scale_attn_weights", True), ("scale_attn_by_inverse_layer_idx", False)):
        c.only(key, wanted)
    hidden = c.need("n_embd", "hidden_size")
    return {
        "vocab": c.need("vocab_size"),
        "hidden": hidden,
        "layers": c.need("n_layer", "num_hidden_layers"),
        "heads": c.need("n_head", "num_attention_heads"),
        "ffn": c("n_inner") or 4 * hidden,
        "max_seq": c("n_positions", 1024),
        "norm_eps": c("layer_norm_epsilon", 1e-5),
        "activation": _gelu(c, "activation_function", "gelu_new"),
        "tied": c("tie_word_embeddings", True),
    }


def _gpt_neox(c: _Config) -> Fields:
    hidden, heads = c.need("hidden_size"), c.need("num_attention_heads")
    rope = c("rope_parameters") or c("rope_scaling") or {}
    share = rope.get("partial_rotary_factor", c("rotary_pct", 0.25))
    return (
        _biases(c, default=True)
        | _rope(c, c("rotary_emb_base", 10_000.0), partial=True)
        | {
            "vocab": c.need("vocab_size"),
            "hidden": hidden,
            "layers": c.need("num_hidden_layers"),
            "heads": heads,
            "ffn": c.need("intermediate_size"),
            "max_seq": c("max_position_embeddings", 2048),
            "norm_eps": c("layer_norm_eps", 1e-5),
            "activation": _gelu(c, "hidden_act", "gelu"),
            "tied": c("tie_word_embeddings", False),
            "residual": "parallel" if c("use_parallel_residual", True) else "serial",
            "rotary_dim": int(hidden // heads * share),
        }
    )


def _gelu(c: _Config, key: str, default: str) -> str:
    known = {"gelu": "gelu", **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), "gelu_tanh")}
    name = c(key, default)
    if name not in known:
        raise c.wrong(f"{key} {name!r} is not supported", f"use one of {', '.join(known)}")
    return known[name]


def _mixtral(c: _Config) -> Fields:
    c.only("router_jitter_noise", 0.0)
    fields = _sizes(c, 131072, 1e-5, kv_heads=8) | _head_dim(c) | _rope(c, 1e6) | {"window": c("sliding_window")}
    routed = {"count": c("num_local_experts", 8), "top_k": c("num_experts_per_tok", 2), "ffn": fields["ffn"]}
    return fields | {"experts": routed | _router_losses(c, routed["top_k"])}


def _router_losses(c: _Config, top_k: int) -> Fields:
    """The router's loss coefficients. In `transformers` the balance loss is the number of experts x the sum over them
    of (share of tokens x mean score), with shares that sum to top_k; ours sum to 1."""
    return {"balance_loss": c("router_aux_loss_coef", 0.001) * top_k, "z_loss": c("router_z_loss_coef", 0.0)}


def _qwen3_moe(c: _Config) -> Fields:
    fields = _sizes(c, 32768, kv_heads=4) | _head_dim(c) | _biases(c) | _rope(c)
    if c("use_sliding_window", False):
        fields["window"] = c("sliding_window")
    step, dense = c("decoder_sparse_step", 1), c("mlp_only_layers", [])
    routed = {
        "count": c("num_experts") or c("num_local_experts", 128),
        "top_k": c("num_experts_per_tok", 8),
        "ffn": c("moe_intermediate_size", 768),
        "dense_layers": [i for i in range(fields["layers"]) if i in dense or (i + 1) % step],
        "normalized": c("norm_topk_prob", False),
    }
    return fields | {"experts": routed | _router_losses(c, routed["top_k"])}


def _deepseek_v2(c: _Config) -> Fields:
    """norm_topk_prob is refused: transformers ignores it, and DeepSeek's own code then omits the scale."""
    for key, wanted in (("scoring_func", "softmax"), ("norm_topk_prob", False)):
        c.only(key, wanted)
    c.only("topk_method", "greedy", "group_limited_greedy")
    fields = _deepseek(c, 2048) | {"mlp_bias": c("mlp_bias", False)}
    fields["experts"] |= {"scale": c("routed_scaling_factor", 1.0)}
    if c("topk_method") == "group_limited_greedy":
        fields["experts"] |= {"groups": c.need("n_group"), "top_groups": c.need("topk_group")}
    return fields


def _deepseek_v3(c: _Config) -> Fields:
    for key, wanted in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        c.only(key, wanted)
    fields = _deepseek(c, 4096)
    fields["latent"] |= {"interleaved": c("rope_interleave", True)}
    fields["experts"] |= {
        "normalized": c("norm_topk_prob", True),
        "scale": c("routed_scaling_factor", 2.5),
        "groups": c("n_group", 8),
        "top_groups": c("topk_group", 4),
    }  # families.py has the rest
    return fields


def _deepseek(c: _Config, max_seq: int) -> Fields:
    """The fields that both generations share. Sizes whose defaults differ between them must be present."""
    c.only("moe_layer_freq", 1)
    if c("aux_loss_alpha"):
        c.only("seq_aux", True)
    fields = _sizes(c, max_seq) | _biases(c) | _rope(c)
    if "rope_scaling" in fields:
        rope = c("rope_parameters") or c("rope_scaling")
        fields["rope_scaling"] |= {"mscale_all_dim": float(rope.get("mscale_all_dim") or 0)}
    fields["kv_heads"] = fields["heads"]  # each head has its own keys, projected from the shared latent
    ffn = c.need("moe_intermediate_size")
    latent = {
        "q_rank": c("q_lora_rank") if "q_lora_rank" in c.keys else 1536,
        "kv_rank": c("kv_lora_rank", 512),
        "nope_dim": c("qk_nope_head_dim", 128),
        "rope_dim": c("qk_rope_head_dim", 64),
        "v_dim": c("v_head_dim", 128),
    }
    routed = {
        "count": c.need("n_routed_experts"),
        "top_k": c.need("num_experts_per_tok"),
        "ffn": ffn,
        "shared_ffn": c.need("n_shared_experts") * ffn,
        "dense_layers": list(range(min(c.need("first_k_dense_replace"), fields["layers"]))),
        "balance_loss": c("aux_loss_alpha", 0.0),
    }
    return fields | {"latent": latent, "experts": routed}


def _gpt_oss(c: _Config) -> Fields:
    yarn = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
    fields = _sizes(c, 131072, 1e-5, kv_heads=8) | _head_dim(c, 64) | _biases(c, default=True)
    fields |= _rope(c, 150_000.0, default=yarn)
    fields |= _windows(c, range(0, fields["layers"], 2))
    routed = {
        "count": c("num_local_experts", 128),
        "top_k": c("num_experts_per_tok", 4),
        "ffn": fields["ffn"],
        "bias": True,
        "router_bias": True,
    }
    return fields | {"experts": routed}


_READERS = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "gpt_oss": _gpt_oss,
}
