"""Write the config.json of GPT-2, GPT-NeoX, Llama, Mistral, Qwen 2 and Qwen 3."""

from phalanx.spec.model.hugging_face import writing as write
from phalanx.spec.model.hugging_face.reading import Fields
from phalanx.spec.model.spec import ModelSpec

_GELUS = {"gelu": "gelu", "gelu_tanh": "gelu_new"}


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


def write_llama(spec: ModelSpec) -> Fields:
    """Return the config of a Llama model."""
    return write.llama_fields(spec) | {"attention_bias": spec.qkv_bias, "mlp_bias": spec.mlp_bias}


def write_mistral(spec: ModelSpec) -> Fields:
    """Return the config of a Mistral model."""
    return write.llama_fields(spec) | {"sliding_window": spec.window}


def write_qwen2(spec: ModelSpec) -> Fields:
    """Return the config of a Qwen 2 model."""
    windowed = range(spec.layers) if spec.window_layers is None else spec.window_layers
    if spec.window is None:
        return write.llama_fields(spec) | {"use_sliding_window": False, "sliding_window": None, "layer_types": None}
    kinds = ["sliding_attention" if i in windowed else "full_attention" for i in range(spec.layers)]
    window = {
        "use_sliding_window": True,
        "sliding_window": spec.window,
        "max_window_layers": min(windowed, default=spec.layers),
    }
    return write.llama_fields(spec) | window | {"layer_types": kinds}


def write_qwen3(spec: ModelSpec) -> Fields:
    """Return the config of a Qwen 3 model."""
    return write_qwen2(spec) | {"attention_bias": spec.qkv_bias}
