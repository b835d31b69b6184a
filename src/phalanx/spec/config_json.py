"""The `config.json` that makes `transformers` build the same model: the way back from spec/model.py's reader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from phalanx.spec.model import ModelSpec

Config = dict[str, Any]

_GELUS = {"gelu": "gelu", "gelu_tanh": "gelu_new"}


def to_hugging_face(spec: ModelSpec) -> Config:
    """The fields of a config.json. What a family of `transformers` cannot say is not in it: read it back to know."""
    architecture, write = _WRITERS[spec.family]
    same = {"vocab_size": spec.vocab, "tie_word_embeddings": spec.tied}
    return {"architectures": [architecture], "model_type": spec.family, **same, **write(spec)}


def _llama(spec: ModelSpec) -> Config:
    return {
        "hidden_size": spec.hidden,
        "intermediate_size": spec.ffn,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.max_seq,
        "rms_norm_eps": spec.norm_eps,
        "hidden_act": "silu",
        "attention_bias": spec.qkv_bias,
        "mlp_bias": spec.mlp_bias,
        **_rope(spec),
    }


def _rope(spec: ModelSpec) -> Config:
    """As transformers 5 writes it, and as 4 did."""
    scaling: Config = {"rope_type": "default"}
    if spec.rope_scaling is not None:
        s = spec.rope_scaling
        scaling = {
            "rope_type": "llama3",
            "factor": s.factor,
            "low_freq_factor": s.low_freq_factor,
            "high_freq_factor": s.high_freq_factor,
            "original_max_position_embeddings": s.original_max_seq,
        }
    return {
        "rope_parameters": {"rope_theta": spec.rope_theta, **scaling},
        "rope_theta": spec.rope_theta,
        "rope_scaling": scaling if spec.rope_scaling is not None else None,
    }


def _gpt2(spec: ModelSpec) -> Config:
    return {
        "n_embd": spec.hidden,
        "n_inner": spec.ffn,
        "n_layer": spec.layers,
        "n_head": spec.heads,
        "n_positions": spec.max_seq,
        "layer_norm_epsilon": spec.norm_eps,
        "activation_function": _GELUS.get(spec.activation, spec.activation),
    }


_WRITERS: dict[str, tuple[str, Callable[[ModelSpec], Config]]] = {
    "llama": ("LlamaForCausalLM", _llama),
    "gpt2": ("GPT2LMHeadModel", _gpt2),
}
