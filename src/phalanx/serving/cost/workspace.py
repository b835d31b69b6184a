"""What an engine keeps of a GPU beyond weights and cache: activations of its largest step, logits, graphs, libraries.

vLLM runs its largest step before it allocates the cache, and takes the peak (vllm/v1/worker/gpu_worker.py,
determine_available_memory; gpu_model_runner.py, profile_run):

    a layer     tokens of a step x (gate, up and their product), 2 bytes each
    a sample    requests at once x vocabulary x 24 bytes: logits in fp32, sorted, with their indices in int64,
                probabilities and their sum (vllm/v1/sample/ops/topk_topp_sampler.py, apply_top_k_top_p)

the larger of the two, and the residual stream. SGLang and TensorRT-LLM keep as much, as far as they publish it.
"""

from __future__ import annotations

from phalanx.spec.cluster.spec import GIB, Device
from phalanx.spec.model.spec import ModelSpec

GRAPHS = 0.4 * GIB
"""CUDA graphs: vLLM 0.22 to 0.27 estimates 0.36 GiB (gpustack/runner#251, 27B over two GPUs of 24 GB) and 0.42 GiB
(noonghunna/club-3090#323, one of them)."""
LIBRARIES = 0.2 * GIB
"""What libraries allocate apart from torch: 0.16 to 0.20 GiB (vllm-project/vllm#12126, #14447)."""
_A_LOGIT, _A_TOKEN = 24, 4
"""Bytes of a logit that is sampled, and of a token's element of the residual stream: it, and a layer's output."""
_LARGE, _LARGEST = 70 * GIB, 160 * GIB


def step_limits(device: Device, offline: bool = False) -> tuple[int, int]:
    """Return the most tokens and requests of a step that vLLM chooses for a GPU (vllm/engine/arg_utils.py:2973).
    `offline`: without a server."""
    if device.memory_bytes < _LARGE or "a100" in device.name.lower():
        return (8192 if offline else 2048), 256
    return (16384 if offline or device.memory_bytes >= _LARGEST else 8192), 1024


def workspace_bytes(
    model: ModelSpec, device: Device, tokens: int | None = None, requests: int | None = None
) -> float:
    """Return the bytes beyond weights and cache with steps of `tokens` and `requests` at once; None: the engine's own
    limits. Of one GPU: tensor parallelism splits a layer, and no sample."""
    most_tokens, most = step_limits(device)
    tokens, requests = tokens or most_tokens, requests or most
    x = model.experts
    width = max(model.ffn, 0 if x is None else x.top_k * x.ffn + x.shared_ffn)
    layer = tokens * 3 * width * 2
    sample = requests * model.vocab * _A_LOGIT
    return float(GRAPHS + LIBRARIES + max(layer, sample) + tokens * model.hidden * _A_TOKEN)
