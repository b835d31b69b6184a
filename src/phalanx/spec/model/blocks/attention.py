"""Softmax attention with grouped key heads (Vaswani et al. 2017, Ainslie et al. 2023), in a window, with sinks, norms
of queries and keys, an output gate, with or without positions."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from phalanx.spec.model.blocks.block import Sublayer
from phalanx.spec.model.blocks.mixer import Heads, MixerSizes
from phalanx.spec.model.blocks.operators import (
    Activate,
    Attend,
    Dim,
    Norm,
    Operator,
    Output,
    Resize,
    Role,
    Rotary,
    Weight,
    added,
    linear,
    whole,
)
from phalanx.spec.model.mechanisms import Width
from phalanx.spec.ranges import Count, Range


@dataclass(frozen=True)
class AttentionSizes(MixerSizes):
    """Softmax attention that differs from the model's own; None: as the model."""

    divided: ClassVar = ("heads", "kv_heads")
    kind: Literal["attention"] = "attention"
    """The mechanism."""
    heads: Heads | None = None
    """Query heads."""
    kv_heads: Heads | None = None
    """Key and value heads, a divisor of `heads`."""
    head_dim: Heads | None = None
    """Width of a query or key head."""
    value_dim: Width | None = None
    """Width of a value head; None: `head_dim`."""
    window: Count | None = None
    """Sliding window in tokens; None: a token attends to all before it, whatever the model's window."""
    rotary_dim: Annotated[int, Range(0, 10**7)] | None = None
    """Rotated dimensions of a head; 0: no positions; None: as the model."""
    sinks: bool | None = None
    """Whether each head has a learned logit that takes weight from the tokens."""
    shared_values: bool = False
    """Whether keys, before their norm and positions, are the values too (Gemma 4's full attention: transformers 5.23,
    models/gemma4/modeling_gemma4.py:1226), which have no matrix of their own. Both are cached."""

    own_keys: bool = True
    """Whether it has keys and values of its own; False: it reads an earlier layer's (Gemma 3n and 4)."""


def attention(
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    norm: Norm | None,
    *,
    value_dim: int | None = None,
    qkv_bias: bool = False,
    out_bias: bool = False,
    qk_norm: Literal["", "head", "each", "all", "plain"] = "",
    rotary: int = 0,
    window: int | None = None,
    sinks: bool = False,
    gated: Literal["", "element", "head"] = "",
    shared_values: bool = False,
    own_keys: bool = True,
    after: Norm | None = None,
) -> Sublayer:
    """Return softmax attention. `qk_norm`: how queries and keys are normed, as `ModelSpec.qk_norm_over`; `rotary`:
    rotated elements of a head; `gated`: a sigmoid gate of the result's elements or heads."""
    value = head_dim if value_dim is None else value_dim
    core = max(head_dim, value)
    q = Dim(heads, head_dim, "tp", of="heads")
    k = Dim(kv_heads, head_dim, "tp", copies=True, of="kv_heads")
    v = Dim(kv_heads, value, "tp", copies=True, of="kv_heads")
    result, h = Dim(heads, value, "tp", of="heads"), whole(hidden)
    keys = [Output("k", k), *([] if shared_values else [Output("v", v)])]
    outputs = [Output("q", q), *(keys if own_keys else [])]
    gate = result if gated == "element" else Dim(heads, 1, "tp", of="heads")
    outputs += [Output("gate", gate)] if gated else []
    ops: list[Operator] = [linear("n", h, tuple(outputs), tuple(out.name for out in outputs), qkv_bias)]
    if qk_norm:
        ops += [_head_norm("q", q, qk_norm), *([_head_norm("k", k, qk_norm)] if own_keys else [])]
    if rotary:
        ops.append(Rotary(("q", "k"), (q, k), rotary) if own_keys else Rotary(("q",), (q,), rotary))
    if value < core:
        ops.append(Resize("v", Output("v", Dim(kv_heads, core, "tp", copies=True, of="kv_heads"))))
    sink = (Weight("sinks", (Dim(heads, 1, "tp", of="heads"),), "sink", late=True),) if sinks else ()
    cached = k.size + v.size if own_keys else 0
    ops.append(Attend(Output("o", result), k, head_dim, value, core, cached, True, window, weights=sink))
    if gated:
        ops.append(Activate("sigmoid_gate", ("o", "gate"), Output("o", result)))
    ops.append(linear("o", result, (added(hidden),), ("o",), out_bias))
    return Sublayer("attention", norm, tuple(ops), after)


def _head_norm(part: str, heads: Dim, over: Literal["head", "each", "all", "plain"]) -> Norm:
    """Return the norm of queries or keys: over each head, or over all at once; with one weight for all heads, weights
    of their own, or none."""
    shape = whole(heads.each) if over == "head" else heads
    role: Role = "norm" if over == "head" else "head_norm"
    weights = () if over == "plain" else (Weight(f"{part}_norm.weight", (shape,), role, late=True),)
    spans = heads.count if over == "all" else 1
    return Norm(part, Output(part, heads), "rms", weights, inside=True, spans=spans)
