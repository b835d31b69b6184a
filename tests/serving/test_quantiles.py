"""Quantiles that bound predicted figures of servers weigh families, not runs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibration.quantiles import Ratio, held, quantiles


@given(st.integers(1, 50), st.floats(0.5, 0.98))
def test_quantiles_hold_their_share_of_one_family(seed: int, share: float) -> None:
    values = np.exp(np.random.default_rng(seed).normal(0, 0.2, 500))
    low, high = quantiles([Ratio("any", "one", float(v)) for v in values], share)
    assert np.mean((low <= values) & (values <= high)) == pytest.approx(share, abs=0.01)


def test_a_family_of_many_rows_does_not_decide_alone() -> None:
    many = [Ratio("any", "many", 1.0)] * 900
    few = [Ratio("any", "few", 2.0)] * 25
    assert quantiles([*many, *few], 0.8)[1] > 1.0  # 25 rows weigh a sixth of 900, not a 36th
    assert held([*many, *few], 0.8) == 0.0
