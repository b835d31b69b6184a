"""Sequences of whole documents: none is lost or cut, targets are inside them, no layout and no dealing changes a
step, and the trainer trains as many tokens as the planner expects of such lengths."""

from __future__ import annotations

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

from phalanx.nn import functional
from phalanx.observation.parity.parity import BOUNDS
from phalanx.planning.lengths.distribution import parse_lengths
from phalanx.planning.lengths.steps import UnevenSteps
from phalanx.planning.lookup import cluster_named, model_named, pricing_by_gpus
from phalanx.spec.job import Job
from phalanx.spec.strategy.spec import Strategy
from phalanx.training.data.whole import Way, WholeDocuments

WAYS: tuple[Way, ...] = ("whole", "balanced", "padded")


def _of(lengths: list[int], way: Way, seq: int = 12, batch: int = 4, seed: int = 0) -> WholeDocuments:
    starts = np.cumsum([0, *lengths[:-1]])
    return WholeDocuments(np.arange(sum(lengths)), seq, batch, seed, starts, way)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.sampled_from(WAYS), st.integers(0, 3))
def test_every_document_is_in_one_sequence(lengths: list[int], way: Way, seed: int) -> None:
    found = _of(lengths, way, seed=seed)
    assert sorted(np.concatenate(found.sequences)) == list(range(len(lengths)))
    for number, documents in enumerate(found.sequences):
        ids, places, targets = found.row(number)
        at = 0
        for d in documents.tolist():
            n = min(lengths[d], 13)
            first = int(found.starts[d])
            assert ids[at : at + n].tolist() == list(range(first, first + n))
            assert places[at : at + n].tolist() == list(range(n))
            assert targets[at : at + n].tolist() == [-1, *range(first + 1, first + n)]
            at += n
        assert at <= 13
        assert (places[at:] == 0).all()
        assert (targets[at:] == -1).all()
    if way == "padded":
        assert all(len(each) == 1 for each in found.sequences)


@given(st.lists(st.integers(1, 30), min_size=9, max_size=40), st.integers(0, 30), st.sampled_from([1, 2]))
def test_a_step_has_the_same_sequences_however_they_are_dealt(lengths: list[int], step: int, size: int) -> None:
    dealt = {}
    for way in ("whole", "balanced"):
        found = _of(lengths, way, batch=8)
        for replicas in (1, 2, 4):
            shares = [b for r in range(replicas) for b in found.share(step, r, replicas, size)]
            rows = np.concatenate(shares, axis=1).swapaxes(0, 1).reshape(8, -1)
            dealt[way, replicas] = sorted(map(tuple, rows.tolist()))
            assert sum(int((b[2, :, 1:] >= 0).sum()) for b in shares) == found.targets(step)
    assert all(rows == dealt["whole", 1] for rows in dealt.values())


def test_dealing_evens_the_attention_of_ranks() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(4, 1.2, 4000), 1, 1000).astype(int).tolist()
    worst = {}
    for way in ("whole", "balanced"):
        found, over = _of(lengths, way, seq=1024, batch=32), []
        for step in range(8):
            of_rank = [sum(float((b[1] + 1.0).sum()) for b in found.share(step, r, 4, 1)) for r in range(4)]
            over.append(max(of_rank) / np.mean(of_rank))
        worst[way] = float(np.mean(over))
    assert worst["balanced"] < 1.03 < worst["whole"]


def test_as_many_tokens_as_the_planner_expects() -> None:
    """A step of the trainer has the tokens that the price of such lengths has: within 2 %."""
    seq, batch = 2048, 16
    drawn = parse_lengths("lognormal:300,1.0+packed")
    lengths = np.minimum(drawn.draw(np.random.default_rng(1), 20_000), seq + 1).tolist()
    pricing = pricing_by_gpus(model_named("llama3-8b")[0], cluster_named("dgx-h100"), batch, seq, "megatron-core")(8)
    for words, way in (("packed", "whole"), ("packed+balanced", "balanced"), ("padded", "padded")):
        line = parse_lengths(f"lognormal:300,1.0+{words}")
        asked = UnevenSteps(pricing, Strategy(dp=8, zero=1), line).asked()
        found = _of(lengths, way, seq, batch)
        each = [
            found.targets(step) + sum(len(found.sequences[i]) for i in found.step_sequences(step))
            for step in range(40)
        ]
        assert np.mean(each) == pytest.approx(asked.tokens, rel=0.02 if way != "padded" else 0.1)


def test_what_has_no_target_has_no_loss_and_no_gradient() -> None:
    draw = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 8, generator=draw, dtype=torch.float64, requires_grad=True) for n in (6, 11))
    targets = torch.tensor([3, -1, 5, -1, 0, 10])
    kept = targets >= 0
    expected = torch.nn.functional.cross_entropy(x[kept] @ weight.t(), targets[kept], reduction="sum")
    of_x, of_weight = torch.autograd.grad(expected, (x, weight))
    for found in (
        functional.cross_entropy(x @ weight.t(), targets, masked=True),
        functional.linear_cross_entropy(x, weight, targets, masked=True),
    ):
        assert float(found) == pytest.approx(float(expected), rel=1e-12)
        for own, wanted in zip(torch.autograd.grad(found, (x, weight)), (of_x, of_weight), strict=True):
            torch.testing.assert_close(own, wanted)


CASES: list[tuple[dict[str, Any], str]] = [
    ({"dp": 2, "zero": 3}, "balanced"),
    ({"tp": 2, "sp": True}, "whole"),
    ({"cp": 2, "micro_batch": 2}, "padded"),
    ({"pp": 2, "dp": 2}, "balanced"),
    ({"cp": 2, "tp": 2}, "whole"),
]


@pytest.mark.parametrize(("line", "documents"), sampled(CASES, (2, 3)))
def test_any_strategy_equals_one_process(pool: Pool, line: dict[str, Any], documents: Any) -> None:
    strategy, job = Strategy(**line), Job(8, 16, documents=documents)
    for found in pool.run(strategy.world, rank_cases.examine, model(), job, strategy, "float64", 3, "shm", ("sgd",))[
        0
    ]:
        assert found.loss_rel_max <= BOUNDS["float64"], found
        assert found.grad_rel_max <= BOUNDS["float64"], found
