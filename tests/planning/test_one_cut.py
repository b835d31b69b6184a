"""A pipeline whose blocks nothing lists (`layers=auto`) has the price of one cut: the time and the memory that it has
where that cut is listed. The first pass of a search bounds its memory from below."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from phalanx.answers.plan import plan_of
from phalanx.answers.question.query import Query
from phalanx.answers.question.resolution import read
from phalanx.frameworks.registry import DOCUMENTED
from phalanx.frameworks.writing.subject import subject
from phalanx.planning.explain.analytic import AnalyticSubject
from phalanx.planning.search import space
from phalanx.planning.search.column_pricing import Pricing
from phalanx.planning.search.refine import GAIN, RefinedPrices, refine, with_listed_blocks
from phalanx.planning.search.strategy_columns import columns_of
from phalanx.schedule.pipeline.given_layout import equal_blocks, write_layers
from phalanx.schedule.pipeline.stages import rank_of
from phalanx.spec.strategy.spec import Strategy

PIPELINED = tuple(name for name, row in DOCUMENTED.items() if row.strategy["pp"].values is None)
MODELS = ("llama3-8b", "llama3-70b", "llama3-405b", "mixtral-8x7b", "deepseek-v3")


@cache
def pricing(stack: str, model: str, gpus: int, seq: int, precision: str = "bf16") -> Pricing:
    return read(Query(None, model, "dgx-h100", gpus, 512, seq, None, stack, precision), True).pricing


def drawn(stack: str, seed: int, count: int) -> tuple[Pricing, list[Strategy]]:
    """Return strategies with a pipeline, drawn from a question's legal ones, whether they fit or not."""
    rng = random.Random(f"{stack} {seed}")
    gpus = rng.choice((64, 256))
    p = pricing(stack, rng.choice(MODELS), gpus, rng.choice((2048, 4096)))
    rows = space.experts(space.cores(p.model, p.job, gpus, p.options), p.model, p.job, p.options)
    rows = rows.take(np.flatnonzero(rows.pp > 1))
    for expanded in (
        lambda some: space.pipelines(some, p.model, p.job, p.options),
        lambda some: space.recomputations(some, p.model, p.job, p.options),
        lambda some: space.sharding(some, p.job, p.options),
    ):
        rows = expanded(rows.take(np.array(rng.choices(range(len(rows)), k=count))))
    rows = rows.take(np.array(rng.choices(range(len(rows)), k=count)))
    return p, [rows.strategy(i) for i in range(count)]


def check(stack: str, seed: int, count: int) -> None:
    p, strategies = drawn(stack, seed, count)
    everything = refine(p, strategies)
    bound, own = p.least_reserved(columns_of(strategies)), np.array([priced.bytes_ for priced, _ in everything])
    assert np.all(bound <= own * (1 + 1e-12)), strategies[int(np.argmax(bound / own))]
    for s, (together, run) in zip(strategies, everything, strict=True):
        cut = replace(s, layers=write_layers(run.blocks))
        ((as_listed, listed_run),) = refine(p, [cut])
        assert as_listed.seconds == pytest.approx(together.seconds, rel=1e-9), cut
        assert as_listed.bytes_ == pytest.approx(together.bytes_, rel=1e-12), cut
        assert as_listed.memory_terms == pytest.approx(together.memory_terms, rel=1e-12), cut
        assert listed_run.blocks == run.blocks
        assert with_listed_blocks(p, s) == cut
        equal = replace(s, layers=write_layers(equal_blocks(int(p.shape.layers), len(rank_of(s)))))
        ((other, other_run),) = refine(p, [equal])
        if not p.lists_blocks or run.blocks == other_run.blocks:
            continue
        # Balanced chunks are worth a line, and leave free what a search does or need less memory than equal ones.
        assert together.seconds <= (1 - GAIN) * other.seconds or other.bytes_ > p.usable_by_default, cut
        assert together.bytes_ <= max(p.usable_by_default, other.bytes_), cut


@pytest.mark.parametrize("stack", PIPELINED)
def test_what_nothing_lists_is_priced_as_its_cut_listed(stack: str) -> None:
    check(stack, 0, 4)


@pytest.mark.long
@pytest.mark.parametrize("stack", PIPELINED)
def test_what_nothing_lists_is_priced_as_its_cut_listed_in_many(stack: str) -> None:
    for seed in range(1, 9):
        check(stack, seed, 16)


def test_equal_chunks_stand_in_where_balanced_ones_do_not_fit() -> None:
    """Llama 3 8B in two stages, on cards with less and less memory: equal chunks have their own time."""
    p, s = pricing("megatron-core", "llama3-8b", 64, 8192), Strategy(dp=32, zero=1, pp=2)
    ((balanced, run),) = refine(p, [s])
    assert run.blocks == (17, 15)
    assert balanced.fits
    device = replace(p.cluster.device, usable_bytes=int(balanced.bytes_ / 0.95) - 2**20)
    smaller = replace(p, cluster=replace(p.cluster, device=device))
    ((equal, equal_run),) = refine(smaller, [s])
    assert equal_run.blocks == (16, 16)
    assert equal.seconds > balanced.seconds
    assert equal.bytes_ < 0.95 * device.usable_bytes < balanced.bytes_


def test_recomputation_that_makes_room_for_balanced_chunks_is_found() -> None:
    """Llama 3 8B on 8 H100: with two stages equal chunks fit, and are slower than tp=2; balanced ones fit where the
    norms are recomputed, and are faster."""
    p = read(Query(None, "llama3-8b", "dgx-h100", 8, 64, 8192, None, "megatron-core", "bf16"), True).pricing
    stages = Strategy(dp=4, zero=1, pp=2, virtual=8, schedule="interleaved")
    others = [stages, Strategy(dp=4, zero=1, tp=2, sp=True)]
    (tight, run), (wide, _), (balanced, _) = refine(p, [*others, replace(stages, recompute="selective:layernorm")])
    assert run.unbalanced
    assert balanced.seconds < wide.seconds < tight.seconds
    assert RefinedPrices(p).descend(others)[0].seconds <= balanced.seconds


def test_an_export_has_the_blocks_that_its_plan_was_priced_with() -> None:
    """Megatron-Core would deal out equal chunks, where nothing is written."""
    s = Strategy(dp=32, zero=1, pp=2)
    x = AnalyticSubject(lambda _: pricing("megatron-core", "llama3-8b", 64, 8192), s, 64)
    plan = plan_of(x.pricing, x.priced, x.run, x.mfu, "dgx-h100", "bf16")
    assert plan.strategy.layers == "auto"
    assert subject(plan, DOCUMENTED["megatron-core"]).s.layers == write_layers(x.run.blocks) == "17/15"
