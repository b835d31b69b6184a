"""Callbacks around the forward pass of every unit of a model."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def unit_hooks(
    units: Mapping[str, nn.Module],
    before: Callable[[str, nn.Module], None],
    after: Callable[[str, nn.Module, Any], None],
) -> Iterator[None]:
    """Call `before` and `after` each unit's forward pass with its name and module, `after` also with its output."""
    hooks: list[Any] = []
    for unit, module in units.items():
        hooks.append(module.register_forward_pre_hook(lambda m, _, unit=unit: before(unit, m)))
        hooks.append(module.register_forward_hook(lambda m, _, out, unit=unit: after(unit, m, out)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
