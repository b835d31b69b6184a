"""The space of strategies: what columns enumerate is what the grammar and its checks allow, and nothing twice."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sizes import examples

from phalanx.frameworks.registry import STACKS
from phalanx.planning.search import space, strategy_columns
from phalanx.planning.search.branch_and_bound import FAMILIES, family, may_become
from phalanx.planning.search.limits import SearchLimits, conditions
from phalanx.schedule.pipeline.stages import check
from phalanx.spec.errors import InputError
from phalanx.spec.files.job_file import build
from phalanx.spec.job import Job
from phalanx.spec.model.families import complete
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy import legality
from phalanx.spec.strategy.spec import Strategy, divisors


def _model(heads: int, kv: int, layers: int, ffn: int, experts: int) -> ModelSpec:
    sizes = {"vocab": 64, "hidden": 8 * heads, "layers": layers, "heads": heads, "kv_heads": kv, "ffn": ffn}
    family = {"family": "mixtral", "experts": {"count": experts, "top_k": 1, "ffn": ffn}} if experts else {}
    return build(ModelSpec, complete({"family": "llama", **sizes, "max_seq": 64, **family}), "model")


def _brute(model: ModelSpec, job: Job, ranks: int, options: strategy_columns.Options) -> list[Strategy]:
    """Every combination of values, each made and checked by itself; those without effect are left out by hand."""
    found = []
    degrees = divisors(ranks)
    for tp, cp, pp in itertools.product(degrees, repeat=3):
        if ranks % (tp * cp * pp):
            continue
        dp = ranks // (tp * cp * pp)
        for zero, shard, sp, ulysses, ep, etp, virtual, schedule, micro, recompute, order in itertools.product(
            range(4),
            divisors(dp),
            (False, True),
            divisors(cp),
            degrees if model.experts else [1],
            degrees if model.experts else [1],
            range(1, (model.layers + 2) // pp + 1) if pp > 1 else [1],
            options.schedules if pp > 1 else ["1f1b"],
            divisors(job.global_batch),
            options.recompute,
            options.orders if pp > 1 and dp > 1 else options.orders[:1],
        ):
            if shard > 1 if zero == 0 else shard * cp == 1:
                continue
            try:
                s = Strategy(
                    dp=dp,
                    zero=zero,
                    shard=shard if zero and shard < dp else None,
                    tp=tp,
                    sp=sp,
                    cp=cp,
                    ulysses=ulysses,
                    ep=ep,
                    etp=etp,
                    pp=pp,
                    virtual=virtual,
                    schedule=schedule,
                    micro_batch=micro,
                    recompute=recompute,
                    order=order,
                    local=options.local,
                )
                check(s, model, job, ranks)
            except InputError:
                continue
            found.append(s)
    return found


@examples(5, 100)
def test_columns_are_what_the_checks_allow(examples):
    @settings(max_examples=examples)
    @given(
        ranks=st.sampled_from([1, 2, 3, 4, 6, 8]),
        heads=st.sampled_from([(2, 1), (4, 2), (4, 4), (6, 3)]),
        layers=st.integers(1, 5),
        ffn=st.sampled_from([6, 8, 12]),
        experts=st.sampled_from([0, 0, 4]),
        batch=st.sampled_from([4, 6, 8]),
        seq=st.sampled_from([8, 12, 16]),
        schedules=st.sampled_from([("1f1b", "interleaved"), ("naive", "dualpipe-v"), ("gpipe", "zb-h1", "zb-v")]),
        local=st.sampled_from([0, 0, 5]),
    )
    def holds(ranks, heads, layers, ffn, experts, batch, seq, schedules, local):
        model, job = _model(*heads, layers, ffn, experts), Job(batch, seq)
        options = strategy_columns.Options(schedules, ("none", "full"), local=local)
        brute = _brute(model, job, ranks, options)
        try:
            found = space.all_strategies(model, job, ranks, options).strategies()
        except InputError:
            found = []
        assert len(found) == len(set(found))
        assert set(found) == set(brute)

    holds()


def test_replicas_that_step_alone_have_whole_groups_of_their_experts():
    model, job, options = _model(4, 2, 1, 8, 4), Job(8, 16), strategy_columns.Options(recompute=("none",), local=5)
    found = space.all_strategies(model, job, 8, options).strategies()
    assert set(found) == set(_brute(model, job, 8, options))
    assert {(4, 4), (4, 2), (2, 4)} <= {(s.dp_shard, s.ep) for s in found}


def test_recomputation_that_means_the_same_is_there_once():
    """Of fewer than four blocks there is no every:4, of one no every:2: jobs that say so are refused."""
    job = Job(2, 8)
    for layers, kinds in ((1, 3), (2, 4), (3, 4), (4, 5)):
        found = space.all_strategies(_model(2, 2, layers, 8, 0), job, 1).strategies()
        assert len({s.recompute for s in found}) == kinds
        for s in found:
            legality.check(s, _model(2, 2, layers, 8, 0), job, 1)


def test_columns_and_strategies_are_the_same():
    found = space.all_strategies(_model(4, 2, 4, 8, 4), Job(8, 16), 8, strategy_columns.Options(recompute=("none",)))
    again = strategy_columns.columns_of(found.strategies())
    assert all((getattr(again, name) == getattr(found, name)).all() for name in strategy_columns.COLUMNS)


@pytest.mark.parametrize("experts", [0, 4])
def test_sizes_are_those_of_the_rows(experts):
    model, job, options = _model(4, 2, 4, 8, experts), Job(8, 16), strategy_columns.Options()
    assert space.size(space.cores(model, job, 8), model, job, options).sum() == len(
        space.all_strategies(model, job, 8)
    )


@pytest.mark.parametrize("kind", range(len(FAMILIES)))
def test_a_core_may_become_the_families_of_its_shardings(kind):
    model, job, options = _model(4, 2, 2, 32, 4), Job(global_batch=8, seq=8), strategy_columns.Options()
    cores = space.experts(space.cores(model, job, 8), model, job, options)
    each = [family(space.sharding(cores.take(slice(i, i + 1)), job, options)) for i in range(len(cores))]
    may = may_become(cores, [kind])
    assert may.any(), FAMILIES[kind]
    assert all(may[[kind in own for own in each]])
    assert not any(may & ~np.isin(family(cores), [0, kind]))


def test_no_split_is_one_line():
    with pytest.raises(InputError, match="no split of 7 ranks"):
        space.cores(_model(2, 2, 2, 8, 0), Job(4, 8), 7)


@pytest.mark.parametrize("stack", ["megatron-core", "torchtitan"])
@pytest.mark.parametrize("line", ["ep<=4", "ep>=2*etp, ep*etp<=8", "etp=1, ep!=2", "tp>=ep"])
def test_a_choice_is_judged_alone_as_among_others(stack: str, line: str) -> None:
    limits, given = SearchLimits(STACKS[stack], conditions(line)[0]), {"tp": 4, "pp": 1, "dp": 8, "zero": 1}
    ways = list(itertools.product((1, 2, 4, 8, 16), (1, 2, 4)))
    ep, etp = np.array(ways).T
    together = limits.keeps_ways(("ep", "etp"), {**given, "ep": ep, "etp": etp}, len(ways))
    assert 0 < together.sum() < len(ways)
    assert [limits.way(("ep", "etp"), {**given, "ep": a, "etp": b}) for a, b in ways] == together.tolist()
