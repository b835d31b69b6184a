"""The keys of Megatron-Bridge's ConfigContainer by the flags of Megatron-LM that they are (flags.toml)."""

import re
import tomllib
from pathlib import Path
from typing import Any

_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
KEYS: dict[str, str] = _TABLE["keys"]
"""Flag -> key with the same value."""
IMPLIED: tuple[str, ...] = tuple(_TABLE["implied"])
"""Flags without a key: in a ConfigContainer their meaning follows from other keys."""
INVERTED: dict[str, str] = _TABLE["inverted"]
"""Flag -> the key that has the opposite truth value."""
DTYPES = {"fp32": "torch.float32", "fp16": "torch.float16", "bf16": "torch.bfloat16", "fp8": "torch.uint8"}
"""Word of the optimizer's dtype flags -> word of the keys."""
TARGETS = {
    "qkv": ("linear_qkv",),
    "attention": ("linear_qkv", "linear_proj"),
    "linear": ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"),
}
TARGETS["experts"] = TARGETS["linear"]  # with peft.share_expert_adapters off
"""options.lora_targets -> peft.target_modules (peft/lora.py)."""
_PRECISION = re.compile(r"(?:(\w+)_)?(bf16|fp16)_(?:with_(\w+)_)?mixed")


def mixed_precision(name: str) -> dict[str, Any] | None:
    """Return the keys that a named recipe of mixed precision sets; None for a name that is not known."""
    match, recipes = _PRECISION.fullmatch(name.replace("-", "_")), _TABLE["mixed_precision"]
    if match is None:
        return None
    model, computed, scaling = match.groups()
    scaled = recipes.get(f"{model}_{scaling}", recipes.get(scaling)) if scaling else {}
    return None if scaled is None else recipes[computed] | scaled
