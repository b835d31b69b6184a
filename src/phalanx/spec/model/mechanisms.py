"""What a model may have beyond the plain transformer: stretched positions, experts, latent attention."""

from __future__ import annotations

import math
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
    whole dimensions. `mscale_all_dim`, of latent attention: its logits, of what turns and of what does not, are
    multiplied by (0.1 mscale_all_dim ln(factor) + 1)².
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
    mscale_all_dim: float = 0.0

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
        if self.mscale_all_dim < 0:
            raise InputError(f"{where}.mscale_all_dim", self.mscale_all_dim, "must not be negative")

    @property
    def logits(self) -> float:
        """What latent attention's logits are multiplied by."""
        return float((0.1 * self.mscale_all_dim * math.log(max(self.factor, 1.0)) + 1) ** 2)


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of the MLP: each token goes to `top_k` of `count` experts of width `ffn`, and
    through one of width `shared_ffn` that all tokens share. In `dense_layers` the MLP stays.

    `score`: of an expert for a token, from the router's logits. `normalized`: the scores of those chosen are divided
    by their sum; then multiplied by `scale`. With `groups`, a token's experts come from its `top_groups` best ones,
    by their best expert's score or the sum of their best two (DeepSeek-V2, V3). `chooser`: tokens choose experts, or
    experts choose tokens (Zhou et al. 2022). `capacity`: of a sequence of S tokens an expert takes at most capacity
    x top_k x S / count, the first ones (none: all that come).

    `balance_loss`, `z_loss`: the coefficients of the loss that evens out the load (Fedus et al. 2021, over each
    sequence) and of that on large logits (Zoph et al. 2022). `balance_bias`: what is added to each expert's score
    where it is chosen changes by so much a step, against its load (Wang et al. 2024); none: there is no such bias.
    `held`: how many of them one of several ranks has.
    """

    count: int
    top_k: int
    ffn: int
    shared_ffn: int = 0
    dense_layers: tuple[int, ...] = ()
    bias: bool = False
    router_bias: bool = False
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalized: bool = False
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_score: Literal["max", "top2"] = "max"
    chooser: Literal["tokens", "experts"] = "tokens"
    capacity: float | None = None
    balance_loss: float = 0.0
    z_loss: float = 0.0
    balance_bias: float | None = None
    held: int | None = None

    def __post_init__(self) -> None:
        where = "model.experts"
        at_least_one(where, self, "count", "top_k", "ffn", "groups", "top_groups", "held")
        for name in ("shared_ffn", "balance_loss", "z_loss", "balance_bias"):
            if (getattr(self, name) or 0) < 0:
                raise InputError(f"{where}.{name}", getattr(self, name), "must not be negative")
        for name in ("scale", "capacity"):
            if getattr(self, name) is not None and getattr(self, name) <= 0:
                raise InputError(f"{where}.{name}", getattr(self, name), "must be positive")
        if self.top_k > self.count:
            raise InputError(f"{where}.top_k", self.top_k, f"is more than count = {self.count}")
        if self.count % self.groups:
            raise InputError(f"{where}.groups", self.groups, f"does not divide count = {self.count}")
        within = self.count // self.groups
        if self.top_groups > self.groups or self.top_k > self.top_groups * within:
            raise InputError(
                f"{where}.top_groups",
                self.top_groups,
                f"is not between top_k / experts of a group = {self.top_k} / {within} and groups = {self.groups}",
            )
        if self.group_score == "top2" and self.groups > 1 and within < 2:
            raise InputError(f"{where}.group_score", "top2", "needs two experts in a group", "use max")
        if self.chooser == "experts":
            for name, off in (("groups", self.groups == 1), ("balance_loss", not self.balance_loss)):
                if not off:
                    reason = "is for tokens that choose; experts that choose tokens are balanced"
                    raise InputError(f"{where}.{name}", getattr(self, name), reason, "leave it out")
            if self.balance_bias is not None or self.normalized:
                name = "normalized" if self.normalized else "balance_bias"
                raise InputError(f"{where}.{name}", getattr(self, name), "is for tokens that choose", "leave it out")

    @property
    def here(self) -> int:
        """How many experts a rank has."""
        return self.count if self.held is None else self.held


@dataclass(frozen=True)
class Latent:
    """Latent attention (DeepSeek-V2, 2024): keys and values come from `kv_rank` numbers per token, queries from
    `q_rank` (none: from the token). A head compares `nope_dim` dimensions without and `rope_dim` with positions, and
    returns `v_dim`. `interleaved`: neighbouring dimensions turn together, not those half a head apart."""

    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    q_rank: int | None = None
    interleaved: bool = True

    def __post_init__(self) -> None:
        at_least_one("model.latent", self, *(f.name for f in fields(self) if f.name != "interleaved"))
