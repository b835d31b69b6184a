"""Write a ModelSpec as the `config.json` from which `transformers` builds the same model (see from_hugging_face.py).

What a family of `transformers` cannot express is left out. To learn whether anything was, read the file back and
compare.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from phalanx.spec.errors import InputError, nearest
from phalanx.spec.model.mechanisms import Experts
from phalanx.spec.model.spec import ModelSpec

Config = dict[str, Any]


def to_hugging_face(spec: ModelSpec) -> Config:
    """Return the fields of a config.json. Raises InputError for a family whose weights `transformers` cannot load."""
    if spec.family not in _WRITERS:
        reason = "has no weight format that both transformers and Phalanx read"
        raise InputError("model.family", spec.family, reason, nearest(spec.family, _WRITERS))
    architecture, write = _WRITERS[spec.family]
    common = {"vocab_size": spec.vocab, "tie_word_embeddings": spec.tied}
    return {"architectures": [architecture], "model_type": spec.family, **common, **write(spec)}


def _sizes(spec: ModelSpec) -> Config:
    return {
        "hidden_size": spec.hidden,
        "intermediate_size": spec.ffn,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "max_position_embeddings": spec.max_seq,
    }


def _of_llama(spec: ModelSpec) -> Config:
    """The fields that all descendants of Llama share."""
    heads = {"num_key_value_heads": spec.kv_heads, "head_dim": spec.head_dim}
    return _sizes(spec) | heads | {"rms_norm_eps": spec.norm_eps, "hidden_act": "silu"} | _rope(spec)


def _rope(spec: ModelSpec, **more: float) -> Config:
    """Rotary positions in both forms: as transformers 5 writes them, and as 4 did."""
    scaling: Config = {"rope_type": "default"}
    if spec.rope_scaling is not None:
        values = asdict(spec.rope_scaling)
        kind = values.pop("kind")
        names = {
            "linear": (),
            "llama3": ("low_freq_factor", "high_freq_factor", "original_max_seq"),
            "yarn": (
                *("beta_fast", "beta_slow", "attention_factor", "truncate", "original_max_seq"),
                *(("mscale_all_dim",) if spec.latent else ()),
            ),
        }[kind]
        scaling = {
            "rope_type": kind,
            "factor": values["factor"],
            **{k: values[k] for k in names if values[k] is not None},
        }
        if "original_max_seq" in scaling:
            scaling["original_max_position_embeddings"] = scaling.pop("original_max_seq")
    return {
        "rope_parameters": {"rope_theta": spec.rope_theta, **scaling, **more},
        "rope_theta": spec.rope_theta,
        "rope_scaling": scaling if spec.rope_scaling is not None else None,
    }


def _llama(spec: ModelSpec) -> Config:
    return _of_llama(spec) | {"attention_bias": spec.qkv_bias, "mlp_bias": spec.mlp_bias}


def _mistral(spec: ModelSpec) -> Config:
    return _of_llama(spec) | {"sliding_window": spec.window}


def _qwen2(spec: ModelSpec) -> Config:
    windowed = range(spec.layers) if spec.window_layers is None else spec.window_layers
    if spec.window is None:
        return _of_llama(spec) | {"use_sliding_window": False, "sliding_window": None, "layer_types": None}
    kinds = ["sliding_attention" if i in windowed else "full_attention" for i in range(spec.layers)]
    window = {
        "use_sliding_window": True,
        "sliding_window": spec.window,
        "max_window_layers": min(windowed, default=spec.layers),
    }
    return _of_llama(spec) | window | {"layer_types": kinds}


def _qwen3(spec: ModelSpec) -> Config:
    return _qwen2(spec) | {"attention_bias": spec.qkv_bias}


_GELUS = {"gelu": "gelu", "gelu_tanh": "gelu_new"}


def _gpt2(spec: ModelSpec) -> Config:
    return {
        "n_embd": spec.hidden,
        "n_inner": spec.ffn,
        "n_layer": spec.layers,
        "n_head": spec.heads,
        "n_positions": spec.max_seq,
        "layer_norm_epsilon": spec.norm_eps,
        "activation_function": _GELUS.get(spec.activation, "gelu_new"),
    }


def _gpt_neox(spec: ModelSpec) -> Config:
    share = spec.rotary_width / spec.head_dim
    return (
        _sizes(spec)
        | _rope(spec, partial_rotary_factor=share)
        | {
            "rotary_pct": share,
            "rotary_emb_base": spec.rope_theta,
            "layer_norm_eps": spec.norm_eps,
            "hidden_act": _GELUS.get(spec.activation, "gelu"),
            "attention_bias": spec.qkv_bias,
            "use_parallel_residual": spec.residual == "parallel",
        }
    )


def _mixtral(spec: ModelSpec) -> Config:
    x = _experts(spec)
    routed = {"num_local_experts": x.count, "num_experts_per_tok": x.top_k, "sliding_window": spec.window}
    return _of_llama(spec) | routed | _balance_loss(x)


def _qwen3_moe(spec: ModelSpec) -> Config:
    x = _experts(spec)
    return (
        _of_llama(spec)
        | {"attention_bias": spec.qkv_bias, "sliding_window": spec.window}
        | {"use_sliding_window": spec.window is not None, "decoder_sparse_step": 1}
        | {"num_experts": x.count, "num_experts_per_tok": x.top_k, "moe_intermediate_size": x.ffn}
        | {"mlp_only_layers": list(x.dense_layers), "norm_topk_prob": x.normalized}
        | _balance_loss(x)
    )


def _balance_loss(x: Experts) -> Config:
    """The coefficient for `transformers`, where the experts' shares of tokens sum to top_k; ours sum to 1."""
    return {"router_aux_loss_coef": x.balance_loss / x.top_k}


