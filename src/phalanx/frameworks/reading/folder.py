"""A folder with a program, as `phalanx export` writes it: what is read from which file.

train.sh                   arguments of Megatron-LM; for the others how many nodes and ranks start
training_arguments.json    TrainingArguments of a script under transformers' Trainer
config.json, train.py      the model of such a script, and its sequence length

The file that holds its configuration is that of a framework (`file` in facts.toml).
"""

import ast
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from phalanx.frameworks.framework import Config, Framework
from phalanx.frameworks.registry import FRAMEWORKS
from phalanx.spec.documents import read_text
from phalanx.spec.errors import InputError
from phalanx.spec.files.job_file import make_model
from phalanx.spec.model.spec import ModelSpec

_LARGEST = 2**20  # bytes of a train.py
Document = Callable[[Path], dict[str, Any]]
_START = "train.sh"
FILES = tuple(dict.fromkeys(f.file for f in FRAMEWORKS.values() if f.file))
"""Names of files with a configuration: a folder that is read has one of them."""


def tables(
    folder: Path, document: Document, kind_of: Callable[[Config], str | None]
) -> tuple[Framework, dict[str, Any]]:
    """Return the framework of a folder's configuration and its tables. Raises InputError where it has none."""

    def table(name: str) -> dict[str, Any]:
        path = folder / name
        return document(path) if path.is_file() else {}

    started, arguments = table(_START), table("training_arguments.json")
    parts = {name: started.get(name, {}) for name in ("launch", "env")}
    parts |= {"args": arguments, "training_arguments": arguments}
    for file in sorted(FILES, key=lambda name: name == _START):  # which every folder has
        config = table(file)
        if not config or (file == _START and not started.get("args")):
            continue
        sharing = [f for f in FRAMEWORKS.values() if f.file == file]
        kind = kind_of(config) if len(sharing) > 1 else None
        framework = next((f for f in sharing if f.reads == kind), sharing[-1])
        whole = {framework.file_as: config} if framework.file_as else config
        named = [n for n in parts if n == "env" or n in framework.companions]  # blanks are variables
        return framework, {**whole, **{name: parts[name] for name in named if parts[name] or name == "args"}}
    raise InputError("file", str(folder), f"is a folder without any of {', '.join(FILES)}", "name the file")


def is_started_by(path: Path) -> bool:
    """Whether a file starts the program of its folder, so that the folder is read: it is train.sh, or a launcher's
    file that names train.sh, and the configuration is a file next to it."""
    home = path.absolute().parent
    exported = any((home / name).is_file() for name in FILES if name != _START)
    if not exported or path.suffix == ".py" or (path.name in FILES and path.name != _START):
        return False
    if not path.is_file() or not (home / _START).is_file():
        return False
    return path.name == _START or _START in read_text(path, "file", _LARGEST)


def model_in(folder: Path) -> ModelSpec | None:
    """Return the model of a folder's config.json, None where it has none. Raises InputError."""
    path = folder / "config.json"
    return make_model({"config": str(path.absolute())}, Path())[0] if path.is_file() else None


def sequence_in(folder: Path) -> int | None:
    """Return the sequence length, the constant SEQ of train.py; None where it has none."""
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
