"""Seconds of a step of a serving engine, by part, in columns.

With n tokens in the step, n / d in each of d attention groups, a product with W elements of weights takes

    ((2 n W / share / FLOP/s)^p + (W / share x bytes / bytes/s)^p)^(1/p)        p: how well reads hide behind products

    projections   share = tp                              experts   of E, n tokens reach E (1 - (1 - k/E)^n)
    attention     4 d pairs FLOP for prompts; in decoding the bytes of the cache, or 4 d FLOP per cached token
    all-reduce    alpha log2(2 tp) + 2 (p - 1)/p bytes / rate, after attention and after the MLP
    dispatch      top_k copies of tokens to their experts' ranks and back, where attention is data parallel
    launches      seconds per layer, with graphs; steps with prompts run without them and are at least `eager`

The constants (engines.py) are fitted on measured runs by `python -m calibration.serving`.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from phalanx.cost.hardware.columns import Column
from phalanx.serving.cost.engines import EngineConstants
from phalanx.serving.cost.shape import ServingShape
from phalanx.spec.cluster.chips import Chip
from phalanx.spec.number_formats import NUMBER_FORMATS

_FORMATS = {
    **{"bf16": "bfloat16", "fp8": "float8", "fp8_block": "float8"},  # scales of 128 x 128 weights are few
    **{name: name for name in ("int4", "nvfp4", "mxfp4")},
}
BYTES = {name: float(NUMBER_FORMATS[known].bytes_per_value) for name, known in _FORMATS.items()}
"""Bytes of a weight, with the scales of blocks."""


@dataclass(frozen=True)
class ChipRates:
    """Datasheet rates of a chip and its links, of which kernels reach a share."""

    memory_bytes_per_s: Column
    half: Column
    """FLOP/s of 16-bit products."""
    weights: Column
    """FLOP/s of products with weights, in the type of their operands."""
    experts: Column
    """The same, for experts."""
    link_bytes_per_s: Column
    """Rate of a GPU, in one direction, to others in its NVLink domain."""
    net_bytes_per_s: Column
    """The same to GPUs outside its domain."""
    domain: Column
    """GPUs of an NVLink domain."""
    launches: Column = 1.0
    """Seconds of a layer's launches and small kernels over those on NVIDIA's GPUs, on which they are fitted."""


@dataclass(frozen=True)
class GpuSplit:
    """A ServingLayout with the sizes of its types, as numbers or columns."""

    tp: Column
    attention_dp: Column
    pp: Column
    moe_tp: Column
    moe_ep: Column
    weight_bytes: Column
    """Bytes of an element of weights."""
    expert_bytes: Column
    """The same, for routed experts."""
    cache_bytes: Column
    """Bytes of an element of the cache."""
    large_ep: Column = 0.0
    """1: the engine runs experts with the kernels of DeepEP and DeepGEMM, places them by load, and overlaps the
    computing of one half of a batch with the communication of the other, as deployments over many GPUs do."""
    graphs: Column = np.inf
    """The most sequences of an attention group that decode under CUDA graphs; 0: no step runs under one."""


@dataclass(frozen=True)
class StepLoad:
    """The load of one step, over all attention groups."""

    tokens: Column
    """Tokens of prompts."""
    pairs: Column
    """Pairs of a prompt's token and a token that it attends to."""
    prompts: Column
    """Number of prompts."""
    sequences: Column
    """Sequences that decode."""
    context: Column
    """Sum of their cached tokens."""
    uneven: Column = 1.0
    """Prompt tokens in the busiest attention group over the mean of all groups."""
    each: Column = 1.0
    """Tokens computed of each sequence that decodes: the latest one, and drafted ones."""


def product_rate(chip: Chip, kind: str) -> float:
    """Return the FLOP/s of products with weights of a type. 4-bit weights without tensor-core support are expanded to
    16 bits."""
    if kind == "nvfp4":
        return chip.fp4
    eight = kind in ("fp8", "fp8_block") or (kind == "mxfp4" and chip.has(NUMBER_FORMATS["mxfp4"]))
    return chip.fp8 if eight else chip.half


