"""The sums over a model's layers from which steps are priced, by how parallelism splits them.

Every field may be a NumPy column (one entry per model), so that the same formulas price one step or 10^5.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from phalanx.cost.hardware.columns import Column
from phalanx.cost.memory.cache import LayerCache, latents, layer_cache
from phalanx.serving.cost.checkpoint import is_whole
from phalanx.spec.errors import InputError
from phalanx.spec.model.blocks.block import Sublayer, products_of
from phalanx.spec.model.blocks.lowering import architecture
from phalanx.spec.model.blocks.operators import Attend, Index, Linear, Norm, Router, Weight
from phalanx.spec.model.spec import ModelSpec


@dataclass(frozen=True)
class ServingShape:
    """Sums over a model's layers, in elements by default."""

    layers: Column
    """Pairs of sublayers, such as attention and MLP: half of all sublayers."""
    hidden: Column
    attention: Column
    """Matrices of attention and recurrences that tensor parallelism splits."""
    replicated: Column
    """Matrices that every rank holds in full: latent projections, routers, the index of sparse attention."""
    mlp: Column
    """Dense MLPs and shared experts."""
    expert: Column
    """Routed experts."""
    whole: Column
    """The part of `attention` that a quantised checkpoint keeps in 16 bits."""
    whole_mlp: Column
    """The same of `mlp`."""
    whole_expert: Column
    """The same of `expert`."""
    head: Column
    ends: Column
    """Embedding and head together."""
    experts: Column
    """Number of routed experts of a layer; 0: a dense model."""
    top_k: Column
    """Routed experts of a token."""
    shared: Column
    """1: every token passes a shared expert too."""
    expert_ffn: Column
    expert_layers: Column
    latent_layers: Column
    """Number of layers whose cache holds latents in place of keys and values."""
    linear_layers: Column
    """Number of layers with a recurrence, whose state does not grow."""
    cache: Column
    """Cache of a token in all layers that keep every token: keys and values of all heads, or the latent."""
    cache_heads: Column
    """Heads over which tensor parallelism splits `cache`; 1: latents are not split."""
    window_cache: Column
    """Cache of a token in all layers that keep at most `window` tokens."""
    window_heads: Column
    """Heads over which tensor parallelism splits `window_cache`."""
    window: Column
    """Tokens of a sliding window."""
    state: Column
    """State of a sequence in all recurrences."""
    inputs: Column
    """Last inputs of their convolutions."""
    prompt_width: Column
    """A quarter of the FLOP per pair of tokens in a prompt, in all layers without a window."""
    window_width: Column
    """The same in all layers with a window, in prompts and in decoding."""
    decode_width: Column
    """As `prompt_width` in decoding, where latents replace keys and values."""
    q_width: Column
    """Width of all query heads of a layer."""
    index_layers: Column
    """Number of layers with an index."""
    index_top: Column
    """Tokens that sparse attention chooses; 0: attention is not sparse."""
    index_cache: Column
    """Elements of the index in `cache`."""
    index_width: Column
    """A quarter of the FLOP per pair to choose them, in all layers."""
    wide_norms: Column
    """Number of layers that normalise queries and keys over all heads, with a small all-reduce."""


def _matrices(s: Sublayer) -> Iterator[tuple[Weight, int]]:
    """Yield (matrix, elements) of a sublayer's products and of its index."""
    for op in s.operators:
        for w in op.weights if isinstance(op, Linear | Index) else ():
            if len(w.shape) > 1:
                elements = 1
                for dim in w.shape:
                    elements *= dim.size
                yield w, elements


def _kind(s: Sublayer, w: Weight) -> str:
    """Return the field of ServingShape to which a matrix is added."""
    if w.role.startswith("expert"):
        return "expert"
    if not any(dim.axis for dim in w.shape):
        return "replicated"
    return "mlp" if layer_cache(s) is None else "attention"


_WHOLE = {"attention": "whole", "mlp": "whole_mlp", "expert": "whole_expert"}


