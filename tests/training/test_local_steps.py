"""Replicas that take steps alone equal one process that trains each of them in turn and applies torch's SGD to the
mean of their changes; what they send is what is predicted; they go on from a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import fault_injection, rank_cases
from support.proving import prove
from support.rank_pool import Pool
from support.sizes import examples, sampled
from support.strategies import COMPRESSORS, OPTIMIZERS, TRANSPORTS, cases, divisors
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.cost.step.expand import expand
from phalanx.cost.step.predict import predict
from phalanx.cost.step.terms import terms
from phalanx.observation.parity.parity import BOUNDS
from phalanx.runtime.checkpoint.manifest import CheckpointError
from phalanx.runtime.data_parallel.outer import OuterUpdate
from phalanx.schedule.layout import Layout
from phalanx.spec.cluster import presets as clusters
from phalanx.spec.errors import InputError
from phalanx.spec.files.job_file import build, make_strategy
from phalanx.spec.job import Job, Precision, Train
from phalanx.spec.model.families import complete
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.optimizers import Optimizer, OuterOptimizer
from phalanx.spec.strategy.legality import check, require_runnable, require_synchronised
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy

SIZES = {"family": "llama", "vocab": 61, "hidden": 16, "layers": 2, "heads": 2, "ffn": 40, "max_seq": 16}
SPEC = build(ModelSpec, complete(SIZES), "model")
FP64 = Precision("float64")


@st.composite
def alone(draw: st.DrawFn, ranks: int, experts: bool = False) -> tuple[ModelSpec, Job, Strategy]:
    """Draw a case whose replicas take steps alone."""

    def several(case: tuple[ModelSpec, Job, Strategy]) -> bool:
        return case[2].dp > 1 and case[1].precision.compute != "float16"

    model, job, s = draw(cases(ranks, experts=experts).filter(several))
    below = [n for n in divisors(s.dp) if n < s.dp]
    shard = draw(st.sampled_from(below)) if s.zero else None
    compression = "none"
    if s.pp == s.tp == s.ep == s.etp == 1 and job.precision.accumulate_dtype in ("float32", "float64"):
        compression = draw(st.sampled_from([c for c in ("none", *COMPRESSORS) if not c.startswith("powersgd")]))
    s = replace(s, compression=compression)
    outer = OuterOptimizer(draw(st.sampled_from([0.3, 1.0])), draw(st.sampled_from([0.0, 0.9])), draw(st.booleans()))
    job = replace(job, outer=outer)
    try:
        s = replace(s, shard=shard, local=draw(st.sampled_from([1, 2, 3])))
        check(s, model, job, ranks)
    except InputError:  # experts over several replicas
        s = replace(s, shard=shard, ep=1, etp=1, local=2)
        if model.experts is not None and model.experts.balance_bias is not None:
            model = replace(model, experts=replace(model.experts, balance_bias=None))
        check(s, model, job, ranks)
    return model, job, s


@examples(3, 60)
@pytest.mark.parametrize("world", sampled([2, 4, 6], (1,)))
def test_parity_with_replicas_trained_in_turn(pool: Pool, world: int, examples: int) -> None:
    @settings(max_examples=examples)
    @given(alone(world), TRANSPORTS, OPTIMIZERS)
    def holds(case: Any, transport: Any, under: Any) -> None:
        prove(*case)
        for found in pool.run(world, rank_cases.examine, *case, "float64", 5, transport, (under,))[0]:
            assert found.loss_rel_max <= BOUNDS["float64"], found
            assert found.grad_rel_max <= BOUNDS["float64"], found

    holds()


@examples(2, 40)
@pytest.mark.parametrize("world", sampled([2, 4], (1,)))
def test_the_step_that_synchronises_is_the_predicted_one(pool: Pool, world: int, examples: int) -> None:
    @settings(max_examples=examples)
    @given(alone(world), TRANSPORTS)
    def holds(case: Any, transport: Any) -> None:
        for found in pool.run(world, rank_cases.instrumented_step, *case, transport):
            assert found["differences"] == []
            assert found["predicted_peak"] == pytest.approx(found["measured_peak"], abs=found["slack"]), case

    holds()


def test_a_mean_after_every_step_is_plain_data_parallelism(pool: Pool, tmp_path: Path) -> None:
    """H = 1 with an inner SGD without clipping or momentum and an outer one of rate 1."""
    job = Job(4, 8, FP64, Optimizer("sgd", momentum=0.0), OuterOptimizer(1.0, 0.0), clip=0.0)

    def losses(name: str, s: Strategy) -> list[float]:
        return pool.run(2, rank_cases.continue_run, SPEC, job, s, tmp_path / name, (0, 4), "native")[0]  # type: ignore[no-any-return]

    plain, local = (losses(name, Strategy(dp=2, local=h)) for name, h in (("plain", 0), ("local", 1)))
    assert local == pytest.approx(plain, rel=1e-12)


def test_replicas_go_on_over_other_layouts_and_others_join(pool: Pool, tmp_path: Path) -> None:
    """Each replica has its own optimizer state again, whatever its layout; the momentum between them is kept. A
    replica that joins starts from the first one's state."""
    job = Job(12, 8, FP64, outer=OuterOptimizer(0.7, 0.9))
    lines = ("dp=2,local=2", "dp=4,zero=3,shard=2,local=2", "dp=2,tp=2,local=2", "dp=2,pp=2,local=2")
    strategies = [s for s in map(make_strategy, lines) if s is not None]

    def run(s: Strategy, name: str, steps: tuple[int, int]) -> list[float]:
        folder = tmp_path / name
        return pool.run(s.world, rank_cases.continue_run, SPEC, job, s, folder, steps, "native")[0]  # type: ignore[no-any-return]

    whole = run(strategies[0], "whole", (0, 8))
    parts = [run(s, "parts", (2 * i, 2 * i + 2)) for i, s in enumerate(strategies)]
    assert list(chain(*parts)) == pytest.approx(whole, rel=1e-9)
    grown = run(Strategy(dp=4, local=2), "parts", (8, 10))
    assert all(0 < loss < 10 for loss in grown)
    run(Strategy(dp=2), "plain", (0, 2))
    with pytest.raises(Exception, match=r"outer\..* is not in the checkpoint") as error:
        run(strategies[0], "plain", (2, 4))
    assert CheckpointError.__name__ in str(error.value)


