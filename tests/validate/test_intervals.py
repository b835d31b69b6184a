"""Intervals of predicted step times: what they hold of published runs, and which one a prediction has."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

import phalanx
from calibration.intervals import (
    ENOUGH,
    Run,
    coverage,
    coverage_by_group,
    first_predictions,
    held,
    interval,
    publication,
    rows,
    runs,
    student,
)
from calibration.intervals import intervals as intervals_of
from phalanx.planning.lookup import model_named
from phalanx.validate import intervals
from phalanx.validate.from_row import cases


@pytest.fixture(scope="module")
def published() -> list[Run]:
    return runs(cases(rows())[0]) + first_predictions()


def test_shipped_intervals_are_those_of_the_published_runs(published: list[Run]) -> None:
    shipped, found = json.loads(intervals.FILE.read_text()), intervals_of(published)
    assert shipped.keys() == found.keys()
    for kind, i in found.items():
        assert (shipped[kind]["low"], shipped[kind]["high"]) == pytest.approx((i.low, i.high), rel=1e-3)
        assert (shipped[kind]["runs"], shipped[kind]["publications"]) == (i.runs, i.publications)


def test_intervals_hold_their_share_of_publications_left_out(published: list[Run]) -> None:
    inside = held(published)
    assert len({run.publication for run in published}) >= 22
    assert intervals.SHARE - 0.04 <= coverage(published, inside) <= intervals.SHARE + 0.04
    for group, (_, share) in coverage_by_group(published, inside).items():
        assert share >= 0.7, group


def test_first_predictions_are_of_kinds_that_a_prediction_has() -> None:
    first = first_predictions()
    shipped = json.loads(intervals.FILE.read_text())
    assert len(first) == 25
    assert {kind for run in first for kind in run.kinds} <= shipped.keys()
    halo = [run for run in first if run.publication == "github:whitecircle/halo"]
    assert [round(math.exp(run.error), 2) for run in halo] == [2.53, 3.27, 3.07, 2.52, 0.76, 0.84, 0.88, 1.89, 1.01]


def test_experts_under_people_s_own_scripts_are_taken_from_those_without_too() -> None:
    dense = Run("a", (intervals.TRAINERS,), (), 0.1, {})
    experts = Run("b", (intervals.TRAINED_EXPERTS,), (), 0.9, {})
    found = intervals_of([dense, experts])
    assert found[intervals.TRAINERS].runs == 1
    assert found[intervals.TRAINED_EXPERTS].runs == 2


def test_no_run_that_constants_were_fitted_on_is_in_an_interval() -> None:
    families = {row.family for row in rows()}
    assert families.isdisjoint({"megatron-2020-tp", "nemo-longseq", "palm-paper", "megatron-moe-modelzoo"})
    assert {"vtrain", "torchtitan", "bigscience-v100", "bridge-cards"} <= families


def test_sources_of_one_repository_are_one_publication() -> None:
    names = {row.family: publication(row) for row in rows()}
    assert names["torchtitan"] == names["torchtitan-2026"] == names["torchtitan-threads"] != names["torchao"]
    assert names["bridge-cards"] == names["nemo-megatron-bridge"]


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1.0, 3.078), (2.0, 1.886), (5.0, 1.476), (10.0, 1.372), (120.0, 1.289)]
)
def test_student_s_quantiles_are_the_tabulated_ones(freedom: float, quantile: float) -> None:
    assert student(0.9, freedom) == pytest.approx(quantile, abs=1e-3)


@pytest.mark.parametrize("publications", [5, 12])
def test_an_interval_holds_its_share_of_a_further_publication(publications: int) -> None:
    """Errors that all runs of a publication share, the hardest case: quantiles of runs hold half to two thirds."""
    random, trials, inside, plain = np.random.default_rng(1), 400, 0, 0
    for _ in range(trials):
        shared = random.normal(0, 0.1, publications + 1)
        sample = [(str(i), float(x)) for i, x in enumerate(shared[:-1]) for _ in range(2)]
        i, errors = interval("any", sample), sorted(shared[:-1])
        inside += i.low <= math.exp(shared[-1]) <= i.high
        plain += np.quantile(errors, 0.1) <= shared[-1] <= np.quantile(errors, 0.9)
    assert plain / trials < 0.7
    assert 0.72 <= inside / trials <= 0.83


def test_a_publication_of_many_runs_does_not_decide_alone() -> None:
    many, few = [("many", 0.0)] * 900, [("few", 1.0)] * ENOUGH
    assert interval("any", [*many, *few]) == replace(interval("any", [*many[:ENOUGH], *few]), runs=910)


def test_fewer_publications_make_an_interval_wider() -> None:
    errors = np.linspace(-0.2, 0.2, 60)

    def width(publications: int) -> float:
        i = interval("any", [(str(n % publications), float(x)) for n, x in enumerate(errors)])
        return i.high / i.low

    assert width(1) > width(2) > width(3) > width(6)


def test_what_is_not_known_of_stack_and_chip_adds_to_an_interval() -> None:
    dense, narrow, generic, datasheet = (
        intervals.Interval(kind, 1 / width, width, 9, 3)
        for kind, width in (
            (intervals.DENSE, 1.2),
            (intervals.NARROW, 1.3),
            (intervals.GENERIC, 1.5),
            (intervals.DATASHEET, 1.4),
        )
    )
    assert intervals.combined([dense, narrow]) == narrow
    both = intervals.combined([dense, narrow, generic, datasheet])
    assert both.kind == "priced as a generic stack; priced from a datasheet; 8 bits or less"
    assert math.log(both.high) == pytest.approx(math.hypot(math.log(1.3), math.log(1.5), math.log(1.4)))
    assert both.low == pytest.approx(1 / both.high)


def test_a_prediction_is_less_sure_in_8_bits_and_of_people_s_own_scripts() -> None:
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
        ("nemotron-h-56b", intervals.EXPERTS),
        ("deepseek-v3.2", intervals.EXPERTS),
    ],
)
def test_kinds_are_of_layers_launches_and_what_is_priced_from_less(model: str, layers: str) -> None:
    spec = model_named(model)[0]
    for launches, adapters, first in (
        (0.0, False, layers),
        (intervals.WAITS, False, layers),
        (intervals.WAITS, True, intervals.TRAINED_EXPERTS if spec.experts else intervals.TRAINERS),
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
