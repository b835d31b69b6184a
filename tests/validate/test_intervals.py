"""Intervals of predicted step times: what they hold of published runs, and which one a prediction has."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import phalanx
from calibration.intervals import Ratio, fitted, held, quantiles, ratios, rows
from phalanx.planning.lookup import model_named
from phalanx.validate import intervals
from phalanx.validate.from_row import cases


@pytest.fixture(scope="module")
def by_kind() -> dict[str, list[Ratio]]:
    found: dict[str, list[Ratio]] = {}
    for ratio in ratios(cases(rows())[0]):
        found.setdefault(ratio.kind, []).append(ratio)
    return found


def test_shipped_intervals_are_those_of_the_published_runs(by_kind: dict[str, list[Ratio]]) -> None:
    shipped = json.loads(intervals.FILE.read_text())
    assert shipped.keys() == by_kind.keys()
    for kind, found in by_kind.items():
        low, high, _ = fitted(found)
        assert (shipped[kind]["low"], shipped[kind]["high"]) == pytest.approx((low, high), rel=1e-3)
        assert shipped[kind]["runs"] == len(found)


def test_an_interval_holds_three_of_four_runs_of_a_family_left_out(by_kind: dict[str, list[Ratio]]) -> None:
    several = [kind for kind, found in by_kind.items() if len({r.family for r in found}) > 1]
    assert len(several) >= 6
    for kind in several:
        assert 0.75 <= fitted(by_kind[kind])[2] <= 0.9, kind


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


def test_a_prediction_has_the_widest_interval_of_its_kinds() -> None:
    def width(**fields: str) -> float:
        p = phalanx.predict(
            **{"model": "llama3-8b", "cluster": "dgx-h100", "strategy": "dp=16,zero=1", **fields},  # type: ignore[arg-type]
            gpus=16,
            batch=1024,
            seq=4096,
        )
        assert p.step_time_low_s is not None
        assert p.step_time_high_s is not None
        assert p.step_time_low_s < p.step_time_s < p.step_time_high_s
        return p.step_time_high_s / p.step_time_low_s

    dense = width(stack="megatron-core")
    assert dense <= width(stack="megatron-core", precision="fp8")
    assert dense < width(stack="deepspeed")


@pytest.mark.parametrize(
    ("model", "layers"),
    [
        ("llama3-8b", intervals.DENSE),
        ("mixtral-8x7b", intervals.EXPERTS),
        ("nemotron-h-56b", intervals.MIXED),
        ("deepseek-v3.2", intervals.MIXED),
    ],
)
def test_kinds_are_of_layers_launches_and_what_is_priced_from_less(model: str, layers: str) -> None:
    spec = model_named(model)[0]
    for launches, adapters, first in (
        (0.0, False, layers),
        (intervals.WAITS, False, layers),
        (intervals.WAITS, True, intervals.ADAPTERS),
        (intervals.WAITS + 1e-9, False, intervals.WAITING),
        (1.0, True, intervals.WAITING),
    ):
        assert intervals.kinds_of_step(spec, launches, adapters, False) == (first,)
        for at, name in enumerate((intervals.NARROW, intervals.GENERIC, intervals.DATASHEET)):
            given_less = [n == at for n in range(3)]
            assert intervals.kinds_of_step(spec, launches, adapters, *given_less) == (first, name)


def test_people_s_own_scripts_have_their_own_interval() -> None:
    """They had that of any run priced as a generic stack, which few of them are in."""
    spec = model_named("llama3-8b")[0]
    assert intervals.kinds_of_step(spec, 0.0, True, False, True, False, True) == (intervals.TRAINERS,)
    assert intervals.kinds_of_step(spec, 1.0, True, False, True, True, True) == (
        intervals.WAITING,
        intervals.DATASHEET,
    )
    assert [intervals.is_trainer_stack(name) for name in ("accelerate", "deepspeed", "fsdp2", "megatron-core")] == [
        True,
        True,
        False,
        False,
    ]
    asked = dict(model="llama3-8b", cluster="dgx-a100", gpus=8, batch=64, seq=4096, strategy="dp=8,zero=3")
    assert intervals.TRAINERS in phalanx.predict(**asked, stack="accelerate").interval  # type: ignore[arg-type]
    assert intervals.GENERIC in phalanx.predict(**asked, stack="fsdp2").interval  # type: ignore[arg-type]
