"""Serving engines: ONE table, a row holding how each one schedules and what it can be asked for.

vLLM 0.33 (v1 scheduler): decodes first, then chunks of prompts, in one step; a full cache preempts by recomputation.
SGLang 0.5.23: prompts run in steps of their own unless --enable-mixed-chunk is given. TensorRT-LLM 1.2
(trtllm-serve): one step for both; a request begins only when its cache is sure (GUARANTEED_NO_EVICT).
"""

import math
from dataclasses import dataclass
from typing import Literal

from phalanx.cost.memory.cache import layer_cache
from phalanx.serving.cost.step import INPUT_BYTES, STATE_BYTES
from phalanx.spec.errors import InputError, nearest
from phalanx.spec.model.blocks.lowering import architecture
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.number_formats import NUMBER_FORMATS


@dataclass(frozen=True)
class EngineRow:
    """How one engine schedules, and what it supports."""

    name: str
    """The name that users write."""
    title: str
    mixed: bool
    """Whether prompts and sequences that decode share a step."""
    reserve: bool
    """Whether a request waits until the cache has room to its end, instead of being preempted."""
    page_tokens: int
    """Tokens of a page of the cache, by default."""
    attention_dp: Literal["any", "all"]
    """Whether groups of attention data parallelism may be tensor parallel (any), or must be single GPUs (all)."""
    experts: Literal["any", "all"]
    """Whether experts may be split by ep and tp at once (any), or only by one of them (all)."""
    state_pages: bool
    """Whether a page of the cache is at least as large as a layer's recurrent state."""
    state_reuse: str
    """How it reuses prefixes of a model with recurrent states."""
    unpacks_fp8: tuple[str, ...] = ()
    """Generations without products of 8 bits on which it makes weights of fp8 16 bits where it multiplies them."""


_VLLM_STATE = (
    "vLLM keeps recurrent states at whole pages of the cache, so that a prefix is reused in pages of as many tokens "
    "as a layer's state takes; priced so"
)
"""docs.vllm.ai/en/latest/features/automatic_prefix_caching, Hybrid Mamba models; vLLM's
model_executor/models/config.py, MambaModelConfig: the modes `align` and `all`."""
_SGLANG_STATE = (
    "SGLang reuses a prefix only up to where it kept the recurrent states: the end of an earlier request or of a "
    "chunk, or every 256 tokens with --mamba-radix-cache-strategy extra_buffer; not modelled"
)
"""github.com/sgl-project/sglang, pull request 14792; mamba_track_interval is 256 by default."""
_TRTLLM_STATE = "how TensorRT-LLM reuses prefixes of a model with recurrent states is not modelled"
_MARLIN = ("ampere", "ampere-gddr")
"""docs.vllm.ai/en/latest/features/quantization/fp8: weight-only on Ampere, by Marlin's kernels, which SGLang has too
(srt/layers/quantization/fp8.py, use_marlin)."""

ENGINES = {
    row.name: row
    for row in (
        EngineRow("vllm", "vLLM", True, False, 16, "any", "all", True, _VLLM_STATE, _MARLIN),
        EngineRow("sglang", "SGLang", False, False, 1, "any", "any", False, _SGLANG_STATE, _MARLIN),
        EngineRow("trtllm", "TensorRT-LLM", True, True, 32, "all", "any", False, _TRTLLM_STATE),
    )
}
"""Every serving engine that Phalanx knows."""

MULTIPLIED_AS = {
    weights: NUMBER_FORMATS[name]
    for weights, name in (
        *(("bf16", "bfloat16"), ("fp8", "float8"), ("int4", "bfloat16"), ("nvfp4", "nvfp4")),
        ("mxfp4", "bfloat16"),  # by 8 bits where the chip has them (cost/step.py, product_rate)
    )
}
"""The format in which products take each type of weights: int4 and mxfp4 are unpacked to 16 bits before."""
NEEDS = {weights: f.generations for weights, f in MULTIPLIED_AS.items()}
"""Generations of chips whose tensor cores take a type of weights."""

CACHE_TYPES = ("bf16", "fp8")
"""Types of the cache that are priced."""


def engine(name: str) -> EngineRow:
    """Return the row of an engine. Raises InputError for an unknown name."""
    if name not in ENGINES:
        raise InputError("engine", name, "is not a serving engine that Phalanx knows", nearest(name, ENGINES))
    return ENGINES[name]


def page_tokens(row: EngineRow, model: ModelSpec, cache_bytes: float) -> int:
    """Return the tokens of a page: where an engine's pages hold recurrent states too, in multiples of 16, as many as
    one layer's state takes (vLLM 0144dd5, model_executor/models/config.py, HybridAttentionMambaModelConfig).
    `cache_bytes`: of an element."""
    kept = [k for block in architecture(model).kinds for s in block.sublayers if (k := layer_cache(s)) is not None]
    state = max((STATE_BYTES * k.state + INPUT_BYTES * k.inputs for k in kept), default=0.0)
    tokens = [cache_bytes * k.token for k in kept if k.token]
    if not (row.state_pages and state and tokens):
        return row.page_tokens
    return max(row.page_tokens, 16 * math.ceil(state / (16 * min(tokens))))


def takes(weights: str, generation: str, row: EngineRow) -> bool:
    """Whether an engine multiplies weights of a known type on a generation of chips."""
    return generation in NEEDS[weights] or (weights == "fp8" and generation in row.unpacks_fp8)


def require_types(weights: str, cache: str, generation: str, chip: str, row: EngineRow) -> None:
    """Require that an engine multiplies these weights on a chip, and that the cache's type is priced: any chip can
    keep it in 8 bits, which are made 16 where they are read (vllm/config/cache.py: fp8_e5m2). Raises InputError."""
    if weights not in NEEDS:
        raise InputError("weights", weights, "is not a type that is priced", nearest(weights, NEEDS))
    if not takes(weights, generation, row):
        able = [each for each in NEEDS if takes(each, generation, row)]
        remedy = f"it has {', '.join(able)}" if able else "no type of these: choose another cluster"
        raise InputError("weights", weights, f"{chip} ({generation}) has no tensor cores for it", remedy)
    if cache not in CACHE_TYPES:
        raise InputError("kv", cache, "is not a type of cache that is priced", nearest(cache, CACHE_TYPES))
