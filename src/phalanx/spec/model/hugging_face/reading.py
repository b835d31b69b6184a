"""Read a Hugging Face `config.json`: its keys, and rotary positions.

Missing keys get the default of `transformers` for the family. Features that our decoder does not support are refused
by name, never dropped.
"""

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


def require_layers(layers: Any) -> Any:
    """Return the number of layers if it is within ModelSpec's range, since readers enumerate them before that is
    checked. Raises InputError."""
    problem = Range(1, MOST_LAYERS).problem(layers) if isinstance(layers, int) else ""
    if problem:
        raise InputError("model.layers", layers, problem)
    return layers


def rope(c: Config, row: Mapping[str, Any]) -> Fields:
    """Read rotary positions: transformers 5 writes `rope_parameters`, 4 wrote `rope_theta` and `rope_scaling`.

    `row` has defaults of theta and scaling, and optionally `partial`: whether the family may rotate a part of each
    head; `kinds`: further kinds of scaling, which are priced and not run; `of`: the kind of layer whose rope is taken
    as the model's where each kind has its own.
    """
    rope = c("rope_parameters") or c("rope_scaling") or row.get("default") or {}
    if row.get("of") in rope:
        rope = rope[row["of"]]
    if not row.get("partial") and rope.get("partial_rotary_factor", c("partial_rotary_factor", 1.0)) != 1.0:
        raise c.wrong("partial_rotary_factor is not supported in this family", "use gpt_neox")
    theta = rope.get("rope_theta") or c("rope_theta") or c(row.get("key", ""), row.get("theta", 10_000.0))
    base: Fields = {"rope_theta": theta}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return base
    if kind in row.get("kinds", ()):
        return base | {"rope_only_priced": [f"{kind} positions"]}
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
    if row.get("latent"):
        scaling |= {"mscale_all_dim": float(rope.get("mscale_all_dim") or 0)}
    return {**base, "rope_scaling": scaling}


def _yarn_attention(rope: Mapping[str, Any]) -> float | None:
    """Read the factor of cos and sin: as stated, or DeepSeek's quotient of two scales; None: YaRN's default."""
    factor = rope.get("attention_factor")
    if factor is None and rope.get("mscale") and rope.get("mscale_all_dim"):
        above, below = (0.1 * rope[k] * math.log(max(rope["factor"], 1)) + 1 for k in ("mscale", "mscale_all_dim"))
        factor = above / below
    return None if factor is None else float(factor)