def rate_share(chip: ChipRates, c: EngineConstants, peak: Any) -> Any:
    """Return the share of `peak` that long products reach: by the ratio of `peak` to the rate of 16 bits, products
    are of 16, 8 (twice that) or 4 bits (four times)."""
    return np.where(peak < 1.5 * chip.half, c.gemm, np.where(peak < 3 * chip.half, c.gemm8, c.gemm4))


def step_parts(m: ServingShape, x: GpuSplit, chip: ChipRates, c: EngineConstants, b: StepLoad) -> dict[str, Any]:
    """Return part -> seconds of a step."""
    all_tokens = b.tokens + b.sequences * b.each
    group = (b.tokens * b.uneven + b.sequences * b.each) / x.attention_dp
    memory = chip.memory_bytes_per_s * c.memory

    def roof(compute: Any, read: Any) -> Any:
        return (compute**c.sharpness + read**c.sharpness) ** (1 / c.sharpness)

    def product(elements: Any, n: Any, inner: Any, size: Any, peak: Any) -> Any:
        rate = peak * rate_share(chip, c, peak) * inner / (inner + c.inner_half)
        return roof(2 * elements * n / rate, elements * size / memory)

    out: dict[str, Any] = {}
    parts = _formats(m.attention, m.whole, x.weight_bytes, chip.weights, chip)
    out["projections"] = sum(product(n / x.tp, group, m.q_width / x.tp, size, peak) for n, size, peak in parts)
    out["projections"] = out["projections"] + product(m.replicated, group, m.hidden, 2.0, chip.half)
    among, rows = _dense(x), np.where(x.large_ep > 0, group, all_tokens)
    parts = _formats(m.mlp, m.whole_mlp, x.weight_bytes, chip.weights, chip)
    out["mlp"] = sum(product(n / among, rows, m.hidden / x.tp, size, peak) for n, size, peak in parts)
    parts = _formats(m.expert, m.whole_expert, x.expert_bytes, chip.experts, chip)
    out["experts"] = sum(_experts(m, *part, x, chip, c, all_tokens, memory, roof) for part in parts)
    out["prompt attention"], out["cache"] = _attention(m, x, chip, c, b, memory)
    out["collectives"] = _collectives(m, x, chip, c, group, b.tokens)
    moved = 24.0 * m.hidden * m.layers * group / memory  # norms, residuals, rotary, activations: 16-bit
    launches = m.layers * c.layer_s + m.expert_layers * c.expert_layer_s
    launches = launches + m.latent_layers * c.latent_layer_s + m.linear_layers * c.linear_layer_s
    launches = launches + m.layers * np.where(x.weight_bytes < 2, c.quantized_layer_s, 0.0)
    launches = launches + m.expert_layers * m.shared * c.shared_layer_s
    launches = launches + m.index_layers * c.index_layer_s
    out["other"] = moved + launches * chip.launches
    heads = np.maximum(b.sequences * b.each + b.prompts, 1.0) / x.attention_dp
    out["head"] = roof(2 * m.head / x.tp * heads / (chip.half * c.gemm), 2.0 * m.head / x.tp / memory)
    out["head"] = out["head"] + heads * c.sequence_s
    out["host"] = c.host_s + 0.0 * all_tokens
    computed = sum(out[part] for part in ("projections", "mlp", "experts", "prompt attention", "cache", "other"))
    hidden = np.where(two_batches(x, chip, group), c.two_batches, 0.0)
    out["collectives"] = out["collectives"] - hidden * np.minimum(out["collectives"], computed)
    gpu = computed + out["collectives"]
    beyond = b.sequences / x.attention_dp > x.graphs
    partial = np.where(b.tokens > 0, c.eager_layer_s, c.eager_decode_s)  # steps under graphs
    each = np.where(x.graphs > 0, partial, c.uncaptured_s)
    eager = np.where((b.tokens > 0) | beyond, m.layers * each + m.latent_layers * c.latent_eager_s, 0.0)
    out["other"] = out["other"] + (gpu**4 + eager**4) ** 0.25 - gpu
    return out


