"""JSON, TOML and YAML of strangers as tables, bounded in size, depth and number of keys; and tables merged, as flags
override a file.

No tag of YAML is followed, and an alias cannot make a small file large. Aliases let a few lines represent more values
than memory holds (each line ten times the line before it), or a table that holds itself. So a document is composed
first, and the values of its nodes are counted, each as often as it is referred to, before any value is made
(yaml.org/spec/1.1, 3.2.1: node graph).
"""

import json
import re
import tomllib
from collections.abc import Mapping
from typing import Any

import yaml  # type: ignore[import-untyped]

from phalanx.spec.documents import require_finite, require_shallow
from phalanx.spec.errors import InputError

MOST_KEYS = 5_000
"""Keys of the largest configuration that is read: each unknown one is compared with hundreds of names."""
_LONGEST_YAML = 2**18
"""Characters of the longest document: PyYAML reads some 50 KB a second."""
_MOST_VALUES = 100_000  # of a YAML document
_JSON_START = re.compile(r'\s*\{\s*["}]')
"""How JSON begins, which a YAML file may hold."""
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
_DEEPEST = 8
"""References of references."""
_PLAIN = "tag:yaml.org,2002:"


def documents(text: str, suffix: str, where: str) -> list[Any]:
    """Return the documents of a text by the suffix of its file, several only of YAML. Raises InputError."""
    try:
        if suffix == ".toml":
            values: list[Any] = [tomllib.loads(text)]
        elif suffix == ".json":
            values = [json.loads(text)]
        elif _JSON_START.match(text) and "\n---" not in text:
            try:
                values = [json.loads(text)]
            except json.JSONDecodeError:  # with comments, as GPT-NeoX writes it
                values = _yaml_documents(text)
        else:
            values = _yaml_documents(text)
        for value in values:
            require_finite(value)
        values = [texts(require_shallow(value)) for value in values]
    except RecursionError:
        raise InputError("file", where, "is nested too deep") from None
    except InputError:
        raise
    except (ValueError, yaml.YAMLError) as error:
        reason = (
            _unseparated(error) or " ".join(str(error).split())[:160] or "it holds a number of more than 4,200 digits"
        )
        template = "it is a template ({{ }}): give what it is rendered to" if re.search(r"{{.*}}", text) else ""
        raise InputError("file", where, f"cannot be parsed: {reason}", template) from error
    if (keys := sum(map(_count, values))) > MOST_KEYS:
        raise InputError("file", where, f"has {keys:,} keys", f"at most {MOST_KEYS:,} are read")
    return values


def _unseparated(error: Exception) -> str:
    """Say where YAML misses a comma or the end of a list or table; "" of any other error."""
    mark = getattr(error, "problem_mark", None)
    end = re.match(r"expected ',' or '([]}])'", str(getattr(error, "problem", "")))
    return f"a comma or {end[1]} is missing before line {mark.line + 1}" if mark and end else ""


def texts(value: Any) -> Any:
    """Return tables whose keys are texts, and whose values are of JSON's types: YAML and TOML have dates too."""
    if isinstance(value, dict):
        return {str(name): texts(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [texts(inner) for inner in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _count(value: Any) -> int:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return (len(value) if isinstance(value, dict) else 0) + sum(map(_count, parts))


def resolve_references(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return tables with the value at `path` in place of each `${path}`, as OmegaConf resolves it; references to
    tables and to nothing stay."""

    def of(value: Any, depth: int) -> Any:
        if isinstance(value, dict):
            return type(value)({name: of(inner, depth) for name, inner in value.items()})
        if isinstance(value, list):
            return [of(inner, depth) for inner in value]
        match = _REFERENCE.fullmatch(value) if isinstance(value, str) and depth < _DEEPEST else None
        at: Any = tables if match else None
        for name in match[1].split(".") if match else ():
            at = at.get(name) if isinstance(at, Mapping) else None
        return value if at is None or isinstance(at, Mapping | list) else of(at, depth + 1)

    result: dict[str, Any] = of(dict(tables), 0)
    return result


def tables_of_paths(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted paths with their values as tables, {"a.b": 1} as {"a": {"b": 1}}; - becomes _."""
    result: dict[str, Any] = {}
    for path, value in flat.items():
        *tables, last = path.lstrip("+").replace("-", "_").split(".")
        at = result
        for name in tables[:32]:
            inner = at.get(name)
            if not isinstance(inner, dict):
                inner = at[name] = {}
            at = inner
        at[last] = value
    return result


def merge_tables(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return tables in which `over` replaces values of `base`; tables that both have are merged."""
    result = dict(base)
    for name, value in over.items():
        earlier = result.get(name)
        both = isinstance(earlier, Mapping) and isinstance(value, Mapping)
        result[name] = merge_tables(earlier, value) if both else value  # type: ignore[arg-type]
    return result


def without_entry(tables: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return tables without the entry at a path with dots."""
    first, _, rest = path.partition(".")
    result = dict(tables)
    if not rest:
        result.pop(first, None)
    elif isinstance(result.get(first), Mapping):
        result[first] = without_entry(result[first], rest)
    return result


def _yaml_documents(text: str) -> list[Any]:
    """Return the values of a text's documents. Raises ValueError or yaml.YAMLError with the reason."""
    if len(text) > _LONGEST_YAML:
        raise ValueError(f"has {len(text):,} characters; at most {_LONGEST_YAML:,} of YAML are read")
    loader = yaml.SafeLoader(text)
    values, total = [], 0
    try:
        while loader.check_node():
            node = loader.get_node()
            total += _values(loader, node, {})
            if total > _MOST_VALUES:
                raise ValueError(f"its aliases make more than {_MOST_VALUES:,} values of it")
            values.append(loader.construct_document(node))
        return values
    finally:
        loader.dispose()


def _values(loader: Any, node: Any, counted: dict[int, int]) -> int:
    """Count the values that a node represents; 0 in `counted` marks one that is being counted."""
    known = counted.get(id(node))
    if known == 0:
        raise ValueError("a table in it holds itself")
    if known:
        return known
    counted[id(node)] = 0
    _require_no_tag(loader, node)
    total = 1
    if isinstance(node, yaml.MappingNode):
        total += sum(_values(loader, k, counted) + _values(loader, v, counted) for k, v in node.value)
    elif isinstance(node, yaml.SequenceNode):
        total += sum(_values(loader, item, counted) for item in node.value)
    counted[id(node)] = total
    return total


def _require_no_tag(loader: Any, node: Any) -> None:
    """Require that a node has the type that YAML gives its text without a tag. Raises ValueError."""
    if isinstance(node, yaml.ScalarNode):
        usual = {loader.resolve(yaml.ScalarNode, node.value, (True, False)), f"{_PLAIN}str"}
    else:
        usual = {f"{_PLAIN}map" if isinstance(node, yaml.MappingNode) else f"{_PLAIN}seq"}
    if node.tag not in usual:
        raise ValueError(f"the tag {node.tag} at line {node.start_mark.line + 1} is not followed")
