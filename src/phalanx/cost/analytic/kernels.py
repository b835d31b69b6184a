"""Seconds of a block's kernels on one rank: matrix products by shape (cost/kernels/tiles.py), attention, and
memory-bound kernels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phalanx.cost.analytic.profile import Profile
from phalanx.cost.hardware.columns import Column
from phalanx.cost.hardware.system import System
from phalanx.cost.kernels.tiles import Tiles, whole_waves_s
from phalanx.cost.ledger.layer_flows import kv_heads, routed_rows
from phalanx.cost.ledger.model_shape import Shape
from phalanx.cost.ledger.rank_layout import FORMATS, NARROW, Layout

_FINE = tuple(f.scales == "block" for f in FORMATS)
"""Whether a cast to each of FORMATS computes many scales."""
_ROUNDED = tuple(f.peak == "tf32" for f in FORMATS)
"""By FORMATS: whether every product of fp32 is rounded to it, attention's and the head's too."""
_TILES = Tiles(((256, 128), (128, 128), (128, 64), (64, 64)))
"""Tiles of cuBLAS's kernels for 2-byte types."""
_SHARES = (1.0, 0.93, 0.80, 0.60)
"""Rate of each tile relative to the best one on a large product."""


def product_s(
    m: Column, n: Column, k: Column, system: System, rate: Column, e: Column, batch: Column = 1.0
) -> Column:
    """Return seconds of `batch` products (m, k) x (k, n) at `rate` FLOP/s that fill the chip together, or of moving
    their operands, of `e` bytes per element, if that takes longer."""
    seconds = whole_waves_s(m, n, k, _TILES, _SHARES, system.processors, rate, system.gemm_half, batch)
    traffic = e * batch * (m * k + k * n + m * n)
    return np.maximum(seconds, traffic / (system.memory_bytes_per_s * system.memory))


def _peak(layout: Layout, system: System) -> Column:
    """Return the peak FLOP/s of products whose operands are not cast."""
    rounded = np.choose(np.asarray(layout.format, dtype=int), _ROUNDED)
    return np.where(rounded, system.peak_tf32, system.peak(layout.activation_bytes))


def rate_of(layout: Layout, system: System, profile: Profile) -> Column:
    """Return the FLOP/s of long products in the layout's number format."""
    plain = _peak(layout, system) * system.gemm
    by_peak = {
        "half": plain,
        "tf32": plain,
        "fp8": system.peak_fp8 * system.gemm8 * profile.gemm8,
        "fp4": system.peak_fp4 * system.gemm4 * profile.gemm8,
    }
    best = np.choose(np.asarray(layout.format, dtype=int), [by_peak[f.peak] for f in FORMATS if f.peak])
    return best * _tuned(system, profile)


def _tuned(system: System, profile: Profile) -> Column:
    """Return the rate of the stack's products relative to the chip's best."""
    return profile.gemm * np.where(profile.plain > 0, system.portable_gemm, 1.0)


@dataclass(frozen=True)
class Passes:
    """Seconds of one micro-batch: forward pass and backward pass."""

    forward: Column
    backward: Column


@dataclass(frozen=True)
class Products:
    """Matrix products of a rank: at `rate` FLOP/s, in elements of `e` bytes; `frozen`: 1 where weights have no
    gradients."""

    system: System
    rate: Column
    e: Column
    frozen: Column = 0.0
    parts: Column = 1.0
    """Kernels that a product is cut into so that it overlaps the tensor-parallel collective of its operand or result.
    They are launched on streams in turn, and where the tiles of one do not fill a wave, the next kernel's do
    (TransformerEngine, common/comm_gemm_overlap/comm_gemm_overlap.cpp, split_overlap_ag and split_overlap_rs:
    `_stream_compute[i % _stream_compute.size()]`)."""

    def linear(self, m: Column, n: Column, k: Column, batch: Column = 1.0, back: bool = False) -> Passes:
        """Return seconds of x (m, k) W (k, n): forward, and the gradients of its input (m, k) and of its weight (k,
        n). `back`: the input gradient is cut into `parts` too."""
        one = (self.system, self.rate, self.e)
        weight = product_s(n, k, m, *one, batch) * (1 - self.frozen)
        parts = self.parts if back else 1.0
        inputs = product_s(m / parts, k, n, *one, parts * batch)
        return Passes(product_s(m / self.parts, n, k, *one, self.parts * batch), inputs + weight)


def _sum(parts: list[Passes]) -> Passes:
    """Return the sum of some passes."""
    return Passes(sum(p.forward for p in parts), sum(p.backward for p in parts))


