"""Context parallelism: which positions a rank holds, what it sends, and which bugs parity does not let through.

Parity, predicted = recorded and checkpoints of random strategies, cp among them, are in the tests of those names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import rank_cases
from support.rank_pool import Pool
from support.sizes import sampled
from support.toy_model import model

from phalanx.cost.step.expand import expand
from phalanx.cost.step.predict import predict
from phalanx.observation.diff import SLACK_BYTES
from phalanx.observation.parity.parity import BOUNDS
from phalanx.observation.rank_classes import classes
from phalanx.observation.trainer.verify import verify
from phalanx.runtime.any_module.parallelize import spread
from phalanx.runtime.autograd import attention_core
from phalanx.runtime.model_parallel.context import merge
from phalanx.runtime.process.environment import World
from phalanx.schedule.gradients.sharding import sharding_of
from phalanx.schedule.layers.context import Context, keys_per_query
from phalanx.schedule.layout import Layout
from phalanx.spec.cluster import presets as clusters
from phalanx.spec.errors import InputError
from phalanx.spec.job import Job, Precision
from phalanx.spec.strategy.legality import check
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.booleans(), st.booleans())
def test_ranks_share_a_sequence(ring: int, ulysses: int, chunk: int, separate: bool, tensors: bool) -> None:
    """Every position is one rank's; all have as many, and see as many keys; what is cut is what lies there."""
    seq = 2 * ring * ulysses * chunk
    parts = [Context(seq, ring, ulysses, i) for i in range(ring * ulysses)]
    assert sorted(np.concatenate([p.own for p in parts])) == list(range(seq))
    assert {len(p.own) for p in parts} == {parts[0].tokens}
    for r in range(ring):
        seen = (parts[0].of_ring(r) + 1).sum()
        assert seen == seq // ring * (seq + 1) // 2
    batch = np.random.default_rng(seq).integers(100, size=(2, 3, seq + 1) if separate else (3, seq + 1))
    for p in parts:
        cut = p.cut(torch.from_numpy(batch)).numpy() if tensors else p.cut(batch)
        assert cut.shape == p.shape(3, 1 + separate)
        if not p.parallel:
            assert cut is batch or tensors
            continue
        ids = batch[0] if separate else batch
        assert (cut[0] == ids[:, p.own]).all()
        assert (cut[1] == ids[:, p.own + 1]).all()
        if separate:
            assert (np.concatenate(list(cut[2:]), axis=1) == batch[1][:, p.of_ring(p.ring_index)]).all()


def test_no_rectangle_of_a_ring_is_half_empty() -> None:
    """All queries see all keys of the rectangles that are computed, but for those of the own block."""
    seq, ring = 48, 4
    here = [Context(seq, ring).of_ring(r) for r in range(ring)]
    half = seq // ring // 2
    pairs = 0
    for own, queries in enumerate(here):
        for source, keys in enumerate(here):
            sees = queries[:, None] >= keys[None, :]
            if source < own:
                assert sees[:, :half].all()
                assert not sees[:, half:].any()
            elif source > own:
                assert sees[half:].all()
                assert not sees[:half].any()
            pairs += len(queries) * len(keys) // (1 if source == own else 2)
    assert pairs == seq * keys_per_query(seq, ring)


