"""Reading tensors on the host: the functions that verification replaces, because its tensors have no content.

A step may read the content of a tensor here and nowhere else, and may copy from the host to the device here.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def read(tensor: Tensor, otherwise: list[Any] | Callable[[], list[Any]]) -> list[Any]:
    """Return the elements of a flat tensor; on CUDA, the host waits for them. Under verification, where tensors have
    no content, it returns `otherwise`, or its result."""
    return tensor.tolist()


def later(tensor: Tensor, otherwise: list[Any]) -> Callable[[], list[Any]]:
    """Start to copy the elements of a flat tensor to the host; return a function that waits for and returns them. On
    CUDA, only that function waits, for the work issued before this call. Under verification it returns
    `otherwise`."""
    if tensor.device.type == "cpu":
        return tensor.tolist
    there = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    there.copy_(tensor, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def wait() -> list[Any]:
        copied.synchronize()
        return there.tolist()

    return wait


def to_device(values: Sequence[int], device: torch.device) -> Tensor:
    """Return integers of the host on a device, (n,) int64. On CUDA, the host does not wait for the copy."""
    tensor = torch.tensor(values, dtype=torch.int64)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def rounds(alike: Sequence[T]) -> Sequence[T]:
    """Return the items of a loop with identical rounds, except that the last one may be smaller: the same operations
    on tensors of the same shape, and no collective. Under verification, where tensors have no content, only the first
    and the last item are returned."""
    return alike
