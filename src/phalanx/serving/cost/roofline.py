"""The price of one model under one engine: seconds of a step by part (step.py), bytes of weights and cache.

The shares of rates that kernels and links reach, and an engine's overheads, are fitted on measured runs (engines.py).
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np

from phalanx.cost.analytic.chips import chip_name
from phalanx.serving.cost.engines import LAUNCHES, EngineConstants, engine
from phalanx.serving.cost.layout import ServingLayout
from phalanx.serving.cost.shape import ServingShape, shape_of
from phalanx.serving.cost.step import (
    BYTES,
    ChipRates,
    GpuSplit,
    StepLoad,
    all_reduce_s,
    product_rate,
    request_bytes,
    step_parts,
    token_bytes,
)
from phalanx.serving.cost.step import weight_bytes as bytes_of_weights
from phalanx.serving.cost.workspace import MemoryRule, graphs, rounded_share
from phalanx.spec.cluster.chips import CHIPS
from phalanx.spec.cluster.spec import ClusterSpec
from phalanx.spec.model.spec import ModelSpec

LargeEp = Literal["auto", "on", "off"]
"""Whether experts over several GPUs, with data-parallel attention, run with DeepEP, DeepGEMM and placement by load.
auto: where they span several NVLink domains, because other kernels would send each token over the network once for
each of its experts."""
LARGE_EP: tuple[LargeEp, ...] = get_args(LargeEp)


@dataclass(frozen=True)
class ServingPrice:
    """Prices of one model on one cluster under one engine, with weights and cache of given types."""

    model: ModelSpec
    cluster: ClusterSpec
    engine: str
    weights: str
    cache: str
    expert_weights: str = ""
    """Type of the weights of routed experts; empty: as `weights`."""
    large_ep: LargeEp = "auto"
    memory_share: float | None = None
    """The engine's option for its share of a GPU's memory; None: its default."""
    step_tokens: int | None = None
    """The most tokens of a step of an attention group; None: the engine's default."""
    slots: int | None = None
    """The most concurrent requests; None: the engine's default."""
    graphs: int | None = None
    """The largest batch of CUDA graphs of decoding; 0: none; None: the engine's default."""

    @cached_property
    def shape(self) -> ServingShape:
        """The model's sums over layers."""
        return shape_of(self.model)

    @cached_property
    def constants(self) -> EngineConstants:
        """The engine's fitted constants."""
        return engine(self.engine)

    @cached_property
    def chip(self) -> ChipRates:
        """Rates of the cluster's chip and links; by the chip's datasheet where the cluster has none."""
        chip, device, tiers = CHIPS[chip_name(self.cluster.device.name)], self.cluster.device, self.cluster.tiers
        return ChipRates(
            memory_bytes_per_s=device.memory_bandwidth_bytes_per_s,
            half=device.dense_flops_per_s.get("bfloat16", chip.half),
            weights=product_rate(chip, self.weights),
            experts=product_rate(chip, self.expert_weights or self.weights),
            link_bytes_per_s=tiers[0].bandwidth_bytes_per_s_per_gpu_per_direction,
            net_bytes_per_s=tiers[-1].bandwidth_bytes_per_s_per_gpu_per_direction,
            domain=tiers[0].ranks,
            launches=LAUNCHES.get(chip.generation, 1.0),
        )

    @cached_property
    def generation(self) -> str:
        """Generation of the cluster's chip."""
        return CHIPS[chip_name(self.cluster.device.name)].generation

    def split(self, x: ServingLayout) -> GpuSplit:
        """Return a layout with the types of weights and cache."""
        bytes_ = (BYTES[self.weights], BYTES[self.expert_weights or self.weights], BYTES[self.cache])
        most = graphs(self.memory.engine, self.cluster.device, x) if self.graphs is None else self.graphs
        return GpuSplit(x.tp, x.attention_dp, x.pp, x.moe_tp, x.moe_ep, *bytes_, float(self.is_large(x)), most)

    def is_large(self, x: ServingLayout) -> bool:
        """Whether a layout's experts run with DeepEP and placement by load."""
        if x.attention_dp == 1 or x.moe_ep < x.width or self.large_ep == "off":
            return False
        return self.large_ep == "on" or x.width > self.chip.domain

    @cached_property
    def cache_bytes_per_token(self) -> float:
        """Bytes of one token's keys and values, or latents, in all layers of the whole model."""
        each = BYTES[self.cache]
        return float(token_bytes(self.shape, each) + self.shape.window_cache * each)

    def cache_bytes_per_gpu(self, x: ServingLayout) -> float:
        """Bytes of one token's cache on a GPU: tp splits heads, and duplicates them beyond their number; latents are
        not split."""
        m = self.shape
        each = BYTES[self.cache]
        local = m.window_cache / min(x.tp, m.window_heads) * each
        return float(token_bytes(m, each) / min(x.tp, m.cache_heads) + local) / x.pp

    def weight_bytes(self, x: ServingLayout) -> float:
        """Bytes of weights on the fullest GPU."""
        split = self.split(x)
        if self.engine == "vllm" and (self.expert_weights or self.weights) == "mxfp4":
            split = replace(split, expert_bytes=split.expert_bytes * rounded_share(self.model, self.generation, x))
        return float(bytes_of_weights(self.shape, split))

    @cached_property
    def memory(self) -> MemoryRule:
        """The engine's rule for dividing a GPU's memory."""
        return MemoryRule(self.engine.partition(" ")[0], self.memory_share, self.step_tokens, self.slots)

    def bytes_for_weights(self, x: ServingLayout) -> float:
        """Bytes of a GPU for weights and cache under a layout."""
        return self.memory.room(self.model, self.cluster.device, x, self.is_large(x))

    def room(self, x: ServingLayout) -> str:
        """The memory of a GPU for weights and cache under a layout, in words."""
        return self.memory.words(self.model, self.cluster.device, x, self.is_large(x))

    def cache_tokens(self, x: ServingLayout, length: int = 0) -> int:
        """Tokens whose cache one copy holds; 0: weights leave no room.

        `length`: tokens of a request. Layers with a sliding window keep only the window of each request, so more
        requests fit. 0: all layers keep all tokens.
        """
        room = (self.bytes_for_weights(x) - self.weight_bytes(x)) * self.memory.cache_share
        each = (
            request_bytes(self.shape, self.split(x), length) / length / x.pp
            if length
            else self.cache_bytes_per_gpu(x)
        )
        return int(max(room, 0.0) / each) * x.attention_dp

    def cache_bytes(self, length: int) -> float:
        """Bytes of the cache of a request of `length` tokens, in all layers of the whole model."""
        return float(request_bytes(self.shape, self.split(ServingLayout()), length))

    def seconds(
        self,
        x: ServingLayout,
        tokens: Any,
        past: Any,
        sequences: Any,
        context: Any,
        uneven: float = 1.0,
        each: int = 1,
    ) -> Any:
        """Return seconds of steps, as columns.

        A step has `tokens` of a prompt after `past` cached tokens, and `sequences` that decode `each` tokens, with
        `context` cached tokens in all. `uneven`: tokens of prompts in the busiest attention group over the mean.
        """
        return sum(self.parts(x, tokens, past, sequences, context, uneven, each).values())

    def parts(
        self,
        x: ServingLayout,
        tokens: Any,
        past: Any,
        sequences: Any,
        context: Any,
        uneven: float = 1.0,
        each: int = 1,
    ) -> dict[str, Any]:
        """Return part -> seconds of a step, as `seconds`."""
        tokens, past, sequences, context = (np.asarray(v, float) for v in (tokens, past, sequences, context))
        pairs = tokens * (past + (tokens + 1) / 2)
        batch = StepLoad(tokens, pairs, np.minimum(tokens, 1.0), sequences, context, uneven, each)
        return step_parts(self.shape, self.split(x), self.chip, self.constants, batch)

    def all_reduce_s(self, ranks: int, size: Any) -> Any:
        """Seconds of an all-reduce of `size` bytes over neighbouring ranks."""
        return all_reduce_s(self.chip, self.constants, ranks, size)
