"""Attention whose queries and results are of experts (mixture of attention heads: Zhang et al. 2022), in JetMoE."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from phalanx.spec.model.blocks.block import Sublayer
from phalanx.spec.model.blocks.mixer import Heads, MixerSizes
from phalanx.spec.model.blocks.operators import (
    Attend,
    Dim,
    Linear,
    Norm,
    Operator,
    Output,
    Rotary,
    Router,
    Weight,
    added,
    linear,
    whole,
)


@dataclass(frozen=True)
class RoutedAttentionSizes(MixerSizes):
    """Attention of experts. Sizes are counts of elements."""

    count: Heads
    """Experts, each with a matrix of queries and one of results."""
    top_k: Heads
    """Experts of a token, each of which has a query head for every key head."""
    kv_heads: Heads
    """Key and value heads, which all tokens have."""
    head_dim: Heads
    """Width of a head."""
    divided: ClassVar = ("kv_heads",)
    kind: Literal["routed_attention"] = "routed_attention"
    """The mechanism."""


def routed_attention(
    hidden: int,
    sizes: RoutedAttentionSizes,
    norm: Norm | None,
    *,
    rotary: int = 0,
    bias: bool = False,
    after: Norm | None = None,
) -> Sublayer:
    """Return attention of experts (transformers 5.24, models/jetmoe/modeling_jetmoe.py:267, :413). `bias`: whether
    one is added to the sum of the experts' results."""
    of, h, count = f"mixers.{sizes.name}.kv_heads", whole(hidden), Dim(sizes.count, 1, "ep")
    kv = Dim(sizes.kv_heads, sizes.head_dim, "tp", of=of)
    q = Dim(sizes.kv_heads * sizes.top_k, sizes.head_dim, "tp", of=of)
    ops: list[Operator] = [
        linear("n", h, (Output("k", kv), Output("v", kv)), ("k", "v")),
        Linear(
            "n",
            h,
            (Output("logits", whole(sizes.count), "routed"),),
            (Weight("router.weight", (whole(sizes.count), h), "router"),),
        ),
        Router(sizes.count, sizes.top_k),
        linear("n", h, (Output("q", kv, "received"),), ("q",), role="expert_column", experts=count),
    ]
    ops += [Rotary(("q", "k"), (q, kv), rotary)] if rotary else []
    width = sizes.head_dim
    ops.append(Attend(Output("o", q), kv, width, width, width, 2 * kv.size, True))
    last = linear("o", kv, (added(hidden, "received"),), ("o",), role="expert_row", experts=count)
    biases = (Weight("o.bias", (h,), "row_bias"),) if bias else ()
    ops.append(Linear(last.x, last.into, last.y, (*last.weights, *biases), last.experts))
    return Sublayer("attention", norm, tuple(ops), after, leaves="complete")
