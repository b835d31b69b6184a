"""Backward passes in two parts: the same gradients, only later, and nothing kept that they do not need."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.live_tensors import live
from support.rank_pool import Pool
from support.sizes import combined, examples, sampled
from support.split_backward_cases import Part, all_apart, apart, batches
from support.strategies import models
from support.toy_model import model

from phalanx.runtime.autograd.deferred_weight_grads import DeferredGradients, Product
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.comm.recorder import Recorder
from phalanx.runtime.process.environment import ALONE
from phalanx.runtime.tracing.instrument import Tracker
from phalanx.schedule.gradients.buckets import backward_order
from phalanx.spec.job import Job, Precision
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy

FP64 = Precision("float64")
EXACT = 1e-12
MODES = ["none", "selective", "full", "every:2"]


@examples(10, 60)
def test_gradients_are_those_of_a_plain_backward_pass(examples: int) -> None:
    @settings(max_examples=examples)
    @given(
        models(small=True), st.sampled_from(MODES), st.sampled_from(["packed", "separate"]), st.sampled_from([1, 2])
    )
    def hold(spec: ModelSpec, mode: str, documents: Any, micro_batch: int) -> None:
        job = Job(4, 8, FP64, documents=documents)
        found = apart(ALONE, spec, job, Strategy(recompute=mode, micro_batch=micro_batch))
        assert max(found["differences"].values()) < EXACT
        order = [p.fqn for p in backward_order(spec)]
        # A tied weight's gradient has two parts, the head's and the embedding's.
        first = [order[-1]] if spec.tied else []
        assert found["came"] == first + order

    hold()


CASES = [
    (model(**sizes), Job(4, 8, FP64, documents=documents), Strategy(tp=2, sp=sp, recompute=mode, micro_batch=2))
    for i, sizes in enumerate(
        [
            {},
            {"family": "gpt2"},
            {"family": "qwen3", "qkv_bias": True},
            {"family": "gpt_neox"},
            {"family": "palm"},
            {"family": "gpt2", "residual": "parallel", "tied": False},
            {"residual": "parallel_one_norm", "qk_norm": True, "qkv_bias": True},
        ]
    )
    for sp in (False, True)
    for mode, documents in [(MODES[(i + 2 * sp) % 4], "separate" if (i + sp) % 3 == 1 else "packed")]
]


@pytest.mark.parametrize("every", sampled([3, 1], (0,)))
def test_so_are_those_of_ranks(pool: Pool, every: int) -> None:
    others = [
        (model(window=5), Job(4, 8, FP64, documents="separate"), Strategy(cp=2, ulysses=u, recompute=mode))
        for u, mode in ((1, "none"), (2, "selective"), (1, "full"))
    ]
    cases = (CASES + others)[::every]
    for found in pool.run(2, all_apart, cases):
        for case, one in zip(cases, found, strict=True):
            assert max(one["differences"].values()) < EXACT, (case, one["differences"])


@pytest.mark.parametrize(("mode", "family"), combined(MODES, ["llama", "qwen3", "gpt2", "gpt_neox"]))
def test_what_w_does_not_need_is_gone_after_i(family: str, mode: str) -> None:
    """Of each product its input and the gradient of its output are there, of a norm its weights' gradients; of
    attention nothing."""
    spec = model(family=family, hidden=64, ffn=96, head_dim=24, vocab=99, max_seq=128)
    job, e, t = Job(2, 128), 4, 256
    s = Strategy(micro_batch=2, recompute=mode)
    stream, q, kv, ffn = (t * n * e for n in (64, spec.q_width, spec.kv_width, spec.ffn))
    into = 1 + (spec.residual != "parallel_one_norm")
    ends = 2 if spec.residual == "serial" else 1  # gradients of what is added to the stream
    block = (into + ends) * stream + 2 * q + 2 * kv + (3 if spec.gated else 2) * ffn
    head = stream + t * 99 * e
    norms = 4 * (64 * 2 * (2 * spec.layers + 1) + 4 * 24 * spec.layers)
    learned = spec.position == "learned"
    embed = stream + 128 * 64 * e * learned
    tokens = 8 * (t + 128 * learned)
    found = live(spec, job, s, lambda part, loss: part.inputs(loss))
    assert 0 <= found - 2 * block - head - embed <= norms + tokens


def test_memory_is_free_gradient_by_gradient() -> None:
    """While W runs, never more than what was left, less what has been delivered, and the one gradient that is
    made, if who takes it makes it at all."""
    spec, job = model(vocab=99, hidden=64, ffn=96, max_seq=128), Job(2, 128)
    part = Part(spec, job, Strategy(micro_batch=2), Comm(ALONE, mesh(Strategy())))
    part.splits()
    (batch,) = batches(spec, job, Strategy(micro_batch=2), part, 1)
    gc.collect()
    with Tracker(Recorder()) as tracker:
        left = part.inputs(part.forward(batch))
        before = tracker.highest = tracker.live
        lives = []

        def deliver(
            _: object, g: torch.Tensor | Product | None, rows: list[tuple[torch.Tensor, torch.Tensor]]
        ) -> None:
            made = g.compute() if isinstance(g, Product) else rows[0][0] if g is None else g
            lives.append(tracker.live - made.nbytes)  # without what is made now: a product, or a copy of token ids

        for _, gradients in left:
            gradients(deliver)
        assert lives == sorted(lives, reverse=True)
        assert tracker.live - tracker.start < 4096
        assert tracker.highest <= before + 99 * 64 * 4


def test_without_the_attribute_nothing_of_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeferredGradients, "leave", None)
    spec, job, s = model(family="gpt2"), Job(2, 8, FP64), Strategy()
    part = Part(spec, job, s, Comm(ALONE, mesh(s)))
    (batch,) = batches(spec, job, s, part, 1)
    part.backward(part.forward(batch))
    part.splits()
    part.backward(part.forward(batch))
    with pytest.raises(TypeError, match="not callable"):
        part.inputs(part.forward(batch))
