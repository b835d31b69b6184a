"""The operators of a block on the compute roofline: FLOPs, bytes, intensity, and their bound.

A product (m, k) x (k, n) multiplies 2 m k n FLOP over e (m k + k n + m n) bytes; it is bound by memory where their
ratio is below the chip's ridge, peak FLOP/s over bytes/s (Williams et al. 2009). In training m is the tokens of a
micro-batch on a rank; in decoding every sequence adds one token, and attention reads all keys and values before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from phalanx.cost.analytic import kernels
from phalanx.cost.ledger.layer_flows import kv_heads, routed_rows
from phalanx.planning.search.column_pricing import Pricing
from phalanx.planning.search.strategy_columns import of
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
    shape, system, tp = pricing.shape, pricing.system, s.tp
    layout, element = pricing.layout(of([s])), pricing.layout(of([s])).activation_bytes
    rate = kernels.rate_of(layout, system, pricing.profile)
    memory = float(system.memory_bytes_per_s * system.memory)
    h, top = shape.hidden, ridge(pricing)

    def product(name: str, m: float, n: float, k: float, batch: float = 1.0) -> Operator:
        seconds = float(np.max(kernels.product_s(m, n, k, system, rate, element, batch)))
        times = f"{batch:,.0f} x " if batch > 1 else ""
        size = element * batch * (m * k + k * n + m * n)
        return Operator(name, f"{times}{m:,.0f} x {k:,.0f} x {n:,.0f}", 2 * batch * m * n * k, size, seconds, top)

    def moved(name: str, elements: float, passes: float, flops: float) -> Operator:
        size = element * passes * elements
        return Operator(name, f"{elements:,.0f}", flops * elements, size, size / memory, top)

    q, out = shape.heads * shape.head_dim / tp, shape.heads * shape.value_dim / tp
    yield moved("norm", tokens * h / (tp if s.sp else 1), 2, 4)
    if shape.kv_rank:
        latent = shape.q_rank + shape.kv_rank + shape.rope_dim
        yield product("latent down", tokens, latent, h)
        yield product("queries up", tokens, q, shape.q_rank or h)
        width = shape.heads * (shape.head_dim - shape.rope_dim + shape.value_dim) / tp
        yield product("keys, values up", tokens, width, shape.kv_rank)
    else:
        yield product(
            "queries, keys, values", tokens, q + 2 * float(np.max(kv_heads(shape, layout))) * shape.head_dim, h
        )
    # Fused: scores are never written; queries, keys, values and the result are. Causal, so half of the square.
    attended = keys if decode else keys / 2
    flops = 2 * tokens * attended * (q + out)
    kv = max(shape.kv_heads / tp, 1) * (shape.head_dim + shape.value_dim)
    if shape.kv_rank:
        kv = (shape.kv_rank + shape.rope_dim) if decode else (q + out)
    size = element * (tokens * (q + out) + sequences * keys / (1 if decode else s.cp) * kv)
    peak = float(system.peak_bf16 * system.attention)
    yield Operator(
        "attention", f"{tokens:,.0f} x {attended:,.0f} keys", flops, size, max(flops / peak, size / memory), top
    )
    yield product("attention out", tokens, h, out)
    if shape.moe_layers < shape.layers:
        f = shape.ffn / tp
        yield product("mlp in", tokens, (shape.mlp_matrices - 1) * f, h)
        yield moved("activation", tokens * f, shape.mlp_matrices, 8)
        yield product("mlp out", tokens, h, f)
    if shape.moe_layers:
        local_experts = max(shape.experts / s.ep, 1)
        f = shape.expert_ffn / s.etp
        m = tokens * shape.top_k * s.etp / tp / local_experts
        if not decode:
            m = float(np.max(routed_rows(shape, layout, local_experts))) * s.ep * s.etp / local_experts
        yield product("router", tokens / tp, shape.experts, h)
        yield product("experts in", m, (shape.mlp_matrices - 1) * f, h, local_experts)
        yield product("experts out", m, h, f, local_experts)
        if shape.shared_ffn:
            f = shape.shared_ffn / tp
            yield product("shared expert in", tokens, (shape.mlp_matrices - 1) * f, h)
            yield product("shared expert out", tokens, h, f)
    yield product("head, once a model", tokens, shape.vocab / tp, h)
