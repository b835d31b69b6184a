"""Settings as programs print or keep them: the argument dump of a log, and W&B's config.yaml.

Megatron-LM prints `  name ............ value` for every argument (megatron/training/arguments.py: `_print_args`),
torchtitan `Running with args: {...}` (torchtitan/config), NeMo 1 its YAML (exp_manager), transformers
`TrainingArguments(` with a line for each, DeepSpeed its file as `json = {...}` (deepspeed/runtime/config.py:
print_user_config).
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from textwrap import dedent
from typing import Any

from phalanx.frameworks.tables import documents

_DOTTED = re.compile(r"^(?:\[?\w[\w\]]*[:\]]\s*)?\s*([A-Za-z_]\w*) \.{3,} ?(.*)$", re.M)
_TRAINER = re.compile(r"^(?:.*\b)?(?:\w*TrainingArguments|\w*Config)\($\n(?P<body>(?:^\s*\w+=.*\n?)+)", re.M)
_TORCHTITAN = re.compile(r"Running with (?:args|configs?): (\{.*)")
_NEMO = re.compile(r"^\[NeMo I [^\]]*\]\s*$\n(?P<body>(?:^(?: {4}.*)?\n)+)", re.M)
_ENGINE = re.compile(r"^.*\bjson = (?P<body>\{\s*\n.*?^\})", re.M | re.S)
_PADDED = re.compile(r"> padded vocab \(size: \d+\) with \d+ dummy tokens \(new size: (\d{1,9})\)")
_FEWEST = 10
"""Lines that make a dump of a text."""


def dumped(text: str) -> dict[str, Any]:
    """Return the settings that a log prints; empty where it prints none."""
    lines = _DOTTED.findall(text)
    if len(lines) >= _FEWEST:
        padded = {"padded_vocab_size": match[1]} if (match := _PADDED.search(text)) else {}
        return padded | {n: value for n, word in lines if (value := _value(word)) is not None and value is not False}
    if match := _TRAINER.search(text):
        pairs = (line.strip().rstrip(",").partition("=") for line in match["body"].splitlines())
        return {name: value for name, _, word in pairs if (value := _value(word)) is not None}
    if match := _ENGINE.search(text):
        value = _literal(match["body"])
        return value if isinstance(value, dict) else {}
    for match in _NEMO.finditer(text):
        tables = documents(dedent(match["body"]), ".yaml", "the log")
        if tables and isinstance(tables[0], dict) and {"trainer", "model"} <= tables[0].keys():
            return tables[0]
    if match := _TORCHTITAN.search(text):
        value = _literal(match[1].strip())
        return value if isinstance(value, dict) else {}
    return {}


def _value(word: str) -> Any:
    value = _literal(word.strip())
    return word.strip() if value is _NONE else value


def _literal(text: str) -> Any:
    """Return the number, text, list or table that a text spells; the text's own mark where it spells none."""
    for parse in (json.loads, ast.literal_eval):
        try:
            return parse(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
    return _NONE


_NONE = object()


def logged(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of W&B's config.yaml, in which each stands as {desc, value}, and of Megatron-LM's tests,
    whose keys are flags (tests/functional_tests/test_cases); other tables unchanged."""
    if isinstance(flags := config.get("MODEL_ARGS"), Mapping):
        args = {name.removeprefix("--"): value for name, value in flags.items() if value is not False}
        return {"launch": {}, "env": config.get("ENV_VARS") or {}, "args": args}
    values = {
        k: v["value"]
        for k, v in config.items()
        if isinstance(v, Mapping) and set(v) <= {"desc", "value"} and "value" in v
    }
    return (
        {k: v for k, v in values.items() if k != "_wandb"}
        if values and len(values) >= len(config) - 1
        else dict(config)
    )
