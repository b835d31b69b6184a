"""Sequence parallelism: which tokens each rank has, what it sends and keeps, and which bugs parity does not let
through.

Parity, predicted = recorded and checkpoints of random strategies, sp among them, are in the tests of those names."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from support import rank_cases
from support.rank_pool import Pool
from support.sizes import combined, sampled
from support.toy_model import model, order_of_gradients

from phalanx.cost.memory import footprint
from phalanx.cost.step.expand import expand
from phalanx.observation.diff import SLACK_BYTES
from phalanx.observation.parity.parity import BOUNDS
from phalanx.observation.trainer.verify import verify
from phalanx.runtime.autograd.layer_comm import LayerComm
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.data_parallel import shared_gradients
from phalanx.runtime.model_parallel import sequence
from phalanx.runtime.model_parallel.sequence import RankRows
from phalanx.runtime.process.environment import ALONE, World
from phalanx.schedule.layers.collectives import chunks
from phalanx.schedule.layout import Layout
from phalanx.spec.errors import InputError
from phalanx.spec.files.job_file import make_model, make_strategy
from phalanx.spec.job import Job, Precision
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.legality import check
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy
from phalanx.spec.strategy.split import local_model
from phalanx.training.training_step import Training


@given(st.integers(2, 8), st.integers(1, 4), st.integers(1, 24))
def test_parts_of_a_chunk_lie_side_by_side_in_rank_order(tp: int, batch: int, seq: int) -> None:
    assume(batch * seq % tp == 0)
    inner = LayerComm(Comm(ALONE, mesh(Strategy())))
    everyone = [RankRows(inner, tp, index, batch, seq) for index in range(tp)]
    tokens = torch.arange(batch * seq)
    for whole, *parts in everyone[0].per_chunk(tokens, *(rows.of(tokens) for rows in everyone)):
        assert torch.cat(parts).equal(whole)
    assert {rows.chunks for rows in everyone} == {2 if batch * seq % (2 * tp) == 0 else 1}
    assert chunks(np.array([batch * seq]), tp).tolist() == [everyone[0].chunks]


@pytest.mark.parametrize(
    ("tp", "micro_batch", "seq", "under", "sizes"),
    sampled(
        [
            (4, 3, 4, "adamw", {"tied": True, "kv_heads": 1}),  # three tokens a rank: one chunk
            (4, 2, 8, "sgd", {"family": "gpt2", "vocab": 5}),  # the last rank has no token of the vocabulary
            (3, 3, 8, "sgd", {"family": "qwen3", "heads": 12, "kv_heads": 3}),
            (2, 2, 8, "adamw", {"family": "gpt2", "residual": "parallel", "tied": False}),
        ],
        (0, 2),
    ),
)
def test_the_axis_alone_equals_one_process(
    pool: Pool, tp: int, micro_batch: int, seq: int, under: str, sizes: Any
) -> None:
    spec = model(**{"heads": 12, "kv_heads": 2, "ffn": 48} | sizes)
    strategy = Strategy(tp=tp, sp=True, micro_batch=micro_batch)
    case = (spec, Job(2 * micro_batch, seq), strategy)
    for found in pool.run(tp, rank_cases.examine, *case, "float64", 3, "shm", (under,))[0]:
        assert found.loss_rel_max <= BOUNDS["float64"], found
        assert found.grad_rel_max <= BOUNDS["float64"], found


def examine_broken(world: World, how: str, *case: Any) -> list[Any]:
    """The examination with a layer that takes its rows for all there are."""
    summed, scatter = sequence.sum_terms, RankRows.scatter

    def bias_before_the_sum(rows: RankRows, unit: str, terms: Any, made: bool) -> torch.Tensor:
        bare = [replace(term, bias=None) for term in terms]
        out = summed(rows, unit, bare, made)
        for term in terms:  # as if every rank had added it to its term
            out = out if term.bias is None else out + world.size * term.bias
        return out

    def keeps_its_own_term(self: RankRows, into: torch.Tensor, chunk: torch.Tensor, unit: str, phase: Any) -> Any:
        if phase == "B" and unit == "blocks.0":
            own = chunk.clone().view(world.size, -1)[self.index].view_as(into)
            scatter(self, into, chunk, unit, phase).wait()
            into.copy_(own)
            return rank_cases.DONE
        return scatter(self, into, chunk, unit, phase)

    with pytest.MonkeyPatch.context() as patch:
        if how == "norms are not summed":
            patch.setattr(shared_gradients.SharedGradients, "reduce", lambda self: None)
        elif how == "bias on every rank":
            patch.setattr(sequence, "sum_terms", bias_before_the_sum)
        else:
            patch.setattr(RankRows, "scatter", keeps_its_own_term)
        return rank_cases.examine(world, *case)


@pytest.mark.parametrize("how", ["norms are not summed", "bias on every rank", "no backward reduce-scatter"])
def test_textbook_bugs_are_caught(pool: Pool, how: str) -> None:
    case = (model(family="gpt2", tied=False), Job(global_batch=4, seq=8), Strategy(tp=2, sp=True))
    broken = pool.run(2, examine_broken, how, *case, "float64", 2, "shm", ("sgd",))[0]
    assert all(d.grad_rel_max > 1e-2 for d in broken)


@pytest.mark.parametrize("residual", ["serial", "parallel", "parallel_one_norm"])
def test_an_all_reduce_becomes_a_reduce_scatter_and_an_all_gather(residual: str) -> None:
    """Of the same bytes, in two chunks each; and the gathers of the backward pass, of what was not kept."""
    spec, job = model(residual=residual), Job(4, 8)
    events = expand(Layout(spec, job, Strategy(tp=2, sp=True, micro_batch=2)).stage_view()).events
    tensor = [e for e in events if e.axis == "tp" and e.phase in "FB"]
    sent = Counter((e.op, e.phase, e.unit) for e in tensor if e.op != "all_reduce")
    serial = residual == "serial"
    micro_batches, parts = 2, 2
    times = micro_batches * parts
    blocks = {
        ("all_gather", "F"): 2,
        ("reduce_scatter", "F"): 2 if serial else 1,
        ("all_gather", "B"): 4 if serial else 3,
        ("reduce_scatter", "B"): 2,
    }
    assert sent == {
        ("reduce_scatter", "F", "embed"): times,
        ("all_gather", "B", "embed"): times,
        **{(*key, f"blocks.{i}"): n * times for key, n in blocks.items() for i in range(2)},
        ("all_gather", "F", "head"): times,
        ("all_gather", "B", "head"): times,
        ("reduce_scatter", "B", "head"): times,
    }
    assert {e.unit for e in tensor if e.op == "all_reduce"} == {"head"}
    assert {e.bytes for e in tensor if e.op != "all_reduce"} == {2 * 8 * spec.hidden * 4 // parts}


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "palm"])
def test_a_block_keeps_its_share_and_no_more(family: str) -> None:
    """Of every byte that one process keeps for the backward pass, each rank has one of tp: without sp it does not."""
    spec = model(family=family, hidden=128, heads=8, kv_heads=4 if family != "gpt2" else 8, head_dim=16, ffn=256)

    def kept(tp: int, sp: bool) -> int:
        return int(
            footprint.footprint(
                local_model(spec, Strategy(tp=tp)), "blocks", 512, 256, Job(2, 256), "float32", tp, sp
            ).kept
        )

    for tp in (2, 4):
        assert kept(tp, True) * tp == kept(1, False)
        assert kept(tp, False) * tp > 1.15 * kept(1, False)


def test_a_block_of_llama_keeps_what_the_page_says() -> None:
    """docs/model_parallel.md: a block of llama3-8b at 8,192 tokens in bf16."""
    spec = make_model({"preset": "llama3-8b"}, Path())[0]

    def mib(tp: int, sp: bool) -> float:
        local = local_model(spec, Strategy(tp=tp))
        job = Job(1, 8192, Precision("bfloat16"))
        kept = footprint.footprint(local, "blocks", 8192, 8192, job, "bfloat16", tp, sp).kept
        return float(kept) / 2**20

    assert mib(1, False) == pytest.approx(1089, abs=0.5)
    assert mib(8, False) == pytest.approx(360, abs=0.5)
    assert mib(8, True) == pytest.approx(136, abs=0.5)


PROVED = [
    Strategy(tp=2, sp=True),
    Strategy(tp=4, sp=True, dp=2, zero=3),
    Strategy(tp=2, sp=True, dp=4, zero=2, shard=2, micro_batch=3),
]


@pytest.mark.parametrize(("strategy", "family"), combined(PROVED, ["llama", "gpt2", "gpt_neox", "palm"]), ids=str)
def test_a_step_is_proved_event_for_event_and_in_live_bytes(strategy: Strategy, family: str) -> None:
    spec = model(family=family, vocab=1021, hidden=96, heads=8, kv_heads=2, head_dim=16, ffn=256, max_seq=256)
    job = Job(strategy.dp * strategy.micro_batch * 2, 128)
    for found in verify(spec, job, strategy):
        assert not found.failed
        assert found.differences == ()
        assert found.deviation is not None
        assert found.deviation < SLACK_BYTES


def test_tokens_that_do_not_fall_into_equal_parts_are_refused() -> None:
    with pytest.raises(
        InputError, match=r"strategy\.sp = 1: tp = 4 does not divide .* = 2 x 7; use another micro_ba"
    ):
        check(Strategy(tp=4, sp=True, micro_batch=2), model(), Job(4, 7), None)
    check(Strategy(tp=4, sp=True, micro_batch=4), model(), Job(4, 7), None)


def evaluated(world: World, spec: ModelSpec, job: Job, strategy: Strategy) -> tuple[float, int]:
    """Of three sequences, the last one alone; one more pass than there are batches, in which others may have one."""
    comm = Comm(world, mesh(strategy))
    training = Training(spec, job, strategy, comm, seed=0)
    tokens = torch.randint(spec.vocab, (3, job.seq + 1), generator=torch.Generator().manual_seed(1))
    found = training.evaluate(list(map(training.context.cut, (tokens[:2], tokens[2:]))), passes=3)
    training.engine.wait_parameters(list(training.engine.parameters))
    comm.barrier()
    return found


@pytest.mark.parametrize(
    ("line", "seq"),
    [
        ("tp=2,sp=1,micro_batch=2", 7),  # of which two ranks cannot have as many each
        ("tp=2,sp=1,micro_batch=1,dp=2,zero=3", 8),
        ("cp=4,micro_batch=2,zero=3", 8),
    ],
)
def test_an_evaluation_ends_with_any_number_of_tokens(pool: Pool, line: str, seq: int) -> None:
    strategy, spec, job = make_strategy(line), model(), Job(2, seq)
    alone = pool.run(1, evaluated, spec, job, Strategy(micro_batch=2))[0]
    loss, tokens = pool.run(strategy.world, evaluated, spec, job, strategy)[0]
    assert (loss / tokens, tokens) == pytest.approx((alone[0] / alone[1], alone[1] * strategy.dp), rel=1e-5)


def test_a_run_goes_on_without_it_and_back(pool: Pool, tmp_path: Path) -> None:
    spec, job = model(family="gpt2"), Job(4, 8)
    layouts = [
        Strategy(tp=2, sp=True, micro_batch=2),
        Strategy(micro_batch=2),
        Strategy(tp=4, sp=True, micro_batch=4),
    ]
    straight = pool.run(1, rank_cases.continue_run, spec, job, layouts[1], tmp_path / "one", (0, 6), "native")[0]
    losses: list[float] = []
    for i, strategy in enumerate(layouts):
        run = (spec, job, strategy, tmp_path / "many", (2 * i, 2 * i + 2), "native")
        losses += pool.run(strategy.world, rank_cases.continue_run, *run)[0]
    assert losses == pytest.approx(straight, rel=1e-5)


@pytest.mark.parametrize(
    "sizes", sampled([{}, {"family": "gpt2"}, {"family": "qwen3"}, {"family": "gpt_neox", "qkv_bias": True}], (1,))
)
def test_gradients_come_in_the_order_of_one_process(sizes: dict[str, Any]) -> None:
    """Those of one sum over the ranks are made together; buckets fill in one order all the same."""
    strategies = Strategy(dp=2, zero=2), Strategy(dp=2, tp=2, sp=True, zero=2)
    alone, split = (order_of_gradients(model(**sizes), strategy) for strategy in strategies)
    assert alone == split
