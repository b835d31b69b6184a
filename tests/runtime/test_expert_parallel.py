"""Experts' parameters over ranks: who holds what, in which buckets it is reduced and sharded, over whom; and that no
layout shows: in gradients, in checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support import rank_cases
from support.rank_pool import Pool
from support.sizes import examples, sampled
from support.strategies import OPTIMIZERS, TRANSPORTS, cases, splits, with_experts

from phalanx.cost.step.expand import expand
from phalanx.nn.init import initial_source, restrict_to_rank
from phalanx.observation.parity.parity import BOUNDS
from phalanx.observation.rank_classes import classes
from phalanx.observation.trainer.step import record_step
from phalanx.runtime.data_parallel.bucket_buffers import FlatBucket
from phalanx.schedule.event import INSIDE
from phalanx.schedule.gradients.buckets import Bucket, buckets, reduction_slots
from phalanx.schedule.gradients.sharding import sharding_of
from phalanx.schedule.layout import Layout
from phalanx.spec.errors import InputError
from phalanx.spec.files.job_file import build, make_strategy
from phalanx.spec.job import Job, Precision
from phalanx.spec.model.families import complete
from phalanx.spec.model.spec import ModelSpec, parameters
from phalanx.spec.optimizers import Optimizer
from phalanx.spec.strategy.legality import check
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy, divisors
from phalanx.spec.strategy.split import Split, local_model

EXPERTS: dict[str, Any] = {"count": 4, "top_k": 2, "ffn": 12, "shared_ffn": 24}
SIZES: dict[str, Any] = {
    "family": "mixtral",
    "vocab": 61,
    "hidden": 16,
    "layers": 3,
    "heads": 4,
    "ffn": 40,
    "max_seq": 16,
}
DOWN = "blocks.1.mlp.experts.down.weight"


def model(**experts: Any) -> ModelSpec:
    return build(ModelSpec, complete(SIZES | {"experts": EXPERTS | experts}), "model")


def strategy(line: str) -> Strategy:
    found = make_strategy(line)
    assert found is not None
    return found


def splits_of(spec: ModelSpec, s: Strategy) -> Iterator[Split]:
    """As each rank sees a model that is not cut into stages."""
    grid = mesh(s)
    for rank in range(s.world):
        yield Split.of(spec, s, *(int(grid.along(axis)[rank]) for axis in ("tp", "ep", "etp")))


DEGREES = [(1, 2, 1), (1, 2, 2), (2, 1, 1), (2, 2, 3), (3, 3, 2), (1, 4, 3)]


@examples(5, 40)
def test_ranks_hold_every_element_alike(examples: int) -> None:
    """All ranks together each as often as every other: those of experts on `edp` ranks."""
    settings(max_examples=examples)(given(with_experts(small=True), st.sampled_from(DEGREES))(_holds_alike))()


def _holds_alike(spec: ModelSpec, degrees: tuple[int, int, int]) -> None:
    tp, ep, etp = degrees
    assume(splits(spec, *degrees))
    s = Strategy(dp=2 * ep * etp, tp=tp, ep=ep, etp=etp)
    first = initial_source(spec, 7, None)
    for p in parameters(spec):
        whole = first(p, 0, p.numel).view(p.shape)
        times = torch.zeros(p.shape, dtype=torch.int64)
        for split in splits_of(spec, s):
            box = split.box(p.fqn)
            place = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
            times[place] += s.world // box.copies  # in whole numbers: thirds do not add up to one
            numel, cut = torch.Size(box.shape).numel(), box.numel // 3
            runs = [restrict_to_rank(first, split)(p, *run) for run in ((0, cut), (cut, numel))]
            mine = torch.cat(runs).view(box.shape)[tuple(slice(n) for n in box.sizes)]
            assert mine.equal(whole[place])
        assert times.eq(s.world * (s.edp if p.of_experts else s.dp)).all(), p


@pytest.mark.parametrize(
    ("experts", "line", "said"),
    [
        ({}, "dp=3,ep=3", "strategy.ep = 3: does not divide model.experts.count = 4"),
        ({}, "dp=8,etp=8", "strategy.etp = 8: does not divide model.experts.ffn = 12"),
        ({"shared_ffn": 6}, "tp=4", "strategy.tp = 4: does not divide model.experts.shared_ffn = 6"),
        ({}, "dp=2,ep=2,compression=int8", "expert gradients reduce over others; use ep=1 and etp=1"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(experts: dict[str, Any], line: str, said: str) -> None:
    with pytest.raises(InputError) as refused:
        check(strategy(line), model(**experts), Job(24, 8), None)
    assert said in str(refused.value)


def test_without_experts_there_is_nothing_to_share() -> None:
    dense = build(ModelSpec, complete({**SIZES, "family": "llama"}), "model")
    with pytest.raises(InputError, match=r"strategy.ep = 2: the model has no experts"):
        check(Strategy(dp=2, ep=2), dense, Job(2, 8), None)
    # The width of an MLP that no layer has may be any.
    check(
        Strategy(tp=4), build(ModelSpec, complete(SIZES | {"ffn": 37, "experts": EXPERTS}), "model"), Job(2, 8), None
    )


@pytest.mark.parametrize(
    ("line", "gradients", "experts"),
    [  # (axis, parts, replicas)
        ("dp=4", ("dp_replicate", 1, 4), None),
        ("dp=4,zero=2,shard=2", ("dp_shard", 2, 2), None),
        ("dp=4,ep=2", ("dp_replicate", 1, 4), ("edp", 1, 2)),
        ("dp=4,ep=4,zero=1", ("dp_shard", 4, 1), ("edp", 1, 1)),
        ("dp=4,ep=2,zero=2,shard=2", ("dp_shard", 2, 2), ("edp", 2, 1)),
        ("dp=2,cp=2,tp=2,ep=2,zero=3", ("dp_shard+cp", 4, 1), ("edp", 4, 1)),
        ("tp=2,zero=1", ("", 1, 1), ("edp", 1, 2)),  # over one shard no stage takes effect, for experts neither
    ],
)
def test_experts_have_buckets_of_their_own_where_others_hold_them(
    line: str, gradients: tuple[str, int, int], experts: tuple[str, int, int] | None
) -> None:
    spec, job, s = model(), Job(8, 8), strategy(line + ",bucket=0.001")
    local = local_model(spec, s)
    cut, held = buckets(local, job, s), parameters(local)
    assert sorted(p.fqn for b in cut for p in b.parameters) == sorted(p.fqn for p in held)
    assert [b.index for b in cut] == list(range(len(cut)))
    for b in cut:
        assert {p.of_experts for p in b.parameters} == {b.experts} or not s.separate_experts
        assert (b.axis(s), b.parts(s), b.replicas(s)) == (experts if b.experts else gradients)
        assert not b.axis(s) or mesh(s).size(b.axis(s)) == b.ranks(s) // (b.replicas(s) if b.across(s) else 1)
        assert b.padded(s) % b.parts(s) == 0
        pieces = [piece for i in range(b.parts(s)) for piece in FlatBucket(b, s, i).pieces()]
        assert sum(piece.stop - piece.start for piece in pieces) == b.numel
    assert any(b.experts for b in cut) == (experts is not None)
    if sharding_of(s).parameters:
        assert [b.name for b in cut][1:4] == ["blocks.2.experts", "blocks.2", "blocks.1.experts"]


def test_buckets_that_fill_at_once_have_memory_of_their_own() -> None:
    spec, s = model(), Strategy(dp=4, ep=2, zero=2, bucket=0.001)
    local = local_model(spec, s)
    cut = buckets(local, Job(8, 8), s)
    turns, sizes = reduction_slots(local, cut, s)

    def of(experts: bool) -> list[tuple[Bucket, int]]:
        return [(b, slot) for b, slot in zip(cut, turns, strict=True) if b.experts == experts]

    for kind in (of(False), of(True)):
        assert all(a[1] != b[1] for a, b in pairwise(kind))
        assert all(sizes[slot] >= b.padded(s) for b, slot in kind)
    assert not {slot for _, slot in of(False)} & {slot for _, slot in of(True)}


LINES = [
    "dp=2,ep=2",
    "dp=4,ep=2,etp=2,zero=1,bucket=0.001",
    "dp=4,ep=2,zero=2,shard=2,bucket=0.001",
    "dp=4,ep=2,zero=3,shard=2,prefetch=0",
    "dp=6,ep=2,zero=3",
    "dp=4,ep=4,zero=3",
    "dp=2,ep=2,zero=3,reshard=step",
    "tp=2",
    "dp=2,tp=2,ep=2,zero=2,bucket=0.001",
    "dp=2,tp=2,sp=true,zero=3",
    "cp=2,dp=2,ep=4,zero=3,recompute=full",
    "pp=2,dp=2,ep=2,zero=2,schedule=zb-h1,bucket=0.001",
    "pp=3,dp=2,zero=3,etp=2",
]


@pytest.mark.parametrize("line", sampled(LINES, (2, 6)))
def test_what_goes_between_layers_is_what_was_predicted(line: str) -> None:
    s = strategy(line)
    spec, job = model(dense_layers=[0]), Job(s.dp * 3, 8)
    check(s, spec, job, None)

    def between(events: Any) -> list[Any]:
        return [e.identity for e in events if e.kind != "compute" and e.axis not in INSIDE]

    layout = Layout(spec, job, s)
    for kind in classes(layout):
        program = expand(layout.rank_view(kind.rank))
        assert between(record_step(spec, job, s, kind.rank).events) == between(program.events)


@examples(2, 50)
@pytest.mark.parametrize("world", sampled([2, 4, 6], (1, 2)))
def test_parity_with_experts(pool: Pool, world: int, examples: int) -> None:
    @settings(max_examples=examples)
    @given(cases(world, experts=True), TRANSPORTS, OPTIMIZERS)
    def holds(case, transport, under) -> None:  # type: ignore[no-untyped-def]
        for found in pool.run(world, rank_cases.examine, *case, "float64", 3, transport, (under,))[0]:
            assert found.loss_rel_max <= BOUNDS["float64"], found
            assert found.grad_rel_max <= BOUNDS["float64"], found

    holds()


def test_experts_that_choose_among_equal_tokens(pool: Pool) -> None:
    """Documents of few words begin alike: many tokens have equal scores, which every layout rounds differently."""
    experts = {"count": 8, "top_k": 3, "ffn": 12, "chooser": "experts", "capacity": 0.5, "normalized": False}
    sizes = {"vocab": 3, "hidden": 48, "layers": 2, "heads": 12, "kv_heads": 6, "head_dim": 8, "ffn": 48}
    spec = build(ModelSpec, complete(SIZES | sizes | {"experts": experts}), "model")
    case = (spec, Job(18, 8, documents="separate"), strategy("dp=2,etp=2,micro_batch=3"))
    for found in pool.run(2, rank_cases.examine, *case, "float64", 4, "shm", ("adamw",))[0]:
        assert found.loss_rel_max <= BOUNDS["float64"], found
        assert found.grad_rel_max <= BOUNDS["float64"], found


@st.composite
def layouts(draw: st.DrawFn) -> Strategy:
    pp, tp, dp = draw(st.sampled_from([(1, 1, 2), (1, 2, 2), (1, 1, 4), (3, 1, 2), (1, 2, 1), (1, 1, 1), (1, 4, 1)]))
    inside = [(ep, etp) for ep in (1, 2, 4) for etp in (1, 2) if dp * tp % (ep * etp) == 0]
    ep, etp = draw(st.sampled_from(inside))
    zero = draw(st.sampled_from([0, 1, 2, 3]))
    return Strategy(
        dp=dp,
        tp=tp,
        pp=pp,
        ep=ep,
        etp=etp,
        zero=zero,
        shard=draw(st.sampled_from(divisors(dp))) if zero else None,
        micro_batch=draw(st.sampled_from([1, 2])),
        bucket=draw(st.sampled_from([0.001, "auto"])),
    )


@examples(1, 30)
def test_a_run_with_experts_goes_on_over_any_layout(
    pool: Pool, tmp_path_factory: pytest.TempPathFactory, examples: int
) -> None:
    """Balance biases among what is saved: the curve of one process, in fp64 to 1e-9."""
    spec = model(score="sigmoid", balance_bias=0.05, balance_loss=0.01)

    def run(s: Strategy, folder: Path, steps: tuple[int, int], transport: str) -> list[float]:
        job = Job(8, 8, Precision("float64"), Optimizer("adamw"))
        return pool.run(s.world, rank_cases.continue_run, spec, job, s, folder, steps, transport)[0]

    curve = run(Strategy(), tmp_path_factory.mktemp("whole"), (0, 4), "native")
    without = model(score="sigmoid", balance_bias=0.0, balance_loss=0.01)
    job = Job(8, 8, Precision("float64"), Optimizer("adamw"))
    folder = tmp_path_factory.mktemp("unbiased")
    assert curve != pytest.approx(
        pool.run(1, rank_cases.continue_run, without, job, Strategy(), folder, (0, 4), "native")[0], rel=1e-6
    )  # biases matter

    @settings(max_examples=examples)
    @given(layouts(), layouts(), TRANSPORTS)
    def holds(first: Strategy, second: Strategy, transport: str) -> None:
        folder = tmp_path_factory.mktemp("run")
        losses = run(first, folder, (0, 2), transport) + run(second, folder, (2, 4), transport)
        assert losses == pytest.approx(curve, rel=1e-9)

    holds()


@pytest.mark.parametrize(
    ("line", "spoiled", "said"),
    sampled(
        [
            ("dp=2,ep=2,tp=2", {}, ""),
            ("dp=4,ep=2,zero=3,shard=2", {}, ""),
            # ranks 0 and 2 hold the same experts, 1 and 3 the others
            ("dp=4,ep=2", {2: f"weight {DOWN}"}, f"{DOWN} (rank 0 against rank 2)"),
            ("dp=4,ep=2,zero=2", {3: f"weight {DOWN}"}, f"{DOWN} (rank 1 against rank 3)"),
            ("tp=2", {1: f"weight {DOWN}"}, f"{DOWN} (rank 0 against rank 1)"),
            (
                "tp=2,ep=2",
                {1: "weight blocks.0.mlp.router.weight"},
                "blocks.0.mlp.router.weight (rank 0 against rank 1)",
            ),
        ],
        (1, 3, 5),
    ),
)
def test_experts_are_compared_where_others_hold_the_same(
    pool: Pool, line: str, spoiled: dict[int, str], said: str
) -> None:
    s = strategy(line)
    found = pool.run(s.world, rank_cases.compared, model(), Job(8, 8), s, "native", spoiled)
    assert {text for text, _ in found} == {f"replicas hold different bits in {said}" if said else ""}


@pytest.mark.parametrize("zero", sampled([0, 1, 2, 3], (3,)))
def test_an_expert_bucket_that_is_forgotten_is_caught(pool: Pool, zero: int) -> None:
    case = (model(), Job(8, 8), replace(Strategy(dp=4, ep=2), zero=zero), "float64", 2, "shm", ("sgd",))
    assert all(d.grad_rel_max < 1e-9 for d in pool.run(4, rank_cases.examine, *case)[0])
    assert all(d.grad_rel_max > 1e-2 for d in pool.run(4, rank_cases.examine_broken, "experts", *case)[0])


def test_replicas_evaluate_different_numbers_of_sequences(pool: Pool) -> None:
    """A replica that has no more takes part in the passes of the others, whose tokens go to its experts."""
    spec, job = model(), Job(2, 8, Precision("float64"))
    alone = pool.run(1, rank_cases.evaluates_unevenly, spec, job, strategy("dp=1"))[0]
    for line in ("dp=2,ep=2", "dp=2,ep=2,zero=2", "dp=2,tp=2,ep=4", "dp=2,cp=2,zero=3", "dp=2,pp=2,zero=3"):
        s = strategy(line)
        assert pool.run(s.world, rank_cases.evaluates_unevenly, spec, job, s) == pytest.approx([alone] * s.world)
