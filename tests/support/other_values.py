"""Documents in which one value is of another type than a reader expects."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

VALUES = (8, "x", "'", None, [8], {"a": 8}, [[]], [{"name": 8}], True, -1, 1.5, 10**30)


def changed(document: Any) -> Iterator[Any]:
    """Yield a document with each of its values in turn replaced by each of VALUES."""
    for path in _paths(document):
        for value in VALUES:
            yield _replaced(document, path, value)


def _paths(value: Any) -> Iterator[tuple[str | int, ...]]:
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, below in pairs:
        yield (name,)
        yield from ((name, *path) for path in _paths(below))


def _replaced(value: Any, path: tuple[Any, ...], by: object) -> Any:
    if not path:
        return by
    result = copy.copy(value)
    result[path[0]] = _replaced(value[path[0]], path[1:], by)
    return result
