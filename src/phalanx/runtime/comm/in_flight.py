"""Memory in use by a collective over the null transport until its `wait`: verification checks every operation of a
step against it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Bytes:
    """The bytes from `low` to `high` of a storage, which it does not keep alive."""

    storage: weakref.ref[Any]
    low: int
    high: int

    @classmethod
    def of(cls, tensor: Tensor) -> Bytes:
        """All bytes between the first and the last element of a tensor."""
        storage = tensor.untyped_storage()
        if not tensor.numel():
            return cls(weakref.ref(storage), 0, 0)
        size = tensor.element_size()
        low = int(tensor.storage_offset()) * size
        last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        return cls(weakref.ref(storage), low, low + (int(last) + 1) * size)

    def meets(self, other: Bytes) -> bool:
        """Whether two ranges share a byte."""
        mine, its = self.storage(), other.storage()
        same = mine is not None and its is not None and mine._cdata == its._cdata
        return same and self.low < other.high and other.low < self.high


class NotIssued:
    """The handle of a collective over the null transport: waiting only marks it as awaited. `reads` and `writes`: the
    memory it uses until then."""

    def __init__(
        self, unawaited: dict[int, NotIssued], name: str, reads: Sequence[Tensor], writes: Sequence[Tensor]
    ) -> None:
        self._unawaited, self.name = unawaited, name
        self.reads, self.writes = tuple(map(Bytes.of, reads)), tuple(map(Bytes.of, writes))

    def wait(self) -> None:
        """Mark the collective as complete."""
        self._unawaited.pop(id(self), None)
