"""Replicas that take steps alone equal one process that trains each of them in turn and applies torch's SGD to the
mean of their changes; what they send is what is predicted; they go on from a checkpoint."""

from __future__ import annotations

import copy
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
from phalanx.observation.parity.outer_oracle import OuterOracle
from phalanx.observation.parity.parity import BOUNDS
from phalanx.runtime.checkpoint.manifest import CheckpointError
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.data_parallel.outer import OuterUpdate
from phalanx.runtime.process.environment import ALONE
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
from phalanx.training.training_step import Training

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
    local = draw(st.sampled_from([1, 2, 3, 4]))
    fragments = draw(st.sampled_from([n for n in divisors(local) if n <= model.layers]))
    delay = draw(st.integers(0, local // fragments - 1))
    outer = replace(outer, fragments=fragments, delay=delay, mix=draw(st.sampled_from([0.0, 0.5])))
    job = replace(job, outer=outer)
    try:
        s = replace(s, shard=shard, local=local)
        check(s, model, job, ranks)
    except InputError:  # experts over several replicas
        s, job = replace(s, shard=shard, ep=1, etp=1, local=2), replace(job, outer=OuterOptimizer())
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
        # A change is the difference of two parameters: of a tiny one only the first digits are left.
        for found in pool.run(world, rank_cases.examine, *case, "float64", 5, transport, (under,), 0.1)[0]:
            assert found.loss_rel_max <= BOUNDS["float64"], found
            assert found.grad_rel_max <= BOUNDS["float64"], found

    holds()


def test_the_change_of_a_gradient_that_is_rounding_alone_is_not_compared(pool: Pool) -> None:
    """A key's bias: no softmax sees it, and AdamW divides what rounding leaves of its gradient by 1e-8."""
    model = build(ModelSpec, complete({**SIZES, "family": "gpt2", "heads": 1, "max_seq": 64}), "model")
    job, s = (
        Job(6, 32, FP64, outer=OuterOptimizer(0.3, 0.0), clip=0.0),
        make_strategy("dp=2,cp=2,local=4,micro_batch=3"),
    )
    (found,) = pool.run(4, rank_cases.examine, model, job, s, "float64", 5, "native", ("adamw",), 0.1)[0]
    assert found.grad_rel_max <= BOUNDS["float64"], found


@examples(2, 40)
@pytest.mark.parametrize("world", sampled([2, 4], (1,)))
def test_the_step_that_synchronises_is_the_predicted_one(pool: Pool, world: int, examples: int) -> None:
    @settings(max_examples=examples)
    @given(alone(world), TRANSPORTS, st.data())
    def holds(case: Any, transport: Any, data: Any) -> None:
        _, job, s = case
        at = data.draw(st.integers(0, s.local - 1))
        if job.outer.delay and job.outer.applied(at, s.local) is not None:
            at = job.outer.last_sent(s.local)  # this step would wait for what an earlier one sends
        for found in pool.run(world, rank_cases.instrumented_step, *case, transport, False, at):
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


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3)])
def test_a_replica_leaves_or_joins_at_a_synchronisation(pool: Pool, tmp_path: Path, before: int, after: int) -> None:
    """As in one process that trains replicas in turn: the last is left out, or begins with the first one's state."""
    job = Job(12, 8, FP64, Optimizer("sgd", momentum=0.9), OuterOptimizer(0.7, 0.9))

    def run(dp: int, steps: tuple[int, int]) -> list[float]:
        case = SPEC, job, Strategy(dp=dp, local=2), tmp_path, steps, "native"
        return pool.run(dp, rank_cases.continue_run, *case)[0]  # type: ignore[no-any-return]

    def one(replicas: int) -> Training:
        own = replace(job, global_batch=12 // replicas)
        return Training(SPEC, own, Strategy(), Comm(ALONE, mesh(Strategy())), seed=5)

    def in_turn(replicas: list[Training], oracle: OuterOracle, steps: range) -> list[float]:
        losses = []
        for step in steps:
            tokens = torch.randint(SPEC.vocab, (12, 9), generator=torch.Generator().manual_seed(step))
            parts = tokens.view(len(replicas), -1, 1, 9)
            of_each = [r.step(list(part), lr=1e-2).loss for r, part in zip(replicas, parts, strict=True)]
            losses.append(sum(of_each) / len(of_each) if step % 2 else of_each[0])
            oracle.after(step % 2)
        return losses

    first = [one(before) for _ in range(before)]
    outer = OuterOracle(first, job.outer, Strategy(dp=before, local=2))
    losses = in_turn(first, outer, range(4))
    then = [one(after) for _ in range(after)]
    for index, replica in enumerate(then):
        source = first[index if index < before else 0]
        for name, master in replica.masters.items():
            master.detach().copy_(source.masters[name])
            replica.optimizer.state[master].update(copy.deepcopy(source.optimizer.state[source.masters[name]]))
    outer.replicas = then
    losses += in_turn(then, outer, range(4, 8))
    assert run(before, (0, 4)) + run(after, (4, 8)) == pytest.approx(losses, rel=1e-9)


def test_residuals_go_on(pool: Pool, tmp_path: Path) -> None:
    """A run with compressed changes resumes bit for bit; a replica that joins has no residual."""
    job = Job(4, 8, FP64, outer=OuterOptimizer(0.7, 0.9))
    for line in ("dp=2,local=1,compression=int4:stochastic", "dp=4,zero=1,shard=2,local=1,compression=topk:0.1"):
        s, folder = make_strategy(line) or Strategy(), tmp_path / line

        def run(s: Strategy, name: str, steps: tuple[int, int], folder: Path = folder) -> list[float]:
            return pool.run(s.world, rank_cases.continue_run, SPEC, job, s, folder / name, steps, "native")[0]  # type: ignore[no-any-return]

        assert run(s, "parts", (0, 2)) + run(s, "parts", (2, 4)) == run(s, "whole", (0, 4))


def test_fragments_go_on(pool: Pool, tmp_path: Path) -> None:
    """Replicas whose parameters differ at the end of a period go on from their own, in another layout too."""
    job = Job(8, 8, FP64, outer=OuterOptimizer(0.7, 0.9, fragments=2, delay=1, mix=0.5))

    def run(line: str, name: str, steps: tuple[int, int]) -> list[float]:
        s = make_strategy(line) or Strategy()
        return pool.run(s.world, rank_cases.continue_run, SPEC, job, s, tmp_path / name, steps, "native")[0]  # type: ignore[no-any-return]

    parts = run("dp=2,local=4", "parts", (0, 4)) + run("dp=4,zero=3,shard=2,local=4", "parts", (4, 9))
    assert parts == pytest.approx(run("dp=2,local=4", "whole", (0, 9)), rel=1e-9)


@pytest.mark.parametrize("compression", sampled(["int4", "int8:stochastic", "topk:0.1", "bf16"], (0,)))
def test_compressed_changes_of_fragments_are_applied_later(pool: Pool, compression: str) -> None:
    """Fragments of unequal size share memory in turn: what pads a message is zero again."""
    job = Job(8, 8, FP64, outer=OuterOptimizer(0.7, 0.9, fragments=2, delay=1))
    spec, s = replace(SPEC, layers=3), Strategy(dp=2, local=4, compression=compression, bucket=0.002)
    (found,) = pool.run(2, rank_cases.examine, spec, job, s, "float64", 9, "native", ("sgd",), 0.1)[0]
    assert max(found.loss_rel_max, found.grad_rel_max) <= BOUNDS["float64"], found
    step = pool.run(2, rank_cases.instrumented_step, spec, job, s, "native", False, job.outer.last_sent(4))[0]
    assert step["differences"] == []


def test_a_delay_hides_what_is_sent() -> None:
    """Behind the steps until it is applied, not the work of the update."""
    cluster, s = clusters.preset("dgx-h100", 2), Strategy(dp=16, local=8)
    exposed, state = {}, {}
    for delay in (0, 1, 3):
        job = Job(16, 16, Precision("bfloat16"), outer=OuterOptimizer(fragments=2, delay=delay))
        found = predict(SPEC, cluster, job, s)
        exposed[delay], state[delay] = found.exposed_communication_s, found.state_bytes
    assert exposed[0] > exposed[1] >= exposed[3] > 0
    assert state[3] == state[1] > state[0]
    coded = [replace(Strategy(dp=16, local=8), compression=c) for c in ("int4", "int8")]
    for c in coded:  # which have arrived when the step that sends them ends
        one, other = (
            predict(SPEC, cluster, Job(16, 16, outer=OuterOptimizer(fragments=2, delay=d)), c) for d in (0, 3)
        )
        assert other.exposed_communication_s == one.exposed_communication_s > 0


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


# Two parameters of 1, each a fragment, that every step of both replicas lowers by 2; H = 6, an outer rate of 2, no
# momentum: torchft's recorded runs by number (7eb7087, test_fixtures/torchft.diloco_regression_test.
# DiLoCoMockedUpdateTest.test_diloco_mocked_updates_N.json): (delay, mix), then both parameters after each step.
PUBLISHED = (
    ((0, 0.0), (-1, -3, -11, -13, -15, -17, -19, -21, -35, -37, -39, -41, -43, -45, -59)),
    ((0, 0.0), (-1, -3, -5, -7, -9, -23, -25, -27, -29, -31, -33, -47, -49, -51, -53)),
    ((0, 0.5), (-1, -3, -8, -10, -12, -14, -16, -18, -24.5, -26.5, -28.5, -30.5, -32.5, -34.5, -40.25)),
    ((0, 0.5), (-1, -3, -5, -7, -9, -17, -19, -21, -23, -25, -27, -32, -34, -36, -38)),
    ((0, 1.0), tuple(range(-1, -31, -2))),
    ((0, 1.0), tuple(range(-1, -31, -2))),
    ((1, 0.0), (-1, -3, -7, -9, -11, -13, -15, -17, -27, -29, -31, -33, -35, -37, -47)),
    ((1, 0.0), (-1, -3, -5, -7, -9, -19, -21, -23, -25, -27, -29, -39, -41, -43, -45)),
    ((1, 0.5), (-1, -3, -6, -8, -10, -12, -14, -16, -21.5, -23.5, -25.5, -27.5, -29.5, -31.5, -35.75)),
    ((1, 0.5), (-1, -3, -5, -7, -9, -15, -17, -19, -21, -23, -25, -29, -31, -33, -35)),
    ((1, 1.0), tuple(range(-1, -31, -2))),
    ((1, 1.0), tuple(range(-1, -31, -2))),
)


def _one_parameter_each(
    names: tuple[str, ...], rule: OuterOptimizer, s: Strategy, dtype: torch.dtype, n: int = 1
) -> tuple[OuterUpdate, dict[str, torch.Tensor]]:
    """Return an outer update over parameters of `n` ones, each in its own fragment and bucket. Two replicas are
    alike."""

    def reduce(tensor: torch.Tensor, axis: str, **_: object) -> Any:
        tensor.mul_(2)
        return SimpleNamespace(wait=lambda: None)

    def bucket(i: int, name: str) -> SimpleNamespace:
        of = SimpleNamespace(fragment=i, parameters=(SimpleNamespace(fqn=name),))
        return SimpleNamespace(shard=shards[name], name=name, bucket=of, views=lambda flat: {name: flat})

    shards = {name: torch.zeros(n, dtype=dtype) for name in names}
    masters = {name: torch.ones(n) for name in names}
    empty = torch.empty
    comm = SimpleNamespace(
        all_reduce=reduce, size=lambda _: 2, index=lambda _: 0, buffer=lambda n, t: empty(n, dtype=t)
    )
    buckets = [bucket(i, name) for i, name in enumerate(names)]
    engine: Any = SimpleNamespace(comm=comm, strategy=s, buckets=buckets, sharding=SimpleNamespace(state=False))
    return OuterUpdate(engine, masters, shards, rule), masters


@pytest.mark.parametrize("number", range(6))
def test_published_steps_of_two_fragments(number: int) -> None:
    ((delay, mix), first), (_, second) = PUBLISHED[2 * number : 2 * number + 2]
    rule = OuterOptimizer(2.0, 0.0, fragments=2, delay=delay, mix=mix)
    outer, masters = _one_parameter_each(("a", "b"), rule, Strategy(dp=2, local=6), torch.float32)
    found = []
    for step in range(15):
        for master in masters.values():
            master -= 2
        outer.after(step % 6)
        found.append((masters["a"].item(), masters["b"].item()))
    assert found == list(zip(first, second, strict=True))


class _Touched(TorchDispatchMode):
    """Counts the bytes that operations read and write."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        reads = [t for t in args if isinstance(t, torch.Tensor)]
        reads = reads[1:] if func.overloadpacket.__name__ == "copy_" else reads
        self.total += sum(t.nbytes for t in reads) + out.nbytes
        return out


@pytest.mark.parametrize(("momentum", "nesterov", "mix"), [(0.0, True, 0.0), (0.9, True, 0.5), (0.9, False, 0.0)])
def test_the_outer_update_moves_the_bytes_of_its_price(momentum: float, nesterov: bool, mix: float) -> None:
    rule = OuterOptimizer(0.7, momentum, nesterov, mix=mix)
    job, s = Job(4, 8, Precision("bfloat16", accumulate="float64"), outer=rule), Strategy(dp=2, local=4)
    view, n = Layout(SPEC, job, s).rank_view(0), SPEC.parameter_count
    priced = sum(int(t.work.traffic_bytes) for t in terms(view) if t.event.axis == "dp_local")
    outer, _ = _one_parameter_each(("w",), rule, s, torch.float64, n)
    outer.engine.comm.all_reduce = lambda *_, **__: SimpleNamespace(wait=lambda: None)
    with _Touched() as touched:
        outer.after(3)
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
    for fields, said in (
        ({"fragments": 3}, r"needs a block for each fragment, and the model has 2; use at most 2"),
        ({"fragments": 2, "delay": 2}, "is not below the 2 steps between two synchronisations"),
    ):
        with pytest.raises(InputError, match=said):
            check(s, SPEC, Job(4, 8, outer=OuterOptimizer(**fields)), 2)
    with pytest.raises(InputError, match=r"does not divide strategy.local = 3; use one of 1"):
        check(Strategy(dp=2, local=3), SPEC, Job(4, 8, outer=OuterOptimizer(fragments=2)), 2)
    with pytest.raises(InputError, match=r"loss scale"):
        require_runnable(s, Job(4, 8, Precision("float16")))
    require_synchronised(s, Train(steps=12, save_every=4))
    for fields in ({"steps": 13}, {"steps": 12, "save_every": 6}, {"steps": 12, "eval_every": 2}):
        with pytest.raises(InputError, match=r"does not end with a synchronisation, .* every 4 steps"):
            require_synchronised(s, Train(**fields))
