"""The sizes of a model that the price of a step depends on, as plain numbers (Shape)."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.cost.hardware.columns import Column
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

    @property
    def params(self) -> Column:
        """All parameters."""
        blocks = self.block_params * (self.layers - self.moe_layers)
        return blocks + self.moe_layers * (self.moe_block_params + self.expert_params) + self.ends

    @property
    def ends(self) -> Column:
        """Parameters of embedding and head."""
        return self.embedding_params + self.head_params


def shape(spec: ModelSpec) -> Shape:
    """Return the Shape of a model."""
    e, latent = spec.experts, spec.latent
    moe = [i for i in range(spec.layers) if e and i not in e.dense_layers]
    sizes: dict[tuple[str, bool], int] = {}
    for p in parameters(spec):
        key = (p.unit, p.of_experts)
        sizes[key] = sizes.get(key, 0) + p.numel
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
    )
