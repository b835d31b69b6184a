"""Sizes of a model that determine the price of a step, as plain numbers (Shape)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from phalanx.cost.hardware.columns import Column
from phalanx.schedule.gradients.buckets import scales
from phalanx.spec.errors import InputError
from phalanx.spec.model.mechanisms import Experts
from phalanx.spec.model.spec import ModelSpec, parameters


@dataclass(frozen=True)
class Shape:
    """Sizes of a model in elements. `mlp_matrices`: 3 with a gate, else 2, in experts too. `tied`: 1 if the head
    shares the embedding. `window_share`: share of blocks with an attention window. Parameter counts are sums over
    `spec.model.spec.parameters`: of a block with an MLP, of a block with experts without these, of all experts of a
    layer, of the embedding, and of the head (0 if tied)."""

    hidden: Column
    layers: Column
    heads: Column
    kv_heads: Column
    head_dim: Column
    value_dim: Column
    ffn: Column
    mlp_matrices: Column
    vocab: Column
    tied: Column
    q_rank: Column
    kv_rank: Column
    rope_dim: Column
    window_share: Column
    window: Column
    experts: Column
    top_k: Column
    expert_ffn: Column
    shared_ffn: Column
    moe_layers: Column
    block_params: Column
    moe_block_params: Column
    expert_params: Column
    embedding_params: Column
    head_params: Column
    block_whole: Column = 0.0
    """Number of `block_params` replicated over tp: norms, biases after a sum, latent projections."""
    moe_block_whole: Column = 0.0
    """Number of `moe_block_params` replicated over tp, including the router."""
    block_kv: Column = 0.0
    """Number of a block's parameters in key and value heads; every rank holds at least one head."""
    block_own: Column = 0.0
    """Number of `block_whole` whose gradient on a tp rank covers only its own heads: latent projections, norms inside
    attention."""
    moe_block_own: Column = 0.0
    """The same for `moe_block_whole`, including the router, which covers the tokens that a rank routes."""
    embed_whole: Column = 0.0
    """Parameters of the embedding replicated over tp: learned positions."""
    head_whole: Column = 0.0
    """Parameters of the head replicated over tp: the last norm."""
    core_dim: Column = 0.0
    """Width of a head in attention's core: of keys or values, whichever is wider."""
    parallel: Column = 0.0
    """1: attention and MLP read the same input, and their outputs are summed (parallel residual)."""
    capacity: Column = 0.0
    """Capacity factor of experts; 0: unlimited."""
    experts_choose: Column = 0.0
    """1: experts choose tokens."""
    gathers_choices: Column = 0.0
    """Bytes per token that ranks sharing sequences gather where a choice depends on a sequence's other tokens; 0: no
    choice does."""

    norms: Column = 2.0
    """Norms of a block's stream: 1 where attention and MLP share one."""
    rms: Column = 1.0
    """1: norms keep one sum per token, the root mean square; 0: mean and variance."""
    normed_heads: Column = 0.0
    """1: queries and keys are normed."""
    router_scores: Column = 0.0
    """Numbers per token that a router keeps as scores and weights."""
    router_places: Column = 0.0
    """Bytes per token kept by a router for choices and destinations."""
    depths: Column = 0.0
    """Depths of multi-token prediction, each of which computes the head again; their blocks are among `layers`."""
    adapters: Column = 0.0
    """Parameters of a block's adapters, where only these are trained."""
    matrices: Column = 0.0
    """Matrices of a block's products, which may be gathered in 8 bits; `moe_`: of a block with experts without these,
    `expert_`: of one expert."""
    moe_matrices: Column = 0.0
    expert_matrices: Column = 0.0
    others: Column = 0.0
    """Number of `block_params` outside of these matrices: norms, biases; for `moe_block_params` also the router."""
    moe_others: Column = 0.0
    expert_others: Column = 0.0
    """The same for all experts of a layer."""
    others_whole: Column = 0.0
    """Number of `others` replicated over tp."""
    moe_others_whole: Column = 0.0
    others_kv: Column = 0.0
    """Number of `others` in key and value heads."""

    root_params: Column = -1.0
    """Parameters of the unit around all others, where FSDP wraps other modules than blocks (units.py); -1: blocks."""
    unit_params: Column = 0.0
    """Parameters of the largest other unit."""
    unit_count: Column = 0.0
    """Number of the other units."""

    @property
    def wraps_blocks(self) -> Column:
        """Whether each block is a unit."""
        return np.asarray(self.root_params) < 0

    @property
    def params(self) -> Column:
        """All parameters."""
        blocks = self.block_params * (self.layers - self.moe_layers)
        return blocks + self.moe_layers * (self.moe_block_params + self.expert_params) + self.ends

    @property
    def ends(self) -> Column:
        """Parameters of embedding and head."""
        return self.embedding_params + self.head_params


def on_rank(params: Column, whole: Column, kv: Column, shape: Shape, tp: Column) -> Column:
    """Return the number of a block's parameters on each of `tp` ranks (spec/strategy/split.py)."""
    return (params - whole - kv) / tp + kv / np.minimum(tp, np.maximum(shape.kv_heads, 1)) + whole


def _choice_bytes(e: Experts) -> float:
    """Return the bytes per token of exchanged choices; 0 if no choice depends on another token."""
    if e.chooser == "experts":
        return 4.0 * e.count  # scores in fp32
    return 4.0 * e.top_k if e.balance_loss or e.capacity is not None else 0.0


def _router_scores(e: Experts) -> float:
    """Return the numbers per token that a router keeps: scores, their copy for a loss, weights, a loss's sum."""
    width = e.top_k if e.chooser == "tokens" else e.count
    return e.count * (1.0 + bool(e.balance_loss)) + width + bool(e.z_loss)


