"""Settings and manifests as YAML: groups of settings with the reason above each, and tables as documents.

Written here because PyYAML drops comments, and leaves words such as 1e3 unquoted, which Kubernetes reads as numbers.
Keys of settings with dots are nested; floats have a point, which YAML 1.1 needs to read 1.0e-05 as a number.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from phalanx.frameworks.writing.program import Group
from phalanx.frameworks.writing.script import comment

_WIDTH = 110
"""Columns that a list in brackets may take; a longer one has a line for each item."""


class Unquoted(str):
    """A blank for a number, which is written without quotes."""

    __slots__ = ()


def document(groups: Iterable[Group], head: str = "") -> str:
    """Write groups as one document. `head`: its first comment. Raises ValueError for a top-level key in two
    groups."""
    parts, written = [comment(head)] if head else [], set[str]()
    for group in groups:
        tree: dict[str, Any] = {}
        for s in group.settings:
            *path, last = s.key.split(".")
            at = tree
            for name in path:
                at = at.setdefault(name, {})
            at[last] = s.value
        if written & tree.keys():
            raise ValueError(f"{', '.join(written & tree.keys())} stands in two groups")
        written |= tree.keys()
        parts.append("\n" + comment(f"{group.title}. {group.why}" if group.why else f"{group.title}."))
        parts += _lines(tree, "")
    return "".join(parts)


def stream(documents: Iterable[Mapping[str, Any]], notes: Iterable[str] = ()) -> str:
    """Write tables as the documents of one file, under `notes` as comments."""
    return "".join(map(comment, notes)) + "---\n".join("".join(_lines(table, "")) for table in documents)


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
        elif isinstance(value, (list, tuple)) and len(indent) + len(key) + len(scalar(value)) > _WIDTH:
            lines += [f"{indent}{key}:\n", *(f"{indent}- {scalar(item)}\n" for item in value)]
        elif isinstance(value, str) and _is_file(value):
            lines += [f"{indent}{key}: |\n", *(f"{indent}  {line}\n" for line in value.splitlines())]
        else:
            lines.append(f"{indent}{key}: {scalar(value)}\n")
    return lines


def _is_file(text: str) -> bool:
    """Whether a text is lines that a literal block holds unchanged."""
    return text.endswith("\n") and not text[0].isspace() and text.replace("\n", "").isprintable()


def scalar(value: Any) -> str:
    """Write one value, or a list of them in brackets."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(scalar, value))}]"
    if isinstance(value, float):
        text = f"{value:.12g}"
        mantissa, e, exponent = text.partition("e")
        if "." not in mantissa and "inf" not in mantissa:
            mantissa += ".0"
        return mantissa + e + exponent
    return str(value) if isinstance(value, Unquoted) else json.dumps(value)
