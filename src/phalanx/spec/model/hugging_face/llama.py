"""The config.json of Llama, Mistral, Qwen 2 and Qwen 3."""

from __future__ import annotations

from phalanx.spec.model.hugging_face import reading as read
from phalanx.spec.model.hugging_face import writing as write
from phalanx.spec.model.hugging_face.reading import Config, Fields
from phalanx.spec.model.spec import ModelSpec


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
