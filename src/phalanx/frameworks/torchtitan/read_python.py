"""torchtitan's configurations of 0.3, which are Python: functions that return a `Trainer.Config`. Nothing is run.

Keyword arguments of `....Config(...)`, names and attributes that a function sets (`config.training.steps = 10`),
calls of other functions of the file, numbers and lists are followed. Anything else (an environment variable, a call
of the library) leaves its key open.
"""

import ast
from pathlib import Path
from typing import Any

from phalanx.frameworks.reading.python import PythonFile
from phalanx.spec.errors import InputError, nearest

_OPEN = object()
"""A value that only a running program has."""
_DEPTH = 20
"""Calls inside calls at most."""
_CALLS = 1000
"""Calls at most: without a limit a chain of functions that each call the next ten times would not end."""


def tables(file: PythonFile) -> dict[str, Any] | None:
    """Return the tables of the configuration that a function of the file returns: of `file.function`, or of the only
    such function. None for a file without one. Raises InputError for several of which none is named."""
    module, name, function = file.module, file.name, file.function
    functions = {f.name: f for f in module.body if isinstance(f, ast.FunctionDef)}
    providers = [n for n, f in functions.items() if not n.startswith("_") and _returns_config(f, functions)]
    if not providers:
        return None
    if not function and len(providers) > 1:
        shown = ", ".join(providers[:4]) + (", ..." if len(providers) > 4 else "")
        raise InputError(
            "file", name, f"has {len(providers)} configurations ({shown})", f"name one: {name}::{providers[0]}"
        )
    if function and function not in functions:
        raise InputError("file", f"{name}::{function}", "has no such function", nearest(function, providers))
    result = _Reader(functions, _modules(module, Path(name))).value_of(function or providers[0])
    if not isinstance(result, dict):
        raise InputError("file", f"{name}::{function}", "returns no Trainer.Config that can be read")
    return result


def _returns_config(f: ast.FunctionDef, functions: dict[str, ast.FunctionDef]) -> bool:
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


class _Reader:
    """Follows the functions of one module. `modules`: as _modules returns them."""

    def __init__(self, functions: dict[str, ast.FunctionDef], modules: dict[str, str]) -> None:
        self.functions, self.modules, self.depth, self.calls = functions, modules, 0, 0

    def value_of(self, name: str, arguments: tuple[Any, ...] = (), named: dict[str, Any] | None = None) -> Any:
        """Return the result of a function; arguments that are not given have their defaults."""
        self.depth += 1
        self.calls += 1
        if self.depth > _DEPTH:
            raise InputError("file", name, "calls itself")
        if self.calls > _CALLS:
            raise InputError("file", name, f"is reached by more than {_CALLS:,} calls")
        takes = self.functions[name].args
        names = [a.arg for a in takes.args]
        defaults = dict(zip(names[len(names) - len(takes.defaults) :], takes.defaults, strict=True))
        values = {n: self._evaluate(x, {}) for n, x in defaults.items()}
        values |= dict(zip(names, arguments, strict=False)) | (named or {})
        values = {n: v for n, v in values.items() if v is not _OPEN}
        result: Any = _OPEN
        unknown: dict[str, str] = {}
        for line in self.functions[name].body:
            if isinstance(line, ast.Assign) and len(line.targets) == 1:
                target, value = line.targets[0], self._evaluate(line.value, values)
                if isinstance(target, ast.Name) and value is _OPEN and isinstance(line.value, ast.Call):
                    unknown[target.id] = ast.unparse(line.value.func)
                self._assign(target, value, values)
            elif isinstance(line, ast.Return) and line.value is not None:
                result = self._evaluate(line.value, values)
                if isinstance(line.value, ast.Name) and line.value.id in unknown:
                    reason = f"starts from {unknown[line.value.id]}(...), which the file does not hold"
                    raise InputError("file", name, reason, "name the file of that configuration")
                break
        self.depth -= 1
        return result

    def _assign(self, target: ast.expr, value: Any, values: dict[str, Any]) -> None:
        path: list[str] = []
        while isinstance(target, ast.Attribute):
            path.insert(0, target.attr)
            target = target.value
        if not isinstance(target, ast.Name):
            return
        at, names = values, [target.id, *path]
        for name in names[:-1]:
            at = at.setdefault(name, {})
            if not isinstance(at, dict):
                return
        if value is _OPEN:
            at.pop(names[-1], None)
        else:
            at[names[-1]] = value

    def _evaluate(self, x: ast.expr, values: dict[str, Any]) -> Any:
        if isinstance(x, ast.Constant):
            return x.value
        if isinstance(x, ast.Name):
            return values.get(x.id, _OPEN)
        if isinstance(x, ast.List | ast.Tuple):
            items = [self._evaluate(item, values) for item in x.elts]
            return [item for item in items if item is not _OPEN]
        if isinstance(x, ast.UnaryOp) and isinstance(x.op, ast.USub):
            value = self._evaluate(x.operand, values)
            return -value if isinstance(value, int | float) else _OPEN
        if isinstance(x, ast.BinOp) and isinstance(x.op, ast.Mult):
            pair = [self._evaluate(side, values) for side in (x.left, x.right)]
            return pair[0] * pair[1] if all(type(n) is int and abs(n) < 10**9 for n in pair) else _OPEN
        return self._call(x, values) if isinstance(x, ast.Call) else _OPEN

    def _call(self, x: ast.Call, values: dict[str, Any]) -> Any:
        """Return the result of a call of a configuration's class, the model's registry or a function of the file;
        _OPEN of others."""
        called = ast.unparse(x.func)
        last = called.rpartition(".")[2]
        given = {k.arg: self._evaluate(k.value, values) for k in x.keywords if k.arg}
        given = {name: value for name, value in given.items() if value is not _OPEN}
        if called in self.functions:
            return self.value_of(called, tuple(self._evaluate(a, values) for a in x.args), given)
        if last == "model_registry" and x.args:
            flavor = self._evaluate(x.args[0], values)
            return {"module": self.modules.get(last, ""), **({} if flavor is _OPEN else {"flavor": flavor}), **given}
        if last == "Config" and called != "Trainer.Config":
            owner = called.split(".")[-2] if "." in called else called
            kind = "class" if owner.endswith("AC") else "converter" if owner.endswith("Converter") else ""
            return {**({kind: f"{owner}.Config"} if kind else {}), **given}
        return given if last.endswith("Config") or last.startswith("default_") else _OPEN