@pytest.mark.parametrize("forward", [attention_core.forward, attention_core.plain_forward])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_results_over_blocks_of_keys_are_merged(
    forward: Callable[..., attention_core.Results], dtype: torch.dtype, bound: float
) -> None:
    """Those of half of the queries, and over keys that are hidden as a whole. Of 16 bits every result is rounded."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 6, 8).to(dtype)
    whole, lse = forward(q, k, v)
    out, sums = (t.to(torch.promote_types(dtype, torch.float32)) for t in forward(q, k[:, :, :2], v[:, :, :2]))
    hidden = torch.full((1, 1, 6, 4), -6e4, dtype=dtype)
    merge(out, sums, *forward(q, k[:, :, 2:], v[:, :, 2:], hidden))
    for rows in (slice(0, 3), slice(3, 6)):
        merge(out[:, :, rows], sums[:, :, rows], *forward(q[:, :, rows], k[:, :, 2:], v[:, :, 2:]))
    torch.testing.assert_close(out.to(dtype), whole, rtol=bound, atol=bound)
    torch.testing.assert_close(sums.to(lse.dtype), lse, rtol=bound, atol=bound)


@pytest.mark.parametrize(
    ("sizes", "line", "seq", "said"),
    [
        ({}, {"cp": 3}, 16, "job.seq = 16: is not divisible by strategy.cp = 3; use a multiple of 6"),
        ({}, {"cp": 4}, 12, "job.seq = 12: is not divisible by 8, the chunks of a ring of 4; use a multiple of 8"),
        ({}, {"cp": 8, "ulysses": 8}, 16, "strategy.ulysses = 8: does not divide model.heads = 4;"),
        ({}, {"cp": 4, "ulysses": 4, "tp": 2}, 16, r"does not divide model.heads = 2 of a tp rank \(4 / 2\)"),
        (
            {"heads": 12, "kv_heads": 4},
            {"cp": 6, "ulysses": 6},
            24,
            "neither divides model.kv_heads = 4 nor is a mult",
        ),
    ],
)
def test_what_does_not_fall_into_equal_parts_is_refused(
    sizes: dict[str, Any], line: dict[str, Any], seq: int, said: str
) -> None:
    with pytest.raises(InputError, match=said):
        check(Strategy(**line), model(**sizes), Job(4, seq), None)


def test_what_cannot_be_combined_is_refused() -> None:
    with pytest.raises(InputError, match=r"strategy\.cp = 2: splits sequences"):
        spread(World(0, 2, 0, 2), torch.nn.Linear(2, 2), "dp=1,cp=2")


def test_the_state_is_shared_by_all_that_share_sequences() -> None:
    """dp=1, cp=2 at zero=3: two shards; replicas of a shard are dp's alone."""
    strategy = Strategy(cp=2, zero=3)
    assert (sharding_of(strategy).parameters, strategy.shards, mesh(strategy).shard_axis) == (True, 2, "cp")
    strategy = Strategy(dp=4, shard=2, zero=2, cp=3)
    grid = mesh(strategy)
    assert (strategy.shards, grid.shard_axis, strategy.dp_replicate) == (6, "dp_shard+cp", 2)
    for group in grid.groups(grid.shard_axis).tolist():
        assert [grid.shard(r) for r in group] == list(range(6))
    assert not sharding_of(Strategy(cp=2)).state
    assert mesh(Strategy(cp=2, dp=2)).gradient_axis == "dp_replicate+cp"


def test_blocks_travel_and_heads_go_apart() -> None:
    """Forward R - 1 hops, backward as many of keys and values and as many of their gradients; two all-to-alls a pass.
    Verified programs issue just these."""
    spec, job, strategy = model(), Job(2, 32), Strategy(cp=8, ulysses=2, micro_batch=2)
    layout = Layout(spec, job, strategy)
    events = expand(layout.stage_view()).events
    sent = Counter((e.phase, e.op, e.unit) for e in events if e.axis in ("ring", "ulysses"))
    wanted = {("F", "send"): 3, ("F", "recv"): 3, ("B", "send"): 6, ("B", "recv"): 6}
    wanted |= {(phase, "all_to_all"): 2 for phase in "FB"}
    assert sent == {(*key, f"blocks.{i}"): n for key, n in wanted.items() for i in range(2)}
    grid = mesh(strategy)
    for rank in range(8):
        peers = {(e.op, e.peer) for e in expand(layout.rank_view(rank)).events if e.kind == "p2p"}
        group = grid.group_of(rank, "ring")
        at = group.index(rank)
        assert peers == {("send", group[(at + 1) % 4]), ("recv", group[at - 1])}


def test_classes_are_the_ends_of_the_ring_and_what_is_between() -> None:
    spec, job = model(), Job(4, 32)
    assert [
        (c.rank, c.count, c.description) for c in classes(Layout(spec, job, Strategy(cp=8, ulysses=2, dp=2)))
    ] == [(0, 4, "first in the ring"), (2, 8, "within the ring"), (6, 4, "last in the ring")]
    assert [c.count for c in classes(Layout(spec, job, Strategy(cp=2, ulysses=2)))] == [2]
    shards = classes(Layout(spec, job, Strategy(cp=4, zero=3, dp=4)))
    assert sum(c.count for c in shards) == 16


@pytest.mark.parametrize(
    ("line", "sizes", "job"),
    sampled(
        [
            ({"cp": 2}, {}, {}),
            ({"cp": 4, "micro_batch": 2}, {"kv_heads": 8}, {}),
            ({"cp": 4, "ulysses": 4}, {"family": "gpt2"}, {}),
            (
                {"cp": 4, "ulysses": 2, "dp": 2, "zero": 3},
                {"window": 50, "window_layers": [0]},
                {"documents": "separate"},
            ),
            ({"cp": 8, "tp": 2, "zero": 2}, {"family": "qwen3"}, {"precision": Precision("bfloat16")}),
            ({"cp": 6, "ulysses": 2, "micro_batch": 3}, {"window": 50}, {}),
        ],
        (3,),
    ),
)
def test_a_step_is_proved_event_for_event_and_in_live_bytes(
    line: dict[str, Any], sizes: dict[str, Any], job: dict[str, Any]
) -> None:
    given = {"vocab": 1021, "hidden": 128, "heads": 8, "kv_heads": 2, "head_dim": 32, "ffn": 256, "max_seq": 384}
    strategy = Strategy(**line)
    found = verify(model(**given | sizes), Job(strategy.dp * strategy.micro_batch, 384, **job), strategy)
    for v in found:
        assert not v.failed
        assert v.differences == ()
        assert v.deviation is not None
        assert v.deviation < SLACK_BYTES


