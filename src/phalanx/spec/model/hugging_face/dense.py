"""The config.json of GPT-2, GPT-NeoX, Llama, Mistral, Qwen 2 and Qwen 3."""

from __future__ import annotations

from phalanx.spec.model.hugging_face import reading as read
from phalanx.spec.model.hugging_face import writing as write
from phalanx.spec.model.hugging_face.reading import Config, Fields
from phalanx.spec.model.spec import ModelSpec

_GELUS = {"gelu": "gelu", "gelu_tanh": "gelu_new"}


def _gelu(c: Config, key: str, default: str) -> str:
    known = {"gelu": "gelu", **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), "gelu_tanh")}
    name = c(key, default)
    if name not in known:
        raise c.wrong(f"{key} {name!r} is not supported", f"use one of {', '.join(known)}")
    return known[name]


def read_gpt2(c: Config) -> Fields:
    """Read the fields of a ModelSpec from a config of GPT-2."""
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


def write_gpt2(spec: ModelSpec) -> Fields:
    """Return the config of a GPT-2 model."""
    return {
        "n_embd": spec.hidden,
        "n_inner": spec.ffn,
        "n_layer": spec.layers,
        "n_head": spec.heads,
        "n_positions": spec.max_seq,
        "layer_norm_epsilon": spec.norm_eps,
        "activation_function": _GELUS.get(spec.activation, "gelu_new"),
    }


def read_gpt_neox(c: Config) -> Fields:
    """Read the fields of a ModelSpec from a config of GPT-NeoX."""
    hidden, heads = c.need("hidden_size"), c.need("num_attention_heads")
    rope = c("rope_parameters") or c("rope_scaling") or {}
    share = rope.get("partial_rotary_factor", c("rotary_pct", 0.25))
    return (
        read.biases(c, default=True)
        | read.rope(c, c("rotary_emb_base", 10_000.0), partial=True)
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


def write_gpt_neox(spec: ModelSpec) -> Fields:
    """Return the config of a GPT-NeoX model."""
    share = spec.rotary_width / spec.head_dim
    return (
        write.sizes(spec)
        | write.rope(spec, partial_rotary_factor=share)
        | {
            "rotary_pct": share,
            "rotary_emb_base": spec.rope_theta,
            "layer_norm_eps": spec.norm_eps,
            "hidden_act": _GELUS.get(spec.activation, "gelu"),
            "attention_bias": spec.qkv_bias,
            "use_parallel_residual": spec.residual == "parallel",
        }
    )


def read_llama(c: Config) -> Fields:
    """Read the fields of a ModelSpec from a config of Llama."""
    fields = read.sizes(c, 2048) | read.head_dim(c) | read.biases(c) | read.rope(c)
    return fields | {"mlp_bias": c("mlp_bias", False)}


def write_llama(spec: ModelSpec) -> Fields:
    """Return the config of a Llama model."""
    return write.of_llama(spec) | {"attention_bias": spec.qkv_bias, "mlp_bias": spec.mlp_bias}


def read_mistral(c: Config) -> Fields:
    """Read the fields of a ModelSpec from a config of Mistral."""
    window = c("sliding_window") if "sliding_window" in c.keys else 4096
    return read.sizes(c, 131072, kv_heads=8) | read.head_dim(c) | read.rope(c) | {"window": window}


def write_mistral(spec: ModelSpec) -> Fields:
    """Return the config of a Mistral model."""
    return write.of_llama(spec) | {"sliding_window": spec.window}


def read_qwen2(c: Config) -> Fields:
    """Read the fields of a ModelSpec from a config of Qwen 2."""
    fields = read.sizes(c, 32768, kv_heads=32) | read.head_dim(c) | read.rope(c)
    if c("use_sliding_window", False):
        first = c("max_window_layers", 28)
        if first < 0:
            raise c.wrong(f"max_window_layers = {first} must not be negative", "write the first layer with a window")
        fields |= read.windows(c, range(first, fields["layers"]))
    return fields


def write_qwen2(spec: ModelSpec) -> Fields:
    """Return the config of a Qwen 2 model."""
    windowed = range(spec.layers) if spec.window_layers is None else spec.window_layers
    if spec.window is None:
        return write.of_llama(spec) | {"use_sliding_window": False, "sliding_window": None, "layer_types": None}
    kinds = ["sliding_attention" if i in windowed else "full_attention" for i in range(spec.layers)]
    window = {
        "use_sliding_window": True,
        "sliding_window": spec.window,
        "max_window_layers": min(windowed, default=spec.layers),
    }
    return write.of_llama(spec) | window | {"layer_types": kinds}


def read_qwen3(c: Config) -> Fields:
    """Read the fields of a ModelSpec from a config of Qwen 3."""
    return read_qwen2(c) | read.head_dim(c, 128) | read.biases(c)


def write_qwen3(spec: ModelSpec) -> Fields:
    """Return the config of a Qwen 3 model."""
    return write_qwen2(spec) | {"attention_bias": spec.qkv_bias}
