"""FLOPs of a step, exact per layer: 2 per multiply-add, backward twice forward, attention over the full square.

6N per token is the cross-check: it counts embeddings, which multiply nothing, and leaves attention out.
"""

from __future__ import annotations

import numpy as np

from phalanx.cost.hardware.columns import Column
from phalanx.cost.ledger.model_shape import Shape
from phalanx.cost.ledger.rank_layout import Layout


def forward_per_token(shape: Shape, seq: Column) -> tuple[Column, Column]:
    """Return forward FLOPs per token of the whole model, as (blocks, head). Of the experts, only those that a token
    is routed to count; latent attention counts as it trains, with keys and values expanded."""
    h, q = shape.hidden, shape.heads * shape.head_dim
    value = shape.heads * shape.value_dim
    plain = h * (q + 2 * shape.kv_heads * shape.head_dim) + value * h
    rank = np.where(shape.q_rank > 0, shape.q_rank, h)
    low = h * (np.where(shape.q_rank > 0, shape.q_rank, 0) + shape.kv_rank + shape.rope_dim) + rank * q
    low = low + shape.kv_rank * shape.heads * (shape.head_dim - shape.rope_dim + shape.value_dim) + value * h
    around = np.where(shape.kv_rank > 0, low, plain)
    core = seq * (q + value)
    dense = shape.mlp_matrices * h * shape.ffn
    routed = shape.mlp_matrices * h * (shape.top_k * shape.expert_ffn + shape.shared_ffn) + h * shape.experts
    blocks = shape.layers * (around + core) + (shape.layers - shape.moe_layers) * dense + shape.moe_layers * routed
    return 2 * blocks, 2 * h * shape.vocab


def model_flops(shape: Shape, layout: Layout) -> Column:
    """Return FLOPs of one step on all ranks, without recomputation."""
    blocks, head = forward_per_token(shape, layout.seq)
    return 3.0 * (blocks + head) * layout.step_tokens  # a float: 405B's step has more FLOPs than an int64 holds


def hardware_flops(shape: Shape, layout: Layout) -> Column:
    """Return FLOPs of one step on all ranks, with recomputation."""
    blocks, _ = forward_per_token(shape, layout.seq)
    core = 2.0 * shape.layers * layout.seq * shape.heads * (shape.head_dim + shape.value_dim)
    return model_flops(shape, layout) + (layout.full * blocks + layout.selective * core) * layout.step_tokens


def active_params(shape: Shape) -> Column:
    """Return the parameters that take part in a token's forward pass: of the experts, `top_k` per layer."""
    share = shape.top_k / np.maximum(shape.experts, 1)
    blocks = shape.block_params * (shape.layers - shape.moe_layers)
    return blocks + shape.moe_layers * (shape.moe_block_params + shape.expert_params * share) + shape.ends
