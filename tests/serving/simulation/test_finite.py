"""A benchmark of so many requests: makespan, bounds and quantiles that hold whatever the rate."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.serving_reference import worker
from support.sizes import examples

from benchmarks.linear_price import LinearPrice
from phalanx.serving.simulation.deployment import Deployment
from phalanx.serving.simulation.outcome import ServingOutcome, outcome
from phalanx.serving.simulation.requests import (
    Requests,
    closed_loop,
    equal_requests,
    gamma_requests,
    uniform_requests,
    with_arrivals,
)
from phalanx.serving.simulation.simulation import RequestHistory, simulate

_STEP_S, _SLOTS = 5e-3, 16
_SPEC = worker(LinearPrice(_STEP_S, 2e-5, 1e-9, 2e-5, 2e-8), _SLOTS, 4000)
_CAPACITY = _SLOTS / _STEP_S
"""Tokens/s that no load exceeds: a token of every slot in each of the shortest steps."""


def _history(requests: Requests) -> RequestHistory:
    return simulate(Deployment((_SPEC,)), requests)


def _seen(requests: Requests) -> ServingOutcome:
    return outcome(_history(requests), finite=True)


@examples(40, 2000)
def test_makespan_has_its_bounds(examples: int) -> None:
    draw = np.random.default_rng(5)
    for _ in range(examples):
        n = int(draw.integers(1, 200))
        requests = gamma_requests(n, 200, 30, float(draw.choice((0.0, 0.7))), 2000, int(draw.integers(99)))
        users, rate = int(draw.integers(0, 40)), float(draw.choice((0.5, 10, 100, 1e5)))
        seen = _seen(with_arrivals(requests, rate, 1, float(draw.choice((0.3, 1, np.inf))), users))
        assert seen.makespan_s is not None
        assert seen.makespan_s >= requests.output.sum() / _CAPACITY
        assert seen.tokens_per_s == pytest.approx(requests.output.sum() / seen.makespan_s)
        assert seen.requests == n
        assert seen.requests_per_s == pytest.approx(n / seen.makespan_s)
        for times in (seen.ttft, seen.queueing, seen.tpot, seen.gap, seen.latency):
            assert times.p50 <= times.p90 <= times.p99
        assert not users or seen.in_flight <= users * (1 + 1e-9)
        assert seen.in_flight * seen.makespan_s == pytest.approx(seen.latency.mean * n)  # Little's law


@pytest.mark.parametrize("seed", range(12))
def test_the_first_token_comes_no_later_than_the_last_and_the_last_within_the_makespan(seed: int) -> None:
    """Quantile by quantile, for answers that are shorter than the steps on a first token's way too."""
    draw = np.random.default_rng(seed)
    n, tokens = int(draw.integers(1, 120)), int(draw.choice((1, 2, 8, 60)))
    requests = gamma_requests(n, int(draw.choice((20, 1000))), tokens, float(draw.choice((0.0, 0.7))), 2000, seed)
    come = with_arrivals(requests, float(draw.choice((2, 50, 1e5))), seed, 1.0, int(draw.integers(0, 40)))
    seen = outcome(_history(come), way_s=0.02, way_steps=float(draw.choice((0.5, 9.6))), finite=True)
    assert seen.makespan_s is not None
    for name in ("mean", "p50", "p90", "p99"):
        first, last = getattr(seen.ttft, name), getattr(seen.latency, name)
        assert first <= last * (1 + 1e-12), name
        assert last <= seen.makespan_s * (1 + 1e-12), name


@pytest.mark.parametrize("users", [1, 5, 40])
def test_all_at_once_with_a_limit_is_a_closed_loop(users: int) -> None:
    requests = gamma_requests(120, 300, 40, 0.5, 2000, 3)
    looped = _history(closed_loop(requests, users))
    at_once = _history(replace(requests, arrival=np.zeros(len(requests)), users=users))
    for column in ("arrival", "first", "done"):
        assert np.array_equal(getattr(looped, column), getattr(at_once, column)), column


def test_requests_that_come_seldom_are_as_fast_as_one_alone() -> None:
    alone, seldom = _seen(equal_requests(1, 400, 50)), _seen(with_arrivals(equal_requests(40, 400, 50), 1e-4, 2))
    for name in ("ttft", "tpot", "latency"):
        assert getattr(seldom, name).p99 == pytest.approx(getattr(alone, name).p50), name


def test_a_faster_burst_ends_no_later_and_waits_longer() -> None:
    requests = gamma_requests(300, 300, 40, 0.5, 2000, 3)
    seen = [_seen(with_arrivals(requests, rate, 4)) for rate in (2, 20, 200, 1e6)]
    spans = [x.makespan_s or 0.0 for x in seen]
    assert spans == sorted(spans, reverse=True)
    waits = [x.ttft.mean for x in seen]
    assert waits == sorted(waits)


def test_arrivals_have_the_rate_and_the_burstiness() -> None:
    for burstiness, variation in ((0.25, 2.0), (1.0, 1.0), (4.0, 0.5), (np.inf, 0.0)):
        arrival = with_arrivals(equal_requests(20_000, 5, 5), 8.0, 7, burstiness).arrival
        assert arrival is not None
        gaps = np.diff(arrival)
        assert gaps.mean() == pytest.approx(1 / 8, rel=0.05)
        assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.05, abs=1e-9)


def test_uniform_lengths_reach_both_ends() -> None:
    requests = uniform_requests(5000, (3, 9), (2, 2), 1)
    assert np.array_equal(np.unique(requests.input), np.arange(3, 10))
    assert set(requests.output) == {2}


def test_none_of_those_that_come_together_begins_before_the_last_is_accepted() -> None:
    accepted, token = 2e-3, 1e-6
    deployment = Deployment((_SPEC,), None, accepted, token)
    at_once = replace(equal_requests(100, 300, 20), arrival=np.zeros(100), users=0)
    together = simulate(deployment, at_once)
    assert together.admitted.min() == pytest.approx(100 * accepted)
    # Tokenising takes its turn too, while others are accepted.
    slow = Deployment((_SPEC,), None, accepted, 1e-4)
    assert np.diff(simulate(slow, at_once).admitted).max() >= 0.02
    # One that comes alone waits for itself, and what comes later holds nobody.
    seldom = simulate(deployment, with_arrivals(equal_requests(40, 300, 20), 1.0, 3, np.inf))
    assert seldom.admitted - seldom.arrival == pytest.approx(accepted + 300 * token)
    alone = replace(equal_requests(9, 300, 20), arrival=np.zeros(9), users=0)
    assert simulate(Deployment((_SPEC,)), alone).admitted.min() == 0


@pytest.mark.parametrize("n", [1, 30, 1000])
def test_drawn_lengths_have_the_mean_that_was_asked_for(n: int) -> None:
    requests = gamma_requests(n, 220, 200, 0.7, 100_000, 5)
    assert requests.input.mean() == pytest.approx(220, abs=1)
    assert requests.output.mean() == pytest.approx(200, abs=1)
