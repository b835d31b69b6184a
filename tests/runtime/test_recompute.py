"""Activation recomputation: the same numbers for less memory, and no more work than is needed.

Parity, predicted = recorded and verification of random strategies, recompute among them, are in the tests of those
names."""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from support import toy_model
from support.rank_cases import examine, examine_repeating
from support.rank_pool import Pool
from support.sizes import combined, sampled
from support.toy_model import order_of_gradients

from phalanx.cost.step.expand import expand
from phalanx.cost.step.program import instants
from phalanx.observation.diff import SLACK_BYTES
from phalanx.observation.parity.parity import BOUNDS
from phalanx.observation.trainer.step import record_step
from phalanx.observation.trainer.verify import verify
from phalanx.runtime.autograd import recompute
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.process.environment import ALONE
from phalanx.schedule.layout import Layout
from phalanx.spec.files.job_file import make_strategy
from phalanx.spec.job import Job, Precision
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy
from phalanx.training.training_step import Training

MODES = ["selective", "full", "every:2"]
model = partial(toy_model.model, layers=3)


def training(spec: ModelSpec, job: Job, strategy: Strategy) -> Training:
    return Training(spec, job, strategy, Comm(ALONE, mesh(strategy)), seed=3)


def test_which_blocks_repeat_what() -> None:
    of = {mode: [Strategy(recompute=mode).recompute_of(i) for i in range(5)] for mode in ("none", *MODES, "every:1")}
    assert of["every:2"] == ["full", "none", "full", "none", "full"]
    assert of["every:1"] == of["full"] == ["full"] * 5
    assert of["none"] == ["none"] * 5
    assert of["selective"] == ["selective"] * 5


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    combined([{}, {"family": "gpt2"}, {"family": "gpt_neox"}, {"family": "palm"}], ["float32", "bfloat16"]),
)
def test_losses_and_gradient_norms_are_the_same_bits(sizes: dict[str, Any], dtype: Any) -> None:
    """The same kernels run on the same numbers, only later."""
    job = Job(global_batch=4, seq=16, precision=Precision(dtype))
    tokens = torch.randint(0, 61, (3, 2, 2, 17), generator=torch.Generator().manual_seed(0))
    found = []
    for mode in ("none", *MODES):
        run = training(model(**sizes), job, Strategy(recompute=mode, micro_batch=2))
        found.append([(r.loss, r.grad_norm) for r in (run.step(list(batch), 1e-3) for batch in tokens)])
    assert found[1:] == found[:1] * len(MODES)


@pytest.mark.parametrize(
    ("mode", "strategy", "family"), combined(MODES, ["tp=2", "tp=2,dp=2,zero=3,micro_batch=2"], ["gpt_neox", "llama"])
)
def test_a_step_is_proved_event_for_event_and_in_live_bytes(strategy: str, mode: str, family: str) -> None:
    s = make_strategy(f"{strategy},recompute={mode}")
    assert s is not None
    spec = model(family=family, vocab=1021, hidden=96, heads=8, kv_heads=2, head_dim=16, ffn=256, max_seq=256)
    for found in verify(spec, Job(s.dp * s.micro_batch * 2, 128), s):
        assert not found.failed
        assert found.differences == ()
        assert found.deviation is not None
        assert found.deviation < SLACK_BYTES


@pytest.mark.parametrize(
    ("residual", "mode"),
    sampled(list(product(["serial", "parallel", "parallel_one_norm"], ["none", *MODES])), (3, 10)),
)
def test_what_is_repeated_is_sent_again_but_for_the_last_sum(residual: str, mode: str) -> None:
    strategy = Strategy(tp=2, recompute=mode)
    spec, job = model(residual=residual), Job(2, 16)
    events = expand(Layout(spec, job, strategy).stage_view()).events
    sent = Counter((e.phase, e.unit) for e in events if e.axis == "tp")
    assert sent == Counter((e.phase, e.unit) for e in record_step(spec, job, strategy, 0).events if e.axis == "tp")
    for i in range(3):
        again = residual == "serial" and strategy.recompute_of(i) == "full"
        assert sent["B", f"blocks.{i}"] == 2 * (2 + again)


def test_the_last_product_is_not_made_twice() -> None:
    """A third more work, less the product whose result nobody needs; attention's core; not both."""
    spec, job = model(), Job(1, 16)
    flops = {
        m: expand(Layout(spec, job, Strategy(recompute=m)).stage_view()).flops_per_unit()["B", "blocks.1"]
        for m in ("none", *MODES)
    }
    forward = expand(Layout(spec, job, Strategy()).stage_view()).flops_per_unit()["F", "blocks.1"]
    assert flops["full"] - flops["none"] == forward - 2 * 16 * 40 * 16
    assert flops["selective"] - flops["none"] == 4 * 16 * 16 * 32
    assert flops["every:2"] == flops["none"]


def test_kept_is_a_block_s_input_and_its_inside_is_there_once() -> None:
    """A step's peak, of a deep model: the inputs of all blocks and the inside of one, against the insides of all."""
    spec, job = model(layers=6, hidden=64, head_dim=16, ffn=160, max_seq=128), Job(2, 128)
    stream = 2 * 128 * 64 * 4
    live: dict[str, list[int]] = {}
    for mode in ("none", "selective", "full", "every:3"):
        strategy = Strategy(recompute=mode, micro_batch=2)
        program, found = expand(Layout(spec, job, strategy).stage_view()), record_step(spec, job, strategy, 0)
        live[mode] = [i.live for i in instants(found.events, found.memory.first) if i.event.phase == "F"]
        assert abs(found.memory.peak / program.peak_bytes - 1) < 0.001
    inside = live["none"][2] - live["none"][1]
    assert live["full"][6] - live["full"][1] == 5 * stream
    assert live["none"][6] - live["none"][1] == 5 * inside
    assert inside > 14 * stream
    core = 2 * 128 * (4 * 16 * 4 + 4 * 4)  # attention's result, and its log-sum-exp
    assert inside - (live["selective"][2] - live["selective"][1]) == core
    assert live["every:3"][6] - live["every:3"][1] == 2 * stream + 3 * inside  # blocks 0..4


@pytest.mark.parametrize(("tp", "sizes"), sampled(list(product([1, 2], [{}, {"family": "gpt2"}])), (3,)))
def test_gradients_come_in_the_order_of_one_graph(sizes: dict[str, Any], tp: int) -> None:
    strategies = [Strategy(dp=2, tp=tp, zero=2, recompute=mode) for mode in ("none", *MODES)]
    orders = [order_of_gradients(model(**sizes), strategy) for strategy in strategies]
    assert orders[1:] == orders[:1] * len(MODES)


def test_nothing_is_repeated_where_nothing_is_kept() -> None:
    """Evaluation, and a text that is written: no backward pass comes."""
    run = training(model(), Job(2, 16), Strategy(recompute="full"))
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recompute, "recomputed", None)
        with torch.no_grad():
            run.model(tokens)
        with pytest.raises(TypeError):
            run.model(tokens)


def test_two_ranks_equal_one_process_and_a_repeated_bug_is_caught(pool: Pool) -> None:
    """A sum over ranks that the repeated pass leaves out makes other gradients; nothing else would tell."""
    case = (model(), Job(global_batch=4, seq=8), Strategy(tp=2, recompute="full"))
    how = ("float64", 2, "shm", ("sgd",))
    assert all(d.grad_rel_max < BOUNDS["float64"] for d in pool.run(2, examine, *case, *how)[0])
    assert all(d.grad_rel_max > 1e-2 for d in pool.run(2, examine_repeating, *case, *how)[0])
