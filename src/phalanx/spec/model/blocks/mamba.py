"""Mamba-2 (Dao & Gu 2024): z, x, B, C and dt in one column-parallel product, each part divided by itself (Megatron-LM
d98e8a6, core/ssm/mamba_mixer.py:281-309); a causal convolution of x, B and C; the state-space recurrence in chunks; a
norm over each group, gated by z; the last product."""

from __future__ import annotations

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
class MambaSizes(MixerSizes):
    """A Mamba-2 mixer. Sizes are counts of elements."""

    heads: Heads
    """Heads, each with a decay of its own and a state of head_dim x state."""
    head_dim: Heads
    """Width of a head."""
    groups: Heads
    """Groups of heads that share B and C, a divisor of `heads`."""
    state: Heads
    """Width of the state."""
    taps: Annotated[int, Range(1, 1024)] = 4
    """Tokens that the convolution sees."""
    chunk: Annotated[int, Range(1, 65536)] = 128
    """Tokens of a chunk of the recurrence."""
    conv_bias: bool = True
    """Whether the convolution has a bias."""
    bias: bool = False
    """Whether the products have biases."""
    group_norm: bool = True
    """Whether the gated norm is over each group; False: over all heads at once."""
    norm: bool = True
    """Whether there is that norm; False: only the gate (Falcon-H1)."""
    divided: ClassVar = ("heads", "groups")
    kind: Literal["mamba"] = "mamba"
    """The mechanism."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.heads % self.groups:
            raise InputError(f"{self.path}.groups", self.groups, f"does not divide heads = {self.heads}")


def mamba(hidden: int, sizes: MambaSizes, norm: Norm | None, *, after: Norm | None = None) -> Sublayer:
    """Return a Mamba-2 mixer."""
    heads_of, groups_of = f"mixers.{sizes.name}.heads", f"mixers.{sizes.name}.groups"
    x = Dim(sizes.heads, sizes.head_dim, "tp", of=heads_of)
    g = Dim(sizes.groups, sizes.state, "tp", copies=True, of=groups_of)
    each, h, taps = Dim(sizes.heads, 1, "tp", of=heads_of), whole(hidden), whole(sizes.taps)
    parts = (("z", x), ("x", x), ("b", g), ("c", g), ("dt", each))
    filters = tuple(Weight(f"conv.{n}.weight", (d, taps), "conv") for n, d in parts[1:4])
    filters += tuple(Weight(f"conv.{n}.bias", (d,), "conv_bias") for n, d in parts[1:4]) if sizes.conv_bias else ()
    spans = sizes.heads // sizes.groups if sizes.group_norm else sizes.heads
    gates = tuple(Weight(name, (each,), "gate") for name in ("dt_bias", "a_log", "d"))
    weight = (Weight("norm.weight", (x,), "head_norm"),)
    gated: Operator = Norm("o", Output("o", x), "rms", weight, "z", True, spans)
    if not sizes.norm:
        gated = Activate("silu_gate", ("o", "z"), Output("o", x))
    ops: tuple[Operator, ...] = (
        linear("n", h, tuple(Output(n, d) for n, d in parts), tuple(n for n, _ in parts), sizes.bias),
        Conv(("x", "b", "c"), (x, g, g), sizes.taps, filters),
        Scan("ssd", Output("o", x), g, sizes.state, sizes.chunk, gates, ("x", "b", "c")),
        gated,
        linear("o", x, (added(hidden),), ("o",), sizes.bias),
    )
    return Sublayer("mamba", norm, ops, after)
