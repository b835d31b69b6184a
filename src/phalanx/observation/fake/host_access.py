"""Ways in which a program takes tensors out of torch: lists, NumPy arrays and files. Lists and arrays hold the stated
value (values.py); writing to files is skipped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed.checkpoint as checkpoints
from torch._subclasses.fake_tensor import FakeTensor

from phalanx.observation.fake.values import array

_APART = 16
"""Bits by which addresses are shifted, so that addresses of two storages differ by more than most offsets."""


@contextmanager
def answered(answer: Callable[[str, str], None], note: Callable[[str], None]) -> Iterator[None]:
    """Answer tolist(), numpy(), data_ptr() and the like of fake tensors, and skip writing checkpoints."""

    def to_list(tensor: FakeTensor) -> Any:
        answer("tolist", "the stated value")
        return array(tensor).tolist()

    def to_numpy(tensor: FakeTensor, *args: Any, **kwargs: Any) -> Any:
        answer("numpy", "the stated value")
        return array(tensor)

    def to_address(tensor: FakeTensor) -> int:
        answer("data_ptr", "an address of its storage")
        start = _address(tensor.untyped_storage())
        return start and start + int(tensor.storage_offset()) * tensor.element_size()

    def to_address_of_storage(storage: torch.UntypedStorage) -> int:
        if storage.device.type != "meta":
            return real_address(storage)
        answer("data_ptr of the storage", "an address of it")
        return _address(storage)

    real_address = torch.UntypedStorage.data_ptr

    def skipped(name: str) -> Callable[..., None]:
        def skip(*args: Any, **kwargs: Any) -> None:
            note(f"{name}: skipped, nothing is written")

        return skip

    with ExitStack() as stack:
        stack.enter_context(patch.object(FakeTensor, "tolist", to_list, create=True))
        stack.enter_context(patch.object(FakeTensor, "numpy", to_numpy, create=True))
        stack.enter_context(patch.object(FakeTensor, "__array__", to_numpy, create=True))
        stack.enter_context(patch.object(FakeTensor, "data_ptr", to_address, create=True))
        stack.enter_context(patch.object(torch.UntypedStorage, "data_ptr", to_address_of_storage))
        stack.enter_context(patch.object(torch, "save", skipped("torch.save")))
        for name in ("save", "async_save"):
            stack.enter_context(patch.object(checkpoints, name, skipped(f"torch.distributed.checkpoint.{name}")))
        yield


def _address(storage: torch.UntypedStorage) -> int:
    return int(storage._cdata) << _APART if storage.nbytes() else 0
