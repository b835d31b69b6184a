"""Where the weights of named models are published, for launch lines; and the preset of a published model."""

from __future__ import annotations

import re

from phalanx.serving.plan_file import ServingPlan
from phalanx.spec.errors import InputError

_PUBLISHED = {
    "gpt2": "openai-community/gpt2",
    "gpt2-medium": "openai-community/gpt2-medium",
    "gpt2-large": "openai-community/gpt2-large",
    "gpt2-xl": "openai-community/gpt2-xl",
    "gpt-neox-20b": "EleutherAI/gpt-neox-20b",
    "llama2-7b": "meta-llama/Llama-2-7b-hf",
    "llama2-13b": "meta-llama/Llama-2-13b-hf",
    "llama2-70b": "meta-llama/Llama-2-70b-hf",
    "llama3-8b": "meta-llama/Meta-Llama-3-8B",
    "llama3-70b": "meta-llama/Meta-Llama-3-70B",
    "llama3-405b": "meta-llama/Llama-3.1-405B",
    "mistral-7b": "mistralai/Mistral-7B-v0.1",
    "qwen2-7b": "Qwen/Qwen2-7B",
    "qwen3-32b": "Qwen/Qwen3-32B",
    "mixtral-8x7b": "mistralai/Mixtral-8x7B-v0.1",
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
    "deepseek-v2": "deepseek-ai/DeepSeek-V2",
    "deepseek-v3": "deepseek-ai/DeepSeek-V3",
    "gpt-oss-20b": "openai/gpt-oss-20b",
    "gpt-oss-120b": "openai/gpt-oss-120b",
}
_OWN_FP8 = ("deepseek-v3",)  # published in fp8


def weights_of(plan: ServingPlan) -> tuple[str, str]:
    """Return (what to load, a note for the user or nothing).

    A preset's published weights, or the folder of the config.json that was planned for. Raises InputError for a name
    that a command line would take for an option.
    """
    name = plan.model_name
    if name.startswith("-"):
        raise InputError("model_name", name, "would be read as an option", "name a preset, or the config.json's path")
    where = _PUBLISHED.get(name, name.removesuffix("/config.json") if name.endswith("config.json") else name)
    if plan.weights in ("int4", "nvfp4"):
        return where, f"{plan.weights} needs a checkpoint that was quantised so: put its name for {where}"
    if name not in _PUBLISHED and not name.endswith("config.json"):
        return where, f"{name} has no published weights that are known here: put your checkpoint's folder for it"
    return where, ""


_TUNED = re.compile(
    r"-(instruct|chat|it|hf|base|dynamic|distill|bf16|v0\.[0-9]|0324|0528|2507)(?=-|$)|"
    r"-(fp8|awq|gptq|int4|nvfp4|fp4|w4a16|w8a8)(-.*)?$"
)
"""Parts of a checkpoint's name that leave the network as it is."""
_SAME = {"deepseek-r1": "deepseek-v3", "deepseek-v3.1": "deepseek-v3", "qwen2.5-7b": "qwen2-7b"}
"""Models with the sizes of a preset of another name."""


def preset_of(checkpoint: str) -> str:
    """Return the preset with the network of a published checkpoint, such as llama3-70b for
    meta-llama/Llama-3.3-70B-Instruct; empty if there is none."""
    for preset, published in _PUBLISHED.items():
        if checkpoint.lower() in (preset, published.lower()):
            return preset
    name = checkpoint.rstrip("/").rpartition("/")[2].lower()[:200]
    while (shorter := _TUNED.sub("", name)) != name:
        name = shorter
    name = re.sub(r"^(?:meta-)?llama-?(\d)(?:\.[0-9])?-", r"llama\1-", name)
    name = _SAME.get(name, name)
    return name if name in _PUBLISHED else ""


def quantised_on_load(plan: ServingPlan) -> bool:
    """Whether the engine must make fp8 of weights that are published in 16 bits."""
    return plan.weights == "fp8" and plan.model_name not in _OWN_FP8
