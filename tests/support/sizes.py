"""How many cases an examination takes: a sample in the suite, the full number in `make long`."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest


def examples(sample: int, full: int) -> pytest.MarkDecorator:
    """Parametrize a test by `examples`, the number of cases to draw: `sample`, and in `make long` also `full`."""
    return pytest.mark.parametrize("examples", [sample, pytest.param(full, marks=pytest.mark.long)])


def sampled(cases: Sequence[Any], sample: Sequence[int]) -> list[Any]:
    """Return the cases; those whose index is not in `sample` are for `make long`."""
    return [case if i in sample else _long(case) for i, case in enumerate(cases)]


def combined(*axes: Sequence[Any]) -> list[Any]:
    """Return every combination; in the suite as many as the longest axis has values, each value of each axis once."""
    taken = {tuple(i % len(axis) for axis in axes) for i in range(max(map(len, axes)))}
    places = product(*(range(len(axis)) for axis in axes))
    every = [(place, tuple(axis[i] for axis, i in zip(axes, place, strict=True))) for place in places]
    return [case if place in taken else _long(case) for place, case in every]


def _long(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.long)
