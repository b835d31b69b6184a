"""The operators of a block on the compute roofline: FLOPs, bytes, intensity, and their bound.

A product (m, k) x (k, n) multiplies 2 m k n FLOP over e (m k + k n + m n) bytes; it is bound by memory where their
ratio is below the chip's ridge, peak FLOP/s over bytes/s (Williams et al. 2009). In training m is the tokens of a
micro-batch on a rank; in decoding every sequence adds one token, and attention reads all keys and values before it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from phalanx.cost.analytic import kernels
from phalanx.cost.ledger.flops import recurrence_macs, seen_keys
from phalanx.cost.ledger.kind import BlockKind
from phalanx.cost.ledger.layer_flows import group_elements_on_rank, kv_heads, routed_rows
from phalanx.planning.search.column_pricing import Pricing
from phalanx.planning.search.strategy_columns import columns_of
from phalanx.spec.strategy.spec import Strategy


@dataclass(frozen=True)
class Operator:
    """An operator of one block (or the head) on one rank, in the forward pass of one micro-batch."""

    name: str
    shape: str
    flops: float
    bytes_: float
    """Bytes of memory read and written."""
    seconds: float
    ridge: float
    """FLOP per byte at which the chip's memory keeps up with its products."""

    @property
    def intensity(self) -> float:
        """FLOP per byte of memory."""
        return self.flops / self.bytes_

    @property
    def bound(self) -> str:
        """The limiting resource: "compute" or "memory"."""
        return "compute" if self.intensity >= self.ridge else "memory"


def ridge(pricing: Pricing) -> float:
    """Return the FLOP per byte at which the chip's memory keeps up with its products."""
    return float(pricing.system.peak_bf16 / pricing.system.memory_bytes_per_s)


def training(pricing: Pricing, s: Strategy) -> list[Operator]:
    """Return the operators of a forward pass of one micro-batch."""
    tokens = s.micro_batch * pricing.job.seq / s.cp
    return list(_operators(pricing, s, tokens, s.micro_batch, pricing.job.seq, False))


def decoding(pricing: Pricing, s: Strategy, sequences: int, context: int) -> list[Operator]:
    """Return the operators of decoding one token for each of `sequences`, with `context` tokens before it."""
    return list(_operators(pricing, s, sequences, sequences, context, True))


def _operators(
    pricing: Pricing, s: Strategy, tokens: float, sequences: float, keys: float, decode: bool
) -> Iterator[Operator]:
    """Yield the operators of all kinds of blocks, equal ones once, and of the head."""
    by = _Sizes(pricing, s)
    rows: dict[Operator, None] = {}
    for kind in pricing.shape.kinds:
        rows |= dict.fromkeys(_of_block(by, kind, tokens, sequences, keys, decode))
    yield from rows
    yield by.product("head, once a model", tokens, float(pricing.shape.vocab) / s.tp, float(pricing.shape.hidden))


class _Sizes:
    """The chip's rates and the strategy's layout, from which operators are built."""

    def __init__(self, pricing: Pricing, s: Strategy) -> None:
        self.system, self.profile, self.s, self.top = pricing.system, pricing.profile, s, ridge(pricing)
        self.layout = pricing.layout(columns_of([s]))
        self.element = float(self.layout.activation_bytes)
        self.memory = float(self.system.memory_bytes_per_s * self.system.memory)
        self.rate = kernels.rate_of(self.layout, self.system, self.profile)

    def product(self, name: str, m: float, n: float, k: float, batch: float = 1.0) -> Operator:
        """Return a matrix product (m, k) x (k, n)."""
        seconds = float(np.max(kernels.product_s(m, n, k, self.system, self.rate, self.element, batch)))
        times = f"{batch:,.0f} x " if batch > 1 else ""
        size = self.element * batch * (m * k + k * n + m * n)
        return Operator(
            name, f"{times}{m:,.0f} x {k:,.0f} x {n:,.0f}", 2 * batch * m * n * k, size, seconds, self.top
        )

    def moved(self, name: str, elements: float, passes: float, flops: float) -> Operator:
        """Return an operator bound by memory that moves `elements` `passes` times, with `flops` for each."""
        size = self.element * passes * elements
        return Operator(name, f"{elements:,.0f}", flops * elements, size, size / self.memory, self.top)


def _of_block(
    by: _Sizes, kind: BlockKind, tokens: float, sequences: float, keys: float, decode: bool
) -> Iterator[Operator]:
    s, layout, h, tp = by.s, by.layout, float(kind.hidden), by.s.tp
    yield by.moved("norm", tokens * h / (tp if s.sp else 1), 2, 4)
    if kind.heads:
        yield from _attention(by, kind, tokens, sequences, keys, decode)
    if kind.mixed:
        yield from _mixer(by, kind, tokens)
    if kind.ffn:
        f = kind.ffn / tp
        yield by.product("mlp in", tokens, (kind.mlp_matrices - 1) * f, h)
        yield by.moved("activation", tokens * f, kind.mlp_matrices, 8)
        yield by.product("mlp out", tokens, h, f)
    if kind.experts:
        local_experts = max(kind.experts / s.ep, 1)
        f, width = kind.expert_ffn / s.etp, float(kind.expert_dim)
        m = tokens * kind.top_k * s.etp / tp / local_experts
        if not decode:
            m = float(np.max(routed_rows(kind, layout, local_experts))) * s.ep * s.etp / local_experts
        yield by.product("router", tokens / tp, kind.experts, h)
        if width < h:
            yield by.product("experts' latent space in", tokens / tp, width, h)
        yield by.product("experts in", m, (kind.mlp_matrices - 1) * f, width, local_experts)
        yield by.product("experts out", m, width, f, local_experts)
        if width < h:
            yield by.product("experts' latent space out", tokens / tp, h, width)
        if kind.shared_ffn:
            f = kind.shared_ffn / tp
            yield by.product("shared expert in", tokens, (kind.mlp_matrices - 1) * f, h)
            yield by.product("shared expert out", tokens, h, f)
        if kind.shared_gate:
            yield by.product("shared expert's gate", tokens, 1, h)