def _add(counts: dict[str, Any], s: Sublayer, n: int) -> None:
    """Add `n` equal sublayers to the sums."""
    kept = layer_cache(s)
    for w, elements in _matrices(s):
        counts[_kind(s, w)] += n * elements
    if (attend := s.first(Attend)) is not None:
        for named, what in (
            (attend.compressed, "over compressed keys"),
            (not attend.cache, "to an earlier layer's keys"),
        ):
            if named:
                raise InputError("model.mixers", None, f"attention {what} is not priced in serving")
        heads, width = attend.y.dim.count, attend.key + attend.value
        rank, rope = latents(s)
        counts["q_width"] = max(counts["q_width"], heads * attend.key)
        counts["latent_layers"] += n * (rank > 0)
        local = attend.window is not None
        if local and rank:
            raise InputError("model.window", attend.window, "latent attention in a window is not priced in serving")
        counts["window_width" if local else "prompt_width"] += n * heads * width / 2
        counts["decode_width"] += 0 if local else n * heads * (2 * rank + rope if rank else width) / 2
        spans = any(isinstance(op, Norm) and op.inside and op.spans > 1 for op in s.operators)
        counts["wide_norms"] += n * spans
    if (index := s.first(Index)) is not None:
        counts["index_width"] += n * index.heads * index.each / 2
        counts["index_layers"] += n
        counts["index_top"] = index.top
        counts["index_cache"] += n * index.each
    if (route := s.first(Router)) is not None:
        expert = next(p for p in products_of(s) if p.experts is not None)
        counts |= {"experts": route.count, "top_k": route.top_k, "expert_ffn": expert.y[0].dim.size}
        counts |= {"shared": int(s.shared), "expert_layers": counts["expert_layers"] + n}
    if kept is not None:
        _keep(counts, kept, n)


def _keep(counts: dict[str, Any], kept: LayerCache, n: int) -> None:
    """Add the caches of `n` layers. Raises InputError if layers with a window, or layers without, differ in their
    heads or windows, because there is one field for each."""
    counts["linear_layers"] += n * (kept.state > 0)
    counts["state"] += n * kept.state
    counts["inputs"] += n * kept.inputs
    if not kept.token:
        return
    local = kept.window is not None
    name, heads = ("window_cache", "window_heads") if local else ("cache", "cache_heads")
    for field, value in ((heads, kept.heads), ("window", kept.window)):
        if value is not None and counts[name] and counts[field] != value:
            reason = f"{counts[field]} and {value} in layers of one model: serving prices one of each"
            raise InputError("model.mixers", None, f"{field.replace('_', ' ')}: {reason}")
    counts |= {name: counts[name] + n * kept.token, heads: kept.heads, "window": kept.window or counts["window"]}


@cache
def shape_of(model: ModelSpec) -> ServingShape:
    """Return the sums of a model. Raises InputError for layers that serving does not price, or with more than one
    value of a field that serving has one of."""
    counts: dict[str, Any] = dict.fromkeys(ServingShape.__dataclass_fields__, 0)
    counts |= {"cache_heads": 1, "window_heads": 1}
    if any(mixer.kind == "layer_embedding" for mixer in model.mixers):
        raise InputError("model.mixers", None, "embeddings for each layer are not priced in serving")
    for block, n in architecture(model).kinds.items():
        if block.streams > 1:
            raise InputError("model.streams", block.streams, "residual streams are not priced in serving")
        for s in block.sublayers:
            _add(counts, s, n)
            counts["layers"] += n / 2
    for i, block in enumerate(architecture(model).blocks if model.unquantised else ()):
        for s in block.sublayers:
            for w, elements in _matrices(s):
                if (kind := _WHOLE.get(_kind(s, w))) and is_whole(model, i, s, w.name):
                    counts[kind] += elements
    head = model.vocab * model.hidden
    counts |= {"hidden": model.hidden, "head": head, "ends": head * (1 if model.tied else 2)}
    return ServingShape(**counts)
