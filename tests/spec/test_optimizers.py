"""OPTIMIZERS holds every fact about each optimizer that a job can name."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from phalanx.nn.optimizers import KERNELS
from phalanx.spec.errors import InputError
from phalanx.spec.optimizers import OPTIMIZERS, Framework, Optimizer, OptimizerName, UpdateRule


def test_every_name_has_a_row_and_a_kernel() -> None:
    assert set(OPTIMIZERS) == set(KERNELS) == set(get_args(OptimizerName))


def test_a_row_without_a_fact_cannot_be_made() -> None:
    row = OPTIMIZERS["adamw"]
    with pytest.raises(TypeError, match="maxtext"):
        replace(row, words={name: "AdamW" for name in get_args(Framework) if name != "maxtext"})
    with pytest.raises(TypeError):
        UpdateRule(("exp_avg",))  # type: ignore[call-arg]


def test_an_update_reads_and_writes_its_master_and_what_it_keeps() -> None:
    assert OPTIMIZERS["adamw"].others.passes(0.9) == OPTIMIZERS["adamw"].others.passes(0.0) == 6
    assert OPTIMIZERS["sgd"].others.passes(0.9) == 4
    assert OPTIMIZERS["sgd"].others.passes(0.0) == 2


def test_a_framework_without_a_word_is_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"job.optimizer.name = .sgd.*is not exported to DeepSpeed.*use adamw"):
        Optimizer("sgd").word("deepspeed", "DeepSpeed")