def _router_places(e: Experts) -> float:
    """Return the bytes per token of chosen experts, slots and places (int64); of slots alone where experts choose."""
    return 8.0 * 3 * e.top_k if e.chooser == "tokens" else 8.0 * e.count


_SPLIT = ("column", "column_bias", "row", "sink", "embedding", "head")
"""Roles of parameters that are split over tp ranks."""


@lru_cache(
    maxsize=64
)  # called for every set of options in a search, while counting a model's parameters takes milliseconds
def shape(spec: ModelSpec) -> Shape:
    """Return the Shape of a model. Raises InputError for blocks of kinds that it has no columns for."""
    if spec.pattern is not None or spec.output_gate or spec.norms != "before" or (spec.latent and spec.latent.index):
        field = "pattern" if spec.pattern is not None else "output_gate" if spec.output_gate else "norms"
        raise InputError(f"model.{field}", None, "has no price yet", "use a model of attention and an MLP or experts")
    e, latent = spec.experts, spec.latent
    moe = [i for i in range(spec.layers) if e and i not in e.dense_layers]
    sizes: dict[tuple[str, bool], int] = {}
    whole: dict[str, int] = {}
    kv: dict[str, int] = {}
    partial: dict[str, int] = {}
    matrices: dict[tuple[str, bool], int] = {}
    loose: dict[tuple[str, bool], int] = {}
    others_whole: dict[str, int] = {}
    others_kv: dict[str, int] = {}
    # Sum parameters by unit, and by how tp splits them and gathers in 8 bits treat them.
    for p in parameters(spec):
        key = (p.unit, p.of_experts)
        sizes[key] = sizes.get(key, 0) + p.numel
        matrices[key] = matrices.get(key, 0) + (scales(p) > 0)
        loose[key] = loose.get(key, 0) + p.numel * (not scales(p))
        if not p.of_experts and p.role not in _SPLIT:
            whole[p.unit] = whole.get(p.unit, 0) + p.numel
            others_whole[p.unit] = others_whole.get(p.unit, 0) + p.numel * (not scales(p))
            if p.role.startswith(("latent", "router")) or (p.role == "norm" and ".attention." in p.fqn):
                partial[p.unit] = partial.get(p.unit, 0) + p.numel
        if latent is None and p.fqn.split(".attention.")[-1].split(".")[0] in ("k", "v"):
            kv[p.unit] = kv.get(p.unit, 0) + p.numel
            others_kv[p.unit] = others_kv.get(p.unit, 0) + p.numel * (not scales(p))
    # All dense blocks have equal sizes, and so have all blocks with experts: one of each represents them.
    dense = next((i for i in range(spec.layers) if i not in moe), None)
    windowed = [i for i in range(spec.layers) if spec.window_of(i) is not None]
    return Shape(
        hidden=spec.hidden,
        layers=spec.layers,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        value_dim=latent.v_dim if latent else spec.head_dim,
        ffn=spec.ffn,
        mlp_matrices=3 if spec.gated else 2,
        vocab=spec.vocab,
        tied=float(spec.tied),
        q_rank=(latent.q_rank or 0) if latent else 0,
        kv_rank=latent.kv_rank if latent else 0,
        rope_dim=latent.rope_dim if latent else 0,
        window_share=len(windowed) / spec.layers,
        window=spec.window or 0,
        experts=e.count if e else 0,
        top_k=e.top_k if e else 0,
        expert_ffn=e.ffn if e else 0,
        shared_ffn=e.shared_ffn if e else 0,
        moe_layers=len(moe),
        block_params=sizes[f"blocks.{dense}", False] if dense is not None else 0,
        moe_block_params=sizes[f"blocks.{moe[0]}", False] if moe else 0,
        expert_params=sizes[f"blocks.{moe[0]}", True] if moe else 0,
        embedding_params=sizes.get(("embed", False), 0) + sizes.get(("model", False), 0),
        head_params=sizes.get(("head", False), 0),
        block_whole=whole.get(f"blocks.{dense}", 0),
        moe_block_whole=whole.get(f"blocks.{moe[0]}", 0) if moe else 0,
        block_kv=kv.get("blocks.0", 0),
        block_own=partial.get(f"blocks.{dense}", 0),
        moe_block_own=partial.get(f"blocks.{moe[0]}", 0) if moe else 0,
        embed_whole=whole.get("embed", 0) + whole.get("model", 0),
        head_whole=whole.get("head", 0),
        core_dim=spec.core_dim,
        parallel=float(spec.residual != "serial"),
        capacity=(e.capacity or float(e.chooser == "experts")) if e else 0.0,
        experts_choose=float(e is not None and e.chooser == "experts"),
        gathers_choices=_choice_bytes(e) if e else 0.0,
        norms=1.0 if spec.residual == "parallel_one_norm" else 2.0,
        rms=float(spec.norm == "rms"),
        normed_heads=float(spec.qk_norm),
        router_scores=_router_scores(e) if e else 0.0,
        router_places=_router_places(e) if e else 0.0,
        matrices=matrices.get((f"blocks.{dense}", False), 0),
        moe_matrices=matrices[f"blocks.{moe[0]}", False] if moe else 0,
        expert_matrices=matrices[f"blocks.{moe[0]}", True] if moe else 0,
        others=loose.get((f"blocks.{dense}", False), 0),
        moe_others=loose[f"blocks.{moe[0]}", False] if moe else 0,
        expert_others=loose[f"blocks.{moe[0]}", True] if moe else 0,
        others_whole=others_whole.get(f"blocks.{dense}", 0),
        moe_others_whole=others_whole.get(f"blocks.{moe[0]}", 0) if moe else 0,
        others_kv=others_kv.get("blocks.0", 0),
    )
