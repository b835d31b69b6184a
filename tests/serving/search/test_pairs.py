"""Workers that prefill and others that decode: laws of their rates, counts and requests, on copies whose steps take
a + b n seconds, so that every split of the GPUs can be tried."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from phalanx.serving.cost.layout import ServingLayout
from phalanx.serving.question import ask
from phalanx.serving.request import ServingRequest
from phalanx.serving.search.pairs import (
    BATCHES,
    BOUND_USE,
    PREFILL_USE,
    SLACK,
    best_prefills,
    crowding,
    pairs,
    prompt_chunks,
    prompts_together,
    workers_before,
)
from phalanx.serving.search.question import ServingCandidate, ServingQuestion
from phalanx.serving.search.queued import transfer

_ASK = ask(
    ServingRequest(model="llama3-8b", cluster="dgx-h100", gpus=16, input=1000, output=100, mode="disaggregated")
).question
_CHUNK = 2048


@dataclass
class _Copy:
    """A copy whose steps of n prompts, or of n sequences that decode, take a line in n."""

    layout: ServingLayout
    prompt: tuple[float, float]
    decode: tuple[float, float]
    most: int
    weights: str = "bf16"
    together: dict[int, tuple[float, float]] = field(default_factory=dict)
    prompt_slots: int = 5
    cache_tokens: int = 10**6

    def __post_init__(self) -> None:
        self.pricing: Any = SimpleNamespace(cache_bytes=lambda tokens: 1e5 * tokens)

    def prefill_s(self, chunk: int, prompts: int = 1) -> float:
        return self.prompt[0] + self.prompt[1] * prompts

    def prompts_at_once(self, chunk: int) -> int:
        return 2 * self.layout.attention_dp

    def decode_s(self, batch: int) -> float:
        return self.decode[0] + self.decode[1] * batch

    def way_s(self, tpot: float) -> float:
        return 2 * tpot


def _copy(draw: np.random.Generator, groups: int = 1) -> Any:
    tp = int(draw.choice((1, 2)))
    a, b, c, d = (float(least * draw.uniform(1, 3)) for least in (0.02, 0.01, 5e-3, 1e-5))
    return _Copy(ServingLayout(tp, 1, groups, tp, groups), (a, b), (c, d), int(draw.integers(8, 600)))


def _question(draw: np.random.Generator, **fields: Any) -> ServingQuestion:
    lost = (int(draw.integers(0, 2)), "copy")
    ttft, tpot = float(draw.uniform(0.2, 1)), float(draw.uniform(6e-3, 0.05))
    return replace(_ASK, **{"gpus": int(draw.integers(2, 17)), "lost": lost, "ttft_s": ttft, "tpot_s": tpot} | fields)


def _rates(q: ServingQuestion, c: ServingCandidate, first: Any, then: Any, batch: int) -> tuple[float, float]:
    """Return the requests/s of the workers that prefill, and of the others, when some are lost."""
    before, after = (g.count - q.workers_lost(g.layout.gpus) for g in c.groups)
    return before * prompts_together(q, first, _CHUNK)[0], after * batch / (q.output * then.decode_s(batch))


@pytest.mark.parametrize("seed", range(20))
def test_no_split_of_the_gpus_serves_more_requests(seed: int) -> None:
    """And none that serves as many decodes on fewer, at every batch that keeps the limit of a token."""
    draw = np.random.default_rng(seed)
    q, first, then = _question(draw), _copy(draw), _copy(draw)
    lost = [q.workers_lost(copy.layout.gpus) for copy in (first, then)]
    rate, moved = prompts_together(q, first, _CHUNK)
    able = [b for b in BATCHES if b <= then.most and then.decode_s(b) <= q.tpot_s * SLACK]  # type: ignore[operator]
    kept = list(pairs(q, first, then, _CHUNK))
    splits = [
        (p - lost[0], (q.gpus - p * first.layout.gpus) // then.layout.gpus - lost[1]) for p in range(1, q.gpus + 1)
    ]
    splits = [split for split in splits if min(split) > 0]
    assert [c.groups[1].slots for c in kept] == able * bool(splits and rate)
    for c, batch in zip(kept, able, strict=False):
        served, tpot = c.steady.tokens_per_s / q.output, then.decode_s(batch)
        each = batch / (q.output * tpot)
        assert c.gpus <= q.gpus
        assert served == pytest.approx(max(min(p * rate, d * each) for p, d in splits))
        prefill, decode = _rates(q, c, first, then, batch)
        assert served <= min(prefill, decode) * (1 + 1e-9)
        left = [g.count - gone for g, gone in zip(c.groups, lost, strict=True)]
        assert min(left) == 1 or left[1] == 1 or (left[1] - 1) * each < served
        assert left[0] == 1 or min((left[0] - 1) * rate, decode) < served
        # Little's law, of those that decode and of those before them; at least one of each.
        expected = max(1.0, served * q.output * tpot) + max(1.0, served * moved)
        assert abs(c.users - expected) <= 1
        assert (c.steady.ttft_s, c.steady.tpot_s) == (moved + 2 * tpot, tpot)
        assert c.groups[1].step_tokens >= max(_CHUNK, 2 * batch)


@pytest.mark.parametrize("seed", range(10))
def test_an_open_load_has_the_smallest_batch_that_keeps_up(seed: int) -> None:
    draw = np.random.default_rng(seed)
    q = _question(draw, rate=float(draw.uniform(1, 60)), ttft_s=None, tpot_s=None, gpus=16, draft_tokens=1)
    first, then = _copy(draw), _copy(draw)
    closed = [c.steady.tokens_per_s for c in pairs(replace(q, rate=0.0), first, then, _CHUNK)]
    (c,) = pairs(q, first, then, _CHUNK)
    arriving, batches = q.offered * q.output, [b for b in BATCHES if b <= then.most]
    enough = next((i for i, tokens in enumerate(closed) if tokens >= arriving * (1 - 1e-9)), None)
    assert c.groups[1].slots == batches[-1]
    assert c.groups[1].step_tokens == max(_CHUNK, 4 * batches[-1])
    assert c.users == batches[-1] * (c.groups[1].count - q.workers_lost(then.layout.gpus))
    if enough is not None:
        assert c.steady.tpot_s == then.decode_s(batches[enough])
        assert c.steady.tokens_per_s == pytest.approx(arriving)
    else:  # none does: the next would need room for twice as many
        assert c.steady.tokens_per_s in closed
        assert 2 * batches[closed.index(c.steady.tokens_per_s)] > then.most


@pytest.mark.parametrize("seed", range(10))
def test_the_fewest_workers_for_a_load_have_none_too_many(seed: int) -> None:
    draw = np.random.default_rng(seed)
    q = _question(draw, rate=float(draw.uniform(1, 60)), objective="cost", gpus=1, ttft_s=2.0)
    assert q.sized
    first, then = _copy(draw), _copy(draw)
    rate, moved = prompts_together(q, first, _CHUNK)
    c = next(pairs(q, first, then, _CHUNK), None)
    able = [b for b in BATCHES if b <= then.most and then.decode_s(b) <= q.tpot_s]  # type: ignore[operator]
    assert (c is None) == (not able)
    if c is not None:
        assert c.steady.tpot_s == then.decode_s(able[-1])
        served = q.offered * crowding(q, c.steady.tpot_s)
        after = c.groups[1].count - q.workers_lost(then.layout.gpus)
        each = able[-1] / (q.output * c.steady.tpot_s)
        assert (after - 1) * each < served <= after * each * (1 + 1e-9)
        # A queue counts all of a worker's time, where a rate leaves some of it.
        before = c.groups[0].count - q.workers_lost(first.layout.gpus)
        assert before == workers_before(q, rate / BOUND_USE, moved)
        assert c.steady.tokens_per_s == pytest.approx(q.offered * q.output)


@pytest.mark.parametrize("concurrency", [1, 7, 300, 5000])
def test_as_many_slots_as_requests_at_once_as_far_as_they_fit(concurrency: int) -> None:
    draw = np.random.default_rng(concurrency)
    q, first, then = _question(draw, concurrency=concurrency, gpus=16), _copy(draw), _copy(draw)
    kept = list(pairs(q, first, then, _CHUNK))
    assert kept
    for c in kept:
        slots, left = c.groups[1].slots, c.groups[1].count - q.workers_lost(then.layout.gpus)
        assert c.users == concurrency
        assert slots == then.most or slots * left >= concurrency
        assert slots <= then.most
        assert slots in BATCHES or slots == then.most or (slots - 1) * left < concurrency


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("sized", [False, True])
def test_as_many_prompts_come_together_as_the_limit_of_the_first_token_allows(seed: int, sized: bool) -> None:
    draw = np.random.default_rng(seed)
    groups = int(draw.choice((1, 2, 8)))
    more: dict[str, Any] = {"rate": 9.0, "objective": "cost"} if sized else {}
    q, copy = _question(draw, **more), _copy(draw, groups)
    use, most = BOUND_USE if sized else PREFILL_USE, copy.prompts_at_once(_CHUNK)

    def seen(ttft: float | None, objective: str = q.objective) -> tuple[float, float]:
        return prompts_together(
            replace(q, ttft_s=ttft, objective=objective),
            replace(copy, together={}),
            _CHUNK,  # type: ignore[arg-type]
        )

    full = most / copy.prefill_s(_CHUNK, most)
    free = seen(None)
    moved = transfer(q, copy, q.gpus).seconds(q.input)
    one = copy.prefill_s(_CHUNK)
    assert free[0] == pytest.approx(use * full if groups > 1 else min(1 / one, use * full))
    assert free[1] == pytest.approx(moved + (1.5 * copy.prefill_s(_CHUNK, most) if groups > 1 else one))
    limits = [*np.linspace(0.01, free[1], 30), free[1]]
    each = [seen(float(ttft)) for ttft in limits]
    assert each == sorted(each)  # a looser limit is never slower
    assert each[-1] == free
    for ttft, (rate, first_s) in zip(limits, each, strict=True):
        assert first_s <= ttft * SLACK
        assert (rate > 0) == (one + moved <= ttft * SLACK)
    if not sized:
        assert seen(None, "latency")[1] == pytest.approx(moved + one)
    assert copy.together == {}
    first = prompts_together(q, copy, _CHUNK)
    assert copy.together == {_CHUNK: first}


@pytest.mark.parametrize("seed", range(10))
def test_who_is_left_out_is_beaten_by_who_is_kept(seed: int) -> None:
    """In GPUs, requests/s of a GPU and a prompt's time at once, by one of the same weights."""
    draw = np.random.default_rng(seed)
    q = _question(draw, chunks=(512, 2048, 8192))
    copies = [_copy(draw, int(draw.choice((1, 1, 4)))) for _ in range(8)]
    for copy in copies[::2]:
        copy.weights = "fp8"

    def figures(copy: Any, chunk: int) -> tuple[float, float, float]:
        rate, moved = prompts_together(q, copy, chunk)
        return copy.layout.gpus, -rate / copy.layout.gpus, moved

    def beats(a: tuple[Any, int], b: tuple[Any, int]) -> bool:
        mine, its = figures(*a), figures(*b)
        return a[0].weights == b[0].weights and mine != its and all(x <= y for x, y in zip(mine, its, strict=True))

    every = [(copy, chunk) for copy in copies for chunk in prompt_chunks(q, copy.layout)]
    able = [pair for pair in every if prompts_together(q, *pair)[0]]
    kept = best_prefills(q, copies)
    assert [pair for pair in able if not any(beats(other, pair) for other in able)] == kept


