"""The seam between the program and its numbers: what verification replaces, whose tensors have shapes and no content.

A step may look at the content of a tensor here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor

T = TypeVar("T")


def read(tensor: Tensor, otherwise: list[Any] | Callable[[], list[Any]]) -> list[Any]:
    """What a flat tensor holds, read by the host, which on CUDA waits for it; `otherwise`, or what it returns, where
    it holds nothing."""
    return tensor.tolist()  # type: ignore[no-any-return]


def rounds(alike: Sequence[T]) -> Sequence[T]:
    """What a loop goes over whose rounds are alike, the last one perhaps smaller: the same operations, on tensors of
    one shape, and no collective. Where they hold nothing the first and the last round say all."""
    return alike