def projections(shape: Shape, layout: Layout, by: Products) -> Passes:
    """Return seconds of the products around attention; latent attention (DeepSeek-V2, 2024) has low-rank ones
    instead."""
    m, h = layout.tokens, shape.hidden
    out = shape.heads * shape.value_dim / layout.tp
    q = shape.heads * shape.head_dim / layout.tp
    plain = by.linear(m, q + 2 * kv_heads(shape, layout) * shape.head_dim, h)
    last = by.linear(m, h, out, back=True)
    if not np.any(shape.kv_rank):
        return _sum([plain, last])
    down = by.linear(m, shape.q_rank + shape.kv_rank + shape.rope_dim, h)
    low = _sum([down, up_projections(shape, layout, by)])
    latent = shape.kv_rank > 0
    first = Passes(np.where(latent, low.forward, plain.forward), np.where(latent, low.backward, plain.backward))
    return _sum([first, last])


def up_projections(shape: Shape, layout: Layout, by: Products) -> Passes:
    """Return seconds of the products that expand latent queries, keys and values; zero without latents."""
    if not np.any(shape.kv_rank):
        return Passes(0.0, 0.0)
    m, latent = layout.tokens, shape.kv_rank > 0
    q = shape.heads * shape.head_dim / layout.tp
    kv = shape.heads * (shape.head_dim - shape.rope_dim + shape.value_dim) / layout.tp
    up_q = by.linear(m, q, np.where(shape.q_rank > 0, shape.q_rank, shape.hidden))
    up_kv = by.linear(m, kv, np.maximum(shape.kv_rank, 1))
    both = _sum([up_q, up_kv])
    return Passes(both.forward * latent, both.backward * latent)


def mlp(shape: Shape, layout: Layout, width: Column, by: Products) -> Passes:
    """Return seconds of the products of a dense MLP of this width; the gate is part of the first product."""
    m, h, f = layout.tokens, shape.hidden, width / layout.tp
    return _sum(
        [
            by.linear(m, (shape.mlp_matrices - 1) * f, h),
            by.linear(m, h, f, back=True),
        ]
    )


def every_second(shape: Shape) -> Column:
    """Return the share of a block's products that recomputation by operation repeats: the second, fourth and sixth,
    which are keys, the projection after attention and the MLP's second (torchtitan, parallelize_llama.py)."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return (kv + q + shape.ffn) / (2 * q + 2 * kv + shape.mlp_matrices * shape.ffn)


def experts(shape: Shape, layout: Layout, by: Products) -> Passes:
    """Return seconds of the grouped products of the experts on a rank, each with an equal share of the rows."""
    local_experts = np.maximum(shape.experts / layout.ep, 1)
    m = routed_rows(shape, layout, local_experts) * layout.ep * layout.etp / local_experts
    h = shape.hidden
    f = np.maximum(shape.expert_ffn / layout.etp, 1)
    return _sum(
        [
            by.linear(m, (shape.mlp_matrices - 1) * f, h, local_experts),
            by.linear(m, h, f, local_experts),
        ]
    )


def keys_per_query(shape: Shape, layout: Layout) -> Column:
    """Return the mean number of keys per query under a causal mask, over all blocks: half of the sequence or
    document, or a window."""
    reach: Column = np.where(np.asarray(layout.document) > 0, np.minimum(layout.document, layout.seq), layout.seq)
    window = np.minimum(np.maximum(shape.window, 1), reach / 2)
    return (1 - shape.window_share) * reach / 2 + shape.window_share * window


def attention(shape: Shape, layout: Layout, system: System, profile: Profile) -> Passes:
    """Return seconds of attention's core. Flash attention (Dao 2023) works on the causal half and recomputes the
    scores in the backward pass, which takes 2.5 times the forward FLOPs. In a context-parallel ring, each step is a
    kernel over a part of the keys, whose result is merged into the previous ones. Without flash attention, scores are
    written: two batched products over the full square, and passes over it."""
    heads = shape.heads / layout.tp
    pairs = layout.tokens * heads
    flops = 2 * pairs * (shape.head_dim + shape.value_dim)
    keys = keys_per_query(shape, layout)
    ring = np.where(np.asarray(profile.gathers_keys) > 0, 1, layout.cp / layout.ulysses)
    long = layout.seq / (layout.seq + system.attention_half * ring)
    narrow = (np.minimum(shape.head_dim, 128) / 128) ** system.attention_narrow
    share = np.where(profile.portable > 0, system.portable_attention, system.attention)
    best = _peak(layout, system) * share * profile.attention * long * narrow
    flash = flops * keys / best
    backward = np.where(profile.portable > 0, system.portable_backward, system.attention_backward)
    flash_back = 2.5 * flash / backward
    steps = np.where(ring > 1, ring, 0)
    merged = steps * profile.ring_bytes * pairs * shape.value_dim / (system.memory_bytes_per_s * system.memory)

    if np.all(profile.flash):
        return Passes(flash + merged, flash_back + merged)
    # A head as inner or outer size does not fill tiles, and rows that are no multiple of 8 elements cannot use tensor
    # cores.
    d = shape.head_dim
    batch = layout.micro_batch * heads
    s = layout.seq / layout.cp
    rate = _peak(layout, system) * system.gemm * profile.gemm * _aligned(d, system.misaligned)
    e = layout.activation_bytes
    scores = product_s(s, layout.seq, d, system, rate, e, batch) + product_s(s, d, layout.seq, system, rate, e, batch)
    moved = profile.score_bytes + _UNFUSED_BYTES * unfused(shape, layout, profile)
    passes = e / 2 * moved * pairs * layout.seq / (system.memory_bytes_per_s * system.memory)
    return Passes(
        np.where(profile.flash > 0, flash + merged, scores + passes),
        np.where(profile.flash > 0, flash_back + merged, 2 * scores + passes),
    )


_FUSED_BATCHES = 4
"""Masked softmax in one kernel takes matrices of scores by four (Megatron-LM 0cb36de,
megatron/model/fused_softmax.py, attn_batch_size % 4)."""
_UNFUSED_BYTES = 32.0
"""Additional traffic per score if five kernels run instead of one: a cast to fp32 (6 bytes), scale, mask and softmax
there (8 each) and a cast back (6), less 4."""


def unfused(shape: Shape, layout: Layout, profile: Profile) -> Column:
    """Return 1 where scores are written and their masked softmax is not a single kernel, since torch's own operations
    are it, or since a rank's heads and sequences are not a multiple of four."""
    matrices = layout.micro_batch * shape.heads / (layout.tp * layout.ulysses)
    apart = (matrices % _FUSED_BATCHES != 0) | (np.asarray(profile.plain) > 0)
    return 1.0 * ((np.asarray(profile.flash) == 0) & apart)


