"""Seconds of a block's kernels on one rank: matrix products by shape (cost/kernels/tiles.py), attention, and
memory-bound kernels."""

from dataclasses import dataclass

import numpy as np

from phalanx.cost.analytic.profile import Profile
from phalanx.cost.hardware.columns import Column
from phalanx.cost.hardware.system import System
from phalanx.cost.kernels.tiles import Tiles, whole_waves_s
from phalanx.cost.ledger.flops import seen_keys
from phalanx.cost.ledger.kind import BlockKind, groups_on_rank
from phalanx.cost.ledger.layer_flows import group_elements_on_rank, kv_heads, routed_rows
from phalanx.cost.ledger.model_shape import Shape
from phalanx.cost.ledger.rank_layout import FORMATS, NARROW, LayoutColumns

_FINE = tuple(f.scales == "block" for f in FORMATS)
"""By FORMATS: whether a cast computes a scale for each block of elements."""
_ROUNDED = tuple(f.peak == "tf32" for f in FORMATS)
"""By FORMATS: whether every product in fp32 is rounded to TF32, attention's and the head's too."""
_TILES = Tiles(((256, 128), (128, 128), (128, 64), (64, 64)))
"""Tiles of cuBLAS's kernels for 2-byte types."""
_SHARES = (1.0, 0.93, 0.80, 0.60)
"""Rate of each tile relative to the best one on a large product."""


def product_s(
    m: Column, n: Column, k: Column, system: System, rate: Column, e: Column, batch: Column = 1.0
) -> Column:
    """Return seconds of `batch` products (m, k) x (k, n) that fill the chip together, at `rate` FLOP/s, or of moving
    their operands of `e` bytes per element if that takes longer."""
    seconds = whole_waves_s(m, n, k, _TILES, _SHARES, system.processors, rate, system.gemm_half, batch)
    traffic = e * batch * (m * k + k * n + m * n)
    return np.maximum(seconds, traffic / (system.memory_bytes_per_s * system.memory))


def _peak(layout: LayoutColumns, system: System) -> Column:
    """Return the peak FLOP/s of products whose operands are not cast."""
    rounded = np.choose(np.asarray(layout.format, dtype=int), _ROUNDED)
    return np.where(rounded, system.peak_tf32, system.peak(layout.activation_bytes))


