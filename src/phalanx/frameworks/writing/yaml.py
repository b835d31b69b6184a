"""Groups of settings as YAML: a section a group, with the reason above it.

Written here because PyYAML drops comments. Keys with dots are nested; floats have a point, which YAML 1.1 needs to
read 1.0e-05 as a number.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from phalanx.frameworks.writing.program import Group
from phalanx.frameworks.writing.script import comment


class Unquoted(str):
    """A blank for a number, which is written without quotes."""

    __slots__ = ()


def document(groups: Iterable[Group], head: str = "") -> str:
    """Write groups as one document. `head`: its first comment. Raises ValueError for a top-level key in two
    groups."""
    parts, seen = [comment(head)] if head else [], set[str]()
    for group in groups:
        tree: dict[str, Any] = {}
        for s in group.settings:
            *path, last = s.key.split(".")
            at = tree
            for name in path:
                at = at.setdefault(name, {})
            at[last] = s.value
        if seen & tree.keys():
            raise ValueError(f"{', '.join(seen & tree.keys())} stands in two groups")
        seen |= tree.keys()
        parts.append("\n" + comment(f"{group.title}. {group.why}" if group.why else f"{group.title}."))
        parts += _lines(tree, "")
    return "".join(parts)


def _lines(tree: Mapping[str, Any], indent: str) -> list[str]:
    lines = []
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            lines += [f"{indent}{key}:\n", *_lines(value, indent + "  ")]
        elif isinstance(value, (list, tuple)) and value and isinstance(value[0], Mapping):
            lines.append(f"{indent}{key}:\n")
            for item in value:
                first, *rest = _lines(item, indent + "  ")
                lines += [f"{indent}- {first.strip()}\n", *rest]
        else:
            lines.append(f"{indent}{key}: {scalar(value)}\n")
    return lines


def scalar(value: Any) -> str:
    """Write one value."""
    if isinstance(value, float):
        text = f"{value:.12g}"
        mantissa, e, exponent = text.partition("e")
        if "." not in mantissa and "inf" not in mantissa:
            mantissa += ".0"
        return mantissa + e + exponent
    if isinstance(value, Unquoted):
        return str(value)
    return json.dumps(list(value) if isinstance(value, tuple) else value)
