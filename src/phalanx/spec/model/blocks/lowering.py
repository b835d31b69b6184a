"""From the sizes that a user writes to an Architecture: which sublayers each block has, by its pattern."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from phalanx.spec.errors import InputError, nearest
from phalanx.spec.model.blocks.attention import AttentionSizes, attention
from phalanx.spec.model.blocks.block import Architecture, Block, Sublayer, stream_norm
from phalanx.spec.model.blocks.compressed import CompressedSizes, compressed
from phalanx.spec.model.blocks.factorised import FactorisedSizes, factorised
from phalanx.spec.model.blocks.gemma3n import (
    AltUpSizes,
    LaurelSizes,
    LayerEmbeddingSizes,
    altup,
    laurel,
    layer_embedding,
)
from phalanx.spec.model.blocks.latent import EarlierIndexSizes, latent
from phalanx.spec.model.blocks.linear_attention import (
    ChannelDeltaSizes,
    DeltaSizes,
    LightningSizes,
    channel_delta,
    delta,
    lightning,
)
from phalanx.spec.model.blocks.mlp import ExpertsSizes, MlpSizes, experts, mlp
from phalanx.spec.model.blocks.operators import Dim, Norm, Scan, Weight, whole
from phalanx.spec.model.blocks.routed_attention import RoutedAttentionSizes, routed_attention
from phalanx.spec.model.blocks.short_conv import ShortConvSizes, short_conv
from phalanx.spec.model.blocks.state_space import MambaSizes, SelectiveSizes, mamba, selective

if TYPE_CHECKING:
    from phalanx.spec.model.spec import ModelSpec

Mixer = (
    AltUpSizes
    | AttentionSizes
    | ChannelDeltaSizes
    | CompressedSizes
    | DeltaSizes
    | EarlierIndexSizes
    | ExpertsSizes
    | FactorisedSizes
    | LaurelSizes
    | LayerEmbeddingSizes
    | LightningSizes
    | MambaSizes
    | MlpSizes
    | RoutedAttentionSizes
    | SelectiveSizes
    | ShortConvSizes
)
"""Sizes of a sublayer that a pattern names."""
_SUBLAYERS: dict[type, Callable[..., Sublayer]] = {
    AltUpSizes: altup,
    ChannelDeltaSizes: channel_delta,
    CompressedSizes: compressed,
    DeltaSizes: delta,
    FactorisedSizes: factorised,
    LaurelSizes: laurel,
    LayerEmbeddingSizes: layer_embedding,
    LightningSizes: lightning,
    MambaSizes: mamba,
    SelectiveSizes: selective,
    ShortConvSizes: short_conv,
}
"""The function (hidden, sizes, norm, after) that makes a sublayer of mechanisms with sizes of their own."""
OWN_SUBLAYERS = ("attention", "mlp", "experts")
"""Sublayers that a pattern names and the model's own fields describe. With `latent`, `attention` is latent."""
JOINED, PARALLEL, NORMED = "+", "&", ":"
"""Marks of a pattern. Between sublayers of a block, `+`: one after the other; `&`: both read one normed input. After
a sublayer, `:` and the place of its norms, if that is not the model's."""
_NORMS = ("before", "after", "both")


@lru_cache(maxsize=256)
def architecture(spec: ModelSpec) -> Architecture:
    """Return the blocks of a model."""
    distinct: dict[tuple[str, int | None], Block] = {}
    blocks = []
    for i, words in enumerate(pattern_of(spec)):
        kind = (words, None if spec.pattern is not None else spec.window_of(i))
        if kind not in distinct:
            distinct[kind] = _block(spec, words, kind[1])
        blocks.append(distinct[kind])
    return Architecture(
        Dim(spec.vocab, 1, "tp", pads=True, of="vocab"),
        spec.hidden,
        spec.max_seq,
        tuple(blocks),
        stream_norm(spec.hidden, spec.norm, spec.norm_bias, "norm", spec.norm_weights),
        spec.position == "learned",
        spec.tied,
        end_weights=_joined(spec) if spec.streams > 1 else (),
    )


def has_recurrence(spec: ModelSpec) -> bool:
    """Whether a model has recurrences."""
    return any(block.first(Scan) is not None for block in architecture(spec).kinds)


def blocks_with(spec: ModelSpec, blocks: Sequence[int], kind: type) -> list[int]:
    """Return the numbers in `blocks` of the blocks that have an operator of a kind."""
    every = architecture(spec).blocks
    return [i for i in blocks if every[i].first(kind) is not None]


