"""The criteria's numbers are those of the formulas that they state, and their lints exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from phalanx.planning.explain import lint
from phalanx.textbook.case_studies import CRITERIA, criteria


def test_lints_of_the_criteria_exist() -> None:
    known = set(re.findall(r'"([a-z]+(?:-[a-z]+)*)"', Path(lint.__file__).read_text()))
    named = {name for criterion in CRITERIA for name in criterion.lints}
    assert named
    assert named <= known
    assert len(criteria().rows) == len(CRITERIA)


def test_a_bubble_of_a_fifth() -> None:
    for ranks in (2, 4, 16):
        micro_batches = 4 * (ranks - 1)
        assert (ranks - 1) / (micro_batches + ranks - 1) == pytest.approx(0.2)


def test_width_of_a_tensor_parallel_product() -> None:
    """FLOP per byte tends to h/(tp+1) from below as tokens grow."""
    h, tp = 8192, 8
    ratio = [2 * t * h * h / tp / (2 * (t * h + h * h / tp + t * h / tp)) for t in (1e3, 1e5, 1e9)]
    assert ratio[0] < ratio[1] < ratio[2] < h / (tp + 1)
    assert ratio[2] == pytest.approx(h / (tp + 1), rel=1e-4)


def test_a_step_of_a_ring_hides_its_keys_and_values() -> None:
    part, h, heads, key_heads = 2048, 8192, 64, 8
    flop, sent = 4 * part**2 * h, 4 * part * h * key_heads / heads
    assert flop / sent == part * heads / key_heads


def test_tokens_that_hide_data_parallelism() -> None:
    n, tokens = 7e9, 4096
    assert 6 * n * tokens / (4 * n) == 1.5 * tokens
    assert 6 * n * tokens / (2 * n * 3) == tokens
