"""The operators that layers are made of: frozen records of what each reads, writes and learns, without behaviour.

    Dim         how many elements, and which mesh axis divides them
    Weight      a parameter of an operator
    Output      a tensor that an operator writes
    operators   Norm Linear Rotary Resize Views Expand Attend Index Conv Scan Activate Router Dispatch Combine

Readers (parameters, FLOPs, live bytes, messages, caches, legality) match on the record and know no family. Sizes are
counts of elements. Names of outputs join the operators of one sublayer and have no meaning outside of it.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

Axis = Literal["", "tp", "ep", "etp"]
Rows = Literal["own", "all", "routed", "sent", "received"]
"""Rows of a tensor: the residual stream's tokens (with `sp` a rank's own part), all of a rank's tokens, the tokens
that a rank routes, its rows on the way to experts, or the rows that its experts receive."""


Role = Literal[
    "embedding",
    "position",
    "norm",
    "column",
    "column_bias",
    "row",
    "row_bias",
    "latent",  # into the low-rank space of latent attention, which all heads share
    "latent_bias",
    "sink",
    "router",
    "router_bias",
    "expert_column",  # (experts, out, in): all experts of a layer in one tensor
    "expert_column_bias",
    "expert_row",
    "expert_row_bias",
    "head",
    "conv",  # (channels, taps) of a causal convolution
    "conv_bias",
    "gate",  # a number for each head of a recurrence: decay, step, skip
    "head_norm",  # a norm's weight over all heads, divided with them
    "index",  # of sparse attention's indexer, which every rank computes whole
    "balance",  # a buffer: the bias of experts' scores, used for choosing only
]
"""Role of a parameter, which determines its initialisation and whose gradient it sums (strategy/split.py)."""


@dataclass(frozen=True)
class Dim:
    """A dimension of `count` groups of `each` elements, such as heads of a width. An axis deals whole groups to its
    ranks and never cuts one."""

    count: int
    each: int = 1
    axis: Axis = ""
    """The mesh axis that divides the groups; empty: every rank holds all."""
    copies: bool = False
    """Whether neighbouring ranks hold copies of a group where there are more ranks than groups (key heads)."""
    pads: bool = False
    """Whether the last ranks hold padding where the groups do not divide evenly (the vocabulary)."""
    of: str = field(default="", compare=False)
    """The field of a model that states `count`, for messages."""

    @property
    def size(self) -> int:
        """Elements on all ranks together, each counted once."""
        return self.count * self.each

    def groups(self, degrees: Any) -> Any:
        """Return the groups of a rank. `degrees`: anything with tp, ep and etp, numbers or columns."""
        ways = getattr(degrees, self.axis) if self.axis else 1
        if self.pads:
            return -(-self.count // ways)
        if isinstance(ways, int):
            groups = self.count // ways
            return max(1, groups) if self.copies else groups
        return np.maximum(1.0, self.count / ways) if self.copies else self.count / ways

    def here(self, degrees: Any) -> Any:
        """Return the elements of a rank."""
        return self.groups(degrees) * self.each


@dataclass(frozen=True)
class Weight:
    """A parameter: its name inside the sublayer, its dimensions with outputs first, and its role."""

    name: str
    shape: tuple[Dim, ...]
    role: Role
    late: bool = False
    """Whether it is listed after the sublayer's other parameters, which fixes its place in gradient buckets."""


@dataclass(frozen=True)
class Output:
    """A tensor that an operator writes: rows x `dim`."""

    name: str
    dim: Dim
    rows: Rows = "all"


@dataclass(frozen=True)
class Norm:
    """Normalises each of `y.dim.count` heads of `y.dim.each` elements (RMSNorm, LayerNorm, or the L2 norm)."""

    x: str
    y: Output
    kind: Literal["rms", "layer", "l2"]
    weights: tuple[Weight, ...] = ()
    gate: str = ""
    """A tensor whose SiLU multiplies the result, or with Mamba-2 the input; empty: none."""
    inside: bool = False
    """Whether it is between a sublayer's products, instead of on the residual stream."""
    spans: int = 1
    """Neighbouring heads that are normalised together (a group of Mamba-2's, all of OLMo 2's), on several ranks where
    tp divides these."""


@dataclass(frozen=True)
class Linear:
    """Matrix products that read one tensor: y_i = x W_iᵀ + b_i. Which side is divided follows from the Dims."""

    x: str
    into: Dim
    y: tuple[Output, ...]
    weights: tuple[Weight, ...]
    experts: Dim | None = None
    """One matrix for each of these; None: one matrix."""
    grouped: bool = False
    """Whether each group of `into` has a matrix of its own, from the group to its group of the output."""

    @property
    def inner(self) -> int:
        """Elements of the input that one element of the output sums over."""
        return self.into.each if self.grouped else self.into.size


@dataclass(frozen=True)
class Rotary:
    """Rotates `turned` of the elements of every head by position (Su et al. 2021)."""

    x: tuple[str, ...]
    heads: tuple[Dim, ...]
    turned: int
    apart: bool = False
    """Whether it reads the part of a latent that all heads share, and writes a tensor of its own, `rope`."""


@dataclass(frozen=True)
class Resize:
    """A copy of a tensor in another width: padded with zeros, or narrowed."""

    x: str
    y: Output


@dataclass(frozen=True)
class Views:
    """Views of a tensor, whose gradients are joined."""

    x: Output
    parts: tuple[Output, ...]


@dataclass(frozen=True)
class Expand:
    """Lays out latent attention's keys and values of every head from `up` and the shared rotary part."""

    up: str
    rope: str
    y: tuple[Output, Output]
    nope: int
    value: int


