"""The search: tables as the price has them, steady states as the simulation, and no better candidate left out."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from unittest.mock import Mock

import numpy as np
import pytest

from phalanx.planning.expense.rates import rates_on
from phalanx.planning.lookup import cluster_named, model_named
from phalanx.serving.cost.layout import ServingLayout
from phalanx.serving.cost.roofline import ServingPrice
from phalanx.serving.search.answering import answer
from phalanx.serving.search.copies import Copy, Tabulated
from phalanx.serving.search.neighbours import _changes, neighbours
from phalanx.serving.search.question import ServingCandidate, ServingQuestion, WorkerGroup
from phalanx.serving.search.queued import excess, with_outcome
from phalanx.serving.search.search import Search, best_of_each
from phalanx.serving.search.space import layout_error, layouts
from phalanx.serving.simulation.engines import ENGINES, engine
from phalanx.spec.errors import InputError

_MODEL, _CLUSTER = model_named("llama3-8b")[0], cluster_named("dgx-h100")(4)
_ASK = ServingQuestion(
    _MODEL,
    _CLUSTER,
    4,
    engine("vllm"),
    1000,
    100,
    1100,
    "throughput",
    rates_on(_CLUSTER.device.name, phases=("serving", "decode")),
    1.0,
    0.03,
    90,
    ("bf16",),
    "bf16",
    16,
    (1024, 4096),
    ("aggregated", "disaggregated"),
    requests=400,
)


@pytest.mark.parametrize("name", ["llama3-70b", "deepseek-v3"])
def test_a_table_is_the_price(name: str) -> None:
    """Between its points a table differs from the price by a few percent at most."""
    model = model_named(name)[0]
    price = ServingPrice(model, cluster_named("dgx-h200")(8), "vllm", "fp8", "bf16")
    draw = np.random.default_rng(0)
    cases = [ServingLayout(8, 1, 1, 8, 1)]
    cases += [ServingLayout(1, 1, 8, 1, 8)] if model.experts else [ServingLayout(2, 1, 1, 2, 1)]
    for x in cases:
        table = Tabulated(partial(price.seconds, x), 512, 8000, 8192, 1, x.attention_dp)
        for below, above in pairwise(table._tokens):
            for uneven in (1.0, 1.5)[: x.attention_dp]:
                ends, middle = [table._per_tokens(n, uneven) for n in (below, above)], (below + above) / 2
                assert table._per_tokens(middle, uneven) == pytest.approx(tuple(np.mean(ends, axis=0)))
        off = []
        for _ in range(300):
            batch, mean, tokens = (int(10 ** draw.uniform(0, high)) for high in (2.7, 3.9, 3.9))
            past = int(draw.integers(0, 4000))
            exact = float(price.seconds(x, 0, 0, batch, batch * mean))
            off.append(table.decode(batch, batch * mean)[0] / exact - 1)
            exact = float(price.seconds(x, tokens, past, batch, batch * mean))
            pairs = tokens * (past + (tokens + 1) / 2)
            off.append(table.mixed(tokens, pairs, batch, batch * mean) / exact - 1)
        assert np.median(np.abs(off)) < 0.01
        assert np.quantile(np.abs(off), 0.95) < 0.06


def test_a_table_runs_along_its_lines() -> None:
    price = ServingPrice(_MODEL, _CLUSTER, "vllm", "bf16", "bf16")
    table = Tabulated(partial(price.seconds, ServingLayout()), 64, 4000, 2048)
    context, end = 20, 0
    while end < 60 * 3000:
        seconds, slope, end = table.decode(60, context)
        assert table.decode(60, end - 1)[0] == pytest.approx(seconds + slope * (end - 1 - context), rel=1e-9)
        assert end > context
        context = end


@pytest.mark.parametrize("name", sorted(ENGINES))
def test_the_steady_state_is_what_the_simulation_shows(name: str) -> None:
    """Pruning is sound: over layouts and batches TPOT and tokens/s agree within a few percent."""
    q = replace(_ASK, engine=engine(name), page_tokens=16, ttft_s=None, tpot_s=None)
    search = Search(q)
    tpot, rate = [], []
    for copy in search.copies():
        for c in search.aggregated(copy, (1, 4, 16, 64)):
            if c.groups[0].step_tokens == 4096:
                continue
            seen = search.simulate(c)
            tpot.append(c.steady.tpot_s / seen.tpot_s(50) - 1)
            rate.append(c.steady.tokens_per_s / seen.tokens_per_s - 1)
    assert len(tpot) > 15
    assert np.median(np.abs(tpot)) < 0.06
    assert np.quantile(np.abs(tpot), 0.9) < 0.2
    assert np.median(np.abs(rate)) < 0.06


def test_no_candidate_that_was_pruned_is_better(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every aggregated candidate simulated: none that keeps the limits yields more than 5 % above the answer."""
    queues = Mock(wraps=with_outcome)
    monkeypatch.setattr("phalanx.serving.search.search.with_outcome", queues)
    q = replace(_ASK, modes=("aggregated",), requests=150)
    search = Search(q)
    found = answer(search)
    assert search.simulated == queues.call_count > 0
    assert excess(q, found.best) <= 1
    best = 0.0
    for copy in search.copies():
        for c in search.aggregated(copy):
            seen = search.simulate(c)
            if search.keeps(seen):
                best = max(best, seen.tokens_per_s)
    assert found.best.tokens_per_s >= best / 1.05


