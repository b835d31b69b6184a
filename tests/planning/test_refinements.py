"""What a search tries after its second pass: chunks of unequal length, and narrower number types."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

from phalanx.answers.question.query import Query
from phalanx.answers.question.resolution import read
from phalanx.frameworks.registry import DOCUMENTED, facts
from phalanx.planning.explain.analytic import AnalyticSubject
from phalanx.planning.search.column_pricing import Pricing
from phalanx.planning.search.neighbours import neighbours
from phalanx.planning.search.planner import SearchAnswer, answer, best_on
from phalanx.planning.search.stage_lengths import cuts_of
from phalanx.schedule.pipeline import stages
from phalanx.spec.strategy.spec import Strategy
from phalanx.spec.strategy.stack_options import StackOptions


@cache
def asked(model: str, gpus: int, stack: str, where: str = "", precision: str = "bf16") -> Callable[[int], Pricing]:
    about = Query(
        None, model, "dgx-h100", gpus, 512 if gpus == 256 else 256, 8192, None, stack, precision, where=where or None
    )
    return read(about, True).pricing_on


@cache
def answered(model: str, gpus: int, stack: str, where: str = "") -> SearchAnswer:
    return answer(lambda n: replace(asked(model, gpus, stack, where)(n), headroom=0.05), gpus)


def test_the_plan_has_the_chunks_that_were_priced() -> None:
    """Equal chunks leave the head's rank behind; the plan lists those of the second pass, and their price."""
    a = answered("llama3-70b", 64, "megatron-core", "virtual=1, pp>=8")
    assert a.lengths is not None
    assert a.best.strategy.layers == "auto"
    assert a.to_run.strategy.layers == "10/10/10/10/10/10/11/9"
    assert str(a.lengths) == "6 with 10 blocks each, then 1 with 11, then 1 with 9"
    assert a.lengths.equal_seconds is not None
    assert a.to_run.seconds < a.lengths.equal_seconds
    for layers, seconds in ((a.to_run.strategy.layers, a.to_run.seconds), ("/".join(["10"] * 8), None)):
        x = AnalyticSubject(lambda _: a.pricing, replace(a.best.strategy, layers=layers), 64)
        assert x.seconds == pytest.approx(seconds or a.lengths.equal_seconds, rel=1e-12)


def test_the_slowest_rank_never_waits_for_less_than_nothing() -> None:
    """Where it never waits, the makespan is its work, summed in another order: a plan with less was refused."""
    line = "dp=48,zero=1,shard=16,pp=2,virtual=17,schedule=interleaved,micro_batch=4,order=dp/pp/cp/tp"
    about = Query(None, "llama2-7b", "dgx-h200", 96, 384, 4096, line, "megatron-core", "fp8")
    run = read(replace(about, options="cross_entropy=fused")).subject.run
    assert 0 <= run.bubble < 1e-12 * run.makespan


def test_ends_counted_as_blocks_let_a_faster_strategy_fit() -> None:
    """Llama 3 405B on 256 H100: 126 blocks in 64 chunks, with a block less at both ends, as Meta published it."""
    a = answered("llama3-405b", 256, "megatron-core", "tp=8, pp=16, cp=2")
    s = a.to_run.strategy
    assert s.layers == "/".join(["1", *["2"] * 62, "1"])
    assert a.to_run.priced.fits
    assert a.lengths is not None
    assert a.lengths.equal_seconds is None
    x = AnalyticSubject(lambda _: a.pricing, replace(s, layers="/".join(["2"] * 62 + ["1"] * 2)), 256)
    assert not x.priced.fits
    row = DOCUMENTED["megatron-core"]
    assert row.refusal(s, a.pricing.extra, facts(a.pricing.model, a.pricing.job, s)) is None


def test_a_stack_without_layouts_keeps_equal_chunks() -> None:
    a = answered("llama3-70b", 64, "nanotron", "pp>=8")
    assert a.best.strategy.pp >= 8
    assert a.lengths is None
    assert a.types == () or all("gradients" in o.types for o in a.types)


