"""Where the weights of named models are published, for launch lines."""

from __future__ import annotations

from phalanx.serving.plan_file import ServingPlan
from phalanx.spec.errors import InputError
from phalanx.spec.model.presets import published

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
    if name not in _PUBLISHED and published(name) is None and not name.endswith("config.json"):
        return where, f"{name} has no published weights that are known here: put your checkpoint's folder for it"
    return where, ""


def quantised_on_load(plan: ServingPlan) -> bool:
    """Whether the engine must make fp8 of weights that are published in 16 bits."""
    return plan.weights == "fp8" and plan.model_name not in _OWN_FP8
