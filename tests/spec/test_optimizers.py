"""OPTIMIZERS holds every fact about each optimizer that a job can name."""

from __future__ import annotations

from typing import get_args

import pytest

from phalanx.nn.optimizers import KERNELS
from phalanx.spec.optimizers import OPTIMIZERS, OptimizerName, OptimizerRow, UpdateRule


def test_every_name_has_a_row_and_a_kernel() -> None:
    assert set(OPTIMIZERS) == set(KERNELS) == set(get_args(OptimizerName))


def test_a_row_without_a_fact_cannot_be_made() -> None:
    row = OPTIMIZERS["adamw"]
    facts = {name: getattr(row, name) for name in ("title", "matrices", "others", "reads", "momentum")}
    with pytest.raises(TypeError, match="torch"):
        OptimizerRow(**facts)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        UpdateRule(("exp_avg",))  # type: ignore[call-arg]


def test_an_update_reads_and_writes_its_master_and_what_it_keeps() -> None:
    assert OPTIMIZERS["adamw"].others.passes(0.9) == OPTIMIZERS["adamw"].others.passes(0.0) == 6
    assert OPTIMIZERS["sgd"].others.passes(0.9) == 4
    assert OPTIMIZERS["sgd"].others.passes(0.0) == 2
