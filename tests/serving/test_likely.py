"""Where figures are likely to lie, and how near capacity a load is: slowness acts through the queue."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from phalanx import serve_plan
from phalanx.cost.analytic.chips import chip_name
from phalanx.serving.answer import ServingPlanAnswer, as_request
from phalanx.serving.likely import MEASURED, Slowed, capacity_range, edge, likely, slowed, slowness
from phalanx.serving.question import ask
from phalanx.serving.report import likely as said_of
from phalanx.serving.search.queued import capacity, with_outcome
from phalanx.serving.search.search import Search
from phalanx.serving.validation import bursts
from phalanx.serving.validation.predictions import NEEDED, RUNS
from phalanx.spec.cluster.presets import preset
from phalanx.validate.records import load

_ASK: dict[str, Any] = {"model": "llama3-8b", "cluster": "dgx-h100", "gpus": 1, "layout": "tp=1", "weights": "bf16"}
_ASK |= {"input": 1000, "output": 100, "mode": "aggregated"}
_CAPACITY = 25.0
"""About what one GPU answers of these requests in a second."""


def _searched(**more: Any) -> tuple[ServingPlanAnswer, Search]:
    answer, query = serve_plan(**_ASK | more), ask(as_request(_ASK | more))
    return answer, Search(query.question, query.layout)


def _slowed(**more: Any) -> Slowed:
    answer, search = _searched(**more)
    return slowed(search.q, answer.search.best, search.copy_of)


@pytest.mark.parametrize("more", [{"requests": 60, "rate": 9.0}, {"requests": 60, "rate": 40.0}, {"rate": 9.0}])
@pytest.mark.parametrize("factor", [0.6, 1.0, 1.7])
def test_the_slowness_of_an_engine_is_seen_in_its_figures(more: dict[str, Any], factor: float) -> None:
    of = _slowed(**more)
    for figure, seconds in of(factor).items():
        assert slowness(of, figure, seconds) == pytest.approx(factor, rel=0.02), figure


@pytest.mark.parametrize("more", [{"requests": 40, "concurrency": 4}, {"concurrency": 4}])
def test_without_arrivals_slowness_is_measured_over_predicted(more: dict[str, Any]) -> None:
    of = _slowed(**more)
    for figure, seconds in of(1).items():
        assert of(3)[figure] == pytest.approx(3 * seconds)
        assert slowness(of, figure, 1.25 * seconds) == pytest.approx(1.25)


def test_a_small_error_of_a_step_is_a_large_one_of_the_queue_near_capacity() -> None:
    far, near = (_slowed(requests=2000, rate=share * _CAPACITY) for share in (0.3, 0.97))
    assert far(1.2)["ttft_s"] < 1.6 * far(1)["ttft_s"]
    assert near(1.2)["ttft_s"] > 4 * near(1)["ttft_s"]
    assert near(1.2)["tpot_s"] < 2 * near(1)["tpot_s"]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("output", [20, 200])
def test_what_comes_below_capacity_is_answered_and_what_comes_above_it_is_not(output: int, seed: int) -> None:
    answer, search = _searched(rate=1.0, output=output, seed=seed)
    q, best = search.q, answer.search.best
    most = capacity(q, best, search.copy_of)
    for share in (0.8, 0.92, 1.1, 1.4):
        o = with_outcome(replace(q, rate=share * most), replace(best, outcome=None), search.copy_of).outcome
        assert o is not None
        assert (o.requests_per_s > 0.97 * share * most) == (share < 1), share


def test_a_load_within_the_error_of_capacity_has_no_bound_and_that_is_said_first() -> None:
    low, high = capacity_range(_searched(rate=1.0)[1].q, _CAPACITY)
    assert low < 0.9 * _CAPACITY < high
    for share, uncertain in ((0.1, False), (0.9, True)):
        answer, search = _searched(rate=share * _CAPACITY)
        most = answer.capacity_requests_per_s
        assert most == capacity(search.q, answer.search.best, search.copy_of)
        assert answer.capacity_range == capacity_range(search.q, most)
        by = {r.figure: r for r in answer.likely}
        assert (by["ttft_s"].high is None) == uncertain
        assert by["tpot_s"].high is not None
        assert any(line.startswith("uncertain: ") for line in answer.caveats[:1]) == uncertain
        told, taken = said_of(answer)
        assert ("without bound" in told) == uncertain
        assert taken.endswith("that can be answered")
    assert edge(replace(search.q, rate=2 * high), _CAPACITY) == []


def test_a_benchmark_faster_than_its_answers_says_so_and_its_time_ends() -> None:
    answer, _ = _searched(requests=400, rate=3 * _CAPACITY)
    assert said_of(answer)[1].endswith(": the queue grows as long as they come")
    assert all(r.high is not None and math.isfinite(r.high) for r in answer.likely)
    assert answer.passed
    assert _searched(requests=40, concurrency=4)[0].capacity_requests_per_s is None


def test_ranges_are_what_the_queue_makes_of_the_slowness_of_published_runs() -> None:
    answer, search = _searched(requests=300, rate=0.95 * _CAPACITY)
    asked: list[float] = []

    def of(factor: float) -> dict[str, float]:
        asked.append(factor)
        return dict.fromkeys(("makespan_s", "ttft_s", "tpot_s"), factor)

    ranges, basis = likely(search.q, answer.search.best, of)
    assert {(r.low, r.high) for r in ranges if r.figure != "tokens_per_s"} == set(
        zip(asked[::2], asked[1::2], strict=True)
    )
    assert "(vllm, at a rate)" in basis


@pytest.mark.parametrize(("cluster", "said"), [("dgx-b200", ""), ("mi300x", ", none of them on MI300X,")])
def test_a_range_says_that_its_runs_are_on_other_chips(cluster: str, said: str) -> None:
    answer, search = _searched(requests=40, concurrency=4)
    q = replace(search.q, cluster=preset(cluster, 1))
    assert (
        likely(q, answer.search.best, slowed(search.q, answer.search.best, search.copy_of))[1].partition(")")[2]
        == said
    )


def test_the_chips_of_published_runs_are_those_of_their_rows() -> None:
    gpus = {row["gpu"] for rows in (bursts.rows(), load(RUNS, NEEDED)) for row in rows}
    assert {chip_name(gpu) for gpu in gpus} == MEASURED