def _formats(elements: Any, whole: Any, size: Any, peak: Any, chip: ChipRates) -> list[tuple[Any, Any, Any]]:
    """Return (elements, bytes of an element, FLOP/s) of each type of weights; `whole`: elements in 16 bits."""
    parts = [(elements - whole, size, peak)]
    return [*parts, (whole, 2.0, chip.half)] if np.any(whole) else parts


def _experts(
    m: ServingShape,
    elements: Any,
    size: Any,
    peak: Any,
    x: GpuSplit,
    chip: ChipRates,
    c: EngineConstants,
    every: Any,
    memory: Any,
    roof: Any,
) -> Any:
    """Return the seconds of products with `elements` of routed experts, `size` bytes each, at `peak` FLOP/s, on the
    busiest rank. `every`: tokens of the step."""
    count = np.maximum(m.experts, 1.0)
    spread = 1 - (1 - np.minimum(m.top_k / count, 1.0)) ** (every**c.reach)
    share = elements / (x.moe_tp * x.moe_ep)
    most = np.where(x.large_ep > 0, c.balanced, 1 + (c.imbalance - 1) * (1 - 1 / x.moe_ep))
    rows = every * m.top_k / np.maximum(count * spread, 1e-9)  # of one expert
    filled = rows / (rows + c.expert_rows)
    rate = (
        peak
        * rate_share(chip, c, peak)
        * np.where(x.large_ep > 0, 1.0, c.expert_gemm)
        * filled
        * m.expert_ffn
        / x.moe_tp
        / (m.expert_ffn / x.moe_tp + c.inner_half)
    )
    compute = 2 * share * m.top_k / count * every * most / np.maximum(rate, 1.0)
    read = share * np.minimum(spread * most, 1.0) * size / (memory * c.expert_memory)
    return np.where(m.experts > 0, roof(compute, read), 0.0)


def _attention(
    m: ServingShape, x: GpuSplit, chip: ChipRates, c: EngineConstants, b: StepLoad, memory: Any
) -> tuple[Any, Any]:
    """Return (seconds of attention in prompts, seconds of attention in decoding)."""
    peak = chip.half * c.attention
    every, chosen = b.pairs, np.minimum(b.pairs, b.tokens * m.index_top)
    width = m.prompt_width * np.where(m.index_top > 0, chosen, every)
    width = width + m.window_width * np.minimum(every, b.tokens * m.window)
    width = width / x.tp * b.uneven + m.index_width * every
    width = width + m.linear_layers * m.q_width / x.tp * 64 * b.tokens  # chunks of 64
    prompt = 4 * width / x.attention_dp / peak
    each = b.context / np.maximum(b.sequences, 1e-9)
    limit = np.where(m.index_top > 0, np.minimum(each, m.index_top), each)
    sequences = b.sequences / x.attention_dp
    read = sequences * cache_bytes(m, x, limit, each) / (memory * c.cache)
    read = read + 2 * sequences * state_bytes(m, x) / memory
    decode = m.decode_width * limit + m.window_width * np.minimum(each, m.window)
    # Deployments over many GPUs decode 8-bit latents with kernels of 8-bit products (FlashMLA, FlashInfer).
    peak = peak * np.where((x.large_ep > 0) & (m.latent_layers > 0) & (x.cache_bytes < 2), 2.0, 1.0)
    return prompt, np.maximum(read, 4 * sequences * b.each * decode / x.tp / peak)


STATE_BYTES, INPUT_BYTES = 4.0, 2.0
"""Bytes of an element of a recurrent state, and of a convolution's input (SGLang 02e208d, srt/configs/mamba_utils.py:
float32 by default; vLLM, model_executor/models/config.py, NemotronHForCausalLMConfig and
Qwen3_5ForConditionalGenerationConfig: as config.json has it, which is float32)."""


