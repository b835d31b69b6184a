"""Models by name, as their papers or published config.json files describe them: models.toml.

A name that people use says how a model was tuned and quantised too: nvidia/DeepSeek-R1-0528-FP4 has the sizes of
deepseek-ai/DeepSeek-R1.
"""

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from phalanx.spec.errors import InputError, nearest
from phalanx.spec.model.spec import MODEL_FIELDS
from phalanx.spec.rows import Rows, require_fields

_REQUIRED = ("family", "vocab", "hidden", "layers", "heads", "ffn", "max_seq")


def _fields(name: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row's fields of ModelSpec, without its source. Raises ValueError for unknown or missing fields."""
    source = () if _is_published(name) else ("source",)
    require_fields(name, row, ("source", *MODEL_FIELDS), (*source, *_REQUIRED))
    return {field: value for field, value in row.items() if field != "source"}


def _is_published(name: str) -> bool:
    """Whether a row's name is a Hugging Face name, which is its source too."""
    return "/" in name


_FILE = Path(__file__).with_name("models.toml")
PRESETS: Mapping[str, dict[str, Any]] = Rows(_FILE, _fields, lambda name: not _is_published(name))
"""Every preset, by name; `families.complete` adds the fields that its family fixes."""
PUBLISHED: Mapping[str, dict[str, Any]] = Rows(_FILE, _fields, _is_published)
"""Published models by Hugging Face name, without the suffixes of tuning and quantisation."""

_TUNED = re.compile(
    r"-(instruct|thinking|reasoning|chat|base|it|preview|hf|sft|dpo|fp8(-kv)?|fp4|nvfp4|mxfp4|awq(-4bit)?|gptq(-4bit)?"
    r"|int[48](-autoround)?|(quantized\.)?w\d+a\d+|bf16|dynamic|terminus|exp|v[01]\.\d|\d{4}|\d+[ek])(?=-|$)"
)
_LONGER = ((re.compile(r"qwen3-.*-2507|qwen3-coder-30b|kimi-k2-(thinking|instruct-0905)", re.I), 262144),)
"""Names of models -> the tokens that they are trained for, more than the model whose sizes they have: their
config.json."""
_SAME = {
    r"llama3\.3": "llama3.1",
    "r1-671b": "deepseek-r1",
    r"(qwen[23](\.5)?)-vl": r"\1",
    r"qwen2-(?=0\.5b|1\.5b)": "qwen2.5-",
    r"(qwen\d(\.\d)?)-(coder|math)(?=-)": r"\1",
    "qwen3guard-(gen|stream)": "qwen3",
    "deepseek-r1-distill-qwen": "qwen2.5",
    "deepseek-r1-distill-llama": "llama3.1",
    r"vicuna-?(\d+b)-v1\.5.*": r"llama2-\1",
    r"(vicuna|alpaca)-?(\d+b).*": r"llama\2",
    r"zephyr-?7b.*": "mistral7b",
}
"""Names -> the models whose sizes they have."""


def _plain(name: str) -> str:
    """Return a model's name without its organisation, tuning and quantisation."""
    short = name.rstrip("/").rpartition("/")[2].lower().replace("_", "-")
    for was, now in _SAME.items():
        short = re.sub(was, now, re.sub(r"^(?:meta-)?([a-z]+)-(?=\d)", r"\1", short))
    while (cut := _TUNED.sub("", short)) != short:
        short = cut
    return short


@cache
def _by_plain() -> Mapping[str, str]:
    return {_plain(name): name for name in PUBLISHED}


def published(name: str) -> str | None:
    """Return a Hugging Face name as PUBLISHED has it; None if it is not known."""
    return name if name in PUBLISHED else _by_plain().get(_plain(name))


def of_longer_context(sizes: Mapping[str, Any], tokens: int) -> str | None:
    """Return the published model of these sizes with the shortest context of at least `tokens`, or None."""
    alike = [
        (row["max_seq"], name)
        for name, row in PUBLISHED.items()
        if row["max_seq"] >= tokens
        and all(row.get(field) == sizes.get(field) for field in (*_REQUIRED[:-1], "kv_heads"))
    ]
    return min(alike)[1] if alike else None


def preset(*names: str) -> dict[str, Any]:
    """Return the fields of the first of these names that is known, a preset's or a published model's;
    `families.complete` adds the rest. Raises InputError for unknown names."""
    for name in names:
        if name in PRESETS:
            return dict(PRESETS[name])
        if (known := published(name)) is not None:
            longer = [tokens for names, tokens in _LONGER if names.search(name)]
            return PUBLISHED[known] | ({"max_seq": longer[0]} if longer else {})
    near = nearest(names[0], PUBLISHED if _is_published(names[0]) else (*PRESETS, *_by_plain()))
    raise InputError("model.preset", names[0], "is not a model that Phalanx knows", near)
