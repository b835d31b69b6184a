"""Read a Hugging Face `config.json`: its keys, and the fields that descendants of Llama share.

Missing keys get the default of `transformers` for the family. Features that our decoder does not support are refused
by name, never dropped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phalanx.spec.errors import InputError
from phalanx.spec.model.mechanisms import MOST_LAYERS
from phalanx.spec.ranges import Range

Fields = dict[str, Any]


class Config:
    """The keys of a config file, where null counts as missing. `path` is for messages."""

    def __init__(self, keys: Mapping[str, Any], path: Path) -> None:
        self.keys, self.path = keys, path

    def __call__(self, key: str, default: Any = None) -> Any:
        value = self.keys.get(key)
        return default if value is None else value

    def need(self, *names: str) -> Any:
        """Return the value of the first of these keys that is present. Raises InputError if none is."""
        for name in names:
            if self.keys.get(name) is not None:
                return self.keys[name]
        raise self.wrong(f"has no {names[0]!r}", "is this a Hugging Face config.json?")

    def wrong(self, reason: str, remedy: str = "") -> InputError:
        """Return an InputError that names the file."""
        return InputError("model.config", str(self.path), reason, remedy)

    def only(self, key: str, *usable: Any) -> None:
        """Raise InputError if the key is present with a value other than these."""
        value = self(key, usable[0])
        if value not in usable:
            raise self.wrong(f"{key} = {value!r} is not supported", f"use {' or '.join(map(str, usable))}")


def sizes(c: Config, max_seq: int, norm_eps: float = 1e-6, kv_heads: int | None = None) -> Fields:
    """Read the sizes that all descendants of Llama share. `kv_heads` is the default of a config without that key."""
    c.only("hidden_act", "silu")
    heads = c.need("num_attention_heads")
    kv = c("num_key_value_heads", heads if "num_key_value_heads" in c.keys or kv_heads is None else kv_heads)
    return {
        "vocab": c.need("vocab_size"),
        "hidden": c.need("hidden_size"),
        "layers": _layers(c),
        "heads": heads,
        "kv_heads": kv,
        "ffn": c.need("intermediate_size"),
        "max_seq": c("max_position_embeddings", max_seq),
        "norm_eps": c("rms_norm_eps", norm_eps),
        "tied": c("tie_word_embeddings", False),
    }


def _layers(c: Config) -> Any:
    """Read the number of layers, within ModelSpec's range, since some families enumerate them before it is
    checked."""
    layers = c.need("num_hidden_layers")
    problem = Range(1, MOST_LAYERS).problem(layers) if isinstance(layers, int) else ""
    if problem:
        raise InputError("model.layers", layers, problem)
    return layers


def head_dim(c: Config, default: int | None = None) -> Fields:
    """Read the width of a head, if the config or `default` states it."""
    size = c("head_dim", default)
    return {"head_dim": size} if size else {}


def biases(c: Config, default: bool = False) -> Fields:
    """Read whether attention has biases."""
    bias = c("attention_bias", default)
    return {"qkv_bias": bias, "out_bias": bias}


def rope(c: Config, theta: float = 10_000.0, partial: bool = False, default: Fields | None = None) -> Fields:
    """Read rotary positions: transformers 5 writes `rope_parameters`, 4 wrote `rope_theta` and `rope_scaling`.

    `theta` and `default` replace missing keys; `partial`: the family may rotate only a part of each head, which the
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
    """Read the factor of cos and sin: as stated, or DeepSeek's quotient of two scales; None: YaRN's default."""
    factor = rope.get("attention_factor")
    if factor is None and rope.get("mscale") and rope.get("mscale_all_dim"):
        above, below = (0.1 * rope[k] * math.log(max(rope["factor"], 1)) + 1 for k in ("mscale", "mscale_all_dim"))
        factor = above / below
    return None if factor is None else float(factor)


def windows(c: Config, by_default: range | None = None) -> Fields:
    """Read the sliding window, in the layers that `layer_types` names, else in those `by_default` (None: all)."""
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
