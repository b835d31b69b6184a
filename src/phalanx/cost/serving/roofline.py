"""A step of a serving engine as a roofline: each part takes the longer of its bytes and its FLOPs.

    step = pp (layers / pp (projections + attention + MLP or experts + collectives + launch) + sends) + head + host

With n tokens in the step, of which each group of attention has n / attention_dp:

    projections   2 n W / tp FLOP over W / tp bytes of weights        experts   the same, of the experts that n tokens
    attention     4 d pairs FLOP for prompts; the cache's bytes                 reach: E (1 - (1 - k / E)^n) of E
    all-reduce    alpha + 2 (p - 1) / p x bytes / rate, after attention and after the MLP
    dispatch      top_k tokens to their experts' ranks and back, where attention is data parallel

Chips' rates and what kernels reach of them are those of training (cost/analytic/chips.py). The constants below are
estimates of what engines add.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from phalanx.cost.analytic.chips import chip_name, system_of
from phalanx.cost.serving.layout import ServingLayout
from phalanx.spec.cluster.chips import CHIPS
from phalanx.spec.cluster.spec import ClusterSpec
from phalanx.spec.model.spec import ModelSpec, expert_layers, parameters

BYTES = {"bf16": 2.0, "fp8": 1.0, "int4": 0.5 + 2 / 128, "nvfp4": 0.5 + 1 / 16}
"""Bytes per weight, scales included: of 128 (int4) and of 16 weights (nvfp4)."""


@dataclass(frozen=True)
class EngineConstants:
    """What an engine adds to kernels, in seconds."""

    host_s: float
    """Of each step: scheduling, sampling, what the CPU does between two steps."""
    layer_s: float
    """Of each layer: launches and small kernels, under CUDA graphs."""


CONSTANTS = {
    "vllm": EngineConstants(2.0e-3, 20e-6),
    "sglang": EngineConstants(2.0e-3, 20e-6),
    "trtllm": EngineConstants(1.0e-3, 20e-6),
}
_ALPHA_NODE, _ALPHA_NET = 8e-6, 30e-6
"""Seconds of a small all-reduce: by the engines' own kernels inside a node, by NCCL across nodes."""
_WORKSPACE = 4 * 2**30
"""Bytes of activations, graphs and libraries on a GPU."""
_SHARE = 0.92
"""Of a GPU's memory that engines use."""


@dataclass(frozen=True)
class _Weights:
    """Elements of a model, by what splits them."""

    attention: int  # by tp, of all layers
    replicated: int  # norms, routers, latent projections
    mlp: int  # of dense layers, and shared experts
    experts: int
    head: int
    embedding: int


