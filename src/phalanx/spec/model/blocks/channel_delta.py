"""Kimi Delta Attention (Moonshot 2025): the gated delta rule with a decay for every key channel, with gates from
low-rank projections (transformers 5.23, models/kimi_linear/modeling_kimi_linear.py:316 and :569)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from phalanx.spec.model.blocks.block import Sublayer
from phalanx.spec.model.blocks.mixer import Heads, MixerSizes
from phalanx.spec.model.blocks.operators import Conv, Dim, Norm, Output, Scan, Weight, added, linear, whole
from phalanx.spec.ranges import Range


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
    q, each, h = Dim(sizes.heads, sizes.head_dim, "tp", of=of), Dim(sizes.heads, 1, "tp", of=of), whole(hidden)
    low, taps = whole(sizes.head_dim), whole(sizes.taps)
    parts = ("q", "k", "v")
    first = (
        *(Output(name, q) for name in parts),
        Output("beta", each),
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
            (Weight("dt_bias", (q,), "gate"), Weight("a_log", (each,), "gate")),
            parts,
            gates=sizes.head_dim + 1,
        ),
        Norm("o", Output("o", q), "rms", (Weight("norm.weight", (low,), "norm"),), "z", inside=True),
        linear("o", q, (added(hidden),), ("o",)),
    )
    return Sublayer("attention", norm, ops, after)