def _aligned(d: Column, otherwise: Column) -> Column:
    """Return the share of the rate reached by products whose inner size is not a multiple of 64 elements (128 bytes);
    `otherwise` if it is not a multiple of 8 (NVIDIA, "Matrix multiplication background", table 1)."""
    d = np.asarray(d)
    loss = np.where(d % 64 == 0, 1.0, np.where(d % 32 == 0, 0.85, np.where(d % 16 == 0, 0.7, 0.55)))
    return np.where(d % 8 == 0, loss, otherwise)


def _rows_aligned(n: Column, odd: Column) -> Column:
    """Return the share of the rate that products reach with rows of `n` 2-byte elements: `odd` where single elements
    are loaded, and on the way to it where two or four are; all of it where they are 16 bytes (NVIDIA, "Matrix
    multiplication background", tensor core requirements)."""
    together = np.gcd(np.asarray(n, dtype=np.int64), 8)
    return np.asarray(odd) ** (1 - np.log2(together) / 3)


def traffic(shape: Shape, layout: Layout, width: Column, system: System, profile: Profile) -> Passes:
    """Return seconds of the memory-bound kernels of a block: norms and residuals (which sequence parallelism splits
    over tp ranks), the inside of an MLP of this `width`, and casts of the products' operands to 8 bits or less."""
    ways = np.where(layout.sp > 0, layout.tp, 1)
    hidden = layout.tokens * shape.hidden
    inner = layout.tokens * width / layout.tp
    size = layout.activation_bytes / 2
    bytes_ = size * (profile.hidden_bytes * hidden / ways + profile.ffn_bytes * inner)
    fine = np.where(np.choose(np.asarray(layout.format, dtype=int), _FINE), profile.fine_cast, 1.0)
    narrow = np.choose(np.asarray(layout.format, dtype=int), NARROW)
    cast = np.where(narrow, profile.cast_bytes * fine * (2 * hidden + inner), 0.0)
    rate = system.memory_bytes_per_s * system.memory
    return Passes((bytes_ + cast) / rate, (bytes_ * profile.backward_traffic + cast) / rate)


def head(shape: Shape, layout: Layout, system: System, profile: Profile) -> tuple[Passes, Column]:
    """Return seconds of the logits over a rank's part of the vocabulary (never in 8 bits), and of the loss, both
    passes together."""
    e = layout.activation_bytes
    vocab = shape.vocab / layout.tp
    whole = np.where(profile.pads_vocab > 0, 8, np.floor(vocab))
    rate = _peak(layout, system) * system.gemm * _tuned(system, profile) * _rows_aligned(whole, system.odd)
    by = Products(system, rate, e, layout.frozen)
    products = by.linear(layout.tokens, vocab, shape.hidden)
    loss = profile.logit_bytes * layout.tokens * vocab / (system.memory_bytes_per_s * system.memory)
    return products, loss
