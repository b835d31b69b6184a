"""FLOPs of a step, exact per layer: 2 per multiply-add, backward twice forward, attention over the full square.

    model      of one process: nothing repeated, nothing computed on several ranks (the numerator of MFU)
    hardware   executed by ranks under a stack's policy, including recomputation and work repeated on every tp rank
               (latents, key heads that several ranks hold, padded values in our runtime), without rows beyond an
               expert's capacity

6N per token is the cross-check: it counts embeddings, which multiply nothing, and leaves attention out.
"""

from dataclasses import dataclass

import numpy as np

from phalanx.cost.hardware.columns import Column
from phalanx.cost.ledger.flow import UnitCount, whole_model
from phalanx.cost.ledger.kind import BlockKind, groups_on_rank
from phalanx.cost.ledger.layer_flows import group_elements_on_rank, kv_heads, routed_rows
from phalanx.cost.ledger.model_shape import Shape
from phalanx.cost.ledger.policy import Policy
from phalanx.cost.ledger.rank_layout import LayoutColumns


def forward_per_token(shape: Shape, seq: Column) -> tuple[Column, Column]:
    """Return forward FLOPs per token of the whole model, as (blocks, heads); heads include the product that joins two
    hidden states at each depth of multi-token prediction. Only the experts to which a token is routed count; latent
    attention counts as in training, with keys and values expanded; recurrences count token by token."""
    blocks = sum(kind.count * (_products_per_token(kind) + _core_per_token(kind, seq)) for kind in shape.kinds)
    return blocks, 2 * shape.hidden * (shape.vocab * (1 + shape.depths) + shape.depths * 2 * shape.hidden)


def _products_per_token(kind: BlockKind) -> Column:
    """Return the FLOPs of a block's products and convolutions, forward."""
    h, q, out = kind.hidden, kind.heads * kind.head_dim, kind.result
    rank = np.where(kind.q_rank > 0, kind.q_rank, h)
    low = h * (kind.q_rank + kind.kv_rank + kind.rope_dim) + rank * q
    low = low + kind.kv_rank * kind.heads * (kind.head_dim - kind.rope_dim + kind.value_dim)
    kv = h * kind.kv_heads * kind.kv_width
    low = low + kv * (np.asarray(kind.kv_rank) == 0)
    around = np.where(kind.latent > 0, low, h * q + kv) + out * h
    around = around + h * kind.gate + kind.index + kind.heads * kind.value_dim * kind.result_rank + kind.mixing
    mixed = h * (kind.mixed + kind.mixed_shared + kind.mixed_whole + kind.mixed_out) + kind.mixed_low + kind.conv
    experts = kind.mlp_matrices * (kind.expert_dim * kind.top_k * kind.expert_ffn + h * kind.shared_ffn)
    inner = kind.mlp_matrices * h * kind.ffn + experts + h * (kind.experts + _further_outputs(kind))
    return 2 * (around + mixed + inner)


def _further_outputs(kind: BlockKind) -> Column:
    """Return the outputs per hidden element of an experts' layer's other products: into its latent space and out of
    it, and of the shared expert's gate."""
    narrow = np.where(np.asarray(kind.expert_dim) < kind.hidden, 2 * kind.expert_dim, 0.0)
    return narrow + kind.shared_gate


def _core_per_token(kind: BlockKind, seq: Column) -> Column:
    """Return the FLOPs of attention's core, of an index's scores, and of a recurrence, forward."""
    keys = seen_keys(kind, seq, seq)
    return 2 * (keys * kind.heads * (kind.head_dim + kind.value_dim) + seq * kind.index_pair) + kind.scan_flops


def seen_keys(kind: BlockKind, reach: Column, near: Column) -> Column:
    """Return the keys per query that an index or compression leaves of `reach` keys; `near` without either."""
    chosen = np.maximum(kind.top, 1)
    keys = np.where(np.asarray(kind.top) > 0, np.minimum(near, chosen), near)
    if not np.any(kind.ratio):
        return keys
    further = reach / np.maximum(kind.ratio, 1)
    further = np.where(np.asarray(kind.top) > 0, np.minimum(further, chosen), further)
    return np.where(np.asarray(kind.ratio) > 0, np.minimum(kind.window, near) + further, keys)


