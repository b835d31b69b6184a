"""Which framework a file belongs to, by its content, and its configuration. JSON, YAML and TOML are parsed as data;
a script or a command line is read as text; Python is not read at all."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from phalanx.frameworks import folder, shell, yaml_tables
from phalanx.frameworks.configuration import Config, Configuration
from phalanx.frameworks.parts import python_tables, reader
from phalanx.frameworks.registry import FRAMEWORKS
from phalanx.spec.documents import read_text, require_finite, require_shallow
from phalanx.spec.errors import InputError, nearest

LARGEST = 2**20
"""Bytes of the largest file that is read."""
MOST_KEYS = 5_000
"""Keys of the largest configuration that is read: what is near an unknown one is looked for among hundreds."""
READERS: dict[str, Callable[[Config, int | None], Configuration]] = {
    framework.reads: reader(framework) for framework in FRAMEWORKS.values() if framework.reads
}
"""The reader of each kind of configuration."""
_IN_PYTHON = next(framework for framework in FRAMEWORKS.values() if framework.python)


def read(paths: Sequence[Path], kind: str | None = None, world: int | None = None) -> tuple[Configuration, Config]:
    """Read a configuration from one file, or from TrainingArguments and their DeepSpeed file; return the tables too.

    `world`: ranks, where the file leaves them open. Raises InputError for a file that is none."""
    if kind is not None and kind not in READERS:
        raise InputError("--kind", kind, "is not a kind of configuration", nearest(kind, READERS))
    if len(paths) == 1 and paths[0].is_dir():
        return _folder(paths[0], kind, world)
    tables = [document(path) for path in paths]
    kinds = [kind if kind and i == 0 else kind_in(paths[i], table) for i, table in enumerate(tables)]
    config, chosen = tables[0], kinds[0]
    if len(tables) > 1:
        if len(tables) > 2 or "hf" not in kinds or "deepspeed" not in kinds:
            reason = "are no TrainingArguments with their DeepSpeed file"
            raise InputError("files", " ".join(map(str, paths)), reason, "name one file")
        arguments = tables[kinds.index("hf")]
        arguments = arguments if "args" in arguments else {"args": arguments}
        config, chosen = {**arguments, "deepspeed_json": tables[kinds.index("deepspeed")]}, "hf"
    if chosen is None:
        known = ", ".join(READERS)
        raise InputError("file", str(paths[0]), "is no configuration of a known framework", f"--kind, one of {known}")
    return READERS[chosen](config, world), config


def _folder(path: Path, kind: str | None, world: int | None) -> tuple[Configuration, Config]:
    """Read a folder with a program: its configuration, with the model and the sequence length of other files."""
    framework, config = folder.tables(path, document, kind_of)
    if kind not in (None, framework.reads):
        raise InputError("--kind", kind, f"{path} holds a configuration of {framework.reads}", "leave it out")
    c = READERS[framework.reads](config, world)
    seq = c.layout.seq or folder.sequence_in(path)
    model = c.spec or (folder.model_in(path) if framework.model_beside else None)
    return replace(c, layout=replace(c.layout, seq=seq), spec=model, open_model="" if model else c.open_model), config


def named(path: Path) -> tuple[Path, str]:
    """Split `config_registry.py::llama3_8b` into a file and the function of it that is meant."""
    file, _, function = str(path).partition(".py::")
    return (Path(f"{file}.py"), function) if function else (path, "")


def document(path: Path) -> dict[str, Any]:
    """Return a file's tables. Raises InputError where it cannot be read."""
    path, function = named(path)
    text = read_text(path, "file", LARGEST)
    suffix = path.suffix.lower()
    try:
        if suffix == ".py":
            value: Any = python_tables(_IN_PYTHON, text, str(path), function)
        elif suffix == ".toml":
            value = tomllib.loads(text)
        elif suffix == ".json" or text.lstrip().startswith("{"):
            value = json.loads(text)
        elif suffix in (".yaml", ".yml"):
            value = yaml_tables.parse(text)
        else:
            value = shell.read(text)
        require_finite(value)
        value = _texts(require_shallow(value))
    except RecursionError:
        raise InputError("file", str(path), "is nested too deep") from None
    except InputError:
        raise
    except (ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())[:160] or "it holds a number of more than 4,200 digits"
        raise InputError("file", str(path), f"cannot be parsed: {reason}") from error
    if not isinstance(value, dict):
        raise InputError("file", str(path), "is no table of settings")
    if (keys := _count(value)) > MOST_KEYS:
        raise InputError("file", str(path), f"has {keys:,} keys", f"at most {MOST_KEYS:,} are read")
    return value


def _texts(value: Any) -> Any:
    """Return tables whose keys are texts, and whose values are those of JSON: YAML and TOML have dates too."""
    if isinstance(value, dict):
        return {str(name): _texts(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_texts(inner) for inner in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _count(value: Any) -> int:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return (len(value) if isinstance(value, dict) else 0) + sum(map(_count, parts))


def kind_in(path: Path, config: Config) -> str | None:
    """Return the framework of a file's tables: one alone is configured in Python, others say it by their keys."""
    return _IN_PYTHON.reads if named(path)[0].suffix == ".py" else kind_of(config)


def kind_of(config: Config) -> str | None:
    """Return the framework that a configuration is of, by its keys; None if it is of none."""
    clues = sorted(
        ((c.order, i, c, f) for i, f in enumerate(FRAMEWORKS.values()) for c in f.clues), key=lambda x: x[:2]
    )
    return next((framework.reads for *_, clue, framework in clues if clue.holds(config)), None)