def test_a_chunk_takes_a_prompt_or_two_and_all_groups_together_take_the_largest() -> None:
    q = replace(_ASK, chunks=(512, 2048, 8192))
    alone, apart = ServingLayout(2, 1, 1, 2, 1), ServingLayout(1, 1, 2, 2, 1)
    for tokens, usual in ((100, 512), (1023, 512), (1024, 2048), (4000, 2048), (4096, 8192), (90_000, 8192)):
        asked = replace(q, input=tokens)
        assert prompt_chunks(asked, alone) == (usual,)
        assert prompt_chunks(asked, apart) == ((usual, 8192) if usual < 8192 else (usual,))


def test_a_crowd_exceeds_its_mean_less_the_larger_it_is() -> None:
    """By the normal quantile of a Poisson count's deviation, the square root of its mean."""
    q = replace(_ASK, rate=50.0, percentile=90)
    assert crowding(replace(q, percentile=50), 0.02) == 1
    assert crowding(replace(q, percentile=99), 0.02) > crowding(q, 0.02) > 1
    assert crowding(q, 0.02) - 1 == pytest.approx(2 * (crowding(q, 0.08) - 1))
    counts = np.random.default_rng(1).poisson(50 * q.output * 0.02, 200_000)
    assert crowding(q, 0.02) * counts.mean() == pytest.approx(np.quantile(counts, 0.9), rel=0.02)
    assert crowding(q, 1e-9) == pytest.approx(1 + 1.28)  # no fewer than one
    assert math.isclose(crowding(replace(q, rate=1e-3), 1e-3), crowding(q, 1e-9))
