"""The gated short convolution of LFM2 (Liquid AI 2025): y = C conv(B x), with B, C and x projected from the token
(transformers 5.23, models/lfm2/modeling_lfm2.py:316)."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from phalanx.spec.model.blocks.block import Sublayer
from phalanx.spec.model.blocks.mixer import MixerSizes
from phalanx.spec.model.blocks.operators import Activate, Conv, Dim, Norm, Output, Weight, added, linear, whole
from phalanx.spec.ranges import Range


@dataclass(frozen=True)
class ShortConvSizes(MixerSizes):
    """A gated short convolution."""

    channels: Annotated[int, Range(1, 10**7)]
    """Channels of the convolution."""
    taps: Annotated[int, Range(1, 1024)] = 3
    """Tokens that it sees."""
    bias: bool = False
    """Whether its products and the convolution have biases."""
    divided: ClassVar = ("channels",)
    kind: Literal["short_conv"] = "short_conv"
    """The mechanism."""


def short_conv(hidden: int, sizes: ShortConvSizes, norm: Norm | None, *, after: Norm | None = None) -> Sublayer:
    """Return a gated short convolution."""
    channels, h = Dim(sizes.channels, 1, "tp", of=f"mixers.{sizes.name}.channels"), whole(hidden)
    filters: tuple[Weight, ...] = (Weight("conv.x.weight", (channels, whole(sizes.taps)), "conv"),)
    filters += (Weight("conv.x.bias", (channels,), "conv_bias"),) if sizes.bias else ()
    parts = ("b", "c", "x")
    ops = (
        linear("n", h, tuple(Output(name, channels) for name in parts), parts, sizes.bias),
        Activate("product", ("b", "x"), Output("x", channels)),
        Conv(("x",), (channels,), sizes.taps, filters, activation=""),
        Activate("product", ("c", "x"), Output("o", channels)),
        linear("o", channels, (added(hidden),), ("o",), sizes.bias),
    )
    return Sublayer("conv", norm, ops, after)