def test_prices_hide_what_travels_beside_attention() -> None:
    """On a device that communicates beside computing, a ring's blocks are hidden where there is enough to do."""
    spec = model(hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=11008, max_seq=131072)
    cluster = clusters.preset("dgx-a100", nodes=1)
    shown = {}
    for seq in (2048, 131072):
        job = Job(1, seq, precision=Precision("bfloat16"))
        ring, ulysses = (predict(spec, cluster, job, Strategy(cp=8, ulysses=u)) for u in (1, 8))
        assert ring.flops < ulysses.flops  # of the square above the diagonal a ring leaves out most
        assert ring.communication_s > ulysses.communication_s
        shown[seq] = ring.exposed_communication_s / ring.communication_s
    assert shown[131072] < shown[2048]
    assert ring.exposed_communication_s < ulysses.exposed_communication_s


CASES: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ({"cp": 2}, {"tied": True}, {}),
    ({"cp": 3}, {"family": "gpt2"}, {"seq": 24}),
    ({"cp": 4}, {"window": 5, "window_layers": [0]}, {}),
    ({"cp": 4, "micro_batch": 2}, {}, {"documents": "separate"}),
    ({"cp": 2, "ulysses": 2}, {"family": "qwen3"}, {}),
    ({"cp": 4, "ulysses": 4}, {"kv_heads": 1}, {}),
    ({"cp": 4, "ulysses": 2, "micro_batch": 2}, {"family": "gpt2", "window": 5}, {"documents": "separate"}),
    ({"cp": 2, "tp": 2, "zero": 3}, {"kv_heads": 1}, {}),
]


@pytest.mark.parametrize(
    ("line", "sizes", "job", "under"),
    sampled([(*case, ("adamw", "sgd")[i % 2]) for i, case in enumerate(CASES)], (6, 7)),
)
def test_the_axis_alone_equals_one_process(
    pool: Pool, line: dict[str, Any], sizes: dict[str, Any], job: dict[str, Any], under: str
) -> None:
    strategy = Strategy(**line)
    case = model(**sizes), Job(**{"global_batch": 4, "seq": 16} | job), strategy
    for found in pool.run(strategy.world, rank_cases.examine, *case, "float64", 3, "shm", (under,))[0]:
        assert found.loss_rel_max <= BOUNDS["float64"], found
        assert found.grad_rel_max <= BOUNDS["float64"], found


@pytest.mark.parametrize("how", ["positions from 0", "all keys of every block"])
def test_textbook_bugs_are_caught(pool: Pool, how: str) -> None:
    case = (model(), Job(global_batch=4, seq=16), Strategy(cp=2))
    broken = pool.run(2, rank_cases.examine_broken_context, how, *case, "float64", 1, "shm", ("sgd",))[0]
    assert all(d.grad_rel_max > 1e-3 for d in broken)


def test_gradients_that_are_not_summed_over_cp_alone_are_caught(pool: Pool) -> None:
    case = (model(), Job(global_batch=4, seq=16), Strategy(cp=2, bucket=0.002))
    broken = pool.run(2, rank_cases.examine_broken, "forgets", *case, "float64", 1, "shm", ("sgd",))[0]
    assert all(d.grad_rel_max > 1e-3 for d in broken)


@pytest.mark.parametrize(
    ("compression", "zero"), sampled(list(product(["int8", "topk:0.1", "powersgd:2"], [0, 1])), (3,))
)
def test_compressed_gradients_lose_nothing(pool: Pool, compression: str, zero: Any) -> None:
    strategy = Strategy(cp=2, dp=2, zero=zero, compression=compression)
    for lost in pool.run(4, rank_cases.kept_and_sent, model(), Job(4, 16), strategy, 3, "native"):
        assert lost is not None
        assert lost < 1e-9


def test_replicas_are_compared_though_tables_differ(pool: Pool) -> None:
    """Angles are of a rank's own positions; weights and masters are everybody's."""
    for zero in (0, 3):
        case = model(), Job(2, 16), Strategy(cp=2, zero=zero)  # type: ignore[arg-type]
        assert pool.run(2, rank_cases.stepped_and_compared, *case) == [None, None]


def test_a_rank_that_dies_does_not_leave_the_ring_waiting(pool: Pool) -> None:
    with pytest.raises(Exception, match="rank 1: died"):
        pool.run(3, rank_cases.die_in_a_ring, 1)
    assert len(pool.run(2, rank_cases.rank_and_sum)) == 2