def block_of(spec: ModelSpec, unit: str) -> Block:
    """Return the block of a unit `blocks.i`."""
    return architecture(spec).blocks[int(unit.partition(".")[2])]


def pattern_of(spec: ModelSpec) -> tuple[str, ...]:
    """Return the sublayers of every block, such as `attention+mlp`."""
    if spec.pattern is not None:
        n = len(spec.pattern)
        return tuple(spec.pattern[i % n] for i in range(spec.layers))
    x = spec.experts
    return tuple("attention+mlp" if not x or i in x.dense_layers else "attention+experts" for i in range(spec.layers))


def words_of(block: str) -> list[str]:
    """Return the words of one block of a pattern."""
    return [word.partition(NORMED)[0] for word in block.replace(PARALLEL, JOINED).split(JOINED)]


def require_pattern(spec: ModelSpec) -> None:
    """Require that a pattern is no longer than the model's layers, and names sublayers that the model describes, all
    of its mixers among them. Raises InputError."""
    mixers = [m.name for m in spec.mixers]
    for i, name in enumerate(mixers):
        if name in OWN_SUBLAYERS or name in mixers[:i] or len(words_of(name)) > 1 or not name.strip():
            reason = (
                "is the model's own"
                if name in OWN_SUBLAYERS
                else "is used twice"
                if name in mixers[:i]
                else "is not a word"
            )
            raise InputError(f"model.mixers.{i}.name", name, reason, "give each mixer a name of its own")
    if spec.pattern is None:
        if mixers:
            raise InputError("model.mixers", mixers[0], "is in no block", "give a pattern that names it")
        return
    if not spec.pattern:
        raise InputError("model.pattern", "()", "has no block", "name the sublayers of each block")
    if len(spec.pattern) > spec.layers:
        reason = f"has {len(spec.pattern)} blocks, more than layers = {spec.layers}"
        raise InputError("model.pattern", None, reason, "a shorter one repeats; a longer one is a mistake")
    for i, words in enumerate(spec.pattern):
        for word in words.replace(PARALLEL, JOINED).split(JOINED):
            _, colon, norms = word.partition(NORMED)
            if colon and norms not in _NORMS:
                raise InputError(f"model.pattern.{i}", word, "says no place of norms", nearest(norms, _NORMS))
    if spec.latent is None and any(isinstance(m, EarlierIndexSizes) for m in spec.mixers):
        raise InputError("model.latent", None, "is missing: the pattern has layers that read an earlier index")
    known = [*OWN_SUBLAYERS, *mixers]
    for i, words in enumerate(spec.pattern):
        for word in words_of(words):
            if word not in known:
                raise InputError(f"model.pattern.{i}", word, "is not a sublayer of this model", nearest(word, known))
            if word == "experts" and spec.experts is None:
                raise InputError("model.experts", None, f"is missing: the pattern's block {i} has experts")
    unused = [name for name in mixers if not any(name in words_of(words) for words in spec.pattern)]
    if unused:
        raise InputError("model.mixers", unused[0], "is in no block of the pattern", "name it there, or leave it out")
    if spec.experts is not None and spec.experts.dense_layers:
        reason = "contradicts model.pattern, which names the blocks with experts"
        raise InputError("model.experts.dense_layers", list(spec.experts.dense_layers), reason, "leave it out")
    if spec.window_layers is not None:
        reason = "contradicts model.pattern, whose mixers have windows of their own"
        raise InputError("model.window_layers", list(spec.window_layers), reason, "leave it out")


def _block(spec: ModelSpec, words: str, window: int | None) -> Block:
    if spec.pattern is not None:
        window = spec.window
    sublayers: list[Sublayer] = []
    for i, part in enumerate(words.split(JOINED), start=1):
        first, *others = part.split(PARALLEL)
        sublayers.append(_sublayer(spec, first, i, window))
        sublayers += (replace(_sublayer(spec, word, i, window), norm=None) for word in others)
    mixing = tuple(w for s in sublayers for w in _mixing(spec, s.name)) if spec.streams > 1 else ()
    return Block(tuple(sublayers), spec.residual, spec.streams, mixing)


def _mixing(spec: ModelSpec, name: str) -> tuple[Weight, ...]:
    """Return the parameters of a sublayer's hyper-connections: n² + 2n mixing weights from n streams (transformers
    5.23, models/deepseek_v4/modeling_deepseek_v4.py:887)."""
    n = spec.streams
    weights, streams = whole((2 + n) * n), whole(n * spec.hidden)
    return (
        Weight(f"{name}_mix.weight", (weights, streams), "latent"),
        Weight(f"{name}_mix.base", (weights,), "norm"),
        Weight(f"{name}_mix.scale", (whole(3),), "norm"),
    )