@dataclass(frozen=True)
class ServingPrice:
    """Prices of one model on one cluster under one engine, with weights and cache of given types."""

    model: ModelSpec
    cluster: ClusterSpec
    engine: str
    weights: str
    cache: str

    @cached_property
    def _elements(self) -> _Weights:
        count = dict.fromkeys(("attention", "replicated", "mlp", "experts", "head", "embedding"), 0)
        for p in parameters(self.model):
            if p.of_experts:
                count["experts"] += p.numel
            elif p.role in ("head", "embedding", "position"):
                count["embedding" if p.role != "head" else "head"] += p.numel
            elif p.role in ("column", "row", "column_bias", "row_bias", "sink"):
                count["attention" if ".attention." in p.fqn else "mlp"] += p.numel
            else:
                count["replicated"] += p.numel
        if self.model.tied:
            count["head"] = self.model.vocab * self.model.hidden
            count["embedding"] -= count["head"]
        return _Weights(**count)

    @cached_property
    def _rates(self) -> tuple[float, float, float, float]:
        """(FLOP/s of products with weights, FLOP/s of 16-bit attention, bytes/s, inner size that reaches half)."""
        s = system_of(self.cluster)
        half = float(s.peak_bf16) * float(s.gemm)
        products = {
            "bf16": half,
            "int4": half,
            "fp8": float(s.peak_fp8) * float(s.gemm8),
            "nvfp4": float(s.peak_fp4) * float(s.gemm4),
        }[self.weights]
        memory = float(s.memory_bytes_per_s) * float(s.memory)
        return products, float(s.peak_bf16) * float(s.attention), memory, float(s.gemm_half)

    @cached_property
    def generation(self) -> str:
        """Of the cluster's chip."""
        return CHIPS[chip_name(self.cluster.device.name)].generation

    @cached_property
    def cache_bytes_per_token(self) -> float:
        """Bytes of keys and values, or of latents, of one token in all layers: of the whole model."""
        m = self.model
        each = 2 * m.kv_width if m.latent is None else m.latent.kv_rank + m.latent.rope_dim
        return each * m.layers * BYTES[self.cache]

    def cache_bytes_per_gpu(self, x: ServingLayout) -> float:
        """Bytes of one token's cache on a GPU that has it: heads split by tp, duplicated beyond; latents whole."""
        shards = 1 if self.model.latent is not None else min(x.tp, self.model.kv_heads)
        return self.cache_bytes_per_token / shards / x.pp

    def weight_bytes(self, x: ServingLayout) -> float:
        """Bytes of weights on the GPU that has most."""
        e, b = self._elements, BYTES[self.weights]
        split = e.attention / x.tp + e.mlp / x.width + e.experts / (x.moe_tp * x.moe_ep)
        apart = x.pp > 1 and not self.model.tied  # on the first and on the last stage
        ends = max(e.embedding, e.head) if apart else e.embedding + e.head
        return (split * b + 2.0 * e.replicated) / x.pp + 2.0 * ends / x.tp

    def cache_tokens(self, x: ServingLayout) -> int:
        """Tokens whose cache one copy holds; 0 where weights leave no room."""
        room = self.cluster.device.memory_bytes * _SHARE - self.weight_bytes(x) - _WORKSPACE
        return int(max(room, 0.0) / self.cache_bytes_per_gpu(x)) * x.attention_dp

    def seconds(
        self, x: ServingLayout, tokens: Any, past: Any, sequences: Any, context: Any, uneven: float = 1.0
    ) -> Any:
        """Return seconds of steps, as columns.

        `tokens` of one prompt after `past` cached ones, beside `sequences` that decode and have `context` cached
        tokens in sum. `uneven`: the prompt's tokens in the busiest group that attends apart, over their mean.
        """
        return sum(self.parts(x, tokens, past, sequences, context, uneven).values())

    def parts(
        self, x: ServingLayout, tokens: Any, past: Any, sequences: Any, context: Any, uneven: float = 1.0
    ) -> dict[str, Any]:
        """Return the seconds of a step by part."""
        m, e, b = self.model, self._elements, BYTES[self.weights]
        products, attention, memory, half = self._rates
        tokens, past, sequences, context = (np.asarray(v, float) for v in (tokens, past, sequences, context))
        every = tokens + sequences
        group = (tokens * uneven + sequences) / x.attention_dp

        def product(elements: float, n: Any, inner: float) -> Any:
            """A product of n tokens with weights; `inner`: the narrower side of the matrix on a GPU."""
            return np.maximum(elements * b / memory, 2 * elements * n / (products * inner / (inner + half)))

        out: dict[str, Any] = {}
        out["projections"] = product(e.attention / x.tp, group, m.q_width / x.tp) + 2 * e.replicated / memory
        out["mlp"] = product(e.mlp / x.width, every, m.ffn / x.width) if e.mlp else 0.0 * every
        if m.experts is not None:
            k, count = m.experts.top_k, m.experts.count
            reached = 1 - (1 - k / count) ** every
            share = e.experts / (x.moe_tp * x.moe_ep)
            read = share * reached * b / memory
            imbalance = 1.0 if x.moe_ep == 1 else 1.2
            inner = m.experts.ffn / x.moe_tp
            computed = 2 * share * k / count * every * imbalance / (products * inner / (inner + half))
            out["experts"] = np.maximum(read, computed)
        pairs = tokens * (past + (tokens + 1) / 2) * uneven / x.attention_dp
        seen = context
        if m.window is not None:  # the share of layers with a window sees no more than it
            local = sum(m.window_of(i) is not None for i in range(m.layers)) / m.layers
            mean = context / np.maximum(sequences, 1)
            seen = context * (1 - local) + sequences * np.minimum(mean, m.window) * local
            reach = np.minimum(past + (tokens + 1) / 2, m.window)
            pairs = pairs * (1 - local) + tokens * reach * uneven / x.attention_dp * local
        width = m.q_width if m.latent is None else m.heads * (m.latent.kv_rank + m.latent.rope_dim)
        out["prompt attention"] = 4 * m.q_width / x.tp * m.layers * pairs / attention
        decoded = 4 * width / x.tp * m.layers * seen / x.attention_dp / attention
        read = seen / x.attention_dp * self.cache_bytes_per_gpu(x) * x.pp / memory
        out["cache"] = np.maximum(read, decoded)
        out["collectives"] = self._collectives(x, every, group)
        moved = 24.0 * m.hidden * m.layers * group / memory  # norms, residuals, rotary, activations: 16-bit
        out["other"] = moved + CONSTANTS[self.engine].layer_s * m.layers
        out["head"] = np.maximum(
            2.0 * e.head / x.tp / memory, 2.0 * e.head / x.tp * (sequences + 1) / x.attention_dp / products
        )
        out["host"] = CONSTANTS[self.engine].host_s + 0 * every
        return out

    def _collectives(self, x: ServingLayout, every: Any, group: Any) -> Any:
        m, total = self.model, 0.0
        if x.tp > 1:
            times = m.layers if x.attention_dp > 1 else 2 * m.layers
            total = total + times * self.all_reduce_s(x.tp, group * m.hidden * 2.0)
        if x.attention_dp > 1:
            reached = m.experts.top_k if m.experts is not None and x.moe_ep > 1 else x.width
            sent = group / x.tp * min(reached, x.width) * m.hidden * 2.0
            layers = len(expert_layers(m)) or m.layers
            alpha, rate = self._link(x.width)
            total = total + 2 * layers * (2 * alpha + sent / rate)
        if x.pp > 1:
            alpha, rate = self._link(x.gpus)
            total = total + (x.pp - 1) * (alpha + group * m.hidden * 2.0 / rate)
        return total + 0 * every

    def _link(self, ranks: int) -> tuple[float, float]:
        """(seconds of a small message, bytes/s of a GPU in one direction) among this many neighbours."""
        tiers = self.cluster.tiers
        place = next((i for i, t in enumerate(tiers) if t.ranks >= ranks), len(tiers) - 1)
        rate = tiers[place].bandwidth_bytes_per_s_per_gpu_per_direction
        nvlink = place == 0 and rate > 64e9
        return (_ALPHA_NODE if nvlink else _ALPHA_NET), 0.8 * rate

    def all_reduce_s(self, ranks: int, size: Any) -> Any:
        """Seconds of an all-reduce of `size` bytes over neighbouring ranks."""
        alpha, rate = self._link(ranks)
        return alpha + 2 * (ranks - 1) / ranks * size / rate
