"""Names that a program's own source takes as keys, with the lines that declare them. Read with ast: nothing is run.

arguments    `add_argument("--name", ...)`, and the classes whose fields an argument group is made of (Megatron's
             ArgumentGroupFactory): a flag, its other spellings and the attribute that it sets
fields       annotated names of classes (dataclasses, pydantic models, typed dictionaries), with the fields of those
             that they hold, under their names
parameters   of functions, such as `MegatronStrategy.__init__`
constants    texts in capitals that are keys of a file: `ZERO_OPTIMIZATION = "zero_optimization"`
tables       keys of a YAML file, by their paths
read_keys    keys that a program asks its tables for
variables    of the environment
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import yaml  # type: ignore[import-untyped]


@dataclass(frozen=True, order=True)
class Declared:
    """A key where it is declared. `switch`: a flag that takes no value; `default`: the value at which it changes
    nothing, as a word, "" where the source computes it."""

    file: str
    line: int
    name: str
    switch: bool = False
    default: str = ""


@dataclass(frozen=True)
class Sources:
    """A checkout's Python files, parsed, and their classes by name, those inside others with a dot."""

    trees: Mapping[str, ast.Module]
    classes: Mapping[str, tuple[str, ast.ClassDef]] = field(default_factory=dict)


_BARE = ("store_true", "store_false", "store_const", "append_const", "count", "help", "version")
"""Actions of argparse that take no value."""
_DEEPEST = 6
"""Classes inside classes."""


def parsed(texts: Mapping[str, str]) -> Sources:
    """Parse files by path. Raises SyntaxError for one that is no Python."""
    trees = {path: ast.parse(text, path) for path, text in texts.items()}
    return Sources(trees, {name: (path, node) for path, tree in trees.items() for name, node in _classes(tree.body)})


def _classes(body: Sequence[ast.stmt], above: str = "") -> Iterator[tuple[str, ast.ClassDef]]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield f"{above}{node.name}", node
            yield from _classes(node.body, f"{above}{node.name}.")
        elif isinstance(node, ast.If | ast.Try):
            yield from _classes(node.body, above)


def arguments(sources: Sources, path: str) -> Iterator[Declared]:
    """Yield the arguments of every parser in a file, in its order."""
    tree = sources.trees[path]
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if called == "add_argument":
            flags = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
            yield from _flags(path, node.lineno, flags, _options(node))
        elif called == "ArgumentGroupFactory" and node.args and isinstance(node.args[0], ast.Name):
            left_out = next((word.value for word in node.keywords if word.arg == "exclude"), None)
            yield from _group(sources, node.args[0].id, set(_texts(left_out, tree)))
    for statement in ast.walk(tree):  # what is derived of them, which a log of the arguments shows
        if isinstance(statement, ast.Assign):
            for target in statement.targets:
                if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "args":
                    yield Declared(path, statement.lineno, target.attr)


def _flags(path: str, line: int, flags: Sequence[str], options: Mapping[str, ast.expr]) -> Iterator[Declared]:
    """Yield the long spellings of one argument, and the attribute that it sets where that is another name."""
    action = options.get("action")
    optional = isinstance(action, ast.Attribute) and action.attr == "BooleanOptionalAction"
    switch = optional or (isinstance(action, ast.Constant) and action.value in _BARE)
    names = [_plain(flag) for flag in flags if flag.startswith("--") or not flag.startswith("-")]
    names += [f"no_{name}" for name in names] if optional else []
    default = _word(options.get("default", ast.Constant(None)))
    for name in dict.fromkeys(names):
        yield Declared(path, line, name, switch, "False" if switch else default)
    target = options.get("dest")
    if isinstance(target, ast.Constant) and str(target.value) not in names:
        negative = isinstance(action, ast.Constant) and action.value == "store_false"
        yield Declared(path, line, str(target.value), default=str(negative) if switch else default)


