"""What is seen of a history: laws that hold of any, and the closed form of requests that come and go in step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from phalanx.serving.simulation.outcome import outcome
from phalanx.serving.simulation.requests import equal_requests
from phalanx.serving.simulation.simulation import RequestHistory

_GAP, _WAIT, _FIRST, _STAY, _TOKENS = 0.25, 0.5, 1.0, 5.0, 9
"""Seconds between requests; until one is admitted, has its first token and its last; its tokens."""


def _history(n: int, late: float = 0.0, timed: bool = True) -> RequestHistory:
    """Requests that come in even steps, each served as the one before. `late`: seconds by which the first tokens of
    every second one are later."""
    requests = equal_requests(n, 10, _TOKENS)
    arrival = _GAP * np.arange(n)
    first = arrival + _FIRST + late * (np.arange(n) % 2)
    done = arrival + _STAY
    runs = [np.stack((first, np.full(n, _FIRST), np.ones(n)), 1), np.stack((done, done - first, 8 * np.ones(n)), 1)]
    gaps = np.tile((8.0, 0.4, 0.6), (n, 1))
    if timed:
        requests = replace(requests, arrival=arrival)
    return RequestHistory(requests, arrival, arrival + _WAIT, first, done, np.concatenate(runs), gaps, 3)


@pytest.mark.parametrize("timed", [True, False])
@pytest.mark.parametrize("n", [100, 400])
def test_a_steady_flow_is_seen_as_it_flows(n: int, timed: bool) -> None:
    seen = outcome(_history(n, timed=timed))
    assert seen.requests_per_s == pytest.approx(1 / _GAP)
    assert seen.tokens_per_s == pytest.approx(_TOKENS / _GAP)
    assert seen.in_flight == pytest.approx(_STAY / _GAP)
    for times, value in ((seen.ttft, _FIRST), (seen.queueing, _WAIT), (seen.latency, _STAY)):
        assert (times.mean, times.p50, times.p90, times.p99) == pytest.approx((value,) * 4)
    assert seen.tpot.mean == pytest.approx((_STAY - _FIRST) / (_TOKENS - 1))
    assert (seen.gap.mean, seen.preemptions, seen.makespan_s) == (pytest.approx(0.5), 3, None)
    # Left out: a tenth, or who came before two stays had passed; and who was under way when the last one came.
    under_way = round(_STAY / _GAP)
    assert seen.requests == (n - max(n // 10, 2 * under_way) - under_way if timed else n - n // 10)


def test_of_few_requests_half_are_seen_at_most_and_a_quarter_at_least() -> None:
    assert outcome(_history(40)).requests == 10  # all but the first ones are under way when the last one comes
    assert outcome(_history(60)).requests == 15
    assert outcome(_history(80)).requests == 80 - 40 - 20
    assert outcome(_history(2)).requests == outcome(_history(1)).requests == 1
    assert outcome(_history(8), warm=0.0).requests == 8


def test_a_benchmark_counts_all_from_the_first_request_to_the_last_token() -> None:
    seen = outcome(_history(40), finite=True, way_s=0.5)
    assert seen.makespan_s == pytest.approx(39 * _GAP + _STAY + 0.5)
    assert seen.requests == 40
    assert seen.requests_per_s * seen.makespan_s == pytest.approx(40)
    assert seen.in_flight * seen.makespan_s == pytest.approx(40 * _STAY)
    at_once = replace(_history(40), arrival=np.zeros(40))
    whole = outcome(replace(at_once, requests=equal_requests(40, 10, _TOKENS)))
    assert whole.requests_per_s == pytest.approx(40 / float(at_once.done.max()))  # there is no steady part


@pytest.mark.parametrize("steps", [0.0, 2.5, 8.0, 100.0])
def test_a_first_token_is_on_its_way_for_steps_but_no_later_than_the_last(steps: float) -> None:
    seen = outcome(_history(200), way_s=0.1, way_steps=steps)
    assert seen.ttft.mean == pytest.approx(_FIRST + 0.1 + min(steps, _TOKENS - 1) * seen.tpot.mean)
    assert seen.latency.mean == pytest.approx(_STAY + 0.1)
    single = replace(_history(200), requests=replace(_history(200).requests, output=np.ones(200, np.int64)))
    seen = outcome(single, way_s=0.1, way_steps=steps)
    assert (seen.ttft.mean, seen.tpot.mean) == (pytest.approx(_FIRST + 0.1), 0.0)


def test_the_share_that_keeps_a_limit_and_how_sure_it_is() -> None:
    h = _history(400, late=0.2)
    limits = {"ttft": _FIRST + 0.1, "tpot": 1.0, "deadline": None}
    late, all_kept = outcome(h, limits=limits).kept
    assert (late.limit, late.share, all_kept.limit, all_kept.share, all_kept.margin) == (
        "ttft",
        0.5,
        "tpot",
        1.0,
        0.0,
    )
    (deadline,) = outcome(h, limits={"deadline": _STAY}, way_s=0.01).kept
    assert deadline.share == 0.0
    assert outcome(h, limits={"deadline": _STAY + 0.02}, way_s=0.01).kept[0].share == 1.0
    drawn = replace(h, first=h.arrival + np.random.default_rng(0).exponential(1.0, 400))
    shares, margins = [], []
    for seed in range(60):  # drawn anew: 95 % of intervals hold the share
        again = replace(drawn, first=h.arrival + np.random.default_rng(seed).exponential(1.0, 400))
        (kept,) = outcome(again, finite=True, limits={"ttft": 1.0}).kept
        shares.append(kept.share)
        margins.append(kept.margin)
    true = 1 - np.exp(-1)
    assert 0.85 <= np.mean(np.abs(np.array(shares) - true) <= margins) < 1
    assert np.mean(margins) == pytest.approx(1.96 * (true * (1 - true) / 400) ** 0.5, rel=0.12)
    (alone,) = outcome(_history(1), limits={"ttft": 2.0}).kept
    assert (alone.share, alone.margin > 1) == (1.0, True)  # one says nothing


def test_gaps_are_counted_by_their_tokens() -> None:
    """Within a run they grow evenly."""
    h = replace(_history(9), gaps=np.array([(80.0, 1.0, 1.0), (15.0, 3.0, 3.0), (5.0, 7.0, 9.0)]))
    gap = outcome(h).gap
    assert (gap.p50, gap.p90) == (1.0, 3.0)
    assert 7 <= gap.p99 <= 9
    assert gap.mean == pytest.approx(0.8 * 1 + 0.15 * 3 + 0.05 * 8)
    assert outcome(replace(h, gaps=np.empty((0, 3)))).gap.p99 == 0.0
