"""Any strategy equals one process; and the examiner notices when it does not. Each is verified too: its step without
tensors' content does what the plan says."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from support import rank_cases
from support.proving import prove
from support.rank_pool import Pool
from support.sizes import examples, sampled
from support.strategies import OPTIMIZERS, ORDERS, TRANSPORTS, cases

from phalanx.cost.step.expand import expand
from phalanx.observation.parity.outer_oracle import _Meeting
from phalanx.observation.parity.parity import BOUND, BOUNDS, near_ties
from phalanx.planning.lookup import model_named
from phalanx.runtime.comm.transport import Handle
from phalanx.schedule.layout import Layout
from phalanx.spec.errors import InputError
from phalanx.spec.files.job_file import build, make_strategy
from phalanx.spec.job import Job, Precision
from phalanx.spec.model.families import complete
from phalanx.spec.model.modules import require_modules
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.spec import Strategy


@examples(2, 50)
@pytest.mark.parametrize("world", sampled([2, 3, 4, 6], (2, 3)))
def test_parity_in_fp64(pool: Pool, world: int, examples: int) -> None:
    @settings(max_examples=examples)
    @given(cases(world), TRANSPORTS, OPTIMIZERS)
    def holds(case, transport, under) -> None:  # type: ignore[no-untyped-def]
        prove(*case)
        # 5 steps: batches, of which there are 4, begin anew.
        for found in pool.run(world, rank_cases.examine, *case, "float64", 5, transport, (under,))[0]:
            assert found.loss_rel_max <= BOUNDS["float64"], found
            assert found.grad_rel_max <= BOUNDS["float64"], found

    holds()


@examples(2, 150)
@pytest.mark.parametrize("world", sampled([2, 4], (1,)))
def test_parity_of_blocks_that_a_pattern_lists(pool: Pool, world: int, examples: int) -> None:
    """Recurrences, windows, gates and norms of every kind, in blocks of one or two."""

    @settings(max_examples=examples)
    @given(cases(world, patterns=True), TRANSPORTS, OPTIMIZERS)
    def holds(case, transport, under) -> None:  # type: ignore[no-untyped-def]
        for found in pool.run(world, rank_cases.examine, *case, "float64", 3, transport, (under,))[0]:
            assert found.loss_rel_max <= BOUNDS["float64"], found
            assert found.grad_rel_max <= BOUNDS["float64"], found

    holds()


@examples(2, 50)
def test_parity_in_fp32(pool: Pool, examples: int) -> None:
    @settings(max_examples=examples)
    @given(cases(2), OPTIMIZERS)
    def holds(case, under) -> None:  # type: ignore[no-untyped-def]
        model, job, strategy = case
        # Tiny random models have gradients as small as Adam's usual eps = 1e-8, and there Adam turns fp32 rounding
        # into steps of the size of lr: chaos, not error (with eps = 1e-6 one process in fp32 is 1.5e-5 off itself in
        # fp64 when there are 8 tokens in a step). fp64 above examines eps = 1e-8.
        job = replace(job, optimizer=replace(job.optimizer, eps=1e-4))
        prove(model, job, strategy)
        for found in pool.run(2, rank_cases.examine, model, job, strategy, "float32", 5, "native", (under,))[0]:
            assert found.loss_rel_max <= BOUNDS["float32"], found
            assert found.grad_rel_max <= BOUNDS["float32"], found

    holds()


@pytest.mark.parametrize(
    ("line", "experts", "transport"),
    sampled(
        [
            ("dp=2,tp=2", False, "native"),
            ("dp=2,cp=2,zero=1", False, "shm"),
            ("dp=2,cp=2,zero=3", False, "native"),
            ("cp=2,tp=2,sp=1", True, "native"),
            ("dp=2,pp=2,zero=1", False, "shm"),
        ],
        (2, 3, 4),
    ),
)
@pytest.mark.parametrize("order", sampled(ORDERS, (len(ORDERS) - 1,)))
def test_every_order_of_the_mesh(pool: Pool, order: str, line: str, experts: bool, transport: str) -> None:
    """The last of the orders turns every two axes round."""
    strategy = make_strategy(f"{line},order={order}")
    assert strategy is not None
    model = build(ModelSpec, complete(SIZES | (EXPERTS if experts else {}) | {"layers": strategy.pp}), "model")
    job = Job(4, 8, Precision("float64"), clip=0.0)
    for found in pool.run(4, rank_cases.examine, model, job, strategy, "float64", 2, transport, ("sgd",))[0]:
        assert found.loss_rel_max <= BOUNDS["float64"], found
        assert found.grad_rel_max <= BOUNDS["float64"], found
    pool.run(4, rank_cases.kept_and_sent, model, job, strategy, 1, transport)
    prove(model, job, strategy)


SIZES = {
    "family": "llama",
    "vocab": 61,
    "hidden": 16,
    "layers": 2,
    "heads": 2,
    "ffn": 40,
    "max_seq": 16,
    "tied": True,
}
EXPERTS = {"experts": {"count": 4, "top_k": 2, "ffn": 24}}
CASE = (build(ModelSpec, complete(SIZES), "model"), Job(global_batch=4, seq=8), Strategy(dp=2, bucket=0.002))


_OF_TWO = ["dp=2,zero=3", "tp=2,sp=1", "cp=2", "pp=2,schedule=zb-v", "dp=2,ep=2"]


@pytest.mark.parametrize("line", sampled(_OF_TWO, (1, 3)))
def test_ranks_that_send_through_the_host(pool: Pool, line: str) -> None:
    """As those do that share a GPU: all that travels is copied to the host and back."""
    strategy = make_strategy(line)
    assert strategy is not None
    experts, layers = EXPERTS if strategy.ep > 1 else {}, 2 * strategy.pp
    model = build(ModelSpec, complete(SIZES | experts | {"layers": layers}), "model")
    job = Job(4, 8, Precision("float64"))
    for found in pool.run(2, rank_cases.through_the_host, model, job, strategy, "float64", 2, "native")[0]:
        assert found.loss_rel_max <= BOUNDS["float64"], found
        assert found.grad_rel_max <= BOUNDS["float64"], found


@pytest.mark.parametrize(
    ("how", "zero"), sampled([("mean", 0), ("forgets", 0), ("forgets", 1), ("forgets", 2), ("forgets", 3)], (0, 4))
)
def test_a_broken_engine_is_caught(pool: Pool, how: str, zero: int) -> None:
    model, job, strategy = CASE
    case = (model, job, replace(strategy, zero=zero), "float64", 2, "shm", ("sgd",))
    assert all(d.grad_rel_max < 1e-9 for d in pool.run(2, rank_cases.examine, *case)[0])
    assert all(d.grad_rel_max > 1e-2 for d in pool.run(2, rank_cases.examine_broken, how, *case)[0])


@pytest.mark.parametrize(
    ("zero", "schedule"),
    sampled(
        [(0, "1f1b"), (0, "dualpipe-v"), (1, "zb-v"), (1, "1f1b"), (2, "dualpipe-v"), (3, "zb-v"), (3, "dualpipe-v")],
        (5,),
    ),
)
def test_an_embedding_that_is_tied_over_a_pipeline(pool: Pool, schedule: str, zero: int) -> None:
    """Held by two ranks, or used by two chunks of one: its gradients come at two times, and count once."""
    model = build(ModelSpec, complete(SIZES | {"layers": 4}), "model")
    strategy = Strategy(pp=2, dp=2, zero=zero, schedule=schedule, bucket=0.002)  # type: ignore[arg-type]
    for found in pool.run(4, rank_cases.examine, model, Job(8, 8), strategy, "float64", 2, "shm", ("sgd",))[0]:
        assert found.loss_rel_max <= BOUNDS["float64"], found
        assert found.grad_rel_max <= BOUNDS["float64"], found
    over_replicas = replace(strategy, cp=2, shard=1) if zero else strategy
    prove(model, Job(8, 8), over_replicas)
    for view in Layout(model, Job(8, 8), over_replicas).stage_views():
        across = [e.unit for e in expand(view).events if e.axis == "dp_replicate" and zero]
        assert len(across) == len(set(across))  # each shard goes over the replicas once


def test_parity_refuses_only_what_has_no_module() -> None:
    """Mechanisms that have no price yet are examined all the same."""
    mamba = {"kind": "mamba", "name": "m", "heads": 4, "head_dim": 4, "groups": 2, "state": 4}
    runs = SIZES | {"mixers": [mamba], "pattern": ["m", "attention+mlp"], "norms": "both", "output_gate": True}
    require_modules(build(ModelSpec, complete(runs), "model"))
    with pytest.raises(InputError, match="attention sinks: the runtime has no module for it"):
        require_modules(build(ModelSpec, complete(SIZES | {"sinks": True}), "model"))
    latent = {"kv_rank": 8, "nope_dim": 4, "rope_dim": 4, "v_dim": 6, "q_rank": 8}
    indexed = SIZES | {"latent": latent | {"index": {"heads": 2, "dim": 6, "top": 4}}}
    require_modules(build(ModelSpec, complete(indexed), "model"))
    with pytest.raises(InputError, match=r"strategy\.cp = 2: cuts sequences, and an index chooses among the keys"):
        require_modules(build(ModelSpec, complete(indexed), "model"), 2)
    scan = {"kind": "selective", "name": "m", "channels": 32, "state": 4, "step_rank": 2}
    with pytest.raises(InputError, match="the recurrence selective"):
        require_modules(build(ModelSpec, complete(SIZES | {"mixers": [scan], "pattern": ["m"]}), "model"))


def test_a_choice_is_near_a_tie_where_a_change_of_the_bound_turns_it() -> None:
    """Two scores change by a bound each, so that those twice it apart are the last ones."""
    experts = model_named("mixtral-8x7b")[0].experts
    assert experts is not None
    for bounds, near in ((1.5, True), (2.5, False), (100, False)):
        scores = torch.full((64, experts.count), 0.01, dtype=torch.float64)
        scores[:, 0], scores[:, 1], scores[:, 2] = 0.4, 0.2, 0.2 * (1 - bounds * BOUND)
        assert (
            near_ties(scores, experts, None) > 48 if near else near_ties(scores, experts, None) == 0
        )  # changes are drawn


def test_the_collectives_of_ranks_in_one_process() -> None:
    meeting = _Meeting(2)
    comms = [meeting.comm(rank) for rank in range(2)]
    assert [(c.world.rank, c.size("dp"), c.ranks("dp"), len(c.buffer(3, torch.float64))) for c in comms] == [
        (0, 2, (0, 1), 3),
        (1, 2, (0, 1), 3),
    ]
    own = [torch.arange(4.0) + 10 * rank for rank in range(2)]
    summed, gathered, swapped = [t.clone() for t in own], [torch.empty(8) for _ in own], [torch.empty(4) for _ in own]

    def work(rank: int) -> Iterator[Handle]:
        yield comms[rank].all_reduce(summed[rank], "dp")
        yield comms[rank].all_gather(gathered[rank], own[rank], "dp")
        yield comms[rank].all_to_all(swapped[rank], own[rank], axis="dp")

    meeting.run([work(0), work(1)])
    assert [t.tolist() for t in summed] == [[10.0, 12.0, 14.0, 16.0]] * 2
    assert [t.tolist() for t in gathered] == [[0.0, 1.0, 2.0, 3.0, 10.0, 11.0, 12.0, 13.0]] * 2
    assert [t.tolist() for t in swapped] == [[0.0, 1.0, 10.0, 11.0], [2.0, 3.0, 12.0, 13.0]]
