"""The tensors in the arguments and results of operations, which are nests of lists, tuples and dicts."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def tensors(*values: Any) -> list[Tensor]:
    """Return all tensors in the values, in order."""
    result: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            result.append(value)
        elif isinstance(value, list | tuple):
            result += tensors(*value)
        elif isinstance(value, dict):
            result += tensors(*value.values())
    return result