def model_flops(shape: Shape, layout: LayoutColumns) -> Column:
    """Return FLOPs of one step on all ranks, without recomputation; frozen weights have no gradients."""
    blocks, head = forward_per_token(shape, layout.seq)
    core = sum(kind.count * _core_per_token(kind, layout.seq) for kind in shape.kinds)
    per_token = 3.0 * (blocks + head) - layout.frozen * (blocks - core + head)
    return per_token * layout.step_tokens  # a float: 405B's step has more FLOPs than an int64 holds


@dataclass(frozen=True)
class Flops:
    """FLOPs of a rank in a step: matrix products; attention's core over the full square, and recurrences in
    chunks."""

    products: Column
    attention: Column

    @property
    def all(self) -> Column:
        """Both."""
        return self.products + self.attention


def rank_flops(shape: Shape, layout: LayoutColumns, policy: Policy, units: UnitCount) -> Flops:
    """Return the FLOPs of a rank with these units, or of several ranks together with theirs."""
    per_pass = 2.0 * layout.tokens * layout.micro_batches
    pads = np.asarray(policy.pads_core) > 0
    products: Column = 0.0
    cores: Column = 0.0
    for kind, count in zip(shape.kinds, units.blocks, strict=True):
        if not np.any(count):
            continue
        around, last_around = _mixer_products(kind, layout)
        mlp, last, shared = _inner_products(kind, layout)
        forward = around + mlp
        # Products at the end of a recomputed block that are not needed: the MLP's last; with a parallel residual,
        # attention's last product too; without an MLP, only that.
        alone = (np.asarray(kind.ffn) == 0) & (np.asarray(kind.experts) == 0)
        left_out = (1 - policy.repeats_last) * (np.asarray(kind.after_norms) == 0)  # whose norm would read it
        unread = last + np.where((np.asarray(kind.parallel) > 0) | alone, last_around, 0.0)
        again = layout.full * (forward - left_out * unread)
        m = layout.modules
        dense = kind.mlp_matrices * kind.hidden * kind.ffn / layout.tp
        modules = m.mla_up_proj * _expanding(kind, layout) + m.mlp * (dense - left_out * last)
        if np.any(kind.experts):
            modules = modules + kind.routes * np.where(m.moe > 0, mlp, m.shared_experts * shared)
        products = products + count * ((3 - layout.frozen) * forward + again + (1 - layout.full) * modules)
        keys = seen_keys(kind, layout.seq, layout.seq)
        width = np.where(pads, 2 * kind.core_dim, kind.head_dim + kind.value_dim)
        core = keys * kind.heads / layout.tp * width + layout.seq * kind.index_pair
        cores = cores + count * core * (3 + np.minimum(layout.full + layout.selective, 1.0))
        cores = cores + count * recurrence_macs(kind, layout) * (3 + layout.full)
    vocab = np.ceil(shape.vocab / layout.tp) * (1 + shape.depths) + shape.depths * 2 * shape.hidden
    head = (3 - layout.frozen) * units.head * vocab * shape.hidden
    return Flops(per_pass * (products + head), per_pass * cores)


def recurrence_macs(kind: BlockKind, layout: LayoutColumns) -> Column:
    """Return multiply-adds per token of a recurrence on a rank in chunks of c tokens (Dao & Gu 2024, section 6; Yang
    et al. 2024, section 3.3), and of its convolution.

    scores c n of each group of keys, results c p and states 2 n p of each head; a delta rule also multiplies
    keys by keys, solves the triangle (c^2 / 6) and applies it to keys and values, and reads the state once more."""
    if not np.any(kind.mixed):
        return 0.0
    heads, n, p, c = kind.scan_heads / layout.tp, kind.scan_state, kind.scan_dim, kind.scan_chunk
    groups = np.where(np.asarray(kind.scan_groups) > 0, groups_on_rank(kind.scan_groups, layout.tp), 0.0)
    plain = groups * c * n + heads * (c * p + 2 * n * p)
    delta = heads * (3 * n * p + c * (3 * n + 2 * p) + c * c / 6)
    chunked = np.where(np.asarray(kind.scan_pairs) > 0, delta, plain)
    return np.where(np.asarray(c) > 1, chunked, kind.scan_flops / 2 / layout.tp) + kind.conv / layout.tp


