"""The selective state space of Mamba (Gu & Dao 2023) in Jamba's form: every channel has a state of its own, whose
step, B and C are projected from the convolved channels, with norms of these three (transformers 5.23,
models/jamba/modeling_jamba.py:444)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from phalanx.spec.model.blocks.block import Sublayer
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
        for name, dim in small:
            weight = Weight(f"{name}_norm.weight", (dim,), "norm")
            ops.append(Norm(name, Output(name, Dim(1, dim.size)), "rms", (weight,), inside=True))
    ops.append(linear("step", rank, (Output("dt", x),), ("dt",), bias=True))
    learned = (Weight("a_log", (x, state), "gate"), Weight("d", (x,), "gate"))
    ops.append(Scan("selective", Output("o", x), Dim(1, sizes.state), sizes.state, 1, learned, ("x", "b", "c")))
    ops.append(Activate("silu_gate", ("o", "z"), Output("o", x)))
    ops.append(linear("o", x, (added(hidden),), ("o",), sizes.bias))
    return Sublayer("mamba", norm, tuple(ops), after)
