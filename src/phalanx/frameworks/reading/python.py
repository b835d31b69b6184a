"""What a Python program makes, followed statement by statement and never run.

What is followed: assignments, attributes that are set (`recipe.trainer.devices = 8`), calls of the file's own
functions, numbers, texts, lists and dictionaries, an argument parser's defaults, `if` where its test is known. A call
of anything else makes a PythonObject, of the call's name with its arguments as fields. A value that only a run has is
a text that begins with `$`, as an unset variable of a shell is.
"""

import ast
import operator
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from phalanx.spec.errors import InputError

_DEEPEST, _MOST_STATEMENTS = 20, 20_000
"""Calls inside calls, and statements in all, that are followed."""
_LONGEST = 60
_BINARY = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
}
_SUPPORTED = ("is_bfloat16_supported", "is_bf16_supported", "is_torch_bf16_gpu_available")
_LARGEST = 10**12
_COMPARED = {ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Is: operator.is_, ast.IsNot: operator.is_not}


@dataclass
class PythonObject:
    """The result of a call. `name`: of the function, with dots; `fields`: named arguments, and attributes that were
    set later; `line`: of the call."""

    name: str
    positional: list[Any] = field(default_factory=list)
    fields: dict[str, Any] = field(default_factory=dict)
    line: int = 0

    @property
    def last(self) -> str:
        """Its name without modules and classes around it."""
        return self.name.rpartition(".")[2]

    def tables(self) -> dict[str, Any]:
        """Return its fields, other objects as tables in it."""
        return {name: plain(value) for name, value in self.fields.items()}


def plain(value: Any) -> Any:
    """Return a value with objects as tables; an object without fields as its name."""
    if isinstance(value, PythonObject):
        return value.tables() or value.last
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return {str(n): plain(inner) for n, inner in value.items()} if isinstance(value, dict) else value


@dataclass
class FollowedProgram:
    """The objects that a program made, in order, and what was assumed."""

    objects: list[PythonObject] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def named(self, *ends: str) -> list[PythonObject]:
        """Return the objects whose last name is one of `names`; `*Trainer` is any name that ends so."""
        return [m for m in self.objects if any(m.last == e or (e[0] == "*" and m.last.endswith(e[1:])) for e in ends)]


@dataclass(frozen=True)
class PythonFile:
    """A file in Python. `function`: the function that makes the configuration, "" for the whole program."""

    module: ast.Module
    name: str
    function: str = ""

    @cached_property
    def program(self) -> FollowedProgram:
        """What it makes. Raises InputError for one that cannot be followed."""
        return follow(self.module)


def parsed(text: str, name: str) -> ast.Module:
    """Return a file's syntax tree. Raises InputError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of an escape that is none
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InputError("file", name, f"cannot be parsed: {type(error).__name__}") from error


def declared(module: ast.Module) -> dict[str, Any]:
    """Return the defaults that a file's dataclasses declare for their fields: those that are numbers or texts."""
    defaults: dict[str, Any] = {}
    for owner in (x for x in module.body if isinstance(x, ast.ClassDef)):
        if not any(ast.unparse(by).partition("(")[0].endswith("dataclass") for by in owner.decorator_list):
            continue
        for item in (x for x in owner.body if isinstance(x, ast.AnnAssign) and isinstance(x.target, ast.Name)):
            value = item.value
            if isinstance(value, ast.Call):  # field(default=512)
                value = next((k.value for k in value.keywords if k.arg == "default"), None)
            if isinstance(value, ast.Constant) and isinstance(value.value, bool | int | float | str):
                defaults[ast.unparse(item.target)] = value.value
    return defaults


