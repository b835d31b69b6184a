"""AltUp (Baykal et al. 2023), in Gemma 3n: several residual streams, of which one goes through a block, and the
others are predicted from it before and corrected by it after."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from phalanx.spec.model.blocks.block import Sublayer
from phalanx.spec.model.blocks.mixer import MixerSizes
from phalanx.spec.model.blocks.operators import Linear, Norm, Output, Weight, added, linear, whole
from phalanx.spec.ranges import Range


@dataclass(frozen=True)
class AltUpSizes(MixerSizes):
    """AltUp's streams. Sizes are counts of elements."""

    inputs: Annotated[int, Range(2, 64)]
    """Residual streams."""
    kind: Literal["altup"] = "altup"
    """The mechanism."""

    def table(self, hidden: int, layers: int) -> tuple[Weight, ...]:
        """Return the parameters outside of blocks: what makes the further streams, and what joins them."""
        h = whole(hidden)
        ends = [f"altup_{end}.{i}.weight" for end in ("projections", "unembed") for i in range(self.inputs - 1)]
        return tuple(Weight(name, (h, h), "latent") for name in ends)


def altup(hidden: int, sizes: AltUpSizes, norm: Norm | None, *, after: Norm | None = None) -> Sublayer:
    """Return what predicts and corrects the streams around a block: weights of n streams from a norm of the active
    one (transformers 5.24, models/gemma3n/modeling_gemma3n.py:976)."""
    h, n = whole(hidden), sizes.inputs
    route = Norm(
        "n", Output("n", whole(1, hidden)), "rms", (Weight("router_norm.weight", (h,), "norm"),), inside=True
    )
    into = whole(n)
    coefficients = linear(
        "routes", into, (Output("p", whole(n * n)), Output("c", into)), ("prediction", "correction")
    )
    scale = Linear("c", into, (added(hidden),), (Weight("scale", (h,), "norm"),))
    ops = (route, linear("n", h, (Output("routes", into),), ("router",)), coefficients, scale)
    return Sublayer("altup", None, ops)
