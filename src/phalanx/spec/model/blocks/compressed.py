"""Attention over a window and compressed keys (DeepSeek-V4, 2026).

One key head, whose keys are the values; queries and results in low rank. In addition to the nearest tokens a query
sees one key for every `ratio` tokens: all of them, or the ones that an index chooses (transformers 5.23,
models/deepseek_v4/modeling_deepseek_v4.py:373, :473, :600, :766).
"""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

from phalanx.spec.errors import InputError
from phalanx.spec.model.blocks.block import Sublayer, latent_norm
from phalanx.spec.model.blocks.mixer import Heads, MixerSizes
from phalanx.spec.model.blocks.operators import (
    Attend,
    Dim,
    Index,
    Linear,
    Norm,
    Operator,
    Output,
    Rotary,
    Weight,
    added,
    linear,
    whole,
)
from phalanx.spec.model.mechanisms import SparseIndex, Width
from phalanx.spec.ranges import Count, Range


@dataclass(frozen=True)
class CompressedSizes(MixerSizes):
    """Attention over a window and compressed keys. Sizes are counts of elements."""

    heads: Heads
    """Query heads."""
    head_dim: Heads
    """Width of a head."""
    q_rank: Width
    """Width of the latent vector that queries come from."""
    rotary_dim: Width
    """Rotated dimensions of a head."""
    window: Count
    """The nearest tokens, whose own keys are seen."""
    result_groups: Heads
    """Groups of heads whose results are projected to `result_rank` each; a divisor of `heads`."""
    result_rank: Width
    """Width of a group's result before the last product."""
    ratio: Annotated[int, Range(0, 10**6)] = 0
    """Tokens that one compressed key represents; 0: there are none."""
    overlapping: bool = False
    """Whether a compressed key also sees the tokens of the one before it, with weights of their own."""
    index: SparseIndex | None = None
    """The choice of compressed keys; None: all are seen."""
    divided: ClassVar = ("heads", "result_groups")
    kind: Literal["compressed"] = "compressed"
    """The mechanism."""

    def __post_init__(self) -> None:
        super().__post_init__()
        where = self.path
        if self.heads % self.result_groups:
            raise InputError(f"{where}.result_groups", self.result_groups, f"does not divide heads = {self.heads}")
        if self.index is not None and not self.ratio:
            raise InputError(f"{where}.index", None, "chooses compressed keys, and there are none", "give a ratio")


def compressed(hidden: int, sizes: CompressedSizes, norm: Norm | None, *, after: Norm | None = None) -> Sublayer:
    """Return attention over a window and compressed keys."""
    of, dim, rank = f"mixers.{sizes.name}.heads", sizes.head_dim, sizes.q_rank
    q, h = Dim(sizes.heads, dim, "tp", of=of), whole(hidden)
    groups = sizes.result_groups
    result = Dim(groups, sizes.heads * dim // groups, "tp", of=f"mixers.{sizes.name}.result_groups")
    low = Dim(groups, sizes.result_rank, "tp", of=result.of)
    # Queries from their latent, and the one key.
    down = (Output("q_down", whole(rank)), Output("kv", whole(dim)))
    ops: list[Operator] = [
        linear("n", h, down, ("q_down", "kv")),
        latent_norm("q_down", "q_latent", "q_norm", rank),
        latent_norm("kv", "kv", "kv_norm", dim),
        linear("q_latent", whole(rank), (Output("q", q),), ("q_up",)),
        Norm("q", Output("q", q), "rms", inside=True),
        Rotary(("q", "kv"), (q, Dim(1, dim)), sizes.rotary_dim),
    ]
    # Compressed keys, and the index over them.
    top = None
    if sizes.ratio:
        ops.append(_pooled(hidden, "compressor.", sizes.ratio, dim * (2 if sizes.overlapping else 1), dim))
    if sizes.index is not None:
        x, top = sizes.index, sizes.index.top
        ops.append(_pooled(hidden, "index.", sizes.ratio, 2 * x.dim, x.dim))
        weights = (
            Weight("index.q.weight", (whole(x.heads, x.dim), whole(rank)), "index"),
            Weight("index.weights.weight", (whole(x.heads), h), "index"),
        )
        ops.append(Index(x.heads, x.dim, top, weights, (rank, 0, hidden), sizes.ratio))
    # Attention, and its result in low rank.
    cached = dim + (dim + (sizes.index.dim if sizes.index else 0)) // max(sizes.ratio, 1) * (sizes.ratio > 0)
    sinks = (Weight("sinks", (Dim(sizes.heads, 1, "tp", of=of),), "sink", late=True),)
    key = Dim(1, dim)
    ops.append(
        Attend(Output("o", q), key, dim, dim, dim, cached, False, sizes.window, top, sizes.ratio, weights=sinks)
    )
    weight = Weight("o_down.weight", (low, whole(result.each)), "column")
    ops.append(Linear("o", result, (Output("o_down", low),), (weight,), grouped=True))
    ops.append(linear("o_down", low, (added(hidden),), ("o",)))
    return Sublayer("attention", norm, tuple(ops), after)


def _pooled(hidden: int, name: str, ratio: int, width: int, normed: int) -> Linear:
    """Return the product whose results, weighted by a gate and a position in the group, are pooled over `ratio`
    tokens."""
    outputs = (Output(f"{name}kv", whole(width)), Output(f"{name}gate", whole(width)))
    product = linear("n", whole(hidden), outputs, (f"{name}kv", f"{name}gate"))
    position = Weight(f"{name}position", (whole(ratio), whole(width)), "latent_bias")
    return replace(
        product, weights=(*product.weights, position, Weight(f"{name}norm.weight", (whole(normed),), "norm"))
    )
