"""How many cases an examination takes: a sample in the suite, the full number in `make long`."""

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings


def examples(sample: int, full: int) -> pytest.MarkDecorator:
    """Parametrize a test by `examples`, the number of cases to draw: `sample`, and in `make long` also `full`."""
    return pytest.mark.parametrize("examples", [sample, pytest.param(full, marks=pytest.mark.long)])


def drawn(sample: int, full: int, *strategies: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Draw the arguments of a test that takes no fixtures: `sample` cases, and in `make long` also `full`."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @examples(sample, full)
        def all_hold(examples: int) -> None:
            settings(max_examples=examples, deadline=None)(given(*strategies)(test))()

        all_hold.__name__, all_hold.__doc__ = test.__name__, test.__doc__
        return all_hold

    return decorate


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
