"""Mistakes in TrainingArguments, and between them and their DeepSpeed file."""

from collections.abc import Mapping

from phalanx.frameworks.configuration import Config, Configuration
from phalanx.frameworks.lints import Lint, Mistakes, argument
from phalanx.frameworks.values import truth


def _types_disagree(c: Config, x: Configuration) -> Mistakes:
    """A half type that arguments name, and another that DeepSpeed's or accelerate's file has."""
    inner, launched = c.get("deepspeed_json"), c.get("accelerate")
    mixed = str(launched.get("mixed_precision") or "") if isinstance(launched, Mapping) else ""
    own = next((name for name in ("bf16", "fp16") if truth(argument(c, name))), None)
    if own and mixed in ("bf16", "fp16", "no") and mixed != own:
        yield "mixed_precision", f"is {mixed}, and TrainingArguments have {own}", own
    if not isinstance(inner, Mapping):
        return
    for name in ("fp16", "bf16"):
        table, stated = inner.get(name), truth(argument(c, name))
        enabled = truth(table.get("enabled")) if isinstance(table, Mapping) else None
        if stated is not None and enabled is not None and stated != enabled:
            yield f"deepspeed.{name}.enabled", f"is {enabled}, and TrainingArguments have {name}={stated}", '"auto"'


def _both_engines(c: Config, x: Configuration) -> Mistakes:
    if c.get("fsdp") and c.get("deepspeed"):
        yield "fsdp", "is requested together with deepspeed, and only one of them can shard", "one of the two"


def _both_halves(c: Config, x: Configuration) -> Mistakes:
    on = [truth(argument(c, n)) for n in ("bf16", "fp16")]
    for table in (c, c.get("deepspeed_json")):
        if isinstance(table, Mapping) and all(
            isinstance(table.get(n), Mapping) and truth(table[n].get("enabled")) for n in ("fp16", "bf16")
        ):
            on = [True, True]
    if all(on):
        yield "bf16", "and fp16 are both on", "one of the two"


_QUANTIZATION_KEYS = ("quantization_method", "quantization_type", "double_quantization")


def _without_bits(c: Config, x: Configuration) -> Mistakes:
    """LLaMA-Factory's base (ff6d4d12, src/llamafactory/model/model_utils/quantization.py:177)."""
    named = next((name for name in _QUANTIZATION_KEYS if argument(c, name) is not None), None)
    if named and argument(c, "quantization_bit") is None:
        yield named, "quantises nothing without quantization_bit: the base stays in 16 bits", "quantization_bit: 4"


LINTS = (
    Lint("without-bits", "hiyouga/LLaMA-Factory#10367", _without_bits),
    Lint("types-disagree", "shibing624/MedicalGPT#191", _types_disagree),
    Lint("two-engines", "axolotl-ai-cloud/axolotl#1388", _both_engines),
    Lint("both-halves", "Snowflake-AI-Research/Arctic-Platform#78", _both_halves),
)
