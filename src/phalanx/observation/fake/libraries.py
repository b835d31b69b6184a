"""Checks in libraries that compare ranks: here they compare this rank with itself.

Such a check reads values from other ranks, which do not exist; its collectives are recorded as issued. Modules are
changed when they are imported, so that no library is imported for this.
"""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any


def _deepspeed(module: ModuleType) -> None:
    """ZeRO-3 compares the order of its parameters with rank 0's (0.19: deepspeed/runtime/zero/utils.py:97)."""
    sends = module.get_lst_from_rank0

    def from_rank_0(numbers: list[int]) -> list[int]:
        sends(numbers)
        return numbers

    lengths = module.assert_lst_len_same_as_other_ranks

    def same_length(numbers: list[int]) -> None:
        with suppress(RuntimeError):
            lengths(numbers)

    module.get_lst_from_rank0 = from_rank_0  # type: ignore[attr-defined]
    module.assert_lst_len_same_as_other_ranks = same_length  # type: ignore[attr-defined]


_CHANGES: dict[str, Callable[[ModuleType], None]] = {"deepspeed.runtime.zero.utils": _deepspeed}


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules named above as usual, and changes them once they are executed."""

    def __init__(self) -> None:
        self.searching = False

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname not in _CHANGES or self.searching:
            return None
        self.searching = True
        try:
            spec = find_spec(fullname)
        finally:
            self.searching = False
        if spec is not None and spec.loader is not None:
            execute, change = spec.loader.exec_module, _CHANGES[fullname]

            def executed(module: ModuleType) -> None:
                execute(module)
                change(module)

            spec.loader.exec_module = executed  # type: ignore[method-assign]
        return spec


@contextmanager
def agreeing_ranks() -> Iterator[None]:
    """Make checks of libraries that compare ranks find them alike."""
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