def _attention(
    by: _Sizes, kind: BlockKind, tokens: float, sequences: float, keys: float, decode: bool
) -> Iterator[Operator]:
    h, tp = float(kind.hidden), by.s.tp
    q, out = kind.heads * kind.head_dim / tp, kind.heads * kind.value_dim / tp
    own = float(np.max(kv_heads(kind, by.layout))) * kind.kv_width
    if kind.q_rank and not kind.kv_rank:
        yield by.product("queries down, keys, values", tokens, kind.q_rank + own, h)
        yield by.product("queries up", tokens, q, kind.q_rank)
    elif kind.kv_rank:
        latent = kind.q_rank + kind.kv_rank + kind.rope_dim
        yield by.product("latent down", tokens, latent, h)
        yield by.product("queries up", tokens, q, kind.q_rank or h)
        width = kind.heads * (kind.head_dim - kind.rope_dim + kind.value_dim) / tp
        yield by.product("keys, values up", tokens, width, kind.kv_rank)
    else:
        width = q + own + kind.gate / tp
        name = "queries, keys, values, gate" if kind.gate else "queries, keys, values"
        yield by.product(name, tokens, width, h)
    # Fused: scores are never written; queries, keys, values and the result are. Causal, so half of the square.
    attended = keys if decode else keys / 2
    if kind.index:
        yield by.product("index", tokens, kind.index / h, h)
    if kind.index_pair:
        pairs = 2 * tokens * attended * kind.index_pair
        yield Operator(
            "index's scores",
            f"{tokens:,.0f} x {attended:,.0f} keys",
            pairs,
            by.element * tokens * kind.index_kept,
            pairs / float(by.system.peak_bf16 * by.system.attention),
            by.top,
        )
    attended = float(seen_keys(kind, attended, attended))
    flops = 2 * tokens * attended * (q + out)
    kv = max(kind.kv_heads / tp, 1) * (kind.head_dim + kind.value_dim)
    if kind.kv_rank:
        kv = (kind.kv_rank + kind.rope_dim) if decode else (q + out)
    size = by.element * (tokens * (q + out) + sequences * keys / (1 if decode else by.s.cp) * kv)
    peak = float(by.system.peak_bf16 * by.system.attention)
    seconds = max(flops / peak, size / by.memory)
    yield Operator("attention", f"{tokens:,.0f} x {attended:,.0f} keys", flops, size, seconds, by.top)
    if kind.result_low:
        groups = kind.result_low / kind.result_rank
        yield by.product(
            "results of groups", tokens, kind.result_rank, kind.heads * kind.value_dim / groups, groups / tp
        )
        out = kind.result_low / tp
    yield by.product("attention out", tokens, h, out)


def _mixer(by: _Sizes, kind: BlockKind, tokens: float) -> Iterator[Operator]:
    """Yield the operators of a block with a recurrence or a convolution."""
    h, tp = float(kind.hidden), by.s.tp
    width = kind.mixed / tp + float(np.max(group_elements_on_rank(kind, by.layout))) + kind.mixed_whole
    yield by.product("recurrence in" if kind.scan_heads else "convolution in", tokens, width, h)
    if kind.mixed_low:
        yield by.product("gates", tokens, kind.mixed_low / tp / h, h)
    if kind.conv:
        channels = tokens * kind.conv_channels / tp
        yield by.moved("convolution", channels, 2, 2 * kind.conv / kind.conv_channels)
    if kind.scan_heads:
        passes = kernels.recurrence(kind, by.layout, by.system, by.profile)
        per_token = float(np.max(recurrence_macs(kind, by.layout))) - kind.conv / tp
        # Each head reads keys, queries and values and writes a result; the states of chunks are written and read.
        state = kind.scan_heads * kind.scan_dim * kind.scan_state / tp
        moved = (kind.scan_in + kind.scan_shared + kind.scan_heads * kind.scan_dim) / tp + 2 * state / kind.scan_chunk
        seconds = float(np.max(passes.forward))
        chunks = f"{tokens / kind.scan_chunk:,.0f} chunks of {kind.scan_chunk:,.0f}"
        yield Operator("recurrence", chunks, 2 * tokens * per_token, by.element * tokens * moved, seconds, by.top)
    yield by.product("recurrence out" if kind.scan_heads else "convolution out", tokens, h, kind.mixed_out / tp)