def test_residuals_go_on(pool: Pool, tmp_path: Path) -> None:
    """A run with compressed changes resumes bit for bit; a replica that joins has no residual."""
    job = Job(4, 8, FP64, outer=OuterOptimizer(0.7, 0.9))
    for line in ("dp=2,local=1,compression=int4:stochastic", "dp=4,zero=1,shard=2,local=1,compression=topk:0.1"):
        s, folder = make_strategy(line) or Strategy(), tmp_path / line

        def run(s: Strategy, name: str, steps: tuple[int, int], folder: Path = folder) -> list[float]:
            return pool.run(s.world, rank_cases.continue_run, SPEC, job, s, folder / name, steps, "native")[0]  # type: ignore[no-any-return]

        assert run(s, "parts", (0, 2)) + run(s, "parts", (2, 4)) == run(s, "whole", (0, 4))


def test_compressed_changes_are_smaller() -> None:
    cluster, job = clusters.preset("dgx-h100", 2), Job(16, 16, Precision("bfloat16"))
    sent, spec = {}, build(ModelSpec, complete(SIZES | {"vocab": 4096, "hidden": 256, "ffn": 512}), "model")
    for compression, line in product(("none", "int8", "int4"), ("dp=16", "dp=16,zero=3,shard=4")):
        s = replace(make_strategy(line) or Strategy(), local=4, compression=compression)
        sent[compression, line] = predict(spec, cluster, job, s).bytes_per_axis["dp_local"]
    for line in ("dp=16", "dp=16,zero=3,shard=4"):
        assert sent["int8", line] > 1.8 * sent["int4", line] > 0
        assert sent["none", line] > 1.5 * sent["int8", line]  # which sends twice, padded to whole blocks


def test_a_synchronisation_costs_less_the_rarer_it_is() -> None:
    """Its bytes stay, its part of the time of a step falls as 1 / H; inside, replicas send nothing to each other."""
    cluster, job = clusters.preset("dgx-h100", 2), Job(16, 16, Precision("bfloat16"))
    of = {h: predict(SPEC, cluster, job, Strategy(dp=16, local=h)) for h in (1, 2, 8)}
    assert len({p.bytes_per_axis["dp_local"] for p in of.values()}) == 1
    assert set(of[1].bytes_per_axis) == {"dp_local"}
    extra = {h: p.exposed_communication_s for h, p in of.items()}
    assert extra[2] == pytest.approx(extra[1] / 2)
    assert extra[8] == pytest.approx(extra[1] / 8)
    assert of[1].memory_bytes == of[8].memory_bytes


