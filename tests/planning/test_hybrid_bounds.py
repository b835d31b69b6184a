"""Bounds of the search on models whose blocks differ, drawn: none is above a price that it stands for."""

from __future__ import annotations

import numpy as np
import pytest
from support.hybrids import hybrid
from support.sizes import examples

from phalanx.cost.analytic.step import step
from phalanx.cost.ledger.rank_layout import layout
from phalanx.planning.search import branch_and_bound, space, strategy_columns
from phalanx.planning.search.column_pricing import Pricing
from phalanx.spec.cluster.presets import preset
from phalanx.spec.job import Job, Precision

_STACKS = ("accelerate", "phalanx", "fsdp2", "any")
_ONE = 1 + 1e-12
_AMONG = (5, 10)
"""Models on which a bound was once above a price."""


def _pricing(seed: int, nodes: int = 2) -> Pricing:
    job = Job(32, 2048, Precision("bfloat16"))
    return Pricing(hybrid(seed), preset("dgx-a100", nodes), job, _STACKS[seed % 4], free=True)


def _bounds_are_below(seed: int) -> None:
    p = _pricing(seed)
    cores, draw = space.cores(p.model, p.job, 16, p.options), np.random.default_rng(seed)
    for core in draw.integers(0, len(cores), 4):
        own = cores.take([core])
        rows = space.recomputations(space.pipelines(own, p.model, p.job, p.options), p.model, p.job, p.options)
        full = space.sharding(rows, p.job, p.options)
        for least, of in ((p.least_seconds, p.seconds), (p.least_bytes, p.bytes_)):
            of_rows = least(rows, complete=True)
            assert least(own, complete=False)[0] <= of_rows.min() * _ONE, own.strategy(0)
            assert of_rows.min() <= of(full).min() * _ONE, own.strategy(0)
        assert p.may_fit(own, complete=False)[0] == (p.least_bytes(own, complete=False)[0] <= p.usable)
    kinds, _ = space.cores_by_block(cores)
    of_kind, kind = space.with_experts(kinds, p.model, p.options)
    without, each = p.block_seconds(kinds, spread=False), p.block_seconds(of_kind)
    assert np.all(without[kind] <= each * (1 + 1e-9))


def _columns_price_as_single_strategies(seed: int) -> None:
    p = _pricing(seed)
    rows = space.all_strategies(p.model, p.job, 16, strategy_columns.Options(("1f1b",), ("none", "full")))
    some = rows.take(np.random.default_rng(seed).integers(0, len(rows), 6))
    for s, seconds in zip(some.strategies(), p.seconds(some), strict=True):
        found = step(p.shape, layout(s, p.job, p.model.layers), p.system, p.profile)
        assert seconds == pytest.approx(float(np.sum(found.seconds)), rel=1e-9), s


@examples(3, 200)
def test_bounds_of_hybrids_are_below_what_they_stand_for(examples: int) -> None:
    for seed in (*_AMONG, *range(100, 100 + examples)):
        _bounds_are_below(seed)


@examples(6, 200)
def test_columns_of_hybrids_price_as_single_strategies_do(examples: int) -> None:
    for seed in range(examples):
        _columns_price_as_single_strategies(seed)


@pytest.mark.parametrize("seed", [2, 13])
def test_the_search_of_a_hybrid_finds_what_pricing_everything_finds(seed: int) -> None:
    p = _pricing(seed, 1)
    options = strategy_columns.Options(("1f1b", "interleaved", "zb-v"), ("none", "full"))
    everything = space.all_strategies(p.model, p.job, 8, options)
    rows = everything.take(p.bytes_(everything) <= p.usable)
    found = branch_and_bound.explore(p, 8, options, keep=100)
    assert found.seconds[found.order][:100] == pytest.approx(np.sort(p.seconds(rows))[:100], rel=1e-12)
