"""torchtitan's configurations of 0.3, which are Python: functions that return a `Trainer.Config`. Nothing is run.

What such a function makes is followed as any program is (reading/python.py). Keyword arguments of `....Config(...)`
and attributes that are set later (`config.training.steps = 10`) are the keys of the tables; what only a run has (an
environment variable, a call of the library) leaves its key open.
"""

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phalanx.frameworks.reading.python import PythonFile, PythonObject, is_open, require_few, result_of
from phalanx.spec.errors import InputError, nearest


def tables(file: PythonFile) -> dict[str, Any] | None:
    """Return the tables of the configuration that a function of the file returns: of `file.function`, or of the only
    such function. None for a file without one. Raises InputError for several of which none is named."""
    module, name, function = file.module, file.name, file.function
    functions = {f.name: f for f in module.body if isinstance(f, ast.FunctionDef)}
    providers = [n for n, f in functions.items() if not n.startswith("_") and _returns_config(f)]
    if not providers:
        return None
    if not function and len(providers) > 1:
        shown = ", ".join(providers[:4]) + (", ..." if len(providers) > 4 else "")
        raise InputError(
            "file", name, f"has {len(providers)} configurations ({shown})", f"name one: {name}::{providers[0]}"
        )
    if function and function not in functions:
        raise InputError("file", f"{name}::{function}", "has no such function", nearest(function, providers))
    config = result_of(module, function or providers[0])
    require_few(config, name)
    result = _table(config, _modules(module, Path(name)))
    if isinstance(result, dict):
        return result
    if isinstance(config, PythonObject):
        reason = f"starts from {config.name}(...), which the file does not hold"
        raise InputError("file", function or providers[0], reason, "name the file of that configuration")
    raise InputError("file", f"{name}::{function}", "returns no Trainer.Config that can be read")


def _returns_config(f: ast.FunctionDef) -> bool:
    """Whether a function returns a Trainer.Config, by its signature or its return statements."""
    if f.returns is not None and ast.unparse(f.returns).endswith("Trainer.Config"):
        return True
    returned = [x.value for x in ast.walk(f) if isinstance(x, ast.Return) and isinstance(x.value, ast.Call)]
    return any(ast.unparse(call.func).endswith("Trainer.Config") for call in returned)


def _modules(module: ast.Module, path: Path) -> dict[str, str]:
    """Return imported name -> last part of the module that it is from, such as llama3 of torchtitan.models.llama3."""
    result: dict[str, str] = {}
    for line in module.body:
        if isinstance(line, ast.ImportFrom):
            package = path.absolute().parent.name if line.level else ""
            source = (line.module or package).rpartition(".")[2]
            result |= {a.asname or a.name: source for a in line.names}
    return result


_OPEN = object()
"""A value that only a running program has."""


def _table(value: Any, modules: Mapping[str, str]) -> Any:
    """Return a value, objects of configuration classes, of the model registry and of default_...() in it as tables;
    _OPEN for others. `modules`: as _modules returns them."""
    if isinstance(value, list):
        return [inner for item in value if (inner := _table(item, modules)) is not _OPEN]
    if isinstance(value, dict):
        return {name: inner for name, item in value.items() if (inner := _table(item, modules)) is not _OPEN}
    if not isinstance(value, PythonObject):
        return _OPEN if is_open(value) else value
    fields = _table(value.fields, modules)
    if value.last == "model_registry" and value.positional:
        flavor = _table(value.positional[0], modules)
        return {"module": modules.get(value.last, ""), **({} if flavor is _OPEN else {"flavor": flavor}), **fields}
    if value.last == "Config" and value.name != "Trainer.Config":
        owner = value.name.split(".")[-2] if "." in value.name else value.name
        kind = "class" if owner.endswith("AC") else "converter" if owner.endswith("Converter") else ""
        return {**({kind: f"{owner}.Config"} if kind else {}), **fields}
    # An attribute that is set creates an object without a name.
    return fields if value.last.endswith("Config") or value.last.startswith("default_") or not value.name else _OPEN