def test_cuts_are_whole_models_with_a_shorter_first_rank() -> None:
    pricing = asked("llama3-70b", 64, "megatron-core")(64)
    for s in (Strategy(pp=8, dp=8), Strategy(pp=4, virtual=2, schedule="interleaved", dp=16)):
        cuts = list(cuts_of(s, pricing))
        assert len(set(cuts)) >= 3
        for blocks in cuts:
            listed = replace(s, layers="/".join(map(str, blocks)))
            stages.check(listed, pricing.model, pricing.job, 64)
            assert sum(blocks[i] for i, rank in enumerate(stages.rank_of(s)) if rank == 0) < 80 // s.pp


@pytest.mark.parametrize(
    ("stack", "where"),
    [
        ("megatron-core", ""),
        ("megatron-fsdp", "tp<=4"),
        ("megatron-core", "first_moment=bfloat16"),
    ],
)
def test_narrower_number_types(stack: str, where: str) -> None:
    """What is offered is legal, fits and takes what it takes when it is priced by itself; what the user set stays."""
    a = answered("llama3-70b", 64, stack, where)
    assert a.types, "nothing is offered, so that nothing is tested"
    pinned = a.pricing.extra.changed()
    for o in a.types:
        assert not pinned.keys() & o.types.keys()
        extra = StackOptions(**pinned | o.types)
        there = replace(a.pricing, extra=extra)
        x = AnalyticSubject(lambda _, there=there: there, o.strategy, 64)  # type: ignore[misc]
        assert o.seconds == pytest.approx(x.seconds, rel=1e-9)
        assert o.bytes_ == pytest.approx(x.priced.bytes_, rel=1e-9)
        assert x.priced.fits
        assert o.gain == pytest.approx(1 - o.seconds / a.best.seconds)
        assert o.gain >= 0.002
        assert DOCUMENTED[stack].refusal(o.strategy, extra, facts(there.model, there.job, o.strategy)) is None
    assert [o.seconds for o in a.types] == sorted(o.seconds for o in a.types)


def test_what_is_offered_is_the_least_that_it_brings() -> None:
    """`--where` with the words of an offer searches all strategies."""
    o = answered("llama3-70b", 64, "megatron-core").types[0]
    assert answered("llama3-70b", 64, "megatron-core", o.where).best.seconds <= o.seconds * (1 + 1e-9)


@pytest.mark.parametrize("where", ["virtual=2", "ulysses=1"])
def test_conditions_find_nothing_faster(where: str) -> None:
    """The search had passed by rings that gather keys (2.4 % faster): its candidates exchanged heads, which such
    an option leaves alone, and no neighbour changed that."""
    found = answered("llama3-70b", 64, "megatron-core", where).best
    assert answered("llama3-70b", 64, "megatron-core").best.seconds <= found.seconds * 1.001


def test_neighbours_give_up_the_exchange_of_heads() -> None:
    pricing = asked("llama3-70b", 64, "megatron-core")(64)
    s = Strategy(dp=2, zero=1, tp=4, sp=True, cp=2, ulysses=2, pp=4)
    changes = [change for change, _ in neighbours(s, pricing)]
    assert "ulysses 2 -> 1" in changes
    assert "cp 2 -> 1" in changes


def test_comparing_stacks_is_no_worse_than_planning_for_one() -> None:
    """With overlapped experts the fastest strategy by the formulas no longer fits; the next fastest do."""
    p = read(Query(None, "mixtral-8x7b", "dgx-h100", 64, 128, 8192, None, "megatron-core", "bf16"), True)
    alone = answer(lambda n: replace(p.pricing_on(n), headroom=0.05), 64)
    assert alone.pricing.extra.overlap_experts == "on"
    compared = best_on(replace(p.pricing_on(64), headroom=0.05), 64)
    assert compared is not None
    assert compared.seconds <= (1 + 1e-9) * alone.best.seconds


def test_neighbours_have_one_virtual_stage_more_and_less() -> None:
    """80 blocks on 4 ranks divide by 2, 4 and 5 virtual stages; 3 are as good, with 6 or 7 blocks each."""
    pricing = asked("llama3-70b", 64, "megatron-core")(64)
    s = Strategy(dp=4, zero=1, tp=4, sp=True, pp=4, virtual=2, schedule="interleaved")
    others = {o.virtual for _, o in neighbours(s, pricing) if o.pp == 4 and o.schedule == "interleaved"}
    assert others == {2, 3, 4}
