"""The queue: equal to the step-by-step reference on drawn loads; limits known in closed form; laws of any queue."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.serving_reference import serve, worker
from support.sizes import examples

from benchmarks.linear_price import LinearPrice
from phalanx.schedule.generation import BatchingPolicy, Request, Scheduler
from phalanx.serving.simulation.deployment import Deployment, Speculation, Transfer, WorkerSpec
from phalanx.serving.simulation.outcome import outcome
from phalanx.serving.simulation.requests import (
    Requests,
    closed_loop,
    equal_requests,
    gamma_requests,
    with_adapters,
    with_arrivals,
    with_reuse,
)
from phalanx.serving.simulation.simulation import RequestHistory, simulate
from phalanx.spec.errors import InputError

_PRICE = LinearPrice(5e-3, 2e-5, 1e-9, 2e-5, 2e-8)


def _one(spec: WorkerSpec, requests: Requests, seed: int = 0) -> RequestHistory:
    return simulate(Deployment((spec,)), requests, seed)


def _with_chunk(spec: WorkerSpec, chunk: int) -> WorkerSpec:
    return replace(spec, policy=replace(spec.policy, chunk=chunk))


def _drawn(draw: np.random.Generator) -> tuple[WorkerSpec, Requests]:
    """A load and an engine that is often full: of slots, of pages, of adapters."""
    n = int(draw.integers(1, 60))
    slots, page = int(draw.integers(1, 9)), int(draw.choice((1, 4, 16)))
    lengths = draw.integers(1, 120, n), draw.integers(1, 40, n)
    requests = Requests(*(np.asarray(x, np.int64) for x in lengths), None, int(draw.integers(1, 14)))
    if draw.random() < 0.5:
        requests = with_arrivals(requests, float(draw.choice((1, 10, 40))), int(draw.integers(99)))
    if draw.random() < 0.3:
        requests = with_reuse(requests, float(draw.random()), page)
    if draw.random() < 0.3:
        requests = replace(requests, priority=draw.integers(0, 3, n))
    adapters = int(draw.integers(1, 4)) if draw.random() < 0.3 else 0
    if adapters:
        requests = with_adapters(requests, 5, int(draw.integers(99)))
    longest = int((requests.input + requests.output - 1).max())
    pages = -(-longest // page) + int(draw.integers(0, 4 * longest // page + 2))
    price = LinearPrice(*(float(draw.random()) * x for x in (5e-2, 1e-4, 1e-6, 1e-4, 1e-5)))
    speculation = None
    if draw.random() < 0.3:
        speculation = Speculation(int(draw.integers(1, 4)), float(draw.integers(0, 2)))
    spec = worker(
        replace(price, step_s=price.step_s + 1e-3),
        slots,
        pages,
        page,
        chunk=slots * 4 + int(draw.integers(1, 150)),
        mixed=bool(draw.random() < 0.5),
        reserve=bool(draw.random() < 0.4),
        speculation=speculation,
        adapters=adapters,
        adapter_load_s=0.02 * bool(adapters),
    )
    return spec, requests


@examples(120, 3000)
def test_the_simulation_equals_one_step_after_the_other(examples: int) -> None:
    """Also: no page and no slot is given twice, for the reference gives them out one by one."""
    draw = np.random.default_rng(11)
    preempted = speculated = 0
    for _ in range(examples):
        spec, requests = _drawn(draw)
        per_step = 1
        if spec.speculation:
            per_step += int(spec.speculation.acceptance) * spec.speculation.tokens
            speculated += 1
            verified = 1 + spec.speculation.tokens
            spec = _with_chunk(spec, spec.policy.chunk + spec.policy.slots * verified)
        h = _one(spec, requests)
        budget = spec
        if spec.speculation:  # the reference knows tokens that are kept, the engine also verifies the others
            budget = replace(spec, speculation=None)
            if spec.policy.mixed and per_step != 1 + spec.speculation.tokens:
                continue
        first, done, preemptions = serve(budget, requests, per_step)
        assert h.preemptions == preemptions
        np.testing.assert_allclose(h.first, first, rtol=1e-9)
        np.testing.assert_allclose(h.done, done, rtol=1e-9)
        assert h.sent[:, 2].sum() == requests.output.sum()
        preempted += preemptions
    assert preempted > 20
    assert speculated > 20


@examples(40, 1000)
def test_a_slower_engine_is_a_faster_load_seen_slowly(examples: int) -> None:
    """All steps f times as long, with arrivals that are as far apart: all times are f times as long."""
    draw = np.random.default_rng(17)
    for _ in range(examples):
        (spec, requests), f = _drawn(draw), float(draw.uniform(0.4, 3))
        price = LinearPrice(**{name: f * seconds for name, seconds in vars(spec.price).items()})
        slower = replace(spec, price=price, adapter_load_s=f * spec.adapter_load_s)
        apart = requests if requests.arrival is None else replace(requests, arrival=f * requests.arrival)
        h, slow = _one(spec, requests), _one(slower, apart)
        np.testing.assert_allclose(slow.done, f * h.done, rtol=1e-9)
        np.testing.assert_allclose(slow.first, f * h.first, rtol=1e-9)


@examples(60, 1500)
def test_our_generation_and_the_simulation_execute_one_policy(examples: int) -> None:
    """In steps of a second, requests that our scheduler runs step by step begin and end when the simulation says."""
    draw = np.random.default_rng(3)
    waited = 0
    for _ in range(examples):
        n, slots, page = int(draw.integers(1, 40)), int(draw.integers(1, 7)), int(draw.choice((1, 4, 16)))
        prompts, outputs = draw.integers(1, 90, n), draw.integers(1, 30, n)
        arrives = np.sort(draw.integers(0, 60, n))
        policy = BatchingPolicy(slots, slots + int(draw.integers(1, 60)), page)
        longest = int((prompts + outputs - 1).max())
        policy = replace(policy, pages=policy.pages_of(longest) + int(draw.integers(0, 3 * longest // page + 2)))
        spec = WorkerSpec(LinearPrice(1.0), policy, policy.pages or 0)
        h = _one(spec, Requests(prompts, outputs, arrives.astype(float)))

        rows = zip(prompts.tolist(), outputs.tolist(), arrives.tolist(), strict=True)
        scheduler = Scheduler([Request(i, (0,) * p, o, (), a) for i, (p, o, a) in enumerate(rows)], policy)
        first, done, step = [-1] * n, [-1] * n, 0
        while not scheduler.done:
            batch = scheduler.batch(step)
            step += 1
            sampling = [slot.request for slot in batch.slots if slot.samples]
            for request in sampling:
                first[request] = step if first[request] < 0 else first[request]
            for request in scheduler.advance(batch, dict.fromkeys(sampling, 1)):
                done[request] = step
        assert h.first.tolist() == first
        assert h.done.tolist() == done
        waited += int((h.admitted > h.arrival).sum())
    assert waited > 100


@examples(40, 1000)
def test_requests_and_tokens_are_conserved_across_workers(examples: int) -> None:
    draw = np.random.default_rng(5)
    for _ in range(examples):
        spec, requests = _drawn(draw)
        if spec.speculation:
            spec = replace(_with_chunk(spec, 8192), speculation=Speculation(3, float(draw.random())))
        transfer = Transfer(1e4, 1e9, 1e-3) if draw.random() < 0.7 else None
        roles: tuple[Any, ...] = ("prefill",) * int(draw.integers(1, 4)) + ("decode",) * int(draw.integers(1, 4))
        workers = tuple(replace(spec, role=role) for role in (roles if transfer else ("both", "both", "both")))
        h = simulate(Deployment(workers, transfer), requests)
        assert np.all(h.arrival <= h.admitted)
        assert np.all(h.admitted < h.first)
        assert np.all(h.first <= h.done)
        assert np.all((h.first < h.done) == (requests.output > 1))
        assert h.sent[:, 2].sum() == requests.output.sum()
        again = simulate(Deployment(workers, transfer), requests)
        assert np.array_equal(h.done, again.done)


def test_one_user_waits_for_prefill_and_decodes_alone() -> None:
    price = LinearPrice(5e-3, 2e-5, 1e-9, 2e-5, 2e-8)
    h = _one(worker(price, 1, 1000, chunk=4096), closed_loop(equal_requests(5, 4000, 101), 1))
    ttft = price.mixed(4000, 4000 * 4001 / 2, 0, 0)
    np.testing.assert_allclose(h.first - h.arrival, ttft, rtol=1e-12)
    steps = 100 * price.decode(1, 4001)[0] + price.context_s * 100 * 99 / 2
    np.testing.assert_allclose(h.done - h.first, steps, rtol=1e-12)


def test_saturated_decoding_yields_a_batch_a_step() -> None:
    h = _one(worker(LinearPrice(0.01), 32, 10**6, chunk=10**6), closed_loop(equal_requests(2000, 10, 400), 32))
    assert outcome(h).tokens_per_s == pytest.approx(32 / 0.01, rel=1e-2)  # all 32 finish, and begin, together


@pytest.mark.parametrize(("load", "count"), [(0.3, 20_000), (0.8, 40_000)])  # long queues vary more
def test_prompts_alone_queue_as_m_d_1(load: float, count: int) -> None:
    """Pollaczek-Khinchine for constant service s: the mean wait is load s / (2 (1 - load))."""
    s = 0.05
    waits = []
    for seed in range(4):
        requests = with_arrivals(equal_requests(count, 100, 1), load / s, seed)
        h = _one(worker(LinearPrice(s), 1, 100, chunk=100), requests)
        waits.append(float((h.first - h.arrival).mean()) - s)
    assert np.mean(waits) == pytest.approx(load * s / (2 * (1 - load)), rel=0.05)


def test_littles_law() -> None:
    """Requests in the system, counted over time, are the rate times the mean stay."""
    h = _one(worker(_PRICE, 16, 4000), with_arrivals(gamma_requests(3000, 800, 60, 0.7, 8000, 3), 8, 4))
    times = np.concatenate((h.arrival, h.done))
    order = np.argsort(times, kind="stable")
    inside = np.cumsum(np.repeat((1, -1), len(h.arrival))[order])
    end = times[order][-1]
    counted = float((inside[:-1] * np.diff(times[order])).sum()) / end
    assert counted == pytest.approx(len(h.arrival) / end * float((h.done - h.arrival).mean()), rel=1e-9)
    seen = outcome(h)
    assert seen.in_flight == pytest.approx(seen.requests_per_s * seen.latency.mean, rel=0.05)


def test_waiting_grows_with_the_rate_and_falls_with_slots() -> None:
    load = gamma_requests(2000, 500, 50, 0.5, 8000, 1)

    def ttft(rate: float, slots: int) -> float:
        return outcome(_one(worker(_PRICE, slots, 8000), with_arrivals(load, rate, 2))).ttft.mean

    by_rate = [ttft(rate, 8) for rate in (1, 4, 8, 16)]
    assert by_rate == sorted(by_rate)
    assert by_rate[-1] > 2 * by_rate[0]
    assert ttft(8, 32) <= ttft(8, 8) <= ttft(8, 2)


def test_priorities_reuse_and_speculation_help_whom_they_should() -> None:
    load = with_arrivals(gamma_requests(1500, 2000, 60, 0.3, 8000, 1), 9, 2)
    spec = worker(_PRICE, 8, 4000)
    plain = outcome(_one(spec, load))
    urgent = replace(load, priority=np.arange(1500) % 2)
    h = _one(spec, urgent)
    waits = h.first - h.arrival
    assert waits[::2].mean() < 0.5 * waits[1::2].mean()
    assert outcome(_one(spec, with_reuse(load, 0.5, 16))).ttft.mean < plain.ttft.mean
    speculation = Speculation(3, 0.8)
    faster = outcome(_one(replace(spec, speculation=speculation), closed_loop(load, 8)))
    slower = outcome(_one(spec, closed_loop(load, 8)))
    assert speculation.mean == pytest.approx(1 + 0.8 + 0.64 + 0.512)
    assert faster.tpot.mean < slower.tpot.mean


def test_drafted_tokens_are_accepted_at_their_rate() -> None:
    spec = worker(LinearPrice(0.01), 1, 10_000, speculation=Speculation(4, 0.7))
    h = _one(spec, closed_loop(equal_requests(200, 10, 1000), 1))
    steps = (h.done - h.first) / 0.01
    assert 999 * 200 / steps.sum() == pytest.approx(Speculation(4, 0.7).mean, rel=0.01)


def test_a_cache_is_handed_on_over_its_link() -> None:
    prefill = worker(_PRICE, 4, 1000, role="prefill")
    decode = worker(_PRICE, 8, 1000, role="decode")
    h = simulate(Deployment((prefill, decode), Transfer(1e5, 1e9, 1e-3)), closed_loop(equal_requests(3, 4000, 11), 1))
    expected = _PRICE.mixed(4000, 4000 * 4001 / 2, 0, 0) + 1e-3 + 4000 * 1e5 / 1e9
    np.testing.assert_allclose(h.first - h.arrival, expected, rtol=1e-12)
    slow = simulate(Deployment((prefill, decode), Transfer(1e5, 1e8)), closed_loop(equal_requests(40, 4000, 11), 4))
    assert outcome(slow).requests_per_s < 1e8 / (4000 * 1e5) * 1.001  # the link is full


def test_what_cannot_be_served_is_one_line() -> None:
    with pytest.raises(InputError, match="longest request needs 4,100 tokens, and a both worker's cache holds 1,600"):
        _one(worker(_PRICE, 4, 100), closed_loop(equal_requests(2, 4000, 101), 2))
    with pytest.raises(InputError, match="times must ascend from 0"):
        replace(equal_requests(2, 10, 10), arrival=np.array([-1.0, 2.0]))
    with pytest.raises(InputError, match=r"requests.output\[1\] = 0: must be at least 1"):
        Requests(np.array([4, 4]), np.array([4, 0]), None, 1)
    with pytest.raises(InputError, match="leaves no tokens for prompts when 64"):
        worker(_PRICE, 64, 10, chunk=64)


def test_chunks_follow_one_another_through_a_pipeline() -> None:
    """Four chunks over four stages: a step takes what one takes through all, the last is out 3/4 of it later."""
    price = LinearPrice(0.08)
    h = _one(worker(price, 1, 1000, chunk=4000, stages=4), closed_loop(equal_requests(2, 4000, 1), 1))
    np.testing.assert_allclose(h.first - h.arrival, 0.08 * 1.75)
    h = _one(worker(price, 1, 1000, chunk=4000, stages=4), closed_loop(equal_requests(2, 1000, 1), 1))
    np.testing.assert_allclose(h.first - h.arrival, 0.08)


def test_a_prompt_is_of_one_group_and_the_busiest_group_is_waited_for() -> None:
    """Two groups with 500 tokens a step each: alone a prompt of 1,000 takes two uneven steps, and so do two at once,
    one in each group."""
    price = LinearPrice(0.01, 1e-3)
    spec = worker(price, 2, 1000, chunk=1000, groups=2)
    alone = _one(spec, closed_loop(equal_requests(2, 1000, 1), 1))
    np.testing.assert_allclose(alone.first - alone.arrival, 2 * (0.01 + 500 * 2 * 1e-3))
    together = _one(spec, closed_loop(equal_requests(2, 1000, 1), 2))
    np.testing.assert_allclose(together.first - together.arrival, 2 * (0.01 + 1000 * 1e-3))


def test_the_way_to_the_user_is_in_ttft_alone() -> None:
    h = _one(worker(LinearPrice(0.01), 4, 1000), closed_loop(equal_requests(50, 100, 11), 4))
    plain, seen = outcome(h), outcome(h, way_s=0.005, way_steps=3)
    assert seen.ttft.p50 == pytest.approx(plain.ttft.p50 + 0.005 + 3 * plain.tpot.p50)
    assert seen.tpot == plain.tpot
    assert seen.latency.p50 == pytest.approx(plain.latency.p50 + 0.005)


def test_every_chip_of_the_table_is_served_in_the_types_that_it_has() -> None:
    """Each generation has a type at least, but Volta, which no engine serves; Blackwell with GDDR has all."""
    from phalanx.serving.simulation.engines import ENGINES, NEEDS, require_types
    from phalanx.spec.cluster.chips import CHIPS

    for name, chip in CHIPS.items():
        assert any(chip.generation in able for able in NEEDS.values()) == (chip.generation != "volta"), name
    require_types("nvfp4", "fp8", CHIPS["RTX-PRO-6000"].generation, "RTX-PRO-6000", ENGINES["trtllm"])
    for types, known in ((("fp7", "fp8"), "fp8"), (("bf16", "bf61"), "bf16")):
        with pytest.raises(InputError, match=f"did you mean {known}"):
            require_types(*types, "hopper", "H100", ENGINES["vllm"])
