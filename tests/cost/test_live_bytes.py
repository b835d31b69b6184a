"""Live bytes of the ledger: of our own runtime those of its StepPrograms, drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sizes import examples
from support.strategies import cases, evenly

from phalanx.cost.analytic.memory import memory
from phalanx.cost.analytic.option_effects import with_number_types
from phalanx.cost.analytic.profile import profile
from phalanx.cost.ledger.flow import whole_model
from phalanx.cost.ledger.gradient_flows import expert_ranks, experts_apart, parameters_of
from phalanx.cost.ledger.live_bytes import end_bytes, held_micro_batches, live_bytes, sliced_head, state_bytes
from phalanx.cost.ledger.model_shape import shape
from phalanx.cost.ledger.policy import sharding
from phalanx.cost.ledger.rank_layout import layout
from phalanx.cost.memory.state import model_state
from phalanx.cost.step.expand import expand
from phalanx.cost.step.terms import terms
from phalanx.schedule.layout import Layout as StepLayout
from phalanx.schedule.pipeline.actions import Action
from phalanx.schedule.pipeline.schedules import build
from phalanx.spec.errors import InputError
from phalanx.spec.files.job_file import make_model
from phalanx.spec.job import Job, Precision
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.spec import Strategy, parse

Case = tuple[ModelSpec, Job, Strategy]
DENSE = st.sampled_from([1, 2, 4, 8, 12]).flatmap(lambda ranks: cases(ranks, small=False))
EXPERTS = st.sampled_from([1, 2, 4, 8]).flatmap(lambda ranks: cases(ranks, small=False, experts=True))
PHALANX = profile("phalanx")


def kept_by_program(case: Case) -> tuple[float, float]:
    """Bytes that one micro-batch leaves after its forward pass, a rank of every stage together: of blocks, of
    embedding and head."""
    model, job, s = case
    blocks = ends = 0.0
    for view in StepLayout(model, job, s).stage_views():
        names = dict(view.unit_classes)
        for t in terms(view):
            if t.event.kind == "compute" and t.event.phase == "F":
                size = (t.alloc - t.free) * len(names[t.event.unit])
                if t.event.unit.startswith("blocks"):
                    blocks += size
                else:
                    ends += size
    return blocks, ends


def agree(case: Case) -> None:
    """Hold the ledger against the program. The program keeps token ids and places too where layers can defer the
    weight gradient of an embedding: 16 bytes a token at most."""
    model, job, s = case
    job = replace(job, documents="packed")
    sizes, how = shape(model), layout(s, job, model.layers)
    blocks = float(live_bytes(sizes, how, PHALANX).stored) * sizes.layers
    of_program, of_ends = kept_by_program((model, job, s))
    assert of_program == pytest.approx(blocks, rel=1e-12)
    first, last = end_bytes(sizes, how, PHALANX)
    logits = how.tokens * how.activation_bytes * -(-model.vocab // s.tp)
    in_slices, gradient = sliced_head(sizes, how, PHALANX)
    ends = float(first) + float(last) + (float(gradient) if in_slices else logits)
    assert 0 <= of_ends - ends <= 16 * how.tokens, (of_ends, ends)


@examples(70, 1400)
def test_dense_models(examples: int) -> None:
    settings(max_examples=examples)(given(DENSE)(agree))()


@examples(30, 600)
def test_models_with_experts(examples: int) -> None:
    settings(max_examples=examples)(given(EXPERTS.filter(evenly))(agree))()


@examples(30, 400)
def test_state(examples: int) -> None:
    """Weights, gradients, masters and moments: the program's, but for the padding of buckets to equal parts."""
    settings(max_examples=examples)(given(st.one_of(DENSE, EXPERTS))(_state))()


