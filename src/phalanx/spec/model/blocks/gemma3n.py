"""What Gemma 3n adds to a block.

AltUp (Baykal et al. 2023): several residual streams, of which one goes through the block and the others are predicted
before and corrected after it. LAuReL (Menghani et al. 2024): a low-rank sublayer that reads what attention reads. In
Gemma 4 too, embeddings for each layer: a token's vector from a second table gates a narrow projection of the stream
(transformers 5.23, models/gemma4/modeling_gemma4.py:1353)."""

from dataclasses import dataclass
from typing import Annotated, Literal

from phalanx.spec.model.blocks.block import Sublayer, stream_norm
from phalanx.spec.model.blocks.mixer import MixerSizes
from phalanx.spec.model.blocks.operators import Activate, Linear, Norm, Output, Weight, added, linear, whole
from phalanx.spec.ranges import Range


@dataclass(frozen=True)
class AltUpSizes(MixerSizes):
    """AltUp's streams. Sizes are counts of elements."""

    inputs: Annotated[int, Range(2, 64)]
    """Residual streams."""
    kind: Literal["altup"] = "altup"
    """The mechanism."""

    def table(self, hidden: int, layers: int) -> tuple[Weight, ...]:
        """Return the parameters outside of blocks: the matrices that make the further streams and that join them."""
        h = whole(hidden)
        ends = [f"altup_{end}.{i}.weight" for end in ("projections", "unembed") for i in range(self.inputs - 1)]
        return tuple(Weight(name, (h, h), "latent") for name in ends)


def altup(hidden: int, sizes: AltUpSizes, norm: Norm | None, *, after: Norm | None = None) -> Sublayer:
    """Return the sublayer that predicts and corrects the n streams around a block, with coefficients from a norm of
    the active one (transformers 5.24, models/gemma3n/modeling_gemma3n.py:976)."""
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


@dataclass(frozen=True)
class LayerEmbeddingSizes(MixerSizes):
    """A gate by an embedding for each layer. Sizes are counts of elements."""

    width: Annotated[int, Range(1, 10**6)]
    """Width of a token's vector for one layer."""
    vocab: Annotated[int, Range(1, 10**7)]
    """Tokens in the table."""
    kind: Literal["layer_embedding"] = "layer_embedding"
    """The mechanism."""

    def table(self, hidden: int, layers: int) -> tuple[Weight, ...]:
        """Return the parameters in addition to the embedding's: the table of all layers' vectors, and a projection of
        the stream's, with a norm, that is added to them."""
        all_layers = whole(layers, self.width)
        return (
            Weight("layers.weight", (whole(self.vocab), all_layers), "embedding"),
            Weight("layers_projection.weight", (all_layers, whole(hidden)), "latent"),
            Weight("layers_norm.weight", (whole(self.width),), "norm"),
        )


def layer_embedding(
    hidden: int, sizes: LayerEmbeddingSizes, norm: Norm | None, *, after: Norm | None = None
) -> Sublayer:
    """Return the gate of one layer: it reads the stream without a norm, and norms what it adds."""
    h, width = whole(hidden), whole(sizes.width)
    ops = (
        linear("n", h, (Output("gate", width),), ("gate",)),
        Activate("geglu", ("gate", "layer"), Output("a", width)),
        linear("a", width, (added(hidden),), ("up",)),
    )
    own = stream_norm(hidden, "rms", False, "layer_embedding_after")
    return Sublayer("layer_embedding", None, ops, own)