def _deepseek_v2(spec: ModelSpec) -> Config:
    x = _experts(spec)
    method = "group_limited_greedy" if x.groups > 1 else "greedy"
    more = {"topk_method": method, "scoring_func": "softmax", "mlp_bias": spec.mlp_bias}
    return _deepseek(spec, x) | more


def _deepseek_v3(spec: ModelSpec) -> Config:
    more = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    interleaved = spec.latent is None or spec.latent.interleaved
    return _deepseek(spec, _experts(spec)) | more | {"rope_interleave": interleaved}


def _deepseek(spec: ModelSpec, x: Experts) -> Config:
    a = spec.latent
    assert a is not None
    return (
        _of_llama(spec)
        | {"attention_bias": spec.qkv_bias, "head_dim": a.rope_dim}
        | {"q_lora_rank": a.q_rank, "kv_lora_rank": a.kv_rank, "v_head_dim": a.v_dim}
        | {"qk_nope_head_dim": a.nope_dim, "qk_rope_head_dim": a.rope_dim}
        | {"n_routed_experts": x.count, "num_experts_per_tok": x.top_k, "moe_intermediate_size": x.ffn}
        | {"n_shared_experts": x.shared_ffn // x.ffn, "first_k_dense_replace": len(x.dense_layers)}
        | {"moe_layer_freq": 1, "norm_topk_prob": x.normalized, "routed_scaling_factor": x.scale}
        | {"n_group": x.groups, "topk_group": x.top_groups, "aux_loss_alpha": x.balance_loss, "seq_aux": True}
    )


def _experts(spec: ModelSpec) -> Experts:
    assert spec.experts is not None
    return spec.experts


_WRITERS: dict[str, tuple[str, Callable[[ModelSpec], Config]]] = {
    "llama": ("LlamaForCausalLM", _llama),
    "mistral": ("MistralForCausalLM", _mistral),
    "qwen2": ("Qwen2ForCausalLM", _qwen2),
    "qwen3": ("Qwen3ForCausalLM", _qwen3),
    "gpt2": ("GPT2LMHeadModel", _gpt2),
    "gpt_neox": ("GPTNeoXForCausalLM", _gpt_neox),
    "mixtral": ("MixtralForCausalLM", _mixtral),
    "qwen3_moe": ("Qwen3MoeForCausalLM", _qwen3_moe),
    "deepseek_v2": ("DeepseekV2ForCausalLM", _deepseek_v2),
    "deepseek_v3": ("DeepseekV3ForCausalLM", _deepseek_v3),
}
