"""Names that a program's own source takes as keys, with the lines that declare them. Read with ast: nothing is run.

arguments    `add_argument("--name", ...)`, and the classes whose fields an argument group is made of (Megatron's
             ArgumentGroupFactory): a flag, its other spellings and the attribute that it sets
fields       annotated names of classes: dataclasses, pydantic models, typed dictionaries
parameters   of `__init__` and other functions
keys         of a YAML file
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, order=True)
class Declared:
    """A key where it is declared. `switch`: a flag that takes no value."""

    file: str
    line: int
    name: str
    switch: bool = False


@dataclass(frozen=True)
class Sources:
    """A checkout's Python files, parsed, and their classes by name."""

    trees: Mapping[str, ast.Module]
    classes: Mapping[str, tuple[str, ast.ClassDef]] = field(default_factory=dict)


_BARE = ("store_true", "store_false", "store_const", "append_const", "count", "help", "version")
"""Actions of argparse that take no value."""


def parsed(texts: Mapping[str, str]) -> Sources:
    """Parse files by path. Raises SyntaxError for one that is no Python."""
    trees = {path: ast.parse(text, path) for path, text in texts.items()}
    classes = {
        node.name: (path, node)
        for path, tree in trees.items()
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }
    return Sources(trees, classes)


def arguments(sources: Sources, path: str) -> Iterator[Declared]:
    """Yield the arguments of every parser in a file, in its order."""
    tree = sources.trees[path]
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if called == "add_argument":
            flags = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
            options = {word.arg: word.value for word in node.keywords if word.arg}
            yield from _flags(path, node.lineno, flags, options)
        elif called == "ArgumentGroupFactory" and node.args and isinstance(node.args[0], ast.Name):
            left_out = next((word.value for word in node.keywords if word.arg == "exclude"), None)
            yield from _group(sources, node.args[0].id, set(_texts(left_out, tree)))


def _flags(path: str, line: int, flags: Sequence[str], options: Mapping[str, ast.expr]) -> Iterator[Declared]:
    """Yield the long spellings of one argument, and the attribute that it sets where that is another name."""
    action = options.get("action")
    optional = isinstance(action, ast.Attribute) and action.attr == "BooleanOptionalAction"
    switch = optional or (isinstance(action, ast.Constant) and action.value in _BARE)
    names = [_plain(flag) for flag in flags if flag.startswith("--") or not flag.startswith("-")]
    names += [f"no_{name}" for name in names] if optional else []
    yield from (Declared(path, line, name, switch) for name in dict.fromkeys(names))
    target = options.get("dest")
    if isinstance(target, ast.Constant) and str(target.value) not in names:
        yield Declared(path, line, str(target.value))


def _group(sources: Sources, name: str, left_out: set[str]) -> Iterator[Declared]:
    """Yield the flags that a factory makes of a class: of a bool whose default is true `--no-x` and `--disable-x`."""
    for path, node, default in _members(sources, name):
        field_name = node.target.id if isinstance(node.target, ast.Name) else ""
        options = _options(node.value)
        if field_name in left_out or _is_false(options.get("init")):
            continue
        meta = _table(_table(options.get("metadata")).get("argparse_meta"))
        switch = ast.unparse(node.annotation) in ("bool", "Optional[bool]", "bool | None")
        switch = switch and "type" not in meta and "nargs" not in meta
        negative = switch and not (isinstance(default, ast.Constant) and not default.value)
        flags = [f"no_{field_name}", f"disable_{field_name}"] if negative else [field_name]
        flags = [_plain(flag) for flag in _texts(meta.get("arg_names"), None)] or flags
        yield from (Declared(path, node.lineno, flag, switch) for flag in flags)
        if field_name not in flags:
            yield Declared(path, node.lineno, field_name)


def _members(sources: Sources, name: str) -> Iterator[tuple[str, ast.AnnAssign, ast.expr | None]]:
    """Yield the annotated fields of a class and of those that it derives from, with their defaults."""
    if name not in sources.classes:
        return
    path, node = sources.classes[name]
    for base in node.bases:
        yield from _members(sources, base.id if isinstance(base, ast.Name) else getattr(base, "attr", ""))
    for line in node.body:
        if isinstance(line, ast.AnnAssign):
            called = isinstance(line.value, ast.Call) and ast.unparse(line.value.func).endswith("field")
            yield path, line, _options(line.value).get("default") if called else line.value


def _options(value: ast.expr | None) -> dict[str, ast.expr]:
    return {word.arg: word.value for word in value.keywords if word.arg} if isinstance(value, ast.Call) else {}


def _table(value: ast.expr | None) -> dict[str, ast.expr]:
    if not isinstance(value, ast.Dict):
        return {}
    return {str(k.value): v for k, v in zip(value.keys, value.values, strict=True) if isinstance(k, ast.Constant)}


def _texts(value: ast.expr | None, tree: ast.Module | None) -> list[str]:
    """Return the texts of a list, or of the last list that a name of the file is assigned."""
    if isinstance(value, ast.Name) and tree is not None:
        assigned = [
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign) and any(ast.unparse(t) == value.id for t in node.targets)
        ]
        value = assigned[-1] if assigned else None
    items = value.elts if isinstance(value, ast.List | ast.Tuple | ast.Set) else []
    return [str(item.value) for item in items if isinstance(item, ast.Constant)]


def _is_false(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Constant) and value.value is False


def _plain(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")
