"""Prices of strategies in columns, against strategies one by one, schedules action by action, and brute force."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from phalanx.cost.analytic import alike
from phalanx.cost.analytic.step import step
from phalanx.cost.ledger import pipeline_formulas
from phalanx.cost.ledger.rank_layout import layout
from phalanx.planning.search import branch_and_bound, refine, space, strategy_columns
from phalanx.planning.search.column_pricing import Pricing
from phalanx.planning.search.priced import price
from phalanx.spec.cluster.presets import preset
from phalanx.spec.files.job_file import make_model
from phalanx.spec.job import Job, Precision
from phalanx.spec.strategy.spec import Strategy


def _pricing(model: str, nodes: int, batch: int, seq: int, stack: str = "any") -> Pricing:
    spec, _ = make_model({"preset": model}, Path())
    return Pricing(spec, preset("dgx-a100", nodes), Job(batch, seq, Precision("bfloat16")), stack, free=True)


@pytest.fixture(scope="module")
def llama() -> Pricing:
    """8B on 32 GPUs, whose memory it fills."""
    return _pricing("llama3-8b", 4, 64, 8192)


def test_columns_price_as_single_strategies_do(llama):
    rows = space.all_strategies(llama.model, llama.job, 32, strategy_columns.Options(("1f1b", "interleaved")))
    some = rows.take(np.random.default_rng(0).integers(0, len(rows), 60))
    seconds = llama.seconds(some)
    for i, s in enumerate(some.strategies()):
        one = layout(s, llama.job, llama.model.layers)
        found = step(llama.shape, one, llama.system, llama.profile)
        if s.schedule == "interleaved" and one.micro_batches < s.pp:
            continue  # there the schedule itself is asked, below
        assert seconds[i] == pytest.approx(float(np.sum(found.seconds)), rel=1e-9)


@pytest.mark.parametrize(
    ("model", "stack"), [("llama3-8b", "phalanx"), ("mixtral-8x7b", "megatron-core"), ("deepseek-v3", "torchtitan")]
)
def test_rows_whose_blocks_are_alike_are_priced_as_each_alone(model, stack):
    p = _pricing(model, 2, 24, 4096, stack)
    kinds = ("none", "selective", "selective:layernorm", "selective:mlp")
    rows = space.all_strategies(p.model, p.job, 16, replace(p.options, recompute=kinds))
    starts = np.random.default_rng(0).integers(0, len(rows) - 40, 60)
    some = rows.take((starts[:, None] + np.arange(40)).reshape(-1))
    few = alike.MOST_UNGROUPED - 1
    each = [p.seconds(some.take(slice(i, i + few))) for i in range(0, len(some), few)]
    np.testing.assert_array_equal(p.seconds(some), np.concatenate(each))


@pytest.mark.parametrize(
    ("model", "stack", "seq"),
    [
        ("llama3-8b", "fsdp2", 8192),
        ("mixtral-8x7b", "megatron-core", 4096),
        ("deepseek-v3", "phalanx", 4096),
        ("deepseek-v3", "megatron-bridge", 512),
    ],
)
def test_no_core_is_faster_than_its_blocks(model, stack, seq):
    p = _pricing(model, 8, 48, seq, stack)
    cores = space.cores(p.model, p.job, 64, p.options)
    kinds, place = space.cores_by_block(cores)
    of_kind, kind = space.with_experts(kinds, p.model, p.options)
    bounds = {
        (k, ep, etp): bound
        for k, ep, etp, bound in zip(kind, of_kind.ep, of_kind.etp, p.block_seconds(of_kind), strict=True)
    }
    without, each = p.block_seconds(kinds, spread=False), p.block_seconds(of_kind)
    assert np.all(without[kind] <= each * (1 + 1e-9))
    finite = np.isfinite(each)
    assert np.median(without[kind][finite] / each[finite]) > 0.3  # and no bound that nothing exceeds
    rows, own = space.with_experts(cores, p.model, p.options)
    least = p.least_seconds(rows, complete=False)
    bound = np.array([bounds[key] for key in zip(place[own], rows.ep, rows.etp, strict=True)])
    assert np.all(bound <= least * (1 + 1e-9))
    assert np.median(bound / least) > 0.5  # and no bound that nothing exceeds


def test_only_what_is_certainly_slower_is_left_untimed(llama):
    rows = space.all_strategies(llama.model, llama.job, 32)
    some = [s for s in rows.take(np.arange(0, len(rows), 20000)).strategies() if s.world == 32]
    all_ = refine.refine(llama, some)
    below = float(np.median([p.seconds for p, _ in all_]))
    kept = refine.refine(llama, some, below)
    assert {p.strategy for p, _ in kept} >= {p.strategy for p, _ in all_ if p.seconds <= below}
    assert len(kept) < len(all_)
    assert (
        dict((p.strategy, p.seconds) for p, _ in kept).items()
        <= dict((p.strategy, p.seconds) for p, _ in all_).items()
    )


@pytest.mark.parametrize(
    ("model", "nodes", "batch", "seq"),
    [
        ("llama3-8b", 4, 64, 8192),
        ("llama3-8b", 1, 12, 4096),
        ("mixtral-8x7b", 2, 2, 512),  # whole experts do not fit, parts of them do
    ],
)
def test_branch_and_bound_finds_what_pricing_everything_finds(model, nodes, batch, seq):
    p = _pricing(model, nodes, batch, seq)
    options = strategy_columns.Options(("1f1b", "interleaved", "zb-v", "naive"), ("none", "full"))
    everything = space.all_strategies(p.model, p.job, 8 * nodes, options)
    rows = everything.take(p.bytes_(everything) <= p.usable)
    seconds = p.seconds(rows)
    close = branch_and_bound.explore(p, 8 * nodes, options, keep=1, families=0.25)
    assert float(close.seconds.min()) == pytest.approx(float(seconds.min()), rel=1e-12)
    for limit in (1.01, 0.5):
        below = branch_and_bound.explore(p, 8 * nodes, options, keep=1, below=limit * float(seconds.min()))
        assert (limit > 1) == bool(np.any(below.seconds <= limit * seconds.min()))
        assert below.priced <= close.priced
    found = branch_and_bound.explore(p, 8 * nodes, options, keep=300)
    assert found.legal == len(everything)
    assert found.legal > found.priced >= len(found.rows)
    assert found.seconds[found.order][:300] == pytest.approx(np.sort(seconds)[:300], rel=1e-12)
    kinds = branch_and_bound.family(rows)
    assert set(kinds) == set(found.family)
    for kind in set(kinds):
        assert found.seconds[found.family == kind].min() == pytest.approx(seconds[kinds == kind].min(), rel=1e-12)


_ALIKE = tuple(f"every:{n}" for n in range(16, 32))
"""Kinds that recompute two of 32 blocks: one of them is searched."""


@pytest.mark.parametrize(
    ("model", "nodes", "batch", "seq", "kinds"),
    [
        ("llama3-8b", 4, 64, 8192, ("none", "full")),
        ("llama3-8b", 4, 64, 8192, _ALIKE),
        ("mixtral-8x7b", 2, 16, 4096, ("none", "full")),
    ],
)
def test_what_is_known_before_changes_no_answer(model, nodes, batch, seq, kinds):
    """Known: the best of another batch, also under other names, and faster ones that the search may not have."""
    options = strategy_columns.Options(("1f1b", "interleaved"), kinds)
    here, other = (_pricing(model, nodes, b, seq) for b in (batch, 2 * batch))
    before = branch_and_bound.explore(other, 8 * nodes, options, keep=120)
    first = [before.rows.strategy(int(row)) for row in before.order[:120]]
    more = strategy_columns.Options(("zb-v", "dualpipe-v"), ("none",))
    faster = branch_and_bound.explore(here, 8 * nodes, more, keep=120)
    known = [faster.rows.strategy(int(row)) for row in faster.order[:120]]
    known += [replace(s, recompute=kind) for s in first for kind in kinds]
    found = branch_and_bound.explore(here, 8 * nodes, options, keep=60)
    again = branch_and_bound.explore(here, 8 * nodes, options, keep=60, hints=known)
    best, same = (np.sort(e.seconds)[:60].tolist() for e in (found, again))
    assert best == same
    assert again.priced < found.priced
    for kind in set(found.family):
        assert again.seconds[again.family == kind].min() == found.seconds[found.family == kind].min()


@pytest.mark.parametrize(("nodes", "batch", "seq"), [(2, 16, 8192), (1, 12, 4096)])
def test_the_whole_front_misses_no_point(nodes, batch, seq):
    p = _pricing("llama3-8b", nodes, batch, seq)
    options = strategy_columns.Options(("1f1b", "interleaved"), ("none", "full", "every:2"))
    rows = space.all_strategies(p.model, p.job, 8 * nodes, options)
    bytes_ = p.bytes_(rows)
    wanted = _points(p.seconds(rows)[bytes_ <= p.usable], bytes_[bytes_ <= p.usable])
    found = branch_and_bound.explore(p, 8 * nodes, options, front=1.5)
    assert _points(found.seconds, found.bytes_) == pytest.approx(wanted, rel=1e-9)
    assert len(wanted) > 4
    assert found.priced < found.legal / 2


def _points(seconds: np.ndarray, bytes_: np.ndarray) -> list[float]:
    """Bytes, each less than of all that are as fast, up to 1.5 times the shortest step."""
    points: list[float] = []
    for i in np.lexsort((bytes_, seconds)):
        if seconds[i] <= 1.5 * seconds.min() and (not points or bytes_[i] < points[-1] * (1 - 1e-6)):
            points.append(bytes_[i])
    return points


def test_bounds_are_below_all_that_they_stand_for(llama):
    options = llama.options
    cores = space.cores(llama.model, llama.job, 32)
    fits = llama.may_fit(cores, complete=False)
    assert (fits == (llama.least_bytes(cores, complete=False) <= llama.usable)).all()
    for core in np.random.default_rng(1).integers(0, len(cores), 12):
        own = cores.take([core])
        rows = space.recomputations(
            space.pipelines(own, llama.model, llama.job, options), llama.model, llama.job, options
        )
        full = space.sharding(rows, llama.job, options)
        assert llama.least_seconds(own, complete=False)[0] <= llama.least_seconds(rows, complete=True).min() * (
            1 + 1e-12
        )
        assert llama.least_seconds(rows, complete=True).min() <= llama.seconds(full).min() * (1 + 1e-12)
        assert llama.least_bytes(own, complete=False)[0] <= llama.least_bytes(rows, complete=True).min() * (1 + 1e-12)
        assert llama.least_bytes(rows, complete=True).min() <= llama.bytes_(full).min() * (1 + 1e-12)


# How far the formula of equal chunks may be from the schedule: where it holds, not at all.
@pytest.mark.parametrize(
    ("schedule", "virtual", "micro_batch", "near"),
    [
        ("1f1b", 1, 1, 1e-9),
        ("gpipe", 1, 2, 1e-9),
        ("naive", 1, 1, 1e-9),
        ("interleaved", 6, 1, 1e-9),
        ("interleaved", 3, 16, 0.02),  # 6 micro-batches on 8 ranks
        ("zb-h1", 1, 1, 0.01),
        ("zb-v", 1, 1, 0.01),
        ("dualpipe-v", 1, 1, 0.01),
    ],
)
def test_bubbles_are_those_of_the_schedules(schedule, virtual, micro_batch, near):
    p = _pricing("gpt3-175b", 128, 1536, 2048)
    s = Strategy(dp=16, zero=1, tp=8, sp=True, pp=8, schedule=schedule, virtual=virtual, micro_batch=micro_batch)
    (found,), ((timed, _),) = price(p, [s]), refine.refine(p, [s])
    assert timed.seconds == pytest.approx(found.seconds, rel=near)


def test_few_rounds_stand_for_many(llama, monkeypatch):
    """What is added at the slowest rank's pace is what running on would have shown."""
    kinds = (("1f1b", 1), ("interleaved", 4), ("zb-v", 1))
    given = [Strategy(tp=2, pp=4, cp=4, virtual=v, schedule=name) for name, v in kinds]
    few = [run.makespan for _, run in refine.refine(llama, given)]
    monkeypatch.setattr(pipeline_formulas, "ROUNDS", 16)
    assert [run.makespan for _, run in refine.refine(llama, given)] == pytest.approx(few, rel=1e-9)
