"""Serving engines: ONE table, a row holding how each one schedules and what it can be asked for.

vLLM 0.33 (v1 scheduler): decodes first, then chunks of prompts, in one step; a full cache preempts by recomputation.
SGLang 0.5.23: prompts run in steps of their own unless --enable-mixed-chunk is given. TensorRT-LLM 1.2
(trtllm-serve): one step for both; a request begins only when its cache is sure (GUARANTEED_NO_EVICT).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from phalanx.spec.errors import InputError, nearest
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
    int4: bool
    """Whether it serves 4-bit integer weights (AWQ, GPTQ) on this path."""


ENGINES = {
    row.name: row
    for row in (
        EngineRow("vllm", "vLLM", True, False, 16, "any", "all", True),
        EngineRow("sglang", "SGLang", False, False, 1, "any", "any", True),
        EngineRow("trtllm", "TensorRT-LLM", True, True, 32, "all", "any", True),
    )
}
"""Every serving engine that Phalanx knows."""

MULTIPLIED_AS = {
    weights: NUMBER_FORMATS[name]
    for weights, name in (("bf16", "bfloat16"), ("fp8", "float8"), ("int4", "bfloat16"), ("nvfp4", "nvfp4"))
}
"""The format in which products take each type of weights: int4 is unpacked to 16 bits before."""
NEEDS = {weights: f.generations for weights, f in MULTIPLIED_AS.items()}
"""Generations of chips whose tensor cores take a type of weights."""


def engine(name: str) -> EngineRow:
    """Return the row of an engine. Raises InputError for an unknown name."""
    if name not in ENGINES:
        raise InputError("engine", name, "is not a serving engine that Phalanx knows", nearest(name, ENGINES))
    return ENGINES[name]


def require_types(weights: str, cache: str, generation: str, chip: str) -> None:
    """Require that a chip computes with these types. Raises InputError."""
    for option, name in (("weights", weights), ("kv", cache)):
        if name not in NEEDS:
            raise InputError(option, name, "is not a type that is priced", nearest(name, NEEDS))
        if generation not in NEEDS[name]:
            able = [each for each in NEEDS if generation in NEEDS[each]]
            remedy = f"it has {', '.join(able)}" if able else "no type of these: choose another cluster"
            raise InputError(option, name, f"{chip} ({generation}) has no tensor cores for it", remedy)
