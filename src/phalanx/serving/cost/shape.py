"""A model as the price of a step reads it: numbers of elements by what splits them, and work per token.

Every field may be a NumPy column (one entry per model), so that the same formulas price one step or 10^5.
"""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.cost.hardware.columns import Column
from phalanx.spec.model.served import ServedModel


@dataclass(frozen=True)
class ServingShape:
    """Sums over a model's layers, in elements, unless said otherwise."""

    layers: Column
    hidden: Column
    attention: Column
    """Projections that tensor parallelism splits."""
    replicated: Column
    """Latent projections and routers, which every rank has in full."""
    mlp: Column
    """Dense MLPs and shared experts."""
    expert: Column
    """Routed experts."""
    head: Column
    ends: Column
    """Embedding and head, where one GPU holds both."""
    experts: Column
    """Routed experts of a layer; 0: a dense model."""
    top_k: Column
    shared: Column
    """1: every token also passes a shared expert."""
    expert_ffn: Column
    expert_layers: Column
    attention_layers: Column
    """Layers whose cache grows with the context."""
    window_layers: Column
    """Those of them that see no more than `window` tokens."""
    window: Column
    linear_layers: Column
    state: Column
    """State of a sequence in all layers of linear attention."""
    cache: Column
    """Cache of one token in one layer: keys and values of all heads, or the latent."""
    kv_heads: Column
    latent: Column
    """1: the cache holds latents, which tensor parallelism does not split; 0: heads, which it splits."""
    prompt_width: Column
    """FLOP per pair of tokens and layer in a prompt, / 4."""
    decode_width: Column
    """The same in decoding, where latents replace keys and values."""
    q_width: Column
    index_top: Column
    """Tokens that sparse attention chooses; 0: it sees all."""
    index_width: Column
    """FLOP per pair and layer to choose them, / 4."""
    wide_norm: Column
    """1: queries and keys are normalised over all heads, which takes a small all-reduce."""


def shape_of(m: ServedModel) -> ServingShape:
    """Return the sums of a served model."""
    if m.latent:
        prompt = m.heads * (m.nope_dim + m.rope_dim + m.v_dim) / 2
        decode = m.heads * (2 * m.kv_rank + m.rope_dim) / 2
    else:
        prompt = decode = float(m.heads * m.head_dim)
    return ServingShape(
        layers=m.layers,
        hidden=m.hidden,
        attention=m.attention_elements,
        replicated=m.latent_elements,
        mlp=m.mlp_elements,
        expert=m.expert_elements,
        head=m.vocab * m.hidden,
        ends=m.vocab * m.hidden * (1 if m.tied else 2),
        experts=m.experts,
        top_k=m.top_k,
        shared=int(m.shared_ffn > 0),
        expert_ffn=m.expert_ffn,
        expert_layers=m.expert_layers,
        attention_layers=m.attention_layers,
        window_layers=m.window_layers,
        window=m.window,
        linear_layers=m.linear_layers,
        state=m.linear_layers * m.linear_value_heads * m.linear_dim**2,
        cache=m.cache_elements,
        kv_heads=m.kv_heads,
        latent=int(m.latent),
        prompt_width=prompt,
        decode_width=decode,
        q_width=m.heads * m.head_dim,
        index_top=m.index_top,
        index_width=m.index_heads * m.index_dim / 2,
        wide_norm=m.wide_norm,
    )