def require_few(result: Any, name: str) -> None:
    """Require that what a program makes has few values, each counted as often as something refers to it: nine lists
    of nine lists, a dozen times, are a short program. Raises InputError."""
    counted: dict[int, int] = {}

    def count(value: Any) -> int:
        inner: Any = ()
        if isinstance(value, PythonObject):
            inner = (*value.positional, *value.fields.values())
        elif isinstance(value, dict | list | tuple):
            inner = value.values() if isinstance(value, dict) else value
        if id(value) not in counted:
            counted[id(value)] = 0  # of one that holds itself
            counted[id(value)] = 1 + sum(map(count, inner))
        return counted[id(value)]

    if count(result) > _MOST_STATEMENTS:
        raise InputError(
            "file", name, f"makes more than {_MOST_STATEMENTS:,} values", "name the file of its settings"
        )


def follow(module: ast.Module) -> FollowedProgram:
    """Follow a program from its first line. Raises InputError for one that is too long or calls itself."""
    follower = _Follower({f.name: f for f in ast.walk(module) if isinstance(f, ast.FunctionDef)})
    follower.run(module.body, follower.globals)
    for name in ("main", "train"):  # which other programs call
        if name in follower.functions and name not in follower.called:
            follower.call(name, [], {})
    return follower.program


def result_of(module: ast.Module, function: str) -> Any:
    """Return what a function of a file returns when it is called without arguments. Raises InputError as follow."""
    follower = _Follower({f.name: f for f in module.body if isinstance(f, ast.FunctionDef)})
    follower.run(module.body, follower.globals)
    return follower.call(function, [], {})


class _Returned(Exception):
    def __init__(self, value: Any) -> None:
        self.value = value


