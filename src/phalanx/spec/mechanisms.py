"""What a model may have beyond the plain transformer: stretched positions, experts, latent attention."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from phalanx.spec.errors import InputError


def at_least_one(where: str, given: object, *names: str) -> None:
    """That these sizes, where they are stated, are."""
    for name in names:
        size = getattr(given, name)
        if size is not None and size < 1:
            raise InputError(f"{where}.{name}", size, "must be at least 1")


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the length that a model was trained for, as in `transformers`.

    linear: all divided by `factor` (Chen et al. 2023). llama3: those that turn less than `low_freq_factor` times
    in `original_max_seq` tokens (Meta's `apply_scaling`). yarn: those that turn less than `beta_slow` times, and cos
    and sin are scaled by `attention_factor`, by default 0.1 ln(factor) + 1 (Peng et al. 2023); `truncate`: between
    whole dimensions.
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq: int | None = None
    kind: Literal["llama3", "linear", "yarn"] = "llama3"
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        where = "model.rope_scaling"
        at_least_one(where, self, "original_max_seq")
        for name in ("factor", "beta_fast", "beta_slow"):
            if getattr(self, name) <= 0:
                raise InputError(f"{where}.{name}", getattr(self, name), "must be positive")
        if self.kind != "linear" and self.original_max_seq is None:
            raise InputError(f"{where}.original_max_seq", None, f"is missing, kind = {self.kind} needs it")
        if self.kind == "llama3" and not 0 < self.low_freq_factor < self.high_freq_factor:
            raise InputError(
                f"{where}.low_freq_factor", self.low_freq_factor, "must lie between 0 and high_freq_factor"
            )


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of the MLP: each token goes to `top_k` of `count` experts of width `ffn`, and
    through one of width `shared_ffn` that all tokens share. In `dense_layers` the MLP stays."""

    count: int
    top_k: int
    ffn: int
    shared_ffn: int = 0
    dense_layers: tuple[int, ...] = ()
    bias: bool = False
    router_bias: bool = False

    def __post_init__(self) -> None:
        at_least_one("model.experts", self, "count", "top_k", "ffn")
        if self.shared_ffn < 0:
            raise InputError("model.experts.shared_ffn", self.shared_ffn, "must not be negative")
        if self.top_k > self.count:
            raise InputError("model.experts.top_k", self.top_k, f"is more than count = {self.count}")


@dataclass(frozen=True)
class Latent:
    """Latent attention (DeepSeek-V2, 2024): keys and values come from `kv_rank` numbers per token, queries from
    `q_rank` (none: from the token). A head compares `nope_dim` dimensions without and `rope_dim` with positions, and
    returns `v_dim`."""

    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    q_rank: int | None = None

    def __post_init__(self) -> None:
        at_least_one("model.latent", self, *(f.name for f in fields(self)))
