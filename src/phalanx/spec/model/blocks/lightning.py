"""Lightning attention (Qin et al. 2024), the linear attention of MiniMax-01: queries, keys and values through SiLU, a
recurrence with a fixed decay for each head, a norm over all heads, a sigmoid gate (transformers 5.23,
models/minimax/modeling_minimax.py:125)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from phalanx.spec.model.blocks.block import Sublayer
from phalanx.spec.model.blocks.mixer import Heads, MixerSizes
from phalanx.spec.model.blocks.operators import (
    Activate,
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