def cache_bytes(m: ServingShape, x: GpuSplit, length: Any, within: Any = None) -> Any:
    """Return the bytes that a step reads of the cache of `length` tokens, in all layers, on a GPU: tp splits heads,
    and duplicates them beyond their number. Layers with a window read at most the window of `within` tokens, by
    default of `length`."""
    return _cached(m, x, m.cache * x.cache_bytes, length, within)


def _cached(m: ServingShape, x: GpuSplit, token: Any, length: Any, within: Any = None) -> Any:
    local = np.minimum(length if within is None else within, m.window)
    whole = token / np.minimum(x.tp, m.cache_heads) * length
    return whole + m.window_cache / np.minimum(x.tp, m.window_heads) * local * x.cache_bytes


_INDEX_BYTES, _PACKED = 132 / 128, 80
"""Bytes of an element of the index's keys: 8 bits with a scale for 128, whatever the cache's type (SGLang,
mem_cache/memory_pool.py: index_k_with_scale_buffer; TensorRT-LLM, DSACacheManager). Bytes by which an 8-bit latent of
a layer is larger with an index: 512 values of 8 bits, four scales and 64 values of 16 bits are 656 (vLLM's
fp8_ds_mla; sgl-project/sglang#11309: 43.67 GB of 975,424 tokens are 788 a layer)."""


def token_bytes(m: ServingShape, cache_bytes: Any) -> Any:
    """Return the bytes of a token's cache in all layers that keep every token; `cache_bytes`: of an element."""
    packed = np.where((m.index_cache > 0) & (cache_bytes < 2), _PACKED * m.latent_layers, 0.0)
    return (m.cache - m.index_cache) * cache_bytes + m.index_cache * _INDEX_BYTES + packed


def state_bytes(m: ServingShape, x: GpuSplit) -> Any:
    """Return the bytes on a GPU of a request's recurrent states, with the last inputs of their convolutions, in all
    layers; the length does not matter."""
    return (STATE_BYTES * m.state + INPUT_BYTES * m.inputs) / x.tp


def request_bytes(m: ServingShape, x: GpuSplit, length: Any) -> Any:
    """Return the bytes on a GPU of the cache and the states of a request of `length` tokens, in all layers."""
    return _cached(m, x, token_bytes(m, x.cache_bytes), length) + state_bytes(m, x)


def weight_bytes(m: ServingShape, x: GpuSplit) -> Any:
    """Return the bytes of weights on the fullest GPU."""
    among, experts = _dense(x), x.moe_tp * x.moe_ep
    split = ((m.attention - m.whole) / x.tp + (m.mlp - m.whole_mlp) / among) * x.weight_bytes
    split = split + (m.expert - m.whole_expert) / experts * x.expert_bytes
    split = split + 2.0 * (m.whole / x.tp + m.whole_mlp / among + m.whole_expert / experts)
    ends: Any = np.where(x.pp > 1, m.head, m.ends)
    return (split + 2.0 * m.replicated) / x.pp + 2.0 * ends / x.tp


_BUS = 64e9
"""Bytes/s of the fastest link that is PCIe (5 x16), not NVLink."""
_BUS_PAIR, _BUS_EIGHT, _OLD_BUS_EIGHT = 0.62, 0.37, 0.07
"""Share of PCIe's rate that all-reduces reach: over 2 GPUs, over 8 with PCIe 5 (RTX PRO 6000), and over 8 with PCIe 4
(L40S, two sockets); nccl-tests, 64 MB and more."""


def _link(chip: ChipRates, c: EngineConstants, ranks: Any) -> tuple[Any, Any]:
    """Return (seconds of a small message per doubling of ranks, bytes/s that a GPU sends) among `ranks`
    neighbours."""
    inside, bus = ranks <= chip.domain, chip.link_bytes_per_s <= _BUS
    eight = np.where(chip.link_bytes_per_s < 40e9, _OLD_BUS_EIGHT, _BUS_EIGHT)
    doublings = np.log2(np.clip(ranks, 2, 8))  # measured up to 8
    share = np.where(bus, _BUS_PAIR * (eight / _BUS_PAIR) ** ((doublings - 1) / 2), c.link)
    hop = np.where(inside, np.where(bus, 2 * c.hop_s, c.hop_s), c.net_hop_s)
    within, across = chip.link_bytes_per_s * share, chip.net_bytes_per_s * c.link
    # Traffic that leaves a domain shares its bus, so it is no faster than traffic inside.
    return hop, np.where(inside, within, np.where(bus, np.minimum(across, within), across))