def test_objectives_and_limits_order_the_answers() -> None:
    def best(**change: object) -> Search:
        search = Search(replace(_ASK, **change))  # type: ignore[arg-type]
        return search

    found = answer(best())
    throughput = found.best
    latency = answer(best(objective="latency", ttft_s=None, tpot_s=None)).best
    cost = answer(best(objective="cost")).best
    assert latency.tpot_s(50) < throughput.tpot_s(50)
    assert cost.tokens_per_s / cost.gpus >= 0.999 * throughput.tokens_per_s / throughput.gpus
    loose = answer(best(tpot_s=0.06)).best
    assert loose.tokens_per_s >= 0.999 * throughput.tokens_per_s
    for c in found.finalists:
        assert excess(_ASK, c) <= 1
    with pytest.raises(InputError, match=r"ttft, tpot: no deployment on 4 GPUs .* TPOT .* of 0.5 ms, [\d.]+ x"):
        answer(best(tpot_s=0.0005))


def test_the_front_is_one_and_neighbours_have_reasons() -> None:
    search = Search(_ASK)
    found = answer(search)
    speed = [1 / c.tpot_s(50) for c in found.front]
    each = [c.tokens_per_s / c.gpus for c in found.front]
    assert speed == sorted(speed, reverse=True)
    assert each == sorted(each)
    assert found.best == found.finalists[0]
    assert list(found.finalists) == best_of_each(found.finalists, search)
    assert {len(c.groups) for c in found.finalists} == {1, 2}  # of both modes
    fresh = Search(_ASK)
    assert len(fresh.candidates()) == fresh.evaluated <= found.evaluated
    changes = {n.change: n for n in neighbours(search, found)}
    assert all(n.reason for n in changes.values())
    assert {"twice the tensor parallelism"} <= set(changes)


