"""Mechanisms beyond the plain transformer: scaled rotary positions, mixtures of experts, latent attention."""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from phalanx.spec.errors import InputError
from phalanx.spec.ranges import Count, Range, require_ranges

MOST_LAYERS = 10**4
"""Maximum blocks of a model, checked by readers before they enumerate them."""
Width = Annotated[int, Range(1, 10**7)]
"""Maximum elements of a vector: the largest published are about 10^5 (of an MLP) and 3 x 10^5 (vocabularies)."""
Coefficient = Annotated[float, Range(0, 1e6)]
"""Coefficient of a part of the loss; 0: no such part."""
Turns = Annotated[float, Range(1e-6, 1e9)]
"""Turns of a rotary frequency within the original sequence length."""


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of rotary frequencies beyond a model's training length, as in `transformers`.

    linear    all frequencies are divided by `factor` (Chen et al. 2023)
    llama3    only low ones: fewer than `low_freq_factor` turns in `original_max_seq` tokens (Meta's
              `apply_scaling`); between that and `high_freq_factor` the two are blended
    yarn      the same, between `beta_slow` and `beta_fast` turns; cos and sin are multiplied by
              `attention_factor` (Peng et al. 2023)
    """

    factor: Annotated[float, Range(1e-6, 1e6)]
    """How many times longer sequences become; positive."""
    low_freq_factor: Annotated[float, Range(-1e9, 1e9)] = 1.0
    """llama3: turns below which a frequency is divided by `factor`."""
    high_freq_factor: Annotated[float, Range(-1e9, 1e9)] = 4.0
    """llama3: turns above which a frequency is unchanged."""
    original_max_seq: Count | None = None
    """The length that the model was trained for, in tokens. llama3 and yarn need it."""
    kind: Literal["llama3", "linear", "yarn"] = "llama3"
    """The method, as above."""
    beta_fast: Turns = 32.0
    """yarn: turns above which a frequency is unchanged."""
    beta_slow: Turns = 1.0
    """yarn: turns below which a frequency is divided by `factor`."""
    attention_factor: Annotated[float, Range(1e-6, 1e6)] | None = None
    """yarn: the factor of cos and sin; None: 0.1 ln(factor) + 1."""
    truncate: bool = True
    """yarn: whether the range of blended dimensions is rounded outwards to integers."""
    mscale_all_dim: Coefficient = 0.0
    """Latent attention only: multiplies all of its logits by (0.1 mscale_all_dim ln(factor) + 1)²."""

    def __post_init__(self) -> None:
        where = "model.rope_scaling"
        require_ranges(self, where)
        if self.kind != "linear" and self.original_max_seq is None:
            raise InputError(f"{where}.original_max_seq", None, f"is missing, kind = {self.kind} needs it")
        if self.kind == "llama3" and not 0 < self.low_freq_factor < self.high_freq_factor:
            raise InputError(
                f"{where}.low_freq_factor", self.low_freq_factor, "must lie between 0 and high_freq_factor"
            )

    @property
    def logits(self) -> float:
        """Factor of latent attention's logits, from `mscale_all_dim`; 1 if that is 0."""
        return float((0.1 * self.mscale_all_dim * math.log(max(self.factor, 1.0)) + 1) ** 2)


Factor = Annotated[float, Range(0, 1e6, above=True)]


