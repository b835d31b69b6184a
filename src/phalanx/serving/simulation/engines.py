"""Serving engines: ONE table, with a row for the scheduling and the abilities of each.

vLLM 0.33 (v1 scheduler): decoding first, then chunks of prompts, in one step; a full cache preempts by recomputation.
SGLang 0.5.23: prompts run in separate steps, except with --enable-mixed-chunk. TensorRT-LLM 1.2 (trtllm-serve): one
step for both; a request begins only when the cache has room to its end (GUARANTEED_NO_EVICT).
"""

import math
from dataclasses import dataclass
from typing import Literal

from phalanx.cost.memory.cache import LayerCache, layer_cache
from phalanx.serving.cost.step import INPUT_BYTES, STATE_BYTES
from phalanx.spec.errors import InputError, nearest
from phalanx.spec.model.blocks.lowering import architecture
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.number_formats import NUMBER_FORMATS


@dataclass(frozen=True)
class EngineRow:
    """The scheduling and the abilities of an engine."""

    name: str
    """Its name in questions."""
    title: str
    mixed: bool
    """Whether prompts and sequences that decode share a step."""
    reserve: bool
    """Whether a request waits until the cache has room to its end, so that none is preempted."""
    page_tokens: int
    """Default tokens of a page of the cache."""
    attention_dp: Literal["any", "all"]
    """any: groups of attention data parallelism may be tensor parallel; all: they are single GPUs."""
    experts: Literal["any", "all"]
    """any: experts may be split by ep and tp together; all: by one of them."""
    state_pages: bool
    """Whether a page of the cache is at least as large as a layer's recurrent state."""
    state_reuse: str
    """A note on the reuse of prefixes by a model with recurrent states."""
    unpacks_fp8: tuple[str, ...] = ()
    """Generations without 8-bit products on which it expands fp8 weights to 16 bits for products."""


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
"""docs.vllm.ai/en/latest/features/quantization/fp8: weight-only on Ampere, with Marlin's kernels, as in SGLang
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
"""Type of weights -> the format of its products: int4 and mxfp4 are expanded to 16 bits."""
NEEDS = {weights: f.generations for weights, f in MULTIPLIED_AS.items()}
"""Type of weights -> generations of chips with tensor cores for its products."""

CACHE_TYPES = ("bf16", "fp8")
"""Types of the cache that are priced."""


def engine(name: str) -> EngineRow:
    """Return the row of an engine. Raises InputError for an unknown name."""
    if name not in ENGINES:
        raise InputError("engine", name, "is not a serving engine that Phalanx knows", nearest(name, ENGINES))
    return ENGINES[name]


def state_pages(row: EngineRow, model: ModelSpec, room: float, tp: int, pp: int) -> int | None:
    """Return the pages of a cache of `room` bytes of a GPU, one of which each sequence that decodes needs for its
    recurrent states; None: the engine's pages hold none.

    A page has a place in as many layers as its group, and groups are as large as the smallest number of layers of a
    kind, or the largest if that is less than half as much again (vllm/v1/core/kv_cache_utils.py,
    _get_kv_cache_groups_uniform_page_size). Each place is as large as a layer's state."""
    layers: dict[LayerCache, int] = {}
    for block, count in architecture(model).kinds.items():
        for sublayer in block.sublayers:
            if (kept := layer_cache(sublayer)) is not None:
                layers[kept] = layers.get(kept, 0) + count
    state = max((STATE_BYTES * k.state + INPUT_BYTES * k.inputs for k in layers), default=0.0)
    if not (row.state_pages and state):
        return None
    few, many = min(layers.values()), max(layers.values())
    group = many if many < 1.5 * few else few
    return int(room / (state / tp * group / pp))


def page_tokens(row: EngineRow, model: ModelSpec, cache_bytes: float) -> int:
    """Return the tokens of a page. Where pages hold recurrent states too, a page is as large as a layer's state, in
    multiples of 16 tokens (vLLM 0144dd5, model_executor/models/config.py, HybridAttentionMambaModelConfig).
    `cache_bytes`: of an element."""
    kept = [k for block in architecture(model).kinds for s in block.sublayers if (k := layer_cache(s)) is not None]
    state = max((STATE_BYTES * k.state + INPUT_BYTES * k.inputs for k in kept), default=0.0)
    tokens = [cache_bytes * k.token for k in kept if k.token]
    if not (row.state_pages and state and tokens):
        return row.page_tokens
    return max(row.page_tokens, 16 * math.ceil(state / (16 * min(tokens))))


def supports(weights: str, generation: str, row: EngineRow) -> bool:
    """Whether an engine supports weights of a known type on a generation of chips."""
    return generation in NEEDS[weights] or (weights == "fp8" and generation in row.unpacks_fp8)


def require_types(weights: str, cache: str, generation: str, chip: str, row: EngineRow) -> None:
    """Require that an engine supports these weights on a chip, and that the type of the cache is priced: any chip can
    keep it in 8 bits, which are expanded to 16 on reading (vllm/config/cache.py: fp8_e5m2). Raises InputError."""
    if weights not in NEEDS:
        raise InputError("weights", weights, "is not a type that is priced", nearest(weights, NEEDS))
    if not supports(weights, generation, row):
        able = [each for each in NEEDS if supports(each, generation, row)]
        remedy = f"it has {', '.join(able)}" if able else "no type of these: choose another cluster"
        raise InputError("weights", weights, f"{chip} ({generation}) has no tensor cores for it", remedy)
    if cache not in CACHE_TYPES:
        raise InputError("kv", cache, "is not a type of cache that is priced", nearest(cache, CACHE_TYPES))