@pytest.mark.parametrize("seed", range(30))
def test_a_neighbour_is_one_change_away_and_has_the_change_of_its_words(seed: int) -> None:
    draw = np.random.default_rng(seed)
    tp, pp, groups = (int(2 ** draw.integers(0, 4)) for _ in range(3))
    tp, experts = tp * int(draw.choice((1, 3))), bool(draw.random() < 0.7)
    spread = int(draw.choice((1, tp * groups))) if experts else 1
    x = ServingLayout(tp, pp, groups, tp * groups // spread, spread)
    near = dict(_changes(x, experts))
    for y in near.values():
        assert y != x
        assert y.moe_tp * y.moe_ep == y.width
        assert min(y.moe_tp, y.moe_ep) == 1
        assert y.gpus / x.gpus in (0.5, 1, 2)
    of_experts = ("experts cut by tensor parallelism", "expert parallelism")
    for change, y in near.items():
        assert (y.moe_ep > 1) == (x.moe_ep > 1) or y.width == 1 or x.width == 1 or change in of_experts
    ratios = {change: (y.tp / tp, y.pp / pp, y.attention_dp / groups) for change, y in near.items()}
    expected = {"twice the tensor parallelism": (2, 1, 1)}
    if tp % 2 == 0:
        expected |= {"half the tensor parallelism": (0.5, 1, 1), "a pipeline in its place": (0.5, 2, 1)}
    if pp % 2 == 0:
        expected["tensor parallelism for the pipeline"] = (2, 0.5, 1)
    elif tp % 2:
        expected["a pipeline of two"] = (1, 2, 1)
    if experts and tp * groups > 1:
        expected[of_experts[x.moe_ep == 1]] = (1, 1, 1)
        expected |= (
            {"tensor-parallel attention": (groups, 1, 1 / groups)}
            if groups > 1
            else {"attention data parallelism": (1 / tp, 1, tp)}
        )
    assert ratios == expected
    back = {
        "twice the tensor parallelism": "half the tensor parallelism",
        "a pipeline in its place": "tensor parallelism for the pipeline",
    }
    for there, again in back.items():  # and back
        if there in near and x.width > 1:
            assert dict(_changes(near[there], experts))[again] == x


def test_layouts_are_legal_and_complete() -> None:
    for name in ("llama3-8b", "deepseek-v3", "mixtral-8x7b"):
        model = model_named(name)[0]
        for row in ENGINES.values():
            found = list(layouts(model, 8, row, 8))
            assert len(found) == len(set(found))
            assert all(not layout_error(model, x, row) and x.gpus <= 8 for x in found)
            assert {ServingLayout(8, 1, 1, 8, 1), ServingLayout(1, 8), ServingLayout(1)} <= set(found)
    vllm = engine("vllm")
    deepseek = model_named("deepseek-v3")[0]
    assert "more than heads = 32" in layout_error(_MODEL, ServingLayout(64, 1, 1, 64, 1), vllm)
    assert "does not divide 256 experts" in layout_error(deepseek, ServingLayout(1, 1, 3, 1, 3), vllm)
    assert "moe_tp = 3 does not divide the experts' width 2048" in layout_error(
        deepseek, ServingLayout(1, 1, 3, 3, 1), vllm
    )
    assert "all ranks or not at all" in layout_error(deepseek, ServingLayout(4, 1, 1, 2, 2), vllm)
    assert not layout_error(deepseek, ServingLayout(4, 1, 1, 2, 2), engine("sglang"))
    assert "on every rank" in layout_error(deepseek, ServingLayout(2, 1, 4, 1, 8), engine("trtllm"))


def test_what_cannot_serve_is_listed_with_its_reason() -> None:
    """And with all others there are as many layouts as are legal."""
    search = Search(
        replace(_ASK, model=model_named("llama3-70b")[0], modes=("aggregated",), tpot_s=None, requests=50)
    )
    cannot = answer(search).cannot
    every = list(layouts(search.q.model, 4, search.q.engine, 4))
    able = [copy for copy in search.known.values() if not copy.missing]
    assert len(cannot) + len(able) == len(every)
    assert {copy.layout.gpus for copy in able} == {2, 4}
    assert cannot["tp=1,pp=1,dp=1,ep=1, bf16"].startswith("weights take 131.4 of 69.5 GiB")


def test_a_copy_says_why_it_cannot_serve() -> None:
    big = replace(_ASK, model=model_named("llama3-70b")[0])
    price = ServingPrice(big.model, _CLUSTER, "vllm", "bf16", "bf16")
    said = "weights take 131.4 of 69.5 GiB (92% of 79.6 GiB, less 3.8 GiB of workspace)"
    assert said in Copy(big, ServingLayout(), "bf16", price).missing
    long = replace(big, longest=100_000)
    assert "the longest request 100,000" in Copy(long, ServingLayout(2, 1, 1, 2, 1), "bf16", price).missing


def test_drafting_takes_time_and_nothing_where_nothing_is_drafted() -> None:
    """A drafted token costs a pass of one block and the head; verifying k + 1 tokens is not all that a step does."""
    search = Search(replace(_ASK, draft_tokens=3, acceptance=0.7))
    copy = search.copy_of("bf16", ServingLayout(2, 1, 1, 2, 1))
    free = Tabulated(partial(copy.pricing.seconds, copy.layout), copy.most, 1100, 4096, drafted=3).with_chunk(1024)
    for batch in (1, 8, 64):
        drafts = copy.draft_s(batch)
        step = float(copy.pricing.seconds(copy.layout, 0, 0, batch, batch * 1050))
        assert 3 * step / _MODEL.layers < drafts < 0.5 * step  # three passes of one block of 32, and three heads
        with_drafts = copy.table(1024)
        for at in (100, 1000):
            assert with_drafts.decode(batch, batch * at)[0] - free.decode(batch, batch * at)[0] == pytest.approx(
                drafts
            )
            mixed = [t.mixed(512, 512 * 256, batch, batch * at) for t in (with_drafts, free)]
            assert mixed[0] - mixed[1] == pytest.approx(drafts)
    assert Search(_ASK).copy_of("bf16", copy.layout).draft_s(8) == 0.0


def test_a_window_leaves_room_for_more_requests() -> None:
    """Mistral 7B's first release sees 4,096 tokens: a request of 16,384 takes a quarter of what it would without."""
    model = replace(_MODEL, window=4096)
    price = ServingPrice(model, _CLUSTER, "vllm", "bf16", "bf16")
    x = ServingLayout()
    assert price.cache_tokens(x, 4096) == price.cache_tokens(x) == price.cache_tokens(x, 100)
    assert price.cache_tokens(x, 16384) == pytest.approx(4 * price.cache_tokens(x), rel=1e-4)
    assert price.cache_bytes(16384) == price.cache_bytes(4096) == 4096 * price.cache_bytes_per_token


def test_layouts_divide_every_mechanism_of_a_model() -> None:
    """Gated delta nets: no more ranks than key heads, whatever the heads of attention."""
    qwen, vllm = model_named("Qwen/Qwen3.5-397B-A17B")[0], engine("vllm")
    assert not layout_error(qwen, ServingLayout(16, 1, 1, 1, 16), vllm)
    assert "more than mixers.delta.key_heads = 16" in layout_error(qwen, ServingLayout(32, 1, 1, 1, 32), vllm)


@pytest.mark.parametrize("name", sorted(ENGINES))
def test_what_fewer_requests_at_once_do_not_need_is_cache(name: str) -> None:
    """An engine that is told no number takes its own: then it keeps as much for its steps as for some number."""

    def told(slots: int) -> Copy:
        return Search(replace(_ASK, slots=slots, engine=engine(name))).copy_of("bf16", ServingLayout())

    counts = (7, 256, 1024, 2048)
    copies = [told(slots) for slots in counts]
    room = [copy.cache_tokens for copy in copies]
    assert room == sorted(room, reverse=True)
    assert (room[0] > room[-1]) is (name != "sglang")  # which keeps memory by its step's tokens alone
    assert [copy.most for copy in copies[:2]] == [7, 256]
    assert told(0).cache_tokens in room


def test_of_candidates_that_do_not_last_none_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a rate without end the best that lasts is the answer, with its longer outcome; of those after it each is a
    finalist once, and none of those before."""
    search = Search(replace(_ASK, rate=2.0, requests=0, ttft_s=2.0))
    assert search.q.sustained
    tried: list[tuple[WorkerGroup, ...]] = []

    def lasts(c: ServingCandidate) -> ServingCandidate | None:
        tried.append(c.groups)
        return c if len(tried) == 3 else None

    monkeypatch.setattr(search, "lasts", lasts)
    found = answer(search)
    finalists = [c.groups for c in found.finalists]
    assert found.best.groups == finalists[0] == tried[2]
    assert len(tried) == 3
    assert not [groups for groups in finalists if groups in tried[:2]]
    assert len(set(finalists)) == len(finalists) > 1
