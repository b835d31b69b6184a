"""Memory of a GPU beyond weights and cache: activations of an engine's largest step, logits, graphs, libraries.

vLLM runs its largest step before it allocates the cache, and reserves the peak (vllm/v1/worker/gpu_worker.py,
determine_available_memory; gpu_model_runner.py, profile_run):

    a layer     tokens of a step x (gate, up and their product), 2 bytes each
    a sample    requests at once x vocabulary x 24 bytes: logits in fp32, sorted, with their indices in int64,
                probabilities and their sum (vllm/v1/sample/ops/topk_topp_sampler.py, apply_top_k_top_p)

the larger of the two, the residual stream, and the lasting buffers of expert kernels, for each of a token's k experts
(fused_moe/modular_kernel.py, _allocate_buffers; workspace_shapes of TritonExperts and CutlassExpertsFp8):

    M k (max(N, K) + max(N / 2, K)) x 2 bytes      M tokens of all attention groups, N gate and up of a rank, K hidden
    M k K x 2 bytes                                FlashInfer's kernels on Blackwell (flashinfer-ai/flashinfer#4916)

SGLang measures nothing: a rule reserves a share of the memory that is free before weights are loaded, by the GPU, the
tokens of a prompt's step and the layout (sglang/srt/arg_groups, handle_gpu_memory_settings; at 11e7c9e0,
server_args.py:3323; model_runner.py, profile_max_num_token). TensorRT-LLM runs its largest step of prompts, and the
cache takes a share of the rest (tensorrt_llm/_torch/pyexecutor/_util.py, configure_kv_cache_capacity and
_cal_max_memory): the step is the layer, the residual stream, and the logits of CUDA graphs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from phalanx.cost.analytic.chips import chip_name
from phalanx.serving.cost.layout import ServingLayout
from phalanx.spec.cluster.chips import CHIPS, MIB
from phalanx.spec.cluster.spec import GIB, Device
from phalanx.spec.model.spec import ModelSpec

GRAPHS = 0.4 * GIB
"""CUDA graphs: vLLM 0.22 to 0.27 estimates 0.36 GiB (gpustack/runner#251, 27B over two GPUs of 24 GB) and 0.42 GiB
(noonghunna/club-3090#323, 27B on one)."""
LIBRARIES = 0.2 * GIB
"""Memory of libraries, outside torch's allocator: 0.16 to 0.20 GiB (vllm-project/vllm#12126, #14447)."""
_A_LOGIT, _A_TOKEN = 24, 4
"""Bytes of a sampled logit; of an element of a token in the residual stream, with the output of a layer."""
_LARGE, _LARGEST = 70 * GIB, 160 * GIB
"""Sizes of GPUs from which vLLM takes larger steps."""


def step_limits(device: Device, offline: bool = False) -> tuple[int, int]:
    """Return vLLM's default limits of a step on a GPU, (tokens, requests) (vllm/engine/arg_utils.py:2973). `offline`:
    without a server."""
    if device.memory_bytes < _LARGE or "a100" in device.name.lower():
        return (8192 if offline else 2048), 256
    return (16384 if offline or device.memory_bytes >= _LARGEST else 8192), 1024


def workspace_bytes(
    model: ModelSpec,
    device: Device,
    tokens: int | None = None,
    requests: int | None = None,
    layout: ServingLayout | None = None,
) -> float:
    """Return the bytes beyond weights and cache. `tokens`: of a step of an attention group; `requests`: at once;
    None: vLLM's limits. Tensor parallelism does not split samples."""
    most_tokens, most = step_limits(device)
    tokens, requests = tokens or most_tokens, requests or most
    sample = requests * model.vocab * _A_LOGIT
    kept = GRAPHS + LIBRARIES + _of_experts(model, device, tokens, layout or ServingLayout())
    return float(kept + max(_layer(model, tokens, routed=False), sample) + tokens * model.hidden * _A_TOKEN)


def _of_experts(model: ModelSpec, device: Device, tokens: int, x: ServingLayout) -> float:
    """Return the bytes of the buffers of expert kernels."""
    e = model.experts
    if e is None:
        return 0.0
    rows = tokens * x.attention_dp * e.top_k
    if CHIPS[chip_name(device.name)].generation.startswith("blackwell"):
        return 2.0 * rows * model.hidden
    rank = e.ffn / x.moe_tp
    return 2.0 * rows * (max(2 * rank, model.hidden) + max(rank, model.hidden))


def _layer(model: ModelSpec, tokens: int, routed: bool = True) -> float:
    """Return the bytes of a layer's largest activations; `routed`: with routed experts."""
    x = model.experts
    width = max(model.ffn, 0 if x is None else routed * x.top_k * x.ffn + x.shared_ffn)
    return tokens * 3 * width * 2


_TILES = {"hopper": (256, 256, True), "blackwell": (256, 256, False), "cdna": (256, 256, False)}
_MARLIN_TILES = (256, 128, False)
"""Beginning of a generation's name -> multiples of the hidden and the expert's width to which vLLM's kernels of MXFP4
round, and whether values alone: of FlashInfer and AITER, of Triton on Hopper (triton_kernels, HopperMXValueLayout,
along the dimension that a product sums over), and of Marlin elsewhere (vllm/model_executor/layers/fused_moe/oracle/
mxfp4.py, mxfp4_round_up_hidden_size_and_intermediate_size)."""
_VALUES = 0.5 / 0.53125
"""Of the bytes of MXFP4: the rest are scales."""


def rounded_share(model: ModelSpec, generation: str, x: ServingLayout) -> float:
    """Return the bytes of a rank's MXFP4 experts in vLLM over the checkpoint's. gpt-oss-120b takes 64.4 GiB on an
    H100 (vllm-project/vllm#33155), 66.0 under Marlin (#23278), and 60.8 as published."""
    if model.experts is None:
        return 1.0
    wide, rank = model.hidden, model.experts.ffn / x.moe_tp
    tiles = next((t for name, t in _TILES.items() if generation.startswith(name)), _MARLIN_TILES)
    if generation.endswith("-gddr"):
        tiles = _MARLIN_TILES
    hidden, width = (math.ceil(n / tile) * tile / n for n, tile in zip((wide, rank), tiles, strict=False))
    return 1 + _VALUES * ((2 * hidden + width) / 3 - 1) if tiles[2] else hidden * width


_VLLM_GRAPHS = 512
"""The largest batch of vLLM's CUDA graphs (vllm/config/vllm.py, _set_cudagraph_sizes)."""
_TRTLLM_TOKENS, _TRTLLM_GRAPH, _TRTLLM_LOGIT = 8192, 128, 6
"""Tokens of TensorRT-LLM's step (commands/serve.py), the largest batch of its CUDA graphs (llm_args.py,
validate_cuda_graph_config), and bytes of a logit, in 16 bits and in fp32 (modules/logits_processor.py)."""


@dataclass(frozen=True)
class MemoryRule:
    """The rule by which an engine divides a GPU's memory."""

    engine: str = "vllm"
    share: float | None = None
    """--gpu-memory-utilization, --mem-fraction-static or free_gpu_memory_fraction; None: the default."""
    tokens: int | None = None
    """The most tokens of a step of an attention group; None: the default."""
    requests: int | None = None
    """The most concurrent requests; None: the default."""

    def room(self, model: ModelSpec, device: Device, x: ServingLayout, large: bool = False) -> float:
        """Return the bytes of a GPU for weights and cache. `large`: experts run with DeepEP."""
        if self.engine == "sglang":
            return device.usable_bytes * (self.share or _sglang_share(model, device, x, self.tokens, large))
        if self.engine == "trtllm":
            tokens = self.tokens or _TRTLLM_TOKENS
            logits = min(self.requests or _TRTLLM_GRAPH, _TRTLLM_GRAPH) * model.vocab * _TRTLLM_LOGIT
            return device.usable_bytes - GRAPHS - _layer(model, tokens) - tokens * model.hidden * _A_TOKEN - logits
        kept = workspace_bytes(model, device, self.tokens, self.requests, x)
        return device.memory_bytes * (self.share or VLLM_SHARE) - kept

    @property
    def cache_share(self) -> float:
        """The cache's share of the room that weights leave."""
        return (self.share or TRTLLM_SHARE) if self.engine == "trtllm" else 1.0

    def words(self, model: ModelSpec, device: Device, x: ServingLayout, large: bool = False) -> str:
        """Describe the bytes for weights and cache, and how they follow from the device's memory."""
        room, whole, usable = self.room(model, device, x, large), device.memory_bytes, device.usable_bytes
        if self.engine == "sglang":
            how = f"{room / usable:.1%} of {usable / GIB:.1f} GiB: --mem-fraction-static"
        elif self.engine == "trtllm":
            left = f"the cache has {self.cache_share:.0%} of what weights leave"
            how = f"{whole / GIB:.1f} GiB less {(whole - room) / GIB:.1f} GiB of workspace; {left}"
        else:
            share = self.share or VLLM_SHARE
            how = f"{share:.0%} of {whole / GIB:.1f} GiB, less {(share * whole - room) / GIB:.1f} GiB of workspace"
        return f"{room / GIB:.1f} GiB ({how})"


VLLM_SHARE, TRTLLM_SHARE = 0.92, 0.9
"""Default shares: of a GPU for vLLM (vllm/config/cache.py:215), and of the room that weights leave for TensorRT-LLM's
cache (llm_args.py, KvCacheConfig)."""
_SGLANG_STEPS = ((20, 2048, 8, 8), (35, 4096, 48, 160), (60, 4096, 32, 160), (160, 8192, 256, 512))
"""(GiB of a GPU's memory, up to which: tokens of a step, the largest batch of CUDA graphs on fewer than 4 GPUs, and
on more)."""
_SGLANG_MOST = (16384, 512, 512)
"""The same for larger GPUs."""
_PREFILL_GRAPHS = ((32, 4), (256, 16), (512, 32), (1024, 64), (4096, 256), (1 << 30, 512))
"""(tokens up to which graphs of prompts are captured, tokens between two of them)."""


def _sglang_limits(device: Device) -> tuple[int, int, int]:
    """Return SGLang's defaults on a GPU: (tokens of a step of prompts, largest batch of CUDA graphs on fewer than 4
    GPUs, and on more)."""
    fitting = (limits for most, *limits in _SGLANG_STEPS if device.memory_bytes < most * GIB)
    chunk, few, many = next(fitting, _SGLANG_MOST)
    return chunk, few, many


def graphs(engine: str, device: Device, x: ServingLayout) -> float:
    """Return the most sequences of an attention group for which an engine captures CUDA graphs of decoding by
    default. TensorRT-LLM, as plans and trtllm-bench start it: as many as it serves."""
    if engine == "sglang":
        _, few, many = _sglang_limits(device)
        return few if x.width < 4 else many
    return _VLLM_GRAPHS if engine == "vllm" else math.inf


def prompt_tokens(device: Device) -> int:
    """Return SGLang's default tokens of a step of prompts on a GPU (chunked_prefill_size)."""
    return _sglang_limits(device)[0]


def _sglang_share(model: ModelSpec, device: Device, x: ServingLayout, tokens: int | None, large: bool) -> float:
    """Return the share of a GPU's memory that SGLang's rule, which is in MiB, leaves for weights and cache."""
    memory = device.memory_bytes / MIB
    chunk, batch = prompt_tokens(device), graphs("sglang", device, x)
    groups, gpus = x.attention_dp, x.gpus
    chunk = tokens * groups if tokens else chunk  # which attention groups share
    latent = model.latent is not None
    kept = 512 + 1.5 * max(chunk, 2048) + gpus / 8 * 1024 + 2 * batch
    if groups > 1:
        kept += batch * groups * (4.5 if batch > 300 else 3)
    kept += 1536 if latent else 8 * _captured(chunk)
    return max(memory - max(kept, 10 * 1024 if memory > 60 * 1024 else 0) - (2048 if large else 0), 0.0) / memory


def _captured(most: int) -> int:
    """Return the number of captured graphs of prompts of up to `most` tokens."""
    count = below = 0
    for edge, step in _PREFILL_GRAPHS:
        count += max(min(edge, most) - below, 0) // step
        below = edge
    return count