class _Follower:
    def __init__(self, functions: Mapping[str, ast.FunctionDef]) -> None:
        self.functions = functions
        self.globals: dict[str, Any] = {}
        self.program = FollowedProgram()
        self.called: set[str] = set()
        self.depth = self.steps = 0

    def call(self, name: str, positional: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Return what a function of the file returns for these arguments."""
        self.called.add(name)
        if self.depth > _DEEPEST:
            raise InputError("file", name, "calls itself")
        takes = self.functions[name].args
        names = [a.arg for a in (*takes.posonlyargs, *takes.args)]
        defaults = dict(zip(names[len(names) - len(takes.defaults) :], takes.defaults, strict=True))
        defaults |= {a.arg: d for a, d in zip(takes.kwonlyargs, takes.kw_defaults, strict=True) if d is not None}
        values: dict[str, Any] = {n: f"${n}" for n in (*names, *(a.arg for a in takes.kwonlyargs))}
        values |= {n: self.value(x, self.globals) for n, x in defaults.items()}
        if takes.kwarg is not None:
            values[takes.kwarg.arg] = {n: value for n, value in named.items() if n not in values}
        values |= dict(zip(names, positional, strict=False)) | dict(named)
        self.depth += 1
        try:
            self.run(self.functions[name].body, values)
        except _Returned as returned:
            return returned.value
        finally:
            self.depth -= 1
        return None

    def run(self, body: Sequence[ast.stmt], values: dict[str, Any]) -> None:
        for line in body:
            self.steps += 1
            if self.steps > _MOST_STATEMENTS:
                raise InputError(
                    "file", None, f"makes more than {_MOST_STATEMENTS:,} steps", "name the file of its settings"
                )
            self._statement(line, values)

    def _statement(self, line: ast.stmt, values: dict[str, Any]) -> None:
        if isinstance(line, ast.Assign | ast.AnnAssign):
            targets = line.targets if isinstance(line, ast.Assign) else [line.target]
            if line.value is not None:
                value = self.value(line.value, values)
                for target in targets:
                    self._assign(target, value, values)
        elif isinstance(line, ast.Expr):
            self.value(line.value, values)
        elif isinstance(line, ast.Return):
            raise _Returned(None if line.value is None else self.value(line.value, values))
        elif isinstance(line, ast.If):
            self._branch(line, values)
        elif isinstance(line, ast.With | ast.Try):
            self.run(line.body, values)
        elif isinstance(line, ast.For | ast.While):
            if isinstance(line, ast.For):
                self._assign(line.target, f"${ast.unparse(line.target)}", values)
            self.run(line.body, values)

    def _branch(self, line: ast.If, values: dict[str, Any]) -> None:
        test = self.value(line.test, values)
        if is_open(test):
            said = f"line {line.lineno}: {ast.unparse(line.test)[:_LONGEST]} decides in a run, taken as false"
            self.program.notes.append(said)
            test = False
        self.run(line.body if test else line.orelse, values)

    def _assign(self, target: ast.expr, value: Any, values: dict[str, Any]) -> None:
        if isinstance(target, ast.Name):
            values[target.id] = value
        elif isinstance(target, ast.Tuple | ast.List):
            parts = value if isinstance(value, list) and len(value) == len(target.elts) else [None] * len(target.elts)
            for inner, part in zip(target.elts, parts, strict=True):
                self._assign(inner, f"${ast.unparse(inner)}" if part is None else part, values)
        elif isinstance(target, ast.Attribute):
            at = self._held(target.value, values)
            if at is not None:
                at[target.attr] = value
        elif isinstance(target, ast.Subscript):
            at, key = self._held(target.value, values), self.value(target.slice, values)
            if at is not None and isinstance(key, str):
                at[key] = value

    def _held(self, x: ast.expr, values: dict[str, Any]) -> dict[str, Any] | None:
        """Return the fields of the object that `name` or `name.attribute` refers to, where a statement sets one of
        them; an attribute that does not exist yet is created. None for other expressions."""
        if isinstance(x, ast.Name):
            value = values.get(x.id, self.globals.get(x.id))
            return value.fields if isinstance(value, PythonObject) else value if isinstance(value, dict) else None
        if not isinstance(x, ast.Attribute):
            return None
        above = self._held(x.value, values)
        if above is None:
            return None
        if not isinstance(above.get(x.attr), PythonObject | dict):
            above[x.attr] = PythonObject("")
        inner = above[x.attr]
        return inner.fields if isinstance(inner, PythonObject) else inner

    def value(self, x: ast.expr, values: dict[str, Any]) -> Any:
        """Return the value of an expression; a text that begins with `$` for one that only a run has."""
        known = self._known(x, values)
        return f"${ast.unparse(x)[:_LONGEST]}" if known is _OPEN else known

    def _known(self, x: ast.expr, values: dict[str, Any]) -> Any:
        if isinstance(x, ast.Constant):
            return x.value
        if isinstance(x, ast.Name):
            if x.id == "__name__":
                return "__main__"
            return values[x.id] if x.id in values else self.globals.get(x.id, _OPEN)
        if isinstance(x, ast.List | ast.Tuple | ast.Set):
            return [self.value(item, values) for item in x.elts]
        if isinstance(x, ast.Dict):
            return self._dictionary(x, values)
        if isinstance(x, ast.Attribute):
            return self._attribute(x, values)
        if isinstance(x, ast.Call):
            return self._call(x, values)
        if isinstance(x, ast.IfExp):
            test = self.value(x.test, values)
            return _OPEN if is_open(test) else self._known(x.body if test else x.orelse, values)
        if isinstance(x, ast.Subscript):
            held, key = self.value(x.value, values), self.value(x.slice, values)
            return held.get(key, _OPEN) if isinstance(held, dict) and isinstance(key, str) else _OPEN
        return self._computed(x, values)

    def _computed(self, x: ast.expr, values: dict[str, Any]) -> Any:
        if isinstance(x, ast.UnaryOp):
            value = self.value(x.operand, values)
            if isinstance(x.op, ast.Not):
                return _OPEN if is_open(value) else not value
            return -value if isinstance(x.op, ast.USub) and isinstance(value, int | float) else _OPEN
        if isinstance(x, ast.BinOp):
            pair = [self.value(side, values) for side in (x.left, x.right)]
            counts = all(isinstance(n, int | float) and abs(n) < _LARGEST for n in pair)
            done = _BINARY.get(type(x.op))
            zero = isinstance(x.op, ast.Div | ast.FloorDiv) and not pair[1]
            return done(*pair) if done and counts and not zero else _OPEN
        if isinstance(x, ast.Compare) and len(x.ops) == 1 and type(x.ops[0]) in _COMPARED:
            pair = [self.value(side, values) for side in (x.left, x.comparators[0])]
            return _OPEN if any(map(is_open, pair)) else _COMPARED[type(x.ops[0])](*pair)
        return _OPEN

    def _dictionary(self, x: ast.Dict, values: dict[str, Any]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, inner in zip(x.keys, x.values, strict=True):
            value = self.value(inner, values)
            if key is None:
                result |= value if isinstance(value, dict) else {}
            elif isinstance(name := self.value(key, values), str):
                result[name] = value
        return result

    def _attribute(self, x: ast.Attribute, values: dict[str, Any]) -> Any:
        text = ast.unparse(x)
        root = text.partition(".")[0]
        if root.isidentifier() and root not in values and root not in self.globals:  # of a module: torch.bfloat16
            return text
        held = self.value(x.value, values)
        fields = held.fields if isinstance(held, PythonObject) else None
        return fields.get(x.attr, _OPEN) if fields is not None else _OPEN

    def _call(self, x: ast.Call, values: dict[str, Any]) -> Any:
        positional = [self.value(a, values) for a in x.args if not isinstance(a, ast.Starred)]
        named: dict[str, Any] = {}
        for keyword in x.keywords:
            value = self.value(keyword.value, values)
            if keyword.arg:
                named[keyword.arg] = value
            elif isinstance(value, dict | PythonObject):
                named |= value.fields if isinstance(value, PythonObject) else value
        if isinstance(x.func, ast.Name) and x.func.id in self.functions:
            return self.call(x.func.id, positional, named)
        owner = self.value(x.func.value, values) if isinstance(x.func, ast.Attribute) else None
        if isinstance(owner, PythonObject) and isinstance(x.func, ast.Attribute):
            return self._method(owner, x.func.attr, positional, named, x.lineno)
        name = ast.unparse(x.func)
        if name == "dict":
            return named
        if name.rpartition(".")[2] in _SUPPORTED:
            self.program.notes.append(f"line {x.lineno}: {name}() is taken as true")
            return True
        if name in ("int", "str", "float", "bool", "os.environ.get", "os.getenv"):
            known = bool(positional) and name in ("int", "float") and isinstance(positional[0], int | float)
            return positional[0] if known else _OPEN
        return self._make(PythonObject(name, positional, named, x.lineno))

    def _method(self, owner: PythonObject, name: str, positional: list[Any], named: dict[str, Any], line: int) -> Any:
        """Return the result of an object's method: of an argument parser the arguments with their defaults; of others
        an object with the method's name."""
        if name == "add_argument" and positional and isinstance(positional[-1], str):
            by_default = False if named.get("action") == "store_true" else named.get("default")
            key = str(named.get("dest", str(positional[-1]).lstrip("-").replace("-", "_")))
            owner.fields[key] = by_default if by_default is not None else f"$args.{key}"
            return None
        if name in ("parse_args", "parse_known_args"):
            parsed_ = PythonObject("args", [], owner.fields)
            return [parsed_, []] if name == "parse_known_args" else parsed_
        if name == "add_argument_group":
            return owner
        return self._make(PythonObject(f"{owner.name}.{name}", [owner, *positional], named, line))

    def _make(self, item: PythonObject) -> PythonObject:
        self.program.objects.append(item)
        return item


_OPEN = object()


def is_open(value: Any) -> bool:
    """Whether a value is one that only a run has."""
    return (isinstance(value, str) and value.startswith("$")) or isinstance(value, PythonObject)