def test_state_of_experts_that_one_rank_has() -> None:
    """Their gradients take turns in a bucket at ZeRO-2, though they have nothing to shard: drawn once."""
    strategy = Strategy(dp=2, zero=2, etp=2, bucket=0.002)
    job = Job(global_batch=2, seq=32, precision=Precision(compute="bfloat16", reduce="bfloat16"))
    model = replace(make_model({"preset": "mixtral-8x7b", "layers": 1}, Path())[0], vocab=300)
    _state((model, job, strategy))


def _state(case: Case) -> None:
    model, job, s = case
    s = replace(s, grad_sync=None, reshard=None, compression="none")
    sizes, how, by = shape(model), layout(s, job, model.layers), with_number_types(PHALANX, job)
    sharded = sharding(how, by.policy)
    held = parameters_of(sizes, how, whole_model(sizes.kinds))
    own = np.where(experts_apart(how), np.where(sharded.state, expert_ranks(how), 1.0), sharded.shards)
    dense = float(held.dense * state_bytes(how, by, sharded, sharded.shards))
    experts = float(held.experts * state_bytes(how, by, sharded, own))
    of_program = pads = 0.0
    for view in StepLayout(model, job, s).stage_views():
        state = model_state(view)
        of_program += state.parameters + state.master + state.gradients + state.optimizer
        pads += sum(16 * b.parts(s) for b in view.buckets)
    assert of_program == pytest.approx(dense + experts, rel=1e-9, abs=pads * 40), (of_program, dense + experts)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_interleaved_in_flight(ranks: int) -> None:
    """As many as the actions hold at once, also where ranks do not divide micro-batches."""
    sizes = shape(make_model({"preset": "gpt2", "layers": 48}, Path())[0])
    for virtual in (2, 3):
        for m in range(1, 3 * ranks + 1):
            try:
                actions = build("interleaved", ranks, m, virtual).actions
            except InputError:
                continue
            s = Strategy(pp=ranks, virtual=virtual, schedule="interleaved")
            found = held_micro_batches(layout(s, Job(m, 128), int(sizes.layers)), PHALANX.policy)
            assert found == pytest.approx((_held(actions[0]) / virtual, _held(actions[-1]) / virtual)), (virtual, m)


def _held(actions: Sequence[Action]) -> int:
    """The most chunks whose activations a rank holds at once."""
    return int(np.cumsum([{"F": 1, "B": -1}.get(a.kind, 0) for a in actions]).max())


@pytest.mark.parametrize(
    ("model", "seq", "line"),
    [
        ("llama3-8b", 4096, "dp=64,zero=1"),
        ("llama3-8b", 8192, "dp=16,zero=1,tp=4,sp=1,recompute=full"),
        ("mixtral-8x7b", 4096, "dp=16,zero=1,tp=4,sp=1,ep=8"),
        ("llama3-8b", 4096, "dp=64,zero=2"),  # buffers of the embedding and of two matrices
        ("llama3-8b", 4096, "dp=64,zero=3"),  # of two blocks
        ("mixtral-8x7b", 4096, "dp=64,zero=3,ep=8"),
        ("llama3-8b", 4096, "dp=16,zero=3,pp=4"),
        ("llama3-8b", 8192, "dp=8,zero=1,tp=4,sp=1,pp=2"),  # 17 and 15 blocks
        ("llama3-70b", 8192, "dp=2,zero=1,tp=4,sp=1,cp=2,ulysses=2,pp=4,schedule=dualpipe-v"),
    ],
)
def test_the_peak_is_the_program_s(model: str, seq: int, line: str) -> None:
    """Of the fullest pipeline rank."""
    spec, s, job = (
        make_model({"preset": model}, Path())[0],
        Strategy(**parse(line)),
        Job(128, seq, Precision("bfloat16")),
    )
    exact = max(expand(view, list(terms(view))).peak_bytes for view in StepLayout(spec, job, s).stage_views())
    found = memory(shape(spec), layout(s, job, spec.layers), PHALANX)
    assert float(found.peak) == pytest.approx(exact, rel=0.01)
