"""Multi-head latent attention (DeepSeek-V2, 2024), and its sparse form by an index (DeepSeek-V3.2)."""

from dataclasses import dataclass
from typing import Literal

from phalanx.spec.model.blocks.block import Sublayer, latent_norm
from phalanx.spec.model.blocks.mixer import MixerSizes
from phalanx.spec.model.blocks.operators import (
    Attend,
    Dim,
    Expand,
    Index,
    Linear,
    Norm,
    Operator,
    Output,
    Resize,
    Rotary,
    Views,
    Weight,
    added,
    linear,
    whole,
)
from phalanx.spec.model.mechanisms import Latent


@dataclass(frozen=True)
class EarlierIndexSizes(MixerSizes):
    """Latent attention in the model's own sizes, to the keys that an earlier layer's index chose (GLM-5.2)."""

    kind: Literal["earlier_index"] = "earlier_index"
    """The mechanism."""


def latent(
    hidden: int,
    heads: int,
    sizes: Latent,
    norm: Norm | None,
    *,
    bias: bool = False,
    out_bias: bool = False,
    window: int | None = None,
    own_index: bool = True,
    rotates: bool = True,
    after: Norm | None = None,
) -> Sublayer:
    """Return latent attention. `bias`: of the projections down to the latents; `own_index`: whether its sparse form
    has an index of its own; `rotates`: whether positions turn the last `rope_dim` numbers (not in Kimi Linear)."""
    nope, rope, value, kv_rank, q_rank = sizes.nope_dim, sizes.rope_dim, sizes.v_dim, sizes.kv_rank, sizes.q_rank
    q, h = Dim(heads, nope + rope, "tp", of="heads"), whole(hidden)
    down, result = Output("kv_down", whole(kv_rank + rope)), Dim(heads, value, "tp", of="heads")
    width = max(nope + rope, value)
    core, shared = Dim(heads, width, "tp", of="heads"), Dim(1, rope)
    # Queries, and the latent of keys and values.
    ops: list[Operator] = []
    if q_rank is None:
        of_q = linear("n", h, (Output("q", q),), ("q",)).weights
        of_kv = linear("n", h, (down,), ("kv_down",), bias).weights
        ops.append(Linear("n", h, (Output("q", q), down), (*of_q, *of_kv)))
    else:
        # Next to kv_down, since the gradients of the two are ready together.
        ops.append(linear("n", h, (Output("q_down", whole(q_rank)), down), ("q_down", "kv_down"), bias))
        ops.append(latent_norm("q_down", "q_latent", "q_norm", q_rank))
        ops.append(linear("q_latent", whole(q_rank, of="latent.q_rank"), (Output("q", q),), ("q_up",)))
    ops += [Rotary(("q",), (q,), rope)] * rotates
    ops.append(Views(down, (Output("kv_down", Dim(1, kv_rank)), Output("rope", shared))))
    ops.append(latent_norm("kv_down", "latent", "kv_norm", kv_rank))
    ops += [Rotary(("rope",), (shared,), rope, apart=True)] * rotates
    if width > nope + rope:  # only after the latent's norm, whose temporaries are the peak where latents are wide
        ops.append(Resize("q", Output("q", core)))
    up = Output("kv_up", Dim(heads, nope + value, "tp", of="heads"))
    ops.append(linear("latent", whole(kv_rank, of="latent.kv_rank"), (up,), ("kv_up",)))
    ops.append(Expand("kv_up", "rope", (Output("k", core), Output("v", core)), nope, value))
    # Attention, and its result.
    top, cached = None, kv_rank + rope
    if sizes.index is not None and not own_index:
        top = sizes.index.top
    elif sizes.index is not None:
        ops.append(_index(hidden, q_rank or hidden, sizes.index.heads, sizes.index.dim, sizes.index.top))
        top, cached = sizes.index.top, cached + sizes.index.dim
    kv = Dim(heads, nope + rope, "tp", of="heads")
    ops.append(Attend(Output("o", result), kv, nope + rope, value, width, cached, False, window, top))
    ops.append(linear("o", result, (added(hidden),), ("o",), out_bias))
    return Sublayer("attention", norm, tuple(ops), after)


def _index(hidden: int, of_q: int, heads: int, each: int, top: int) -> Index:
    """Return the indexer, which reads the latent of queries and the token."""
    weights = (
        Weight("index.q.weight", (whole(heads, each), whole(of_q)), "index"),
        Weight("index.k.weight", (whole(each), whole(hidden)), "index"),
        Weight("index.k_norm.weight", (whole(each),), "index"),
        Weight("index.k_norm.bias", (whole(each),), "index"),
        Weight("index.weights.weight", (whole(heads), whole(hidden)), "index"),
    )
    return Index(heads, each, top, weights, (of_q, hidden, hidden))