@dataclass(frozen=True)
class Multipliers:
    """Constant factors of a forward pass (Granite, Cohere, Gemma). Weights are multiplied by them when a file is read
    and divided when one is written, so that nothing is multiplied at run time; drawn weights lack them."""

    embedding: Factor = 1.0
    """Of the embedding's rows, but not where the head shares its matrix."""
    residual: Factor = 1.0
    """Of what each sublayer adds to the stream."""
    attention: Factor | None = None
    """Of attention's logits, in place of 1 / sqrt(head_dim); None: that."""
    logits: Factor = 1.0
    """Of the head's logits."""

    def __post_init__(self) -> None:
        require_ranges(self, "model.multipliers")


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of the MLP. A router scores every expert for a token; the token goes through its
    `top_k` best ones, whose outputs are summed, weighted by their scores, and through any shared expert."""

    count: Annotated[int, Range(1, 10**5)]
    """Routed experts per layer."""
    top_k: Annotated[int, Range(1, 10**5)]
    """Experts per token."""
    ffn: Width
    """Width inside a routed expert, in elements."""
    shared_ffn: Annotated[int, Range(0, 10**7)] = 0
    """Width of the shared expert, which every token passes; 0: none. Several shared experts are one of their total
    width."""
    shared_gate: bool = False
    """Whether a sigmoid of the token scales the shared expert's result (Qwen2-MoE)."""
    identity: Annotated[int, Range(0, 10**5)] = 0
    """Further choices of the router, which return their input and have no weights (LongCat-Flash)."""
    latent: Annotated[int, Range(0, 10**7)] = 0
    """Width of the space in which routed experts work, between a product down and one up that all experts share
    (Nemotron 3); 0: the residual stream's."""
    dense_layers: tuple[Annotated[int, Range(0, MOST_LAYERS)], ...] = ()
    """Blocks, from 0, that keep the dense MLP; only without a pattern, which names them itself."""
    bias: bool = False
    """Whether the experts' matrices have biases."""
    router_bias: bool = False
    """Whether the router's matrix has a bias."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    """Function from the router's logits to scores."""
    normalized: bool = False
    """Whether the chosen scores of a token are divided by their sum."""
    scale: Annotated[float, Range(0, 1e6, above=True)] = 1.0
    """Multiplies the chosen scores, after normalization."""
    groups: Annotated[int, Range(1, 10**5)] = 1
    """Equal groups of neighbouring experts (DeepSeek-V2, V3); a divisor of `count`. 1: no groups."""
    top_groups: Annotated[int, Range(1, 10**5)] = 1
    """The best groups of a token: its experts come from these."""
    group_score: Literal["max", "top2"] = "max"
    """A group's score: its best expert's, or the sum of its best two."""
    chooser: Literal["tokens", "experts"] = "tokens"
    """Tokens choose experts, or experts choose tokens (Zhou et al. 2022)."""
    capacity: Annotated[float, Range(0, 1e6, above=True)] | None = None
    """Capacity factor: of a sequence of S tokens an expert takes the first capacity x top_k x S / count and drops the
    others. None: it takes all."""
    balance_loss: Coefficient = 0.0
    """Coefficient of the load-balancing loss, per sequence (Fedus et al. 2021)."""
    z_loss: Coefficient = 0.0
    """Coefficient of the loss on large router logits (Zoph et al. 2022)."""
    balance_bias: Coefficient | None = None
    """Step by which the bias of an expert's score, used only for choosing, moves against its load (Wang et al. 2024).
    None: no such bias."""
    local_count: Annotated[int, Range(1, 10**5)] | None = None
    """Experts that one rank holds under expert parallelism. None: all. Set by strategy/split.py."""

    def __post_init__(self) -> None:
        table = "model.experts"
        require_ranges(self, table)
        if self.top_k > self.count + self.identity:
            raise InputError(f"{table}.top_k", self.top_k, f"is more than count = {self.count}")
        if self.count % self.groups:
            raise InputError(f"{table}.groups", self.groups, f"does not divide count = {self.count}")
        within = self.count // self.groups
        if self.top_groups > self.groups or self.top_k > self.top_groups * within:
            reason = f"is not between top_k / experts of a group = {self.top_k} / {within} and groups = {self.groups}"
            raise InputError(f"{table}.top_groups", self.top_groups, reason)
        if self.group_score == "top2" and self.groups > 1 and within < 2:
            raise InputError(f"{table}.group_score", "top2", "needs two experts in a group", "use max")
        if self.chooser == "experts":
            for name, off in (("groups", self.groups == 1), ("balance_loss", not self.balance_loss)):
                if not off:
                    reason = "is for chooser = tokens; experts that choose tokens are balanced already"
                    raise InputError(f"{table}.{name}", getattr(self, name), reason, "leave it out")
            if self.balance_bias is not None or self.normalized:
                name = "normalized" if self.normalized else "balance_bias"
                raise InputError(f"{table}.{name}", getattr(self, name), "is for chooser = tokens", "leave it out")

        if self.shared_gate and not self.shared_ffn:
            raise InputError(f"{table}.shared_gate", True, "scales a shared expert, and there is none")

    @property
    def here(self) -> int:
        """Experts that this rank holds."""
        return self.count if self.local_count is None else self.local_count


@dataclass(frozen=True)
class SparseIndex:
    """The lightning indexer of sparse attention (DeepSeek-V3.2), which chooses the keys of a query."""

    heads: Annotated[int, Range(1, 10**5)]
    """Heads that score keys."""
    dim: Width
    """Width of a head, and of the one key that a token leaves."""
    top: Count
    """Keys of a query: the best ones."""

    def __post_init__(self) -> None:
        require_ranges(self, "model.latent.index")


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, 2024): keys and values are projected up from a small vector per
    token, which all heads share. Sizes are counts of elements."""

    kv_rank: Width
    """Size of the latent vector that keys and values come from."""
    nope_dim: Width
    """Dimensions of a head's query and key without positions."""
    rope_dim: Width
    """Dimensions of a head's query and key with rotary positions; the heads share this part of the key."""
    v_dim: Width
    """Dimensions of a head's value."""
    q_rank: Width | None = None
    """Size of the latent vector that queries come from; None: queries are projected from the token itself."""
    interleaved: bool = True
    """Whether rotary positions turn neighbouring dimensions as pairs, instead of those half a head apart."""
    index: SparseIndex | None = None
    """Sparse attention by an index; None: a query attends to all keys."""

    def __post_init__(self) -> None:
        require_ranges(self, "model.latent")