def test_published_steps_of_one_parameter() -> None:
    """A parameter of 1 that every step of a replica lowers by 2, six steps alone, an outer rate of 2: the second
    fragment of torchft's recorded run (7eb7087,
    test_fixtures/torchft.diloco_regression_test.DiLoCoMockedUpdateTest.test_diloco_mocked_updates_0.json)."""
    master, gradient = torch.ones(1), torch.zeros(1)

    def reduce(tensor: torch.Tensor, axis: str, **_: object) -> Any:
        tensor.mul_(2)  # the other replica's change is the same
        return SimpleNamespace(wait=lambda: None)

    comm = SimpleNamespace(all_reduce=reduce, size={"dp_local": 2}.__getitem__, index=lambda _: 0)
    s = Strategy(dp=2, local=6)
    engine: Any = SimpleNamespace(comm=comm, strategy=s, buckets=[SimpleNamespace(shard=gradient, name="bucket.0")])
    outer, found = OuterUpdate(engine, {"w": master}, {"w": gradient}, OuterOptimizer(2.0, 0.0)), []
    for step in range(1, 13):
        master -= 2
        if step % 6 == 0:
            outer.synchronise()
        found.append(master.item())
    assert found == [-1, -3, -5, -7, -9, -23, -25, -27, -29, -31, -33, -47]


class _Touched(TorchDispatchMode):
    """Counts the bytes that operations read and write."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        reads = [t for t in args if isinstance(t, torch.Tensor)]
        reads = reads[1:] if func.overloadpacket.__name__ == "copy_" else reads
        self.total += sum(t.nbytes for t in reads) + out.nbytes
        return out


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, True), (0.9, True), (0.9, False)])
def test_the_outer_update_moves_the_bytes_of_its_price(momentum: float, nesterov: bool) -> None:
    job = Job(4, 8, Precision("bfloat16", accumulate="float64"), outer=OuterOptimizer(0.7, momentum, nesterov))
    view = Layout(SPEC, job, Strategy(dp=2, local=4)).rank_view(0)
    priced = sum(int(t.work.traffic_bytes) for t in terms(view) if t.event.axis == "dp_local")
    n = SPEC.parameter_count
    master, change = torch.ones(n), torch.zeros(n, dtype=torch.float64)
    reduced = SimpleNamespace(wait=lambda: None)
    comm = SimpleNamespace(all_reduce=lambda *_, **__: reduced, size=lambda _: 2, index=lambda _: 0)
    s = Strategy(dp=2, local=4)
    engine: Any = SimpleNamespace(comm=comm, strategy=s, buckets=[SimpleNamespace(shard=change, name="bucket.0")])
    outer = OuterUpdate(engine, {"w": master}, {"w": change}, job.outer)
    with _Touched() as touched:
        outer.synchronise()
    assert touched.total == priced


def test_a_replica_that_skips_the_last_step_synchronises_too(pool: Pool) -> None:
    """Else the others would wait for it."""
    (why, first), (none, second) = pool.run(
        2, fault_injection.skips_while_others_synchronise, SPEC, Job(4, 8, FP64), Strategy(dp=2, local=3)
    )
    assert "not finite" in why
    assert none == ""
    assert first == second


def test_experts_stay_inside_a_replica() -> None:
    grid = mesh(Strategy(dp=8, zero=1, shard=4, ep=2, local=4))
    replicas = [set(row) for row in grid.groups("dp_shard").tolist()]
    assert all(any(set(row) <= r for r in replicas) for axis in ("ep", "edp") for row in grid.groups(axis).tolist())
    assert sorted(grid.replica(rank) for rank in range(8)) == list(range(8))


def test_the_step_ends_with_the_changes_of_all_buckets() -> None:
    s = Strategy(dp=4, zero=2, shard=2, local=5)
    events = [e for e in expand(Layout(SPEC, Job(4, 8), s).rank_view(0)).events if e.axis == "dp_local"]
    assert next(e.unit for e in events) == "metrics"
    sent = sum(e.bytes for e in events[1:])
    assert SPEC.parameter_count * 4 / 2 <= sent < SPEC.parameter_count * 4 / 2 + 64 * len(events)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("dp=1,local=2", "needs several replicas"),
        ("dp=4,zero=1,local=2", "dp = 4 over dp_shard = 4 is one"),
        ("dp=4,ep=4,local=2", "of a replica that steps alone"),
        ("dp=2,compression=powersgd:2,local=2", "takes gradients of whole matrices"),
        ("dp=2,tp=2,compression=int8,local=2", "on each tp rank"),
        ("dp=2,local=-1", "strategy.local"),
    ],
)
def test_what_cannot_step_alone_is_refused(line: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        require_runnable(make_strategy(line) or Strategy(), Job(4, 8))


def test_refusals_of_the_job() -> None:
    s = Strategy(dp=2, local=4)
    with pytest.raises(InputError, match=r"loss scale"):
        require_runnable(s, Job(4, 8, Precision("float16")))
    require_synchronised(s, Train(steps=12, save_every=4))
    for fields in ({"steps": 13}, {"steps": 12, "save_every": 6}, {"steps": 12, "eval_every": 2}):
        with pytest.raises(InputError, match=r"does not end with a synchronisation, .* every 4 steps"):
            require_synchronised(s, Train(**fields))