@dataclass(frozen=True)
class Attend:
    """softmax(q kᵀ) v of `y.dim` query heads, reading `q`, `k` and `v`."""

    y: Output
    kv: Dim
    """Key heads of width `key`."""
    key: int
    """Width of a query or key."""
    value: int
    """Width of a value."""
    core: int
    """The one width that our runtime's core has: it pads the narrower of keys and values."""
    cache: int
    """Elements that a token leaves when a model generates."""
    cache_splits: bool
    """Whether tp divides the cache by key heads."""
    window: int | None = None
    """Most keys of a query, the nearest ones; None: all."""
    top: int | None = None
    """Most keys of a query, chosen by an Index; None: all."""
    compressed: int = 0
    """Tokens that one further, pooled key represents, of which `top` are read (DeepSeek-V4); 0: no such keys."""
    weights: tuple[Weight, ...] = ()
    """Sinks."""


@dataclass(frozen=True)
class Index:
    """The lightning indexer of sparse attention (DeepSeek-V3.2): scores of `heads` queries of width `each` against
    one key for each token, whose best `top` tokens are attended to. Whole on every tp rank (Megatron-LM d98e8a6,
    core/transformer/experimental_attention_variant/dsa.py:1168)."""

    heads: int
    each: int
    top: int
    weights: tuple[Weight, ...]
    """Matrices of queries, of keys and of the heads' weights; norms."""
    into: tuple[int, int, int]
    """Inner sizes of these three products."""
    ratio: int = 1
    """Tokens that one key represents."""


@dataclass(frozen=True)
class Conv:
    """A causal convolution of `taps` over each channel, then an activation."""

    x: tuple[str, ...]
    channels: tuple[Dim, ...]
    taps: int
    weights: tuple[Weight, ...]
    activation: Literal["silu", ""] = "silu"


@dataclass(frozen=True)
class Scan:
    """A linear recurrence over tokens, computed in chunks. Each of `y.dim.count` heads has a state of `state` x
    `y.dim.each` elements.

    delta      S = a S (I - b k kᵀ) + b v kᵀ      (gated delta rule: Yang et al. 2024)
    ssd        S = a S + dt x Bᵀ                  (Mamba-2: Dao & Gu 2024)
    lightning  S = a S + v kᵀ, fixed decay a      (Lightning Attention-2: Qin et al. 2024)
    selective  S = a S + dt x Bᵀ of each channel  (Mamba: Gu & Dao 2023), token by token
    channel_delta   as delta, with a decay for every key channel (Kimi Delta Attention, 2025)
    """

    kind: Literal["delta", "ssd", "lightning", "selective", "channel_delta"]
    y: Output
    groups: Dim
    """Heads of keys and queries (of B and C), each shared by several value heads."""
    state: int
    chunk: int
    """Tokens of a chunk."""
    weights: tuple[Weight, ...]
    x: tuple[str, ...]
    gates: int = 1
    """Numbers for each token and head in addition to keys and values: decay, and with delta the write strength."""


@dataclass(frozen=True)
class Activate:
    """An elementwise function of one tensor, or of a gate and another."""

    kind: str
    x: tuple[str, ...]
    y: Output


@dataclass(frozen=True)
class Router:
    """A router's scores from its logits, the choice of experts, and the order of rows."""

    count: int
    top_k: int
    chooser: Literal["tokens", "experts"] = "tokens"
    capacity: float | None = None
    identity: int = 0
    """Further choices that return their input."""
    balance_loss: float = 0.0
    """Weight of the loss that compares what experts get of a sequence; 0: there is none."""
    z_loss: float = 0.0
    """Weight of the loss on the size of logits; 0: there is none."""


@dataclass(frozen=True)
class Dispatch:
    """Rows of `width` travel to their experts' ranks. `width`: the stream's, or of latent experts."""

    width: int


@dataclass(frozen=True)
class Combine:
    """Experts' results return and are summed by weight."""

    width: int
    top_k: int


Operator = (
    Norm
    | Linear
    | Rotary
    | Resize
    | Views
    | Expand
    | Attend
    | Index
    | Conv
    | Scan
    | Activate
    | Router
    | Dispatch
    | Combine
)
"""Any operator."""
GATED = ("swiglu", "swiglu_clamped", "geglu")
"""Activations of two tensors."""


def whole(count: int, each: int = 1, of: str = "") -> Dim:
    """Return a dimension that every rank holds."""
    return Dim(count, each, of=of)


def linear(
    x: str,
    into: Dim,
    outputs: tuple[Output, ...],
    names: tuple[str, ...],
    bias: bool = False,
    role: Role | Literal[""] = "",
    experts: Dim | None = None,
) -> Linear:
    """Return a Linear with a weight `name.weight` for each output, and `name.bias` where `bias`. Without a `role`,
    the divided side says it: column for outputs, row for the input, latent for neither."""
    weights: list[Weight] = []
    for name, out in zip(names, outputs, strict=True):
        kind: Any = role or ("column" if out.dim.axis else "row" if into.axis else "latent")
        shape = (out.dim, into) if experts is None else (experts, out.dim, into)
        weights.append(Weight(f"{name}.weight", shape, kind))
        if bias:
            of_bias: Any = f"{kind}_bias"
            weights.append(Weight(f"{name}.bias", shape[:-1], of_bias))
    return Linear(x, into, outputs, tuple(weights), experts)


def added(hidden: int, rows: Rows = "own") -> Output:
    """Return the output of a sublayer, which is added to the residual stream."""
    return Output("y", whole(hidden), rows)