def rate_of(layout: LayoutColumns, system: System, profile: Profile) -> Column:
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
    """Times matrix products on a rank, at `rate` FLOP/s and with elements of `e` bytes; `frozen`: 1 if weights have
    no gradients."""

    system: System
    rate: Column
    e: Column
    frozen: Column = 0.0
    parts: Column = 1.0
    """Number of kernels into which a product is cut to overlap the tensor-parallel collective of its operand or
    result. They are launched on streams in turn, and where the tiles of one do not fill a wave, the next kernel's do
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


def projections(kind: BlockKind, layout: LayoutColumns, by: Products) -> Passes:
    """Return seconds of the products around attention, or around another mixer; latent attention (DeepSeek-V2, 2024)
    has low-rank ones instead."""
    m, h = layout.tokens, kind.hidden
    q = kind.heads * kind.head_dim / layout.tp
    width = q + kv_heads(kind, layout) * kind.kv_width + kind.gate / layout.tp
    out = kind.result / layout.tp
    if np.any(kind.mixed):
        width = width + kind.mixed / layout.tp + group_elements_on_rank(kind, layout) + kind.mixed_whole
        out = out + kind.mixed_out / layout.tp
    if not np.any(out):
        return Passes(0.0, 0.0)
    plain = by.linear(m, width, h)
    last = by.linear(m, h, out, back=True)
    parts = [plain, last]
    if np.any(kind.latent):
        apart = kv_heads(kind, layout) * kind.kv_width * (np.asarray(kind.kv_rank) == 0)  # keys without a latent
        down = by.linear(m, kind.q_rank + kind.kv_rank + kind.rope_dim + apart, h)
        low = _sum([down, up_projections(kind, layout, by)])
        latent = kind.latent > 0
        parts[0] = Passes(
            np.where(latent, low.forward, plain.forward), np.where(latent, low.backward, plain.backward)
        )
    if np.any(kind.index):
        parts.append(by.linear(m, kind.index / h, h))
    if np.any(kind.result_low):  # of groups of heads; nothing where a kind has none
        groups = np.maximum(kind.result_low / np.maximum(kind.result_rank, 1), 1)
        inner = np.maximum(kind.heads * kind.value_dim / groups, 1)
        low = by.linear(m, np.maximum(kind.result_rank, 1), inner, np.maximum(groups / layout.tp, 1))
        has = np.asarray(kind.result_low) > 0
        parts.append(Passes(np.where(has, low.forward, 0.0), np.where(has, low.backward, 0.0)))
    if np.any(kind.mixing):
        n = np.maximum(kind.streams, 1)
        parts.append(by.linear(m / np.where(layout.sp > 0, layout.tp, 1), kind.mixing / (n * h), n * h))
    if np.any(kind.mixed_low):
        parts.append(by.linear(m, kind.mixed_low / layout.tp / h, h))
    has, total = np.asarray(kind.attends + kind.mixes) > 0, _sum(parts)
    return Passes(np.where(has, total.forward, 0.0), np.where(has, total.backward, 0.0))


def up_projections(kind: BlockKind, layout: LayoutColumns, by: Products) -> Passes:
    """Return seconds of the products that expand latent queries, keys and values; zero without latents."""
    if not np.any(kind.latent):
        return Passes(0.0, 0.0)
    m, latent = layout.tokens, kind.latent > 0
    q = kind.heads * kind.head_dim / layout.tp
    kv = kind.heads * (kind.head_dim - kind.rope_dim + kind.value_dim) / layout.tp
    up_q = by.linear(m, q, np.where(kind.q_rank > 0, kind.q_rank, kind.hidden))
    both = up_q
    if np.any(kind.kv_rank):
        up_kv, expands = by.linear(m, kv, np.maximum(kind.kv_rank, 1)), np.asarray(kind.kv_rank) > 0
        both = Passes(both.forward + up_kv.forward * expands, both.backward + up_kv.backward * expands)
    return Passes(both.forward * latent, both.backward * latent)


def mlp(kind: BlockKind, layout: LayoutColumns, width: Column, by: Products) -> Passes:
    """Return seconds of the products of a dense MLP of this width, 0 if the width is 0; the gate is part of the first
    product."""
    if not np.any(width):
        return Passes(0.0, 0.0)
    m, h, f = layout.tokens, kind.hidden, np.maximum(width, 1) / layout.tp
    both = _sum([by.linear(m, (kind.mlp_matrices - 1) * f, h), by.linear(m, h, f, back=True)])
    has = np.asarray(width) > 0
    return Passes(np.where(has, both.forward, 0.0), np.where(has, both.backward, 0.0))


def last_products(kind: BlockKind, layout: LayoutColumns, by: Products) -> tuple[Column, Column]:
    """Return forward seconds of the products whose results only the residual stream at the end of a block reads: of
    the MLP's last product, and of the one after the mixer, which is such with a parallel residual or without an MLP.
    0 if a norm reads the result."""
    m, h = layout.tokens, kind.hidden
    ffn = np.asarray(kind.ffn + kind.shared_ffn) / layout.tp
    alone = (np.asarray(kind.ffn) == 0) & (np.asarray(kind.experts) == 0)
    mixer = ((np.asarray(kind.parallel) > 0) | alone) * np.asarray((kind.result + kind.mixed_out) / layout.tp)
    read = np.asarray(kind.after_norms) > 0

    def seconds(width: Column) -> Column:
        product = by.linear(m, h, np.maximum(width, 1), back=True).forward
        return np.where((np.asarray(width) > 0) & ~read, product, 0.0)

    return seconds(ffn), seconds(mixer)


def every_second(kind: BlockKind) -> Column:
    """Return the share of a block's products, experts left out, that recomputation by operation repeats: the second,
    fourth and sixth in order, which are keys, the projection after attention and the MLP's second (torchtitan,
    parallelize_llama.py)."""
    q, kv = kind.heads * kind.head_dim, kind.kv_heads * kind.head_dim
    ffn = kind.ffn + kind.shared_ffn
    mixed = kind.mixed + kind.mixed_shared
    return (kv + q + kind.mixed_out + ffn) / (2 * q + 2 * kv + mixed + kind.mixed_out + kind.mlp_matrices * ffn)


def experts(kind: BlockKind, layout: LayoutColumns, by: Products) -> Passes:
    """Return seconds of the grouped products of the experts on a rank, each with an equal share of the rows, and of
    the products into and out of their latent space."""
    local_experts = np.maximum(kind.experts / layout.ep, 1)
    m = routed_rows(kind, layout, local_experts) * layout.ep * layout.etp / local_experts
    width, f = kind.expert_dim, np.maximum(kind.expert_ffn / layout.etp, 1)
    parts = [
        by.linear(m, (kind.mlp_matrices - 1) * f, width, local_experts),
        by.linear(m, width, f, local_experts),
    ]
    narrow = (np.asarray(width) < kind.hidden) & (np.asarray(kind.experts) > 0)
    if np.any(narrow):
        both = by.linear(layout.tokens / layout.tp, 2 * width, kind.hidden)
        parts.append(Passes(np.where(narrow, both.forward, 0.0), np.where(narrow, both.backward, 0.0)))
    return _sum(parts)


def _reach(layout: LayoutColumns) -> Column:
    """Return the tokens among which attention stays: of a sequence, or of a document packed into one."""
    return np.where(np.asarray(layout.document) > 0, np.minimum(layout.document, layout.seq), layout.seq)


def keys_per_query(kind: BlockKind, layout: LayoutColumns) -> Column:
    """Return the mean number of keys per query under a causal mask, over blocks of a kind: half of the sequence or
    document, a window, or the number that an index selects."""
    reach = _reach(layout)
    window = np.minimum(np.maximum(kind.window, 1), reach / 2)
    keys = (1 - kind.window_share) * reach / 2 + kind.window_share * window
    return seen_keys(kind, reach / 2, keys)


_SCAN_SLOWDOWN = 4.5
"""Seconds of a recurrence's kernels relative to its products at a library's rates. One number for Mamba-2 and the
gated delta rule, implied by published steps of Nemotron 3 and Qwen3-Next; no kernel was timed."""


def recurrence(kind: BlockKind, layout: LayoutColumns, system: System, profile: Profile) -> Passes:
    """Return seconds of a linear recurrence in chunks of c tokens, and of its convolution: the products of chunks,
    (c, n, c) for each group of keys and (c, c, p), (n, c, p), (c, n, p) for each head, which are written between
    kernels (Dao & Gu 2024, section 6); a delta rule multiplies keys by keys as well, applies the inverse of each
    chunk's triangle to keys and values, and corrects values by the state (Yang et al. 2024, section 3.3). The
    backward pass takes two products for each of these, and computes states again."""
    if not np.any(kind.mixed):
        return Passes(0.0, 0.0)
    n, p, c = (np.maximum(x, 1) for x in (kind.scan_state, kind.scan_dim, kind.scan_chunk))
    chunks = layout.tokens / c
    heads = chunks * kind.scan_heads / layout.tp
    groups = chunks * np.where(np.asarray(kind.scan_groups) > 0, groups_on_rank(kind.scan_groups, layout.tp), 0.0)
    by = (system, _peak(layout, system) * system.gemm * profile.gemm, layout.activation_bytes)
    # Products of pairs in a chunk are of value heads in a delta rule, whose keys are repeated to them.
    delta = np.asarray(kind.scan_pairs) > 0
    pairs = product_s(c, c, n, *by, np.where(delta, 2 * heads, groups))
    plain = pairs + product_s(c, p, c, *by, heads) + product_s(n, p, c, *by, heads) + product_s(c, p, n, *by, heads)
    solved = product_s(c, n, c, *by, heads) + product_s(c, p, c, *by, heads) + product_s(c, p, n, *by, heads)
    products = _SCAN_SLOWDOWN * (plain + np.where(delta, solved, 0.0))
    if np.any(np.asarray(kind.scan_chunk) <= 1):
        products = np.where(np.asarray(kind.scan_chunk) > 1, products, _token_by_token(kind, layout, system))
    # The convolution reads and writes its channels, with their activation in the same kernel.
    moved = 2 * layout.tokens * kind.conv_channels / layout.tp * layout.activation_bytes
    conv = moved / (system.memory_bytes_per_s * system.memory)
    forward = kind.recurs * products + conv
    return Passes(forward, 3 * kind.recurs * products + 2 * conv)


_EXPONENTIAL = 16.0
"""FLOPs outside of tensor cores in the time of an exponential: a processor computes 16 a clock, and 128 multiply-adds
(NVIDIA, CUDA C++ programming guide, throughput of native arithmetic instructions, compute capability 9.0)."""


def _token_by_token(kind: BlockKind, layout: LayoutColumns, system: System) -> Column:
    """Return forward seconds of a selective scan in one kernel that keeps its state on chip (Gu & Dao 2023, section
    3.3.2): its arithmetic, an exponential for each element of a state, or what it reads and writes. Not timed."""
    state = kind.scan_heads * kind.scan_dim * kind.scan_state
    flops = layout.tokens * (kind.scan_flops + _EXPONENTIAL * state) / layout.tp
    moved = layout.tokens * (kind.scan_in + kind.scan_heads * kind.scan_dim) / layout.tp * layout.activation_bytes
    return np.maximum(flops / system.peak_fp32, moved / (system.memory_bytes_per_s * system.memory))


def attention(kind: BlockKind, layout: LayoutColumns, system: System, profile: Profile) -> Passes:
    """Return seconds of attention's core. Flash attention (Dao 2023) works on the causal half and recomputes the
    scores in the backward pass, which takes 2.5 times the forward FLOPs. In a context-parallel ring, each step is a
    kernel over a part of the keys, whose result is merged into the previous ones. Without flash attention, scores are
    written: two batched products over the full square, and passes over it."""
    if not np.any(kind.heads):
        return Passes(0.0, 0.0)
    heads = kind.heads / layout.tp
    pairs = layout.tokens * heads
    widths = kind.head_dim + kind.value_dim
    rounded = _power_of_two(kind.head_dim) + _power_of_two(kind.value_dim)
    flops = 2 * pairs * np.where(np.asarray(profile.portable) >= _FLEX, rounded, widths)
    keys = keys_per_query(kind, layout)
    ring = np.where(np.asarray(profile.gathers_keys) > 0, 1, layout.cp / layout.ulysses)
    long = _reach(layout) / (_reach(layout) + system.attention_half * ring)
    narrow = (np.clip(kind.head_dim, 1, 128) / 128) ** system.attention_narrow
    vendor_first = np.where(kind.head_dim == kind.value_dim, system.vendor_first, 0.0)
    portable = np.asarray(profile.portable) > vendor_first
    share = np.where(portable, system.portable_attention, system.attention)
    best = _peak(layout, system) * share * profile.attention * long * narrow
    flash = flops * keys / best
    if np.any(kind.index_pair):  # every rank scores all keys before a query
        flash = flash + 2 * layout.tokens * kind.index_pair * layout.seq / 2 / best
    backward = np.where(portable, system.portable_backward, system.attention_backward)
    flash_back = 2.5 * flash / backward
    steps = np.where(ring > 1, ring, 0)
    merged = steps * profile.ring_bytes * pairs * kind.value_dim / (system.memory_bytes_per_s * system.memory)

    if np.all(profile.flash):
        return Passes(flash + merged, flash_back + merged)
    # A head as inner or outer size does not fill tiles, and rows that are no multiple of 8 elements cannot use tensor
    # cores.
    d = kind.head_dim
    batch = layout.micro_batch * heads
    s = layout.seq / layout.cp
    rate = _peak(layout, system) * system.gemm * profile.gemm * _aligned(d, system.misaligned)
    e = layout.activation_bytes
    scores = product_s(s, layout.seq, d, system, rate, e, batch) + product_s(s, d, layout.seq, system, rate, e, batch)
    moved = profile.score_bytes + _UNFUSED_BYTES * unfused(kind, layout, profile)
    passes = e / 2 * moved * pairs * layout.seq / (system.memory_bytes_per_s * system.memory)
    return Passes(
        np.where(profile.flash > 0, flash + merged, scores + passes),
        np.where(profile.flash > 0, flash_back + merged, 2 * scores + passes),
    )


_FLEX = 3
"""Profile.portable of FlexAttention. Its kernels, which Triton compiles, reach what FlashAttention 2 does: on an H100
0.92 to 1.14 of it forward, over the full square of 512 to 16,384 tokens (pytorch/benchmark#2443); on a B200 a
backward pass of heads 192 and 128 wide takes 12.2 ms for twice the full square of 4 sequences of 4,096 with 16 heads
(pytorch/pytorch#165760), where these formulas say 13.1."""


def _power_of_two(width: Column) -> Column:
    """Return the width that FlexAttention's tiles have (torch 2.13, torch/_inductor/kernel/flex/common.py:405)."""
    return 2.0 ** np.ceil(np.log2(np.maximum(width, 1)))


_FUSED_BATCHES = 4
"""Masked softmax in one kernel takes matrices of scores by four (Megatron-LM 0cb36de,
megatron/model/fused_softmax.py, attn_batch_size % 4)."""
_UNFUSED_BYTES = 32.0
"""Additional traffic per score if five kernels run instead of one: a cast to fp32 (6 bytes), scale, mask and softmax
there (8 each) and a cast back (6), less 4."""


def unfused(kind: BlockKind, layout: LayoutColumns, profile: Profile) -> Column:
    """Return 1 if scores are written and their masked softmax is not a single kernel, because the stack uses torch's
    own operations or a rank's heads x sequences are not a multiple of four."""
    matrices = layout.micro_batch * kind.heads / (layout.tp * layout.ulysses)
    apart = (matrices % _FUSED_BATCHES != 0) | (np.asarray(profile.plain) > 0)
    return 1.0 * ((np.asarray(profile.flash) == 0) & apart)


def _aligned(d: Column, otherwise: Column) -> Column:
    """Return the share of the rate reached by products whose inner size is not a multiple of 64 elements (128 bytes);
    `otherwise` if it is not a multiple of 8 (NVIDIA, "Matrix multiplication background", table 1)."""
    d = np.asarray(d)
    loss = np.where(d % 64 == 0, 1.0, np.where(d % 32 == 0, 0.85, np.where(d % 16 == 0, 0.7, 0.55)))
    return np.where(d % 8 == 0, loss, otherwise)


def _rows_aligned(n: Column, odd: Column) -> Column:
    """Return the share of the rate that products reach with rows of `n` 2-byte elements: 1 if rows are a multiple of
    16 bytes, `odd` if n is odd, and in between if two or four elements are loaded at a time (NVIDIA, "Matrix
    multiplication background", tensor core requirements)."""
    together = np.gcd(np.asarray(n, dtype=np.int64), 8)
    return np.asarray(odd) ** (1 - np.log2(together) / 3)


def traffic(kind: BlockKind, layout: LayoutColumns, width: Column, system: System, profile: Profile) -> Passes:
    """Return seconds of the memory-bound kernels of a block: norms and residuals (which sequence parallelism splits
    over tp ranks), the inside of an MLP of this `width`, gates of mixers, and casts of the products' operands to 8
    bits or less."""
    ways = np.where(layout.sp > 0, layout.tp, 1)
    hidden = layout.tokens * kind.hidden
    inner = layout.tokens * width / layout.tp
    # A gate reads two tensors of a mixer's width and writes one.
    inner = inner + layout.tokens * (kind.gate + kind.mixed_out) / layout.tp / 2
    size = layout.activation_bytes / 2
    bytes_ = size * (profile.hidden_bytes * hidden * kind.sublayers / 2 / ways + profile.ffn_bytes * inner)
    bytes_ = bytes_ + size * 2 * hidden * kind.sublayers / ways * mixed_traffic(kind)
    rate = system.memory_bytes_per_s * system.memory
    cast = kind.sublayers * hidden + inner
    if np.any(profile.recasts):
        cast = cast + recast(kind.on_rank(layout.tp) - kind.others_on_rank(layout.tp), profile)
    both_s = cast_s(cast, layout, system, profile)
    return Passes(bytes_ / rate + both_s, bytes_ * profile.backward_traffic / rate + both_s)


def recast(weights: Column, profile: Profile) -> Column:
    """Return the number of `weights` that a pass casts: all if the stack casts in every pass, unless they are
    gathered in 8 bits."""
    return profile.recasts * (profile.parameter_bytes > 1) * weights


def cast_s(elements: Column, layout: LayoutColumns, system: System, profile: Profile) -> Column:
    """Return seconds of casting elements to the layout's number format, if it is narrow."""
    format_ = np.asarray(layout.format, dtype=int)
    fine = np.where(np.choose(format_, _FINE), profile.fine_cast, 1.0)
    seconds = profile.cast_bytes * fine * elements / (system.memory_bytes_per_s * system.memory)
    return np.where(np.choose(format_, NARROW), seconds, 0.0)


def mixed_traffic(kind: BlockKind) -> Column:
    """Return the traffic of n hyper-connected streams around a sublayer, in hidden states read or written, beyond the
    three of a plain residual. Streams are read for the weights, joined into one, and read with the sublayer's result
    to be written mixed: 4 n + 2 (Xie et al. 2025, table 2, with kernels joined as in section 4.3.1)."""
    return np.where(np.asarray(kind.streams) > 1, 4 * kind.streams + 2 - 3, 0.0)


def head(shape: Shape, layout: LayoutColumns, system: System, profile: Profile) -> tuple[Passes, Column]:
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
