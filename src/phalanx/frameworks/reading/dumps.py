"""Settings as programs print or keep them: the argument dump of a log, and W&B's config.yaml.

Megatron-LM prints `  name ............ value` for every argument (megatron/training/arguments.py: `_print_args`),
torchtitan `Running with args: {...}` (torchtitan/config), NeMo 1 its YAML (exp_manager), transformers
`TrainingArguments(` with a line for each, DeepSpeed its file as `json = {...}` (deepspeed/runtime/config.py:
print_user_config).
"""

import ast
import json
import re
from collections.abc import Mapping
from textwrap import dedent
from typing import Any

from phalanx.frameworks.tables import documents

_DOTTED = re.compile(r"^(?:\[?\w[\w\]]*[:\]]\s*)?\s*([A-Za-z_]\w*) \.{3,} ?(\S.*)$", re.M)
"""An argument; a line without a value, `training ...`, says what the program does next."""
_TRAINER = re.compile(r"^(?:.*\b)?(?:\w*TrainingArguments|\w*Config)\($\n(?P<body>(?:^\s*\w+=.*\n?)+)", re.M)
_TORCHTITAN = re.compile(r"Running with (?:args|configs?): (\{.*)")
_NEMO = re.compile(r"^\[NeMo I [^\]]*\]\s*$\n(?P<body>(?:^(?: {4}.*)?\n)+)", re.M)
_ENGINE = re.compile(r"^.*\bjson = (?P<body>\{\s*\n.*?^\})", re.M | re.S)
_PADDED = re.compile(r"> padded vocab \(size: \d+\) with \d+ dummy tokens \(new size: (\d{1,9})\)")
_FEWEST = 10
"""Lines of settings from which a text is taken for a dump."""


def settings_in_log(text: str) -> dict[str, Any]:
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


def _of_flagscale(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return Megatron's flags of FlagScale's tables, which may nest them at will (flagscale/runner/runner_train.py:
    _get_args_megatron); empty for other tables."""
    parts = [config.get(name) for name in ("system", "model", "data")]
    if not isinstance(parts[0], Mapping) or "tensor_model_parallel_size" not in parts[0]:
        return {}

    def flags(table: Mapping[str, Any]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for name, value in table.items():
            if isinstance(value, Mapping):
                result |= flags(value)
            elif value is not False:
                result[str(name).replace("_", "-")] = value
        return result

    return {name: value for part in parts if isinstance(part, Mapping) for name, value in flags(part).items()}


def flagscale_launch(config: Mapping[str, Any]) -> tuple[str, dict[str, Any], dict[str, Any]] | None:
    """Return the file of settings that FlagScale's experiment names, how its ranks are started, and their environment
    (flagscale/run.py: hydra takes train/NAME.yaml for the default `train: NAME`); None for other tables."""
    experiment, defaults = config.get("experiment"), config.get("defaults")
    if not isinstance(experiment, Mapping) or not isinstance(defaults, list):
        return None
    task, runner, variables = (_table(experiment.get(name)) for name in ("task", "runner", "envs"))
    name = next((str(d["train"]) for d in defaults if isinstance(d, Mapping) and d.get("train")), None)
    if name is None or task.get("backend") != "megatron":
        return None
    launch = {n: runner[n] for n in ("nnodes", "nproc_per_node") if isinstance(runner.get(n), int)}
    return f"train/{name}.yaml", launch, {str(n): str(value) for n, value in variables.items()}


def _table(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _value(word: str) -> Any:
    value = _literal(word.strip())
    return word.strip() if value is _NONE else value


def _literal(text: str) -> Any:
    """Return the number, text, list or table that a text spells; _NONE where it spells none."""
    for parse in (json.loads, ast.literal_eval):
        try:
            return parse(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
    return _NONE


_NONE = object()


def unwrapped_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of W&B's config.yaml, where each is {desc, value}, of Megatron-LM's tests, where keys are
    flags (tests/functional_tests/test_cases), and of FlagScale's files; other tables unchanged."""
    if isinstance(flags := config.get("MODEL_ARGS"), Mapping):
        args = {name.removeprefix("--"): value for name, value in flags.items() if value is not False}
        return {"launch": {}, "env": config.get("ENV_VARS") or {}, "args": args}
    if flags := _of_flagscale(config):
        return {"launch": {}, "env": {}, "args": flags}
    described = {
        k: v for k, v in config.items() if isinstance(v, Mapping) and {"value"} <= set(v) <= {"desc", "value"}
    }
    if not described or len(described) < len(config) - 1:
        return dict(config)
    return {k: v["value"] for k, v in described.items() if k != "_wandb"}
