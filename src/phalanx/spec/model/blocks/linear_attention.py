"""Linear attention, a recurrence in chunks over a matrix for each head.

Gated delta net (Yang et al. 2024) of Qwen3-Next and Qwen3.5: q, k, v, z, beta and alpha in one column-parallel
product (Megatron-LM d98e8a6, core/ssm/gated_delta_net/gdn.py:43-58), a causal convolution of q, k and v, a norm
over each head, gated by z. Kimi Delta Attention (Moonshot 2025): the same with a decay for every key channel, with
gates from low-rank projections (transformers 5.23, models/kimi_linear/modeling_kimi_linear.py:316 and :569).
Lightning attention (Qin et al. 2024) of MiniMax-01: SiLU, a fixed decay for each head, a norm over all heads, a
sigmoid gate (transformers 5.23, models/minimax/modeling_minimax.py:125).
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from phalanx.spec.errors import InputError
from phalanx.spec.model.blocks.block import Sublayer
from phalanx.spec.model.blocks.mixer import Heads, MixerSizes
from phalanx.spec.model.blocks.operators import (
    Activate,
    Conv,
    Dim,
    Norm,
    Operator,
    Output,
    Scan,
    Weight,
    added,
    linear,
    whole,
)
from phalanx.spec.ranges import Range


@dataclass(frozen=True)
class DeltaSizes(MixerSizes):
    """A gated delta net. Sizes are counts of elements."""

    key_heads: Heads
    """Heads of queries and keys."""
    value_heads: Heads
    """Heads of values, a multiple of `key_heads`; each has a state of key_dim x value_dim."""
    key_dim: Heads
    """Width of a query or key head."""
    value_dim: Heads
    """Width of a value head."""
    taps: Annotated[int, Range(1, 1024)] = 4
    """Tokens that the convolution sees."""
    chunk: Annotated[int, Range(1, 65536)] = 64
    """Tokens of a chunk of the recurrence."""
    divided: ClassVar = ("key_heads", "value_heads")
    kind: Literal["delta"] = "delta"
    """The mechanism."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.value_heads % self.key_heads:
            reason = f"is not a multiple of key_heads = {self.key_heads}"
            raise InputError(f"{self.path}.value_heads", self.value_heads, reason)


def delta(hidden: int, sizes: DeltaSizes, norm: Norm | None, *, after: Norm | None = None) -> Sublayer:
    """Return a gated delta net."""
    key_of, value_of = f"mixers.{sizes.name}.key_heads", f"mixers.{sizes.name}.value_heads"
    k = Dim(sizes.key_heads, sizes.key_dim, "tp", of=key_of)
    v = Dim(sizes.value_heads, sizes.value_dim, "tp", of=value_of)
    each, h = Dim(sizes.value_heads, 1, "tp", of=value_of), whole(hidden)
    taps = whole(sizes.taps)
    parts = (("q", k), ("k", k), ("v", v), ("z", v), ("beta", each), ("alpha", each))
    first = linear("n", h, tuple(Output(n, d) for n, d in parts), tuple(n for n, _ in parts))
    filters = tuple(Weight(f"conv.{n}.weight", (d, taps), "conv") for n, d in parts[:3])
    gates = (Weight("dt_bias", (each,), "gate"), Weight("a_log", (each,), "gate"))
    ops = (
        first,
        Conv(("q", "k", "v"), (k, k, v), sizes.taps, filters),
        Norm("q", Output("q", k), "l2", inside=True),
        Norm("k", Output("k", k), "l2", inside=True),
        Scan("delta", Output("o", v), k, sizes.key_dim, sizes.chunk, gates, ("q", "k", "v"), gates=2),
        Norm("o", Output("o", v), "rms", (Weight("norm.weight", (whole(sizes.value_dim),), "norm"),), "z", True),
        linear("o", v, (added(hidden),), ("o",)),
    )
    return Sublayer("attention", norm, ops, after)


