"""The model: its shape, and the ONE list of its parameters.

Everything that needs to know what a model is made of (initialisation, buckets, sharding, checkpoints, memory,
parameter counts) reads `parameters(spec)`; nobody keeps a second list.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

from phalanx.spec.errors import InputError, nearest

Role = Literal["embedding", "position", "norm", "column", "column_bias", "row", "row_bias", "head"]


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's stretching of low rotary frequencies (Meta's `apply_scaling`, as in `transformers`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_seq: int


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only transformer. Sizes are counts of elements; `ffn` is the width inside the MLP."""

    family: Literal["llama", "gpt2"]
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    max_seq: int
    norm: Literal["rms", "layer"]
    norm_eps: float
    position: Literal["rotary", "learned"]
    activation: Literal["swiglu", "gelu", "gelu_tanh"]
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    tied: bool
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        for name in ("vocab", "hidden", "layers", "heads", "kv_heads", "head_dim", "ffn", "max_seq"):
            if getattr(self, name) < 1:
                raise InputError(f"model.{name}", getattr(self, name), "must be at least 1")
        for name in ("norm_eps", "rope_theta"):
            if getattr(self, name) <= 0:
                raise InputError(f"model.{name}", getattr(self, name), "must be positive")
        if self.heads % self.kv_heads:
            raise InputError(
                "model.kv_heads",
                self.kv_heads,
                f"does not divide heads = {self.heads}",
                f"use a divisor of {self.heads}",
            )
        if self.position == "rotary" and self.head_dim % 2:
            raise InputError("model.head_dim", self.head_dim, "rotary positions turn pairs", "use an even head_dim")

    @property
    def q_width(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all key (or value) heads together."""
        return self.kv_heads * self.head_dim

    @cached_property
    def parameter_count(self) -> int:
        return sum(p.numel for p in parameters(self))


@dataclass(frozen=True)
class Parameter:
    """One logical parameter: its single-process name, global shape, role and unit.

    The unit is the lowest common ancestor of the modules that use it: a tied embedding belongs to `model`.
    Matrices are (out, in), as torch.nn.Linear has them.
    """

    fqn: str
    shape: tuple[int, ...]
    role: Role
    unit: str

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def units(spec: ModelSpec) -> tuple[str, ...]:
    """The units in forward order: what runs, and later what ZeRO-3 gathers, at once."""
    return ("embed", *(f"blocks.{i}" for i in range(spec.layers)), "head")


@cache
def parameters(spec: ModelSpec) -> tuple[Parameter, ...]:
    """Every logical parameter, in forward order."""
    h, q, kv, f = spec.hidden, spec.q_width, spec.kv_width, spec.ffn
    found: list[Parameter] = []

    def add(unit: str, name: str, shape: tuple[int, ...], role: Role) -> None:
        found.append(Parameter(name, shape, role, unit))

    def linear(unit: str, name: str, out: int, into: int, role: Literal["column", "row"], bias: bool) -> None:
        add(unit, f"{name}.weight", (out, into), role)
        if bias:
            add(unit, f"{name}.bias", (out,), "column_bias" if role == "column" else "row_bias")

    def norm(unit: str, name: str) -> None:
        add(unit, f"{name}.weight", (h,), "norm")
        if spec.norm == "layer":
            add(unit, f"{name}.bias", (h,), "norm")

    add("model" if spec.tied else "embed", "embed.token.weight", (spec.vocab, h), "embedding")
    if spec.position == "learned":
        add("embed", "embed.position.weight", (spec.max_seq, h), "position")
    for i in range(spec.layers):
        b = f"blocks.{i}"
        norm(b, f"{b}.norm1")
        linear(b, f"{b}.attention.q", q, h, "column", spec.qkv_bias)
        linear(b, f"{b}.attention.k", kv, h, "column", spec.qkv_bias)
        linear(b, f"{b}.attention.v", kv, h, "column", spec.qkv_bias)
        linear(b, f"{b}.attention.o", h, q, "row", spec.out_bias)
        norm(b, f"{b}.norm2")
        if spec.activation == "swiglu":
            linear(b, f"{b}.mlp.gate", f, h, "column", spec.mlp_bias)
        linear(b, f"{b}.mlp.up", f, h, "column", spec.mlp_bias)
        linear(b, f"{b}.mlp.down", h, f, "row", spec.mlp_bias)
    norm("head", "head.norm")
    if not spec.tied:
        add("head", "head.linear.weight", (spec.vocab, h), "head")
    return tuple(found)


# What a family fixes, so that a user writes only sizes. Any of it may be overridden field by field.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {
        "norm": "rms",
        "norm_eps": 1e-5,
        "position": "rotary",
        "activation": "swiglu",
        "qkv_bias": False,
        "out_bias": False,
        "mlp_bias": False,
        "tied": False,
    },
    "gpt2": {
        "norm": "layer",
        "norm_eps": 1e-5,
        "position": "learned",
        "activation": "gelu_tanh",
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
        "tied": True,
    },
}


def _gpt2(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "family": "gpt2",
        "vocab": 50257,
        "hidden": hidden,
        "layers": layers,
        "heads": heads,
        "max_seq": 1024,
        "ffn": 4 * hidden,
    }


def _llama(vocab: int, h: int, layers: int, heads: int, kv: int, ffn: int, seq: int) -> dict[str, Any]:
    return {
        "family": "llama",
        "vocab": vocab,
        "hidden": h,
        "layers": layers,
        "heads": heads,
        "kv_heads": kv,
        "ffn": ffn,
        "max_seq": seq,
    }


_LLAMA3_ROPE: dict[str, Any] = {"rope_theta": 500_000.0}

# Shapes as in the published config.json of each model.
PRESETS: dict[str, dict[str, Any]] = {
    "gpt2": _gpt2(768, 12, 12),
    "gpt2-medium": _gpt2(1024, 24, 16),
    "gpt2-large": _gpt2(1280, 36, 20),
    "gpt2-xl": _gpt2(1600, 48, 25),
    "llama2-7b": _llama(32000, 4096, 32, 32, 32, 11008, 4096),
    "llama2-13b": _llama(32000, 5120, 40, 40, 40, 13824, 4096),
    "llama2-70b": _llama(32000, 8192, 80, 64, 8, 28672, 4096),
    "llama3-8b": _llama(128256, 4096, 32, 32, 8, 14336, 8192) | _LLAMA3_ROPE,
    "llama3-70b": _llama(128256, 8192, 80, 64, 8, 28672, 8192) | _LLAMA3_ROPE,
}


def complete(given: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in what the family fixes and what follows from the other sizes."""
    family = given.get("family")
    if family is None:
        raise InputError(
            "model",
            None,
            "needs a preset, a config, or a family with sizes",
            f"families: {', '.join(FAMILIES)}",
        )
    if not isinstance(family, str) or family not in FAMILIES:
        raise InputError("model.family", family, "is not a family that Phalanx knows", nearest(str(family), FAMILIES))
    full = {**FAMILIES[family], **given}
    heads, hidden = full.get("heads"), full.get("hidden")
    if isinstance(heads, int):
        if heads < 1:
            raise InputError("model.heads", heads, "must be at least 1")
        full.setdefault("kv_heads", heads)
        if "head_dim" not in full and isinstance(hidden, int):
            if hidden % heads:
                raise InputError(
                    "model.heads", heads, f"does not divide hidden = {hidden}", "or state head_dim as well"
                )
            full["head_dim"] = hidden // heads
    return full


def preset(name: str) -> dict[str, Any]:
    if name not in PRESETS:
        raise InputError("model.preset", name, "is not a model that Phalanx knows", nearest(name, PRESETS))
    return dict(PRESETS[name])


def _take(config: Mapping[str, Any], path: Path, *keys: str) -> Any:
    for key in keys:
        if config.get(key) is not None:
            return config[key]
    raise InputError("model.config", str(path), f"has no {keys[0]!r}", "is this a Hugging Face config.json?")


def from_hugging_face(path: Path) -> tuple[dict[str, Any], list[str]]:
    """The fields of a ModelSpec from a Hugging Face `config.json`, and one line for each thing left out.

    Raises InputError naming the file where it is missing, no JSON, of another family, or asks for something
    that the decoder does not do.
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
    kind = config.get("model_type")
    readers = {"llama": _llama_fields, "gpt2": _gpt2_fields}
    if isinstance(kind, str) and kind in readers:
        try:
            given = readers[kind](config, path)
        except (KeyError, TypeError, AttributeError) as error:
            raise InputError("model.config", str(path), f"has a field that cannot be read ({error!r})") from None
    else:
        raise InputError(
            "model.config", str(path), f"model_type {kind!r} is not supported", nearest(str(kind), FAMILIES)
        )
    dropouts = [k for k in ("attention_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop") if config.get(k)]
    notes = [f"dropout set to 0 ({', '.join(dropouts)} in {path.name})"] if dropouts else []
    return given, notes


def _llama_fields(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    if config.get("hidden_act", "silu") != "silu":
        raise InputError(
            "model.config", str(path), f"hidden_act {config['hidden_act']!r} is not supported", "use silu"
        )
    heads = _take(config, path, "num_attention_heads")
    hidden = _take(config, path, "hidden_size")
    given: dict[str, Any] = {
        "family": "llama",
        "vocab": _take(config, path, "vocab_size"),
        "hidden": hidden,
        "layers": _take(config, path, "num_hidden_layers"),
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads") or heads,
        "ffn": _take(config, path, "intermediate_size"),
        "max_seq": config.get("max_position_embeddings", 2048),
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "qkv_bias": config.get("attention_bias", False),
        "out_bias": config.get("attention_bias", False),
        "mlp_bias": config.get("mlp_bias", False),
        "tied": config.get("tie_word_embeddings", False),
    }
    if config.get("head_dim"):
        given["head_dim"] = config["head_dim"]
    # transformers 5 writes `rope_parameters`, 4 wrote `rope_theta` and `rope_scaling`.
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    given["rope_theta"] = rope.get("rope_theta", config.get("rope_theta", 10_000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "llama3":
        given["rope_scaling"] = {
            "factor": rope["factor"],
            "low_freq_factor": rope["low_freq_factor"],
            "high_freq_factor": rope["high_freq_factor"],
            "original_max_seq": rope["original_max_position_embeddings"],
        }
    elif kind != "default":
        raise InputError("model.config", str(path), f"rope type {kind!r} is not supported", "use default or llama3")
    return given


def _gpt2_fields(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    activations = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
    activation = config.get("activation_function", "gelu_new")
    if activation not in activations:
        raise InputError(
            "model.config",
            str(path),
            f"activation_function {activation!r} is not supported",
            f"use one of {', '.join(activations)}",
        )
    for key, wanted in (("scale_attn_weights", True), ("scale_attn_by_inverse_layer_idx", False)):
        if config.get(key, wanted) != wanted:
            raise InputError("model.config", str(path), f"{key} = {config[key]} is not supported", f"use {wanted}")
    hidden = _take(config, path, "n_embd", "hidden_size")
    return {
        "family": "gpt2",
        "vocab": _take(config, path, "vocab_size"),
        "hidden": hidden,
        "layers": _take(config, path, "n_layer", "num_hidden_layers"),
        "heads": _take(config, path, "n_head", "num_attention_heads"),
        "ffn": config.get("n_inner") or 4 * hidden,
        "max_seq": config.get("n_positions", 1024),
        "norm_eps": config.get("layer_norm_epsilon", 1e-5),
        "activation": activations[activation],
        "tied": config.get("tie_word_embeddings", True),
    }


MODEL_FIELDS = tuple(f.name for f in fields(ModelSpec))
