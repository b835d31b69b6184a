"""Many rows as one: a dataclass of numbers becomes the same dataclass of NumPy columns.

Every formula in this folder takes either, so one strategy is explained, and 1e5 are priced, by the same lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

T = TypeVar("T")
Column = Any
"""A number, or a NumPy column of numbers: one per row."""


def gather(rows: Sequence[T]) -> T:
    """One dataclass whose fields are the columns of many. Equal rows (the same object) are read once."""
    kinds = list({id(row): row for row in rows}.values())
    place = {id(row): i for i, row in enumerate(kinds)}
    return take(kinds, np.array([place[id(row)] for row in rows], dtype=int))


def take(kinds: Sequence[T], rows: npt.NDArray[np.int64]) -> T:
    """The same where row i is of kind `kinds[rows[i]]`."""
    first = kinds[0]
    columns: dict[str, Any] = {}
    for field in fields(first):  # type: ignore[arg-type]
        found = [getattr(kind, field.name) for kind in kinds]
        if isinstance(found[0], tuple):
            columns[field.name] = tuple(take(part, rows) for part in zip(*found, strict=True))
        elif is_dataclass(found[0]):
            columns[field.name] = take(found, rows)
        elif isinstance(found[0], str):
            columns[field.name] = found[0]
        else:
            columns[field.name] = np.array(found, dtype=float)[rows]
    return _made(type(first), columns)


def _made(kind: type[T], columns: dict[str, Any]) -> T:
    """Without the checks of `__post_init__`, which ran on every row."""
    made = object.__new__(kind)
    for name, column in columns.items():
        object.__setattr__(made, name, column)
    return made
