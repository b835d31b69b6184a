"""FLOPs of a step, exact per layer: 2 per multiply-add, backward twice forward, attention over the full square.

    model      of one process: nothing repeated, nothing computed on several ranks (the numerator of MFU)
    hardware   executed by ranks under a stack's policy, including recomputation, and work repeated on every tp rank
               (latents, key heads that several ranks hold, in our runtime padded values), by capacity no more rows

6N per token is the cross-check: it counts embeddings, which multiply nothing, and leaves attention out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phalanx.cost.hardware.columns import Column
from phalanx.cost.ledger.flow import Held
from phalanx.cost.ledger.layer_flows import kv_heads, routed_rows
from phalanx.cost.ledger.model_shape import Shape
from phalanx.cost.ledger.policy import Policy
from phalanx.cost.ledger.rank_layout import Layout


def forward_per_token(shape: Shape, seq: Column) -> tuple[Column, Column]:
    """Return forward FLOPs per token of the whole model, as (blocks, heads; a depth of multi-token prediction joins
    two hidden states by a product). Of the experts, only those that a token
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
    return 2 * blocks, 2 * h * (shape.vocab * (1 + shape.depths) + shape.depths * 2 * h)


def model_flops(shape: Shape, layout: Layout) -> Column:
    """Return FLOPs of one step on all ranks, without recomputation; frozen weights have no gradients."""
    blocks, head = forward_per_token(shape, layout.seq)
    core = 2 * shape.layers * layout.seq * shape.heads * (shape.head_dim + shape.value_dim)
    per_token = 3.0 * (blocks + head) - layout.frozen * (blocks - core + head)
    return per_token * layout.step_tokens  # a float: 405B's step has more FLOPs than an int64 holds


@dataclass(frozen=True)
class Flops:
    """FLOPs of a rank in a step: matrix products, and attention's core over the full square."""

    products: Column
    attention: Column

    @property
    def all(self) -> Column:
        """Both."""
        return self.products + self.attention


def rank_flops(shape: Shape, layout: Layout, policy: Policy, units: Held) -> Flops:
    """Return the FLOPs of a rank with these units (with several ranks' units, of all together)."""
    per_pass = 2.0 * layout.tokens * layout.micro_batches
    around, last_around = _attention_products(shape, layout)
    pads = np.asarray(policy.pads_core) > 0
    core = layout.seq * shape.heads / layout.tp
    core = core * np.where(pads, 2 * shape.core_dim, shape.head_dim + shape.value_dim)
    expanded = _expanding(shape, layout)
    products: Column = 0.0
    attention: Column = 0.0
    for moe, count in ((False, units.dense), (True, units.experts)):
        if not np.any(count):
            continue
        mlp, last, shared = _inner_products(shape, layout, moe)
        forward = around + mlp
        # The end of a repeated block: with a parallel residual, attention's last product too.
        unread = last + np.where(np.asarray(shape.parallel) > 0, last_around, 0.0)
        again = layout.full * (forward - (1 - policy.repeats_last) * unread)
        m = layout.modules
        modules = m.mla_up_proj * expanded
        modules = modules + (np.where(m.moe > 0, mlp, m.shared_experts * shared) if moe else m.mlp * mlp)
        products = products + count * ((3 - layout.frozen) * forward + again + (1 - layout.full) * modules)
        attention = attention + count * core * (3 + np.minimum(layout.full + layout.selective, 1.0))
    vocab = np.ceil(shape.vocab / layout.tp) * (1 + shape.depths) + shape.depths * 2 * shape.hidden
    head = (3 - layout.frozen) * units.head * vocab * shape.hidden
    return Flops(per_pass * (products + head), per_pass * attention)


def _attention_products(shape: Shape, layout: Layout) -> tuple[Column, Column]:
    """Return multiply-adds per token of the products around attention on a rank; and of the last of them."""
    h, tp = shape.hidden, layout.tp
    q = shape.heads * shape.head_dim / tp
    out = shape.heads * shape.value_dim / tp * h
    plain = h * (q + 2 * kv_heads(shape, layout) * shape.head_dim)
    if not np.any(shape.kv_rank):
        return plain + out, out
    # Every rank projects to the latents; each expands its own heads.
    latent = h * (shape.q_rank + shape.kv_rank + shape.rope_dim) + np.where(shape.q_rank > 0, shape.q_rank, h) * q
    latent = latent + shape.kv_rank * shape.heads / tp * (shape.head_dim - shape.rope_dim + shape.value_dim)
    return np.where(shape.kv_rank > 0, latent, plain) + out, out


def _expanding(shape: Shape, layout: Layout) -> Column:
    """Return multiply-adds per token of the products that expand latent queries, keys and values."""
    q = np.where(shape.q_rank > 0, shape.q_rank, shape.hidden) * shape.heads * shape.head_dim
    kv = shape.kv_rank * shape.heads * (shape.head_dim - shape.rope_dim + shape.value_dim)
    return (q + kv) / layout.tp * (np.asarray(shape.kv_rank) > 0)


def _inner_products(shape: Shape, layout: Layout, moe: bool) -> tuple[Column, Column, Column]:
    """Return multiply-adds per token after attention in a block: all; the last product that all tokens go through;
    and only the shared expert."""
    h, f = shape.hidden, shape.ffn / layout.tp
    if not moe:
        return shape.mlp_matrices * h * f, h * f, 0.0
    f = shape.shared_ffn / layout.tp
    shared = shape.mlp_matrices * h * f
    rows = routed_rows(shape, layout, np.maximum(shape.experts, 1) / layout.ep) * layout.ep * layout.etp
    each = rows / layout.tokens * shape.mlp_matrices * h * shape.expert_ffn / layout.etp
    return each + shared + h * shape.experts / layout.tp, h * f, shared


def hardware_flops(shape: Shape, layout: Layout, policy: Policy) -> Column:
    """Return FLOPs of one step on all ranks, as executed by the stack."""
    model = Held(shape.layers - shape.moe_layers, shape.moe_layers, 1.0, 1.0)
    return rank_flops(shape, layout, policy, model).all * (layout.world / layout.pp)


def active_params(shape: Shape) -> Column:
    """Return the parameters that take part in a token's forward pass: of the experts, `top_k` per layer."""
    share = shape.top_k / np.maximum(shape.experts, 1)
    blocks = shape.block_params * (shape.layers - shape.moe_layers)
    return blocks + shape.moe_layers * (shape.moe_block_params + shape.expert_params * share) + shape.ends
