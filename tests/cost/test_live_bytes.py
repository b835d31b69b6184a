"""Live bytes of the ledger: of our own runtime those of its StepPrograms, drawn."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sizes import examples
from support.strategies import cases, evenly

from phalanx.cost.analytic.precision import typed
from phalanx.cost.analytic.stacks import profile
from phalanx.cost.ledger.flow import Held
from phalanx.cost.ledger.gradient_flows import expert_ranks, experts_apart, parameters_of
from phalanx.cost.ledger.live_bytes import end_bytes, live_bytes, sliced_head, state_bytes
from phalanx.cost.ledger.model_shape import shape
from phalanx.cost.ledger.rank_layout import layout
from phalanx.cost.ledger.sharding import sharding
from phalanx.cost.memory.state import model_state
from phalanx.cost.step.terms import terms
from phalanx.schedule.layout import Layout as StepLayout
from phalanx.spec.job import Job
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.spec import Strategy

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
    blocks = sum(
        float(live_bytes(sizes, how, PHALANX, moe).stored) * count
        for moe, count in ((0.0, sizes.layers - sizes.moe_layers), (1.0, sizes.moe_layers))
        if count
    )
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


def _state(case: Case) -> None:
    model, job, s = case
    s = replace(s, grad_sync=None, reshard=None, compression="none")
    sizes, how, by = shape(model), layout(s, job, model.layers), typed(PHALANX, job)
    sharded = sharding(how, by.policy)
    held = parameters_of(sizes, how, Held(sizes.layers - sizes.moe_layers, sizes.moe_layers, 1.0, 1.0))
    own = np.where(experts_apart(how), np.where(sharded.level > 0, expert_ranks(how), 1.0), sharded.shards)
    dense = float(held.dense * state_bytes(how, by, sharded, sharded.shards))
    experts = float(held.experts * state_bytes(how, by, sharded, own))
    of_program = pads = 0.0
    for view in StepLayout(model, job, s).stage_views():
        state = model_state(view)
        of_program += state.parameters + state.master + state.gradients + state.optimizer
        pads += sum(16 * b.parts(s) for b in view.buckets)
    assert of_program == pytest.approx(dense + experts, rel=1e-9, abs=pads * 40), (of_program, dense + experts)
