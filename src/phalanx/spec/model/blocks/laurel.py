"""LAuReL (Menghani et al. 2024): a low-rank sublayer that reads what attention reads, in Gemma 3n."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from phalanx.spec.model.blocks.block import Sublayer, stream_norm
from phalanx.spec.model.blocks.mixer import MixerSizes
from phalanx.spec.model.blocks.operators import Norm, Output, added, linear, whole
from phalanx.spec.ranges import Range


@dataclass(frozen=True)
class LaurelSizes(MixerSizes):
    """A product down to a rank and up again. Sizes are counts of elements."""

    rank: Annotated[int, Range(1, 10**6)]
    """Width between the two."""
    kind: Literal["laurel"] = "laurel"
    """The mechanism."""


def laurel(hidden: int, sizes: LaurelSizes, norm: Norm | None, *, after: Norm | None = None) -> Sublayer:
    """Return the sublayer, with a norm of its own of what it adds (transformers 5.24, models/gemma3n/
    modeling_gemma3n.py:920)."""
    h, rank = whole(hidden), whole(sizes.rank)
    ops = (linear("n", h, (Output("low", rank),), ("left",)), linear("low", rank, (added(hidden),), ("right",)))
    return Sublayer("laurel", norm, ops, stream_norm(hidden, "rms", False, "laurel_after"))
