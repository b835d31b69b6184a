"""Embeddings for each layer (Gemma 3n and 4): a token's own vector for every layer, from a second table, gates a
narrow projection of the stream (transformers 5.23, models/gemma4/modeling_gemma4.py:1353)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from phalanx.spec.model.blocks.block import Sublayer, stream_norm
from phalanx.spec.model.blocks.mixer import MixerSizes
from phalanx.spec.model.blocks.operators import Activate, Norm, Output, Weight, added, linear, whole
from phalanx.spec.ranges import Range


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
