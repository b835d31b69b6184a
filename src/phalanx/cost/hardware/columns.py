"""Turn many dataclasses of numbers into one dataclass of NumPy columns.

Every formula of cost/analytic takes numbers or columns, so the same lines explain one strategy and price 1e5.
"""

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

T = TypeVar("T")
Column = Any
"""A number, or a NumPy column of numbers: one per row."""


def gather(rows: Sequence[T]) -> T:
    """Return one dataclass whose fields are columns over `rows`. Identical objects are read once."""
    kinds = list({id(row): row for row in rows}.values())
    place = {id(row): i for i, row in enumerate(kinds)}
    return take(kinds, np.array([place[id(row)] for row in rows], dtype=int))


def take(kinds: Sequence[T], rows: npt.NDArray[np.int64]) -> T:
    """Return one dataclass of columns whose row i is `kinds[rows[i]]`. Strings are taken from the first kind."""
    first = kinds[0]
    columns: dict[str, Any] = {}
    for field in fields(first):  # type: ignore[arg-type]
        values = [getattr(kind, field.name) for kind in kinds]
        if isinstance(values[0], tuple):
            columns[field.name] = tuple(take(part, rows) for part in zip(*values, strict=True))
        elif is_dataclass(values[0]):
            columns[field.name] = take(values, rows)
        elif isinstance(values[0], str):
            columns[field.name] = values[0]
        else:
            columns[field.name] = np.array(values, dtype=float)[rows]
    return _unchecked(type(first), columns)


def _unchecked(kind: type[T], columns: dict[str, Any]) -> T:
    """Return an instance of `kind` without the checks of `__post_init__`, which ran on every row."""
    instance = object.__new__(kind)
    for name, column in columns.items():
        object.__setattr__(instance, name, column)
    return instance
