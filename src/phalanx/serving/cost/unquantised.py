"""Matrices that a quantised checkpoint keeps in 16 bits: our matrices by the names that files give their modules."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import translate
from functools import cache
from itertools import product

from phalanx.spec.model.blocks.block import Sublayer
from phalanx.spec.model.blocks.operators import Conv, Scan
from phalanx.spec.model.spec import ModelSpec

_BEFORE = ("model.layers", "model.language_model.layers", "language_model.model.layers", "backbone.layers",
           "transformer.h")  # fmt: skip
_SUBLAYERS = {
    "attention": ("self_attn", "attention", "attn", "self_attention", "mixer"),
    "mlp": ("mlp", "feed_forward", "block_sparse_moe", "moe", "mixer"),
    "delta": ("linear_attn",),
    "channel_delta": ("self_attn",),
    "lightning": ("self_attn",),
    "ssd": ("mixer", "mamba"),
    "selective": ("mixer", "mamba"),
    "conv": ("conv", "short_conv"),
}
"""Modules by the kind of a recurrence, or a sublayer's name."""
_INTO = {
    "delta": ("in_proj_qkvz", "in_proj_qkv", "in_proj_z", "in_proj_ba"),
    "ssd": ("in_proj",),
    "selective": ("in_proj", "x_proj", "dt_proj"),
    "conv": ("in_proj",),
}
"""What the products into a recurrence are joined to."""
_PARTS = {
    **{part: (f"{part}_proj", "qkv_proj") for part in "qkv"},
    "o": ("o_proj", "out_proj", "dense"),
    "q_down": ("q_a_proj",),
    "q_up": ("q_b_proj", "q_proj"),
    "kv_down": ("kv_a_proj_with_mqa",),
    "kv_up": ("kv_b_proj",),
    **{part: (f"{part}_proj", *fused) for part, fused in (
        ("gate", ("gate_up_proj", "w1")), ("up", ("gate_up_proj", "w3")), ("down", ("w2",)))},
    "router": ("gate", "router"),
}  # fmt: skip
_WITHIN = {"experts": ("experts.0", "experts"), "shared": ("shared_experts", "shared_expert"), "index": ("indexer",)}


def _names(i: int, s: Sublayer, weight: str) -> Iterator[str]:
    """Yield the names that files may give the module of a matrix of layer `i`."""
    scan = s.first(Scan)
    kind = scan.kind if scan is not None else "conv" if s.first(Conv) is not None else s.name
    *within, part = weight.split(".")[:-1] or [weight]
    parts = _INTO.get(kind, ()) if part != "o" else ()
    parts = parts or _PARTS.get(part, (part,))
    inside = [f"{w}." for w in _WITHIN.get(".".join(within), (".".join(within),))] if within else [""]
    for before, module, where, name in product(_BEFORE, _SUBLAYERS.get(kind, (s.name,)), inside, parts):
        yield f"{before}.{i}.{module}.{where}{name}"


@cache
def _listed(wildcards: tuple[str, ...]) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return what names modules in 16 bits, and what names those that alone are quantised (`!`)."""
    apart = [[w.removeprefix("!") for w in wildcards if w.startswith("!") is alone] for alone in (False, True)]
    named, alone = (re.compile("|".join(map(translate, some)) or "(?!)") for some in apart)
    return named, alone


def is_whole(model: ModelSpec, i: int, s: Sublayer, weight: str) -> bool:
    """Whether the model's quantised checkpoint keeps a matrix of layer `i` in 16 bits."""
    named, alone = _listed(model.unquantised)
    names = list(_names(i, s, weight))
    return any(map(named.match, names)) or (
        any(w.startswith("!") for w in model.unquantised) and not any(map(alone.match, names))
    )
