"""Tensor parallelism: what each rank holds, what it sends, and which bugs parity does not let through.

Parity, predicted = recorded and checkpoints of random strategies, tp among them, are in the tests of those names."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support import rank_cases
from support.rank_pool import Pool
from support.sizes import sampled
from support.strategies import models, splits
from support.toy_model import model, order_of_gradients

from phalanx.cost.step.expand import expand
from phalanx.nn.init import initial_source, restrict_to_rank
from phalanx.observation.diff import SLACK_BYTES
from phalanx.observation.parity.parity import BOUNDS
from phalanx.observation.trainer.verify import verify
from phalanx.runtime.any_module.parallelize import spread
from phalanx.runtime.process.environment import World
from phalanx.schedule.layout import Layout
from phalanx.spec.errors import InputError
from phalanx.spec.job import Job
from phalanx.spec.model.spec import ModelSpec, parameters
from phalanx.spec.strategy.legality import check, require_runnable
from phalanx.spec.strategy.spec import Strategy
from phalanx.spec.strategy.split import Split


@settings(max_examples=15)
@given(models(small=True), st.sampled_from([2, 3, 4, 6, 8]))
def test_ranks_hold_every_element_as_often_as_they_say(spec: ModelSpec, tp: int) -> None:
    assume(splits(spec, tp))
    first = initial_source(spec, 7, None)
    for p in parameters(spec):
        whole = first(p, 0, p.numel).view(p.shape)
        times = torch.zeros(p.shape)
        for index in range(tp):
            split = Split(spec, tp, index)
            box = split.box(p.fqn)
            place = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
            times[place] += 1 / box.copies
            numel = torch.Size(box.shape).numel()
            mine = restrict_to_rank(first, split)(p, 0, numel).view(box.shape)
            assert mine[tuple(slice(n) for n in box.sizes)].equal(whole[place])
            assert mine[box.sizes[0] :].count_nonzero() == 0
            cut = numel // 3
            assert torch.cat([restrict_to_rank(first, split)(p, *run) for run in ((0, cut), (cut, numel))]).equal(
                mine.flatten()
            )
        assert times.sub(1).abs().max() < 1e-6


@pytest.mark.parametrize(
    ("sizes", "line", "said"),
    [
        ({"heads": 6, "kv_heads": 6}, {"tp": 4}, "strategy.tp = 4: does not divide model.heads = 6"),
        ({"ffn": 42}, {"tp": 4}, "strategy.tp = 4: does not divide model.ffn = 42; use a divisor of 2"),
        ({"heads": 12, "kv_heads": 4}, {"tp": 6}, "neither divides model.kv_heads = 4 nor is a multiple of it"),
    ],
)
def test_what_does_not_fall_into_equal_parts_is_refused(
    sizes: dict[str, Any], line: dict[str, Any], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        check(Strategy(**line), model(**{"ffn": 48} | sizes), Job(4, 8), None)


def test_what_cannot_be_combined_is_refused() -> None:
    with pytest.raises(InputError, match="rounds replicated gradients differently on each tp rank"):
        require_runnable(Strategy(dp=2, tp=2, compression="int8"), Job(4, 8))
    for line, said in (
        ("tp=2", "tp_plan: Linear has no published plan"),
        ("cp=2", r"strategy\.cp = 2: splits sequences"),
        ("zero=3,recompute=selective", r"strategy\.recompute = 'selective'"),
    ):
        with pytest.raises(InputError, match=said):
            spread(World(0, 2, 0, 2), torch.nn.Linear(2, 2), line)


@pytest.mark.parametrize("residual", ["serial", "parallel", "parallel_one_norm"])
def test_each_sub_layer_has_one_all_reduce_a_pass(residual: str) -> None:
    """Where attention and MLP read one input, one for both forward. Verified programs issue just these."""
    events = expand(Layout(model(residual=residual), Job(4, 8), Strategy(tp=2, micro_batch=2)).stage_view()).events
    assert {e.op for e in events if e.axis} == {"all_reduce"}
    sent = Counter((e.phase, e.unit) for e in events if e.axis == "tp")
    forward = 4 if residual == "serial" else 2
    blocks = {(phase, f"blocks.{i}"): n for phase, n in (("F", forward), ("B", 4)) for i in range(2)}
    assert sent == {("F", "embed"): 2, **blocks, ("F", "head"): 4, ("B", "head"): 2}


PROVED = [
    Strategy(tp=2),
    Strategy(tp=4),
    Strategy(tp=2, dp=3, zero=1, shard=1, micro_batch=2),
    Strategy(tp=4, dp=2, zero=3),
    Strategy(tp=2, dp=4, zero=2, shard=2),
    Strategy(tp=4, dp=32, zero=3, shard=8),
]


FAMILIES = ["llama", "gpt2", "qwen3", "palm"]


@pytest.mark.parametrize(("strategy", "family"), sampled(list(product(PROVED, FAMILIES)), (1, 12, 18, 23)), ids=str)
def test_a_step_is_proved_event_for_event_and_in_live_bytes(strategy: Strategy, family: str) -> None:
    spec = model(family=family, vocab=1021, hidden=96, heads=8, kv_heads=2, head_dim=16, ffn=256, max_seq=256)
    job = Job(strategy.dp * strategy.micro_batch * 2, 128)
    for found in verify(spec, job, strategy):
        assert not found.failed
        assert found.differences == ()
        assert found.deviation is not None
        assert found.deviation < SLACK_BYTES


@pytest.mark.parametrize(
    ("tp", "under", "sizes"),
    sampled(
        [
            (2, "sgd", {}),
            (4, "adamw", {"tied": True, "kv_heads": 1}),
            (4, "sgd", {"family": "gpt2", "vocab": 5}),  # the last rank has no token
            (6, "adamw", {"family": "qwen3"}),
            (2, "adamw", {"family": "palm", "kv_heads": 1}),
            (4, "sgd", {"family": "gpt_neox"}),
        ],
        (2, 3),
    ),
)
def test_the_axis_alone_equals_one_process(pool: Pool, tp: int, under: str, sizes: dict[str, Any]) -> None:
    spec = model(**{"heads": 12, "kv_heads": 2, "ffn": 48} | sizes)
    case = (spec, Job(4, 8), Strategy(tp=tp))
    for found in pool.run(tp, rank_cases.examine, *case, "float64", 4, "shm", (under,))[0]:
        assert found.loss_rel_max <= BOUNDS["float64"], found
        assert found.grad_rel_max <= BOUNDS["float64"], found


@pytest.mark.parametrize(
    "how", sampled(["bias on every rank", "bias on rank 0 only", "no backward all-reduce"], (0, 2))
)
def test_textbook_bugs_are_caught(pool: Pool, how: str) -> None:
    spec = replace(model(family="gpt2"), tied=False)
    case = (spec, Job(global_batch=4, seq=8), Strategy(tp=2), "float64", 3, "shm", ("sgd",))
    assert all(d.grad_rel_max < 1e-9 for d in pool.run(2, rank_cases.examine, *case)[0])
    assert all(d.grad_rel_max > 1e-2 for d in pool.run(2, rank_cases.examine_broken_tensors, how, *case)[0])


@pytest.mark.parametrize(
    "sizes", sampled([{}, {"family": "gpt2"}, {"family": "qwen3"}, {"qkv_bias": True, "mlp_bias": True}], (3,))
)
def test_gradients_come_in_the_order_of_one_process(sizes: dict[str, Any]) -> None:
    """Those of several weights are made together; buckets fill in one order all the same."""
    alone, split = (order_of_gradients(model(**sizes), Strategy(dp=2, tp=tp, zero=2)) for tp in (1, 2))
    assert alone == split
