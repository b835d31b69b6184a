"""Reading tensors on the host: the functions that verification replaces, as its tensors have shapes but no content.

A step may read the content of a tensor here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor

T = TypeVar("T")


def read(tensor: Tensor, otherwise: list[Any] | Callable[[], list[Any]]) -> list[Any]:
    """Return the elements of a flat tensor; on CUDA, the host waits for them.

    Under verification, where tensors have no content, it returns `otherwise`, or what that returns.
    """
    return tensor.tolist()


def rounds(alike: Sequence[T]) -> Sequence[T]:
    """Return the items of a loop whose rounds are alike, except that the last one may be smaller.

    Alike: the same operations on tensors of the same shape, and no collective. Under verification, where tensors have
    no content, only the first and the last item are returned.
    """
    return alike
