"""How many cases a drawn examination takes: a sample in the suite, the full number in `make long`."""

import pytest


def examples(sample: int, full: int) -> pytest.MarkDecorator:
    """Parametrize a test by `examples`, the number of cases to draw: `sample`, and in `make long` also `full`."""
    return pytest.mark.parametrize("examples", [sample, pytest.param(full, marks=pytest.mark.long)])
