"""Mistakes in TrainingArguments, and between them and their DeepSpeed file."""

from __future__ import annotations

from collections.abc import Mapping

from phalanx.frameworks.configuration import Config, Configuration, count, truth
from phalanx.frameworks.lints import Found, Lint, argument


def _types_disagree(c: Config, x: Configuration) -> Found:
    inner = c.get("deepspeed_json")
    if not isinstance(inner, Mapping):
        return
    for name in ("fp16", "bf16"):
        table, stated = inner.get(name), truth(argument(c, name))
        enabled = truth(table.get("enabled")) if isinstance(table, Mapping) else None
        if stated is not None and enabled is not None and stated != enabled:
            yield f"deepspeed.{name}.enabled", f"is {enabled}, and TrainingArguments have {name}={stated}", '"auto"'


def _batches_disagree(c: Config, x: Configuration) -> Found:
    inner = c.get("deepspeed_json")
    if isinstance(inner, Mapping):
        for theirs, ours in (
            ("train_micro_batch_size_per_gpu", "per_device_train_batch_size"),
            ("gradient_accumulation_steps", "gradient_accumulation_steps"),
        ):
            a, b = count(inner.get(theirs)), count(argument(c, ours))
            if a and b and a != b:
                yield f"deepspeed.{theirs}", f"is {a}, and TrainingArguments have {b}", '"auto"'


def _both_engines(c: Config, x: Configuration) -> Found:
    if c.get("fsdp") and c.get("deepspeed"):
        yield "fsdp", "is requested together with deepspeed, and only one of them can shard", "one of the two"


def _both_halves(c: Config, x: Configuration) -> Found:
    on = [truth(argument(c, n)) for n in ("bf16", "fp16")]
    for table in (c, c.get("deepspeed_json")):
        if isinstance(table, Mapping) and all(
            isinstance(table.get(n), Mapping) and truth(table[n].get("enabled")) for n in ("fp16", "bf16")
        ):
            on = [True, True]
    if all(on):
        yield "bf16", "and fp16 are both on", "one of the two"


LINTS = (
    Lint("types-disagree", "shibing624/MedicalGPT#191", _types_disagree),
    Lint("batches-disagree", "huggingface/transformers#27830", _batches_disagree),
    Lint("two-engines", "axolotl-ai-cloud/axolotl#1388", _both_engines),
    Lint("both-halves", "Snowflake-AI-Research/Arctic-Platform#78", _both_halves),
)
