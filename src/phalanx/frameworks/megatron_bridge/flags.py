"""The keys of Megatron-Bridge's ConfigContainer by the flag of Megatron-LM that each is (flags.toml)."""

import tomllib
from pathlib import Path

_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
KEYS: dict[str, str] = _TABLE["keys"]
"""Flag -> key, for values that are the same in both."""
IMPLIED: tuple[str, ...] = tuple(_TABLE["implied"])
"""Flags without a key: what they say follows there from the others."""
INVERTED: dict[str, str] = _TABLE["inverted"]
"""Flag -> the key that is true where the flag is missing."""
DTYPES = {"fp32": "torch.float32", "fp16": "torch.float16", "bf16": "torch.bfloat16", "fp8": "torch.uint8"}
"""Word of the optimizer's dtype flags -> that of their keys."""
TARGETS = {
    "qkv": ("linear_qkv",),
    "attention": ("linear_qkv", "linear_proj"),
    "linear": ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"),
}
TARGETS["experts"] = TARGETS["linear"]  # with peft.share_expert_adapters off
"""options.lora_targets -> peft.target_modules (peft/lora.py)."""