def _group(sources: Sources, name: str, left_out: set[str]) -> Iterator[Declared]:
    """Yield the flags that a factory makes of a class: of a bool whose default is true `--no-x` and `--disable-x`."""
    for path, node, default in _members(sources, name):
        field_name = _target(node)
        options = _options(node.value)
        if field_name in left_out or _is_false(options.get("init")):
            continue
        meta = _table(_table(options.get("metadata")).get("argparse_meta"))
        switch = ast.unparse(node.annotation) in ("bool", "Optional[bool]", "bool | None")
        switch = switch and "type" not in meta and "nargs" not in meta
        negative = switch and not (isinstance(default, ast.Constant) and not default.value)
        flags = [f"no_{field_name}", f"disable_{field_name}"] if negative else [field_name]
        flags = [_plain(flag) for flag in _texts(meta.get("arg_names"), None)] or flags
        for flag in flags:
            yield Declared(path, node.lineno, flag, switch, "False" if switch else _word(default))
        if field_name not in flags:
            yield Declared(path, node.lineno, field_name, default=_word(default))


def fields(sources: Sources, name: str, above: str = "", depth: int = 0) -> Iterator[Declared]:
    """Yield the fields of a class, by dotted paths where one holds another class of the sources."""
    for path, node, default in _members(sources, name):
        inner = [text for text in re.findall(r"[A-Za-z_][\w.]*", ast.unparse(node.annotation)) if text != name]
        held = [text for text in inner if text in sources.classes and is_record(sources, text)]
        for field_name in (_target(node), *_texts_of(_options(node.value).get("alias"))):
            yield Declared(path, node.lineno, f"{above}{field_name}", default=_word(default))
        for text in held if depth < _DEEPEST else ():
            yield from fields(sources, text, f"{above}{_target(node)}.", depth + 1)


def parameters(sources: Sources, path: str, names: Sequence[str]) -> Iterator[Declared]:
    """Yield the parameters of a file's functions of these names."""
    for node in ast.walk(sources.trees[path]):
        if isinstance(node, ast.FunctionDef) and node.name in names:
            listed = [*node.args.posonlyargs, *node.args.args]
            defaults = [None] * (len(listed) - len(node.args.defaults)) + list(node.args.defaults)
            pairs = [
                *zip(listed, defaults, strict=True),
                *zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True),
            ]
            for arg, default in pairs:
                if arg.arg not in ("self", "cls"):
                    yield Declared(path, arg.lineno, arg.arg, default=_word(default))


def constants(sources: Sources, path: str) -> Iterator[Declared]:
    """Yield the texts of a file's constants, with the value of the constant NAME_DEFAULT where there is one."""
    assigned = {}
    for node in sources.trees[path].body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            assigned[node.targets[0].id] = node
    for name, node in assigned.items():
        value = node.value
        if (
            isinstance(value, ast.Constant)
            and isinstance(value.value, str)
            and re.fullmatch(r"[a-z][\w.]*", value.value)
        ):
            default = assigned.get(f"{name}_DEFAULT")
            yield Declared(path, node.lineno, value.value, default=_word(default.value) if default else "")


def tables(path: str, text: str) -> Iterator[Declared]:
    """Yield the keys of a YAML file, by dotted paths."""
    yield from _keys(path, yaml.compose(text, Loader=yaml.SafeLoader), "")


_ENVIRONMENT = re.compile(
    r"""[^_]NCCL_PARAM\(\w+, *"(?P<nccl>\w+)"|DEFINE_NCCL_PARAM\(\w+, *[\w:]+, *(?P<defined>NCCL_\w+)"""
    r'''|(?:getenv\w*|get_env|ncclGetEnv|environ\.get)\( *"(?P<read>[A-Z]\w+)"'''
    r'''|environ\["(?P<at>[A-Z]\w+)"\]|"(?P<named>TORCH_NCCL_\w+|NCCL_\w+)"'''
)
"""A name where a program asks its environment for it, or holds it to ask later."""


