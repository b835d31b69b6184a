"""The first forward pass of a module that is split over tp, compared with that of the whole module.

A plan of names says how matrices are split, and knows nothing of what the module does with them: a matrix that packs
several (gate and up, or q, k and v) and is cut in equal parts computes another function, without an error. So the
first batch goes through both, without dropout and from the same random state. Of the modules that are called with
equal inputs and return other outputs, the first is named.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.spec.errors import InputError

_BOUNDS = {torch.float64: 1e-6, torch.float32: 1e-3}
"""The largest difference of outputs, as a share of their norm: sums are taken in another order. Other types: 0.1."""

Call = tuple[list[Tensor], list[Tensor]]
"""Tensors that a module was given, and those that it returned."""


def require_equal(
    whole: nn.Module, split: nn.Module, dims: Mapping[str, int], args: Any, kwargs: Mapping[str, Any]
) -> None:
    """Run both modules on a batch, all tp ranks together. `dims` has the names of the split parameters. Raises
    InputError where outputs differ."""
    expected, actual = _calls(whole, args, kwargs), _calls(split, args, kwargs)
    if _equal(expected[""][1], actual[""][1]):
        return
    layers = {name.rpartition(".")[0] for name in dims}
    inside = (
        n for n in actual if n in expected and not any(n == layer or n.startswith(f"{layer}.") for layer in layers)
    )
    culprit = next(
        (n for n in inside if _equal(expected[n][0], actual[n][0]) and not _equal(expected[n][1], actual[n][1])), ""
    )
    within = sorted(layer for layer in layers if not culprit or layer.startswith(f"{culprit}."))
    raise InputError(
        "tp_plan",
        ", ".join(within[:4]) + (", ..." if len(within) > 4 else ""),
        f"makes {culprit or 'the module'} compute another function than unsplit: its output differs by "
        f"{_difference(expected[culprit][1], actual[culprit][1]):.1e} of its norm",
        "a matrix that packs several (gate and up; q, k and v) cannot be cut in equal parts: make a layer of each, "
        "or leave these out of the plan",
    )


def _calls(module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> dict[str, Call]:
    """Run a module once; return the first call of every module in it, innermost first."""
    calls: dict[str, Call] = {}

    def record(name: str) -> Callable[..., None]:
        def after(_: nn.Module, given: Any, named: Any, out: Any) -> None:
            calls.setdefault(name, (list(_tensors((given, named))), list(_tensors(out))))

        return after

    hooks = [m.register_forward_hook(record(n), with_kwargs=True) for n, m in module.named_modules()]
    try:
        with torch.no_grad(), _evaluating(module), torch.random.fork_rng():
            module(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Turn dropout and statistics of batches off."""
    training = [m for m in module.modules() if m.training]
    module.eval()
    try:
        yield
    finally:
        for m in training:
            m.training = True


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value.detach().clone()
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))


def _equal(expected: list[Tensor], actual: list[Tensor]) -> bool:
    """Whether tensors are equal within the bound; pairs of unequal shapes, as caches of split heads, do not count."""
    return _difference(expected, actual) <= min(
        (_BOUNDS.get(t.dtype, 0.1) for t in expected if t.is_floating_point()), default=0.1
    )


def _difference(expected: list[Tensor], actual: list[Tensor]) -> float:
    pairs = [
        (a.double(), b.double())
        for a, b in zip(expected, actual, strict=False)
        if a.shape == b.shape and a.is_floating_point()
    ]
    norm = math.sqrt(sum(float(a.square().sum()) for a, _ in pairs))
    error = math.sqrt(sum(float((a - b).square().sum()) for a, b in pairs))
    return error / norm if norm else error