def all_reduce_s(chip: ChipRates, c: EngineConstants, ranks: Any, size: Any) -> Any:
    """Return the seconds of an all-reduce of `size` bytes over `ranks` neighbouring GPUs."""
    hop, rate = _link(chip, c, ranks)
    return np.where(ranks > 1, hop * np.log2(2 * ranks) + 2 * (ranks - 1) / ranks * size / rate, 0.0)


def _collectives(m: ServingShape, x: GpuSplit, chip: ChipRates, c: EngineConstants, group: Any, prompts: Any) -> Any:
    width = x.tp * x.attention_dp
    spread = x.attention_dp > 1
    times = np.where(spread, 1.0, 2.0) * m.layers
    total = times * all_reduce_s(chip, c, x.tp, group * m.hidden * 2.0)
    total = total + m.wide_norms * all_reduce_s(chip, c, x.tp, group * 8.0)
    hop, rate = _link(chip, c, width)
    copies = np.where(x.moe_ep > 1, np.minimum(m.top_k, width), width)
    sent = group / x.tp * copies * m.hidden * 2.0
    layers = np.where(m.expert_layers > 0, m.expert_layers, m.layers)
    exchanged = 2 * (hop * np.log2(2 * width) + sent / rate)
    exchanged = np.where(x.large_ep > 0, _exchange_s(m, x, chip, c, group, prompts), exchanged)
    total = total + np.where(spread, layers * exchanged, 0.0)
    hop, rate = _link(chip, c, width * x.pp)
    return total + (x.pp - 1) * (hop + group * m.hidden * 2.0 / rate)


def _dense(x: GpuSplit) -> Any:
    """Return the GPUs that split an MLP or a shared expert: with large_ep each attention group has its own copy."""
    return np.where(x.large_ep > 0, x.tp, x.tp * x.attention_dp)


TWO_BATCHES_FROM = 128
"""The fewest tokens of a GPU in a step for which two half batches pay: SGLang's were slower below some 64 to 128
(lmsys.org/blog/2025-05-05-large-scale-ep)."""


def two_batches(x: Any, chip: ChipRates, tokens: Any) -> Any:
    """Whether one half of a step computes while the tokens of the other are sent; `tokens`: of a GPU in the step.
    Over NVLink alone sending is too fast for it to pay (lmsys.org/blog/2025-06-16-gb200-part-1)."""
    return (x.large_ep > 0) & (x.tp * x.attention_dp > chip.domain) & (tokens >= TWO_BATCHES_FROM)


def _exchange_s(m: ServingShape, x: GpuSplit, chip: ChipRates, c: EngineConstants, group: Any, prompts: Any) -> Any:
    """Return the seconds of a layer's dispatch and combine by DeepEP. In steps with prompts a token is sent once to
    each node with one of its experts, and on over NVLink; in decoding it is sent to each expert. It is sent in the
    type of the products, and returned in 16 bits (DeepEP's README)."""
    width = x.tp * x.attention_dp
    domains = np.maximum(width / chip.domain, 1.0)
    apart = np.where(domains > 1, 1 - 1 / domains, 1 - 1 / np.maximum(width, 2))
    reached = np.where(domains > 1, domains * (1 - (1 - 1 / domains) ** m.top_k), np.minimum(m.top_k, width))
    copies = np.where(prompts > 0, reached, np.minimum(m.top_k, width)) * apart
    out = np.where(chip.experts < 1.5 * chip.half, 2.0, np.where(chip.experts < 3 * chip.half, 1.0, 0.5625))
    hop, rate = _link(chip, c, width)
    return 2 * hop + group / x.tp * copies * m.hidden * (out + 2.0) / rate
