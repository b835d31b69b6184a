"""A folder with a program, such as `phalanx export` writes: which of its files say what.

train.sh                 arguments of Megatron-LM; for the others how many nodes and ranks start
phalanx_plan.py          torchtitan's configuration, read as text
ds_config.json           DeepSpeed's table, with training_arguments.json, config.json (the model) and train.py
accelerate.yaml          accelerate's, with the same
config.yml               MaxText's
config.yaml              nanotron's, or a ConfigContainer of Megatron-Bridge
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from phalanx.frameworks.megatron_bridge import read as bridge
from phalanx.spec.documents import read_text
from phalanx.spec.errors import InputError
from phalanx.spec.files.job_file import make_model
from phalanx.spec.model.spec import ModelSpec

_LARGEST = 2**20  # bytes of a train.py
Document = Callable[[Path], dict[str, Any]]
FILES = ("train.sh", "ds_config.json", "accelerate.yaml", "config.yaml", "config.yml", "phalanx_plan.py")
"""Names of which a folder with a configuration has one."""


def tables(folder: Path, document: Document) -> tuple[str, dict[str, Any]]:
    """Return the kind of a folder's configuration and its tables. Raises InputError where it has none."""

    def of(name: str) -> dict[str, Any]:
        path = folder / name
        return document(path) if path.is_file() else {}

    started = of("train.sh")
    launch, env = started.get("launch", {}), started.get("env", {})
    arguments = of("training_arguments.json")
    if (folder / "phalanx_plan.py").is_file():
        return "torchtitan", of("phalanx_plan.py")
    if deepspeed := of("ds_config.json"):
        return "hf", {"launch": launch, "env": env, "args": arguments, "deepspeed_json": deepspeed}
    if accelerate := of("accelerate.yaml"):
        return "accelerate", {**accelerate, **({"training_arguments": arguments} if arguments else {})}
    if config := of("config.yaml"):
        return ("nemo", {**config, "launch": launch}) if bridge.is_container(config) else ("nanotron", config)
    if maxtext := of("config.yml"):
        return "maxtext", {**maxtext, **({"env": env} if env else {})}
    if started.get("args"):
        return "megatron", started
    raise InputError("file", str(folder), f"is a folder without any of {', '.join(FILES)}", "name the file")


def model_in(folder: Path) -> ModelSpec | None:
    """Return the model of a folder's config.json, None where it has none. Raises InputError."""
    path = folder / "config.json"
    return make_model({"config": str(path.absolute())}, Path())[0] if path.is_file() else None


def sequence_in(folder: Path) -> int | None:
    """Return the number that train.py calls SEQ; None where it has none."""
    path = folder / "train.py"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of an escape that is none
            body = ast.parse(read_text(path, "file", _LARGEST)).body if path.is_file() else []
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    for line in body:
        if isinstance(line, ast.Assign) and isinstance(line.value, ast.Constant):
            named = [t.id for t in line.targets if isinstance(t, ast.Name)]
            if named == ["SEQ"] and isinstance(line.value.value, int):
                return line.value.value
    return None
