"""Gated delta net (Yang et al. 2024), the linear attention of Qwen3-Next and Qwen3.5.

q, k, v, z, beta and alpha in one column-parallel product (Megatron-LM d98e8a6,
core/ssm/gated_delta_net/gdn.py:43-58); a causal convolution of q, k and v; the recurrence in chunks; a norm over each
head, gated by z; the last product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from phalanx.spec.errors import InputError
from phalanx.spec.model.blocks.block import Sublayer
from phalanx.spec.model.blocks.mixer import Heads, MixerSizes
from phalanx.spec.model.blocks.operators import Conv, Dim, Norm, Output, Scan, Weight, added, linear, whole
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