def _mixer_products(kind: BlockKind, layout: LayoutColumns) -> tuple[Column, Column]:
    """Return multiply-adds per token of the products around attention or a recurrence on a rank, and of the last one
    alone."""
    h, tp = kind.hidden, layout.tp
    q = kind.heads * kind.head_dim / tp
    out = (kind.result + kind.mixed_out) / tp * h
    plain = h * (q + kv_heads(kind, layout) * kind.kv_width + kind.gate / tp)
    if np.any(kind.latent):
        # Every rank projects to the latents; each expands its own heads.
        low = h * (kind.q_rank + kind.kv_rank + kind.rope_dim) + np.where(kind.q_rank > 0, kind.q_rank, h) * q
        low = low + kind.kv_rank * kind.heads / tp * (kind.head_dim - kind.rope_dim + kind.value_dim)
        low = low + h * kv_heads(kind, layout) * kind.kv_width * (np.asarray(kind.kv_rank) == 0)
        plain = np.where(kind.latent > 0, low, plain)
    plain = plain + kind.index + kind.heads * kind.value_dim * kind.result_rank / tp
    plain = plain + kind.mixing / np.where(layout.sp > 0, tp, 1)
    if np.any(kind.mixed):
        plain = (
            plain
            + h * (kind.mixed / tp + group_elements_on_rank(kind, layout) + kind.mixed_whole)
            + kind.mixed_low / tp
        )
    return plain + out, out


def _expanding(kind: BlockKind, layout: LayoutColumns) -> Column:
    """Return multiply-adds per token of the products that expand latent queries, keys and values."""
    q = np.where(kind.q_rank > 0, kind.q_rank, kind.hidden) * kind.heads * kind.head_dim
    kv = kind.kv_rank * kind.heads * (kind.head_dim - kind.rope_dim + kind.value_dim)
    return (q + kv) / layout.tp * (np.asarray(kind.kv_rank) > 0)


def _inner_products(kind: BlockKind, layout: LayoutColumns) -> tuple[Column, Column, Column]:
    """Return multiply-adds per token of a block's MLP or experts: of all; of the last product that all tokens go
    through; and of the shared expert."""
    h, f = kind.hidden, (kind.ffn + kind.shared_ffn) / layout.tp
    dense = kind.mlp_matrices * h * kind.ffn / layout.tp
    if not np.any(kind.experts):
        return dense, h * f, 0.0
    shared = kind.mlp_matrices * h * kind.shared_ffn / layout.tp
    rows = kind.routes * routed_rows(kind, layout, np.maximum(kind.experts, 1) / layout.ep) * layout.ep * layout.etp
    each = rows / layout.tokens * kind.mlp_matrices * kind.expert_dim * kind.expert_ffn / layout.etp
    further = h * (kind.experts + _further_outputs(kind) - kind.shared_gate) / layout.tp + h * kind.shared_gate
    return dense + each + shared + further, h * f, shared


def hardware_flops(shape: Shape, layout: LayoutColumns, policy: Policy) -> Column:
    """Return FLOPs of one step on all ranks, as executed by the stack."""
    return rank_flops(shape, layout, policy, whole_model(shape.kinds)).all * (layout.world / layout.pp)


def active_params(shape: Shape) -> Column:
    """Return the parameters that take part in a token's forward pass, `top_k` experts per layer."""
    return sum(kind.count * kind.active_params for kind in shape.kinds) + shape.ends