def variables(path: str, text: str) -> Iterator[Declared]:
    """Yield the environment variables that a file of C++ or Python reads."""
    for number, line in enumerate(text.split("\n"), 1):
        for match in _ENVIRONMENT.finditer(f" {line}"):
            yield Declared(
                path, number, f"NCCL_{match['nccl']}" if match["nccl"] else next(filter(None, match.groups()))
            )


def read_keys(path: str, text: str) -> Iterator[Declared]:
    """Yield the keys that a file asks its tables for: `cfg.name`, `cfg.get("name", default)`."""
    for number, line in enumerate(text.split("\n"), 1):
        for match in re.finditer(r"""\bcfg\.(?:get\( *"(\w+)"(?:, *([\w.-]+))?|(?!get\b)(\w+))""", line):
            yield Declared(path, number, match[1] or match[3], default=match[2] or "")


def _keys(path: str, node: Any, above: str) -> Iterator[Declared]:
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        name = f"{above}{key.value}"
        single = value.value if isinstance(value, yaml.ScalarNode) else ""
        default = _simple({"": "None", "null": "None", "~": "None"}.get(single, single)) if single != "" else "None"
        yield Declared(
            path, key.start_mark.line + 1, name, default=default if not isinstance(value, yaml.MappingNode) else ""
        )
        yield from _keys(path, value, f"{name}.")


def _members(sources: Sources, name: str) -> Iterator[tuple[str, ast.AnnAssign, ast.expr | None]]:
    """Yield the annotated fields of a class and of those that it derives from, with their defaults."""
    if name not in sources.classes:
        return
    path, node = sources.classes[name]
    for base in node.bases:
        text = ast.unparse(base)
        yield from _members(sources, text) if text != name else ()
    for line in node.body:
        if isinstance(line, ast.AnnAssign) and "ClassVar" not in ast.unparse(line.annotation):
            called = isinstance(line.value, ast.Call) and re.search("[fF]ield$", ast.unparse(line.value.func))
            default: ast.expr | None = line.value
            if called and isinstance(line.value, ast.Call):
                positional = line.value.args[0] if line.value.args else None
                default = _options(line.value).get("default", positional)
            yield path, line, default


def is_record(sources: Sources, name: str) -> bool:
    """Whether a class is a dataclass, a pydantic model or a typed dictionary, itself or by what it derives from."""
    if name not in sources.classes:
        return bool(
            re.search(r"(BaseModel|TypedDict|NamedTuple|Config|ConfigModel|Config\[.*\]|Arguments|Args)$", name)
        )
    _, node = sources.classes[name]
    decorated = any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)
    return decorated or any(is_record(sources, ast.unparse(base)) for base in node.bases if ast.unparse(base) != name)


def _target(node: ast.AnnAssign) -> str:
    return node.target.id if isinstance(node.target, ast.Name) else ""


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


def _word(value: ast.expr | None) -> str:
    """Return a default as one word; "" for what is computed, or is more than one."""
    if isinstance(value, ast.UnaryOp) and isinstance(value.op, ast.USub) and isinstance(value.operand, ast.Constant):
        return _simple("-" + str(value.operand.value))
    return _simple(str(value.value)) if isinstance(value, ast.Constant) else ""


def _simple(text: str) -> str:
    return text if re.fullmatch(r"[\w.+-]{1,24}", text) else ""


def _texts_of(value: ast.expr | None) -> list[str]:
    return [value.value] if isinstance(value, ast.Constant) and isinstance(value.value, str) else []


def _is_false(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Constant) and value.value is False


def _plain(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


def unique(keys: Iterator[Declared]) -> dict[str, Declared]:
    """Return keys by name: the first line of each, a switch where any spelling is one."""
    result: dict[str, Declared] = {}
    for each in keys:
        if not each.name.startswith("_") and each.name:
            known = result.setdefault(each.name, each)
            if each.switch and not known.switch:
                result[each.name] = replace(known, switch=True)
    return result