def _joined(spec: ModelSpec) -> tuple[Weight, ...]:
    """Return the parameters that join n streams into one before the head (the same file, :1001)."""
    n = spec.streams
    return (
        Weight("mix.weight", (whole(n), whole(n * spec.hidden)), "latent"),
        Weight("mix.base", (whole(n),), "norm"),
        Weight("mix.scale", (whole(1),), "norm"),
    )


def _norms(spec: ModelSpec, i: int, place: str) -> tuple[Norm | None, Norm | None]:
    """Return the norms (or None) before and after a block's sublayer number `i`, from 1. `place`: before, after or
    both; "" as the model."""
    place = place or spec.norms
    before = place != "after" and not (spec.residual == "parallel_one_norm" and i > 1)
    kind = (spec.hidden, spec.norm, spec.norm_bias)
    first = stream_norm(*kind, f"norm{i}", spec.norm_weights) if before else None
    after = stream_norm(*kind, f"norm{i}_after", spec.norm_weights) if place != "before" else None
    return first, after


def _sublayer(spec: ModelSpec, word: str, i: int, window: int | None) -> Sublayer:
    """Return the sublayer that a word of a pattern names."""
    word, _, place = word.partition(NORMED)
    norm, after = _norms(spec, i, place)
    if word == "mlp":
        return mlp(spec.hidden, spec.ffn, spec.activation, norm, bias=spec.mlp_bias, after=after)
    if word == "experts":
        assert spec.experts is not None
        return experts(spec.hidden, spec.experts, spec.activation, norm, bias=spec.mlp_bias, after=after)
    if word == "attention" and spec.latent is not None:
        return _latent(spec, norm, after, window, own_index=True)
    if word == "attention":
        return _attention(spec, None, norm, after, window)
    match mixer := next(m for m in spec.mixers if m.name == word):
        case AttentionSizes():
            return _attention(spec, mixer, norm, after, mixer.window)
        case EarlierIndexSizes():
            return _latent(spec, norm, after, window, own_index=False)
        case ExpertsSizes(of=sizes):
            return experts(spec.hidden, sizes, spec.activation, norm, bias=spec.mlp_bias, after=after)
        case RoutedAttentionSizes():
            rotary = spec.rotary_width if spec.position == "rotary" else 0
            return routed_attention(spec.hidden, mixer, norm, rotary=rotary, bias=spec.out_bias, after=after)
        case MlpSizes():
            return mlp(spec.hidden, mixer.ffn, spec.activation, norm, bias=spec.mlp_bias, after=after)
        case _:
            return _SUBLAYERS[type(mixer)](spec.hidden, mixer, norm, after=after)


def _latent(spec: ModelSpec, norm: Norm | None, after: Norm | None, window: int | None, own_index: bool) -> Sublayer:
    """Return latent attention in the model's own sizes."""
    assert spec.latent is not None
    bias = {"bias": spec.qkv_bias, "out_bias": spec.out_bias}
    more = {**bias, "own_index": own_index, "rotates": spec.position == "rotary"}
    return latent(spec.hidden, spec.heads, spec.latent, norm, **more, window=window, after=after)


def _attention(
    spec: ModelSpec, mixer: AttentionSizes | None, norm: Norm | None, after: Norm | None, window: int | None
) -> Sublayer:
    """Return softmax attention: the model's own, or with the sizes of a mixer where it has them."""
    own = mixer or AttentionSizes("attention")
    rotary = spec.rotary_width if spec.position == "rotary" else 0
    head_dim = own.head_dim or spec.head_dim
    over: Literal["", "head", "each", "all", "plain"] = spec.qk_norm_over if spec.qk_norm else ""
    return attention(
        spec.hidden,
        own.heads or spec.heads,
        own.kv_heads or spec.kv_heads,
        head_dim,
        norm,
        value_dim=own.value_dim,
        qkv_bias=spec.qkv_bias,
        out_bias=spec.out_bias,
        qk_norm=over,
        rotary=(head_dim if own.head_dim else rotary) if own.rotary_dim is None else own.rotary_dim,
        window=window,
        sinks=spec.sinks if own.sinks is None else own.sinks,
        gated=spec.output_gate_over if spec.output_gate else "",
        shared_values=own.shared_values,
        own_keys=own.own_keys,
        after=after,
    )
