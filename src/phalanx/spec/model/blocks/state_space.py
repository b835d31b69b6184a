"""State spaces.

Mamba-2 (Dao & Gu 2024): z, x, B, C and dt in one column-parallel product, each part divided by itself (Megatron-LM
d98e8a6, core/ssm/mamba_mixer.py:281-309); a causal convolution of x, B and C; the recurrence in chunks; a norm over
each group, gated by z. Mamba (Gu & Dao 2023) in Jamba's form: every channel has a state of its own, whose step, B
and C are projected from the convolved channels, with norms of these three (transformers 5.23,
models/jamba/modeling_jamba.py:444).
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from phalanx.spec.errors import InputError
from phalanx.spec.model.blocks.block import Sublayer, latent_norm
from phalanx.spec.model.blocks.mixer import Heads, MixerSizes
from phalanx.spec.model.blocks.operators import (
    Activate,
    Conv,
    Dim,
    Linear,
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


@dataclass(frozen=True)
class SelectiveSizes(MixerSizes):
    """A Mamba mixer. Sizes are counts of elements."""

    channels: Annotated[int, Range(1, 10**7)]
    """Channels, usually twice the residual stream's."""
    state: Heads
    """Width of a channel's state."""
    step_rank: Annotated[int, Range(1, 10**6)]
    """Width of the projection that the step comes from."""
    taps: Annotated[int, Range(1, 1024)] = 4
    """Tokens that the convolution sees."""
    conv_bias: bool = True
    """Whether the convolution has a bias."""
    bias: bool = False
    """Whether the first and the last product have biases."""
    inner_norms: bool = False
    """Whether the step's projection, B and C are normed (Jamba)."""
    divided: ClassVar = ("channels",)
    kind: Literal["selective"] = "selective"
    """The mechanism."""


def selective(hidden: int, sizes: SelectiveSizes, norm: Norm | None, *, after: Norm | None = None) -> Sublayer:
    """Return a Mamba mixer. B, C and the step's projection are sums over tp ranks."""
    x, h = Dim(sizes.channels, 1, "tp", of=f"mixers.{sizes.name}.channels"), whole(hidden)
    state, rank = whole(sizes.state), whole(sizes.step_rank)
    filters: tuple[Weight, ...] = (Weight("conv.x.weight", (x, whole(sizes.taps)), "conv"),)
    filters += (Weight("conv.x.bias", (x,), "conv_bias"),) if sizes.conv_bias else ()
    small = (("step", rank), ("b", state), ("c", state))
    ops: list[Operator] = [
        linear("n", h, (Output("x", x), Output("z", x)), ("x", "z"), sizes.bias),
        Conv(("x",), (x,), sizes.taps, filters),
        Linear(
            "x",
            x,
            tuple(Output(name, dim) for name, dim in small),
            tuple(Weight(f"{name}.weight", (dim, x), "row") for name, dim in small),
        ),
    ]
    if sizes.inner_norms:
        ops += (latent_norm(name, name, f"{name}_norm", dim.size) for name, dim in small)
    ops.append(linear("step", rank, (Output("dt", x),), ("dt",), bias=True))
    learned = (Weight("a_log", (x, state), "gate"), Weight("d", (x,), "gate"))
    ops.append(Scan("selective", Output("o", x), Dim(1, sizes.state), sizes.state, 1, learned, ("x", "b", "c")))
    ops.append(Activate("silu_gate", ("o", "z"), Output("o", x)))
    ops.append(linear("o", x, (added(hidden),), ("o",), sizes.bias))
    return Sublayer("mamba", norm, tuple(ops), after)