@dataclass(frozen=True)
class ChannelDeltaSizes(MixerSizes):
    """A gated delta net with a decay for every channel of a key. Sizes are counts of elements."""

    heads: Heads
    """Heads of queries, keys and values, each with a state of head_dim x head_dim."""
    head_dim: Heads
    """Width of a head, and of the low-rank space of its gates."""
    taps: Annotated[int, Range(1, 1024)] = 4
    """Tokens that the convolution sees."""
    chunk: Annotated[int, Range(1, 65536)] = 64
    """Tokens of a chunk of the recurrence."""
    divided: ClassVar = ("heads",)
    kind: Literal["channel_delta"] = "channel_delta"
    """The mechanism."""


def channel_delta(hidden: int, sizes: ChannelDeltaSizes, norm: Norm | None, *, after: Norm | None = None) -> Sublayer:
    """Return a gated delta net with a decay for every channel."""
    of = f"mixers.{sizes.name}.heads"
    q, per_head, h = Dim(sizes.heads, sizes.head_dim, "tp", of=of), Dim(sizes.heads, 1, "tp", of=of), whole(hidden)
    low, taps = whole(sizes.head_dim), whole(sizes.taps)
    parts = ("q", "k", "v")
    first = (
        *(Output(name, q) for name in parts),
        Output("beta", per_head),
        Output("f_down", low),
        Output("z_down", low),
    )
    ops = (
        linear("n", h, first, tuple(out.name for out in first)),
        Conv(parts, (q, q, q), sizes.taps, tuple(Weight(f"conv.{name}.weight", (q, taps), "conv") for name in parts)),
        Norm("q", Output("q", q), "l2", inside=True),
        Norm("k", Output("k", q), "l2", inside=True),
        linear("f_down", low, (Output("decay", q),), ("f_up",)),
        linear("z_down", low, (Output("z", q),), ("z_up",)),
        Scan(
            "channel_delta",
            Output("o", q),
            q,
            sizes.head_dim,
            sizes.chunk,
            (Weight("dt_bias", (q,), "gate"), Weight("a_log", (per_head,), "gate")),
            parts,
            gates=sizes.head_dim + 1,
        ),
        Norm("o", Output("o", q), "rms", (Weight("norm.weight", (low,), "norm"),), "z", inside=True),
        linear("o", q, (added(hidden),), ("o",)),
    )
    return Sublayer("attention", norm, ops, after)


@dataclass(frozen=True)
class LightningSizes(MixerSizes):
    """Lightning attention. Sizes are counts of elements."""

    heads: Heads
    """Heads, each with a state of head_dim x head_dim."""
    head_dim: Heads
    """Width of a head."""
    chunk: Annotated[int, Range(1, 65536)] = 256
    """Tokens of a chunk of the recurrence."""
    divided: ClassVar = ("heads",)
    kind: Literal["lightning"] = "lightning"
    """The mechanism."""


def lightning(hidden: int, sizes: LightningSizes, norm: Norm | None, *, after: Norm | None = None) -> Sublayer:
    """Return lightning attention."""
    q, h = Dim(sizes.heads, sizes.head_dim, "tp", of=f"mixers.{sizes.name}.heads"), whole(hidden)
    parts = ("q", "k", "v", "gate")
    ops: tuple[Operator, ...] = (
        linear("n", h, tuple(Output(name, q) for name in parts), parts),
        *(Activate("silu", (name,), Output(name, q)) for name in parts[:3]),
        Scan("lightning", Output("o", q), q, sizes.head_dim, sizes.chunk, (), ("q", "k", "v"), gates=0),
        Norm("o", Output("o", q), "rms", (Weight("norm.weight", (q,), "head_norm"),), inside=True, spans=q.count),
        Activate("sigmoid_gate", ("o", "gate"), Output("o", q)),
        linear("o", q, (added(hidden),), ("o",)),
    )
    return Sublayer("attention", norm, ops, after)
