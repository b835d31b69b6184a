"""The ledger against the StepProgram of our own runtime, drawn; and what must hold of any stack."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sizes import examples
from support.strategies import cases

from phalanx.cost.analytic.estimate import estimate, estimate_all
from phalanx.cost.analytic.profile import profile
from phalanx.cost.ledger.compressed import compressed_gradients
from phalanx.cost.ledger.flops import rank_flops
from phalanx.cost.ledger.flow import whole_model
from phalanx.cost.ledger.model_shape import shape
from phalanx.cost.ledger.policy import sharding
from phalanx.cost.ledger.rank_layout import layout
from phalanx.cost.memory.state import model_state
from phalanx.cost.step.terms import terms
from phalanx.frameworks.registry import STACKS
from phalanx.schedule.layout import Layout as StepLayout
from phalanx.spec.cluster.presets import preset
from phalanx.spec.errors import InputError
from phalanx.spec.files.job_file import make_model
from phalanx.spec.job import Job, Precision
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.spec import Strategy, parse

PHALANX = profile("phalanx").policy


@examples(40, 800)
def test_reductions_and_gathers_are_those_of_the_program(examples: int) -> None:
    """How often each bucket is reduced and each unit gathered in a step, on every pipeline rank."""
    settings(max_examples=examples)(given(SHARDED)(_reductions_and_gathers))()


SHARDED = st.sampled_from([2, 4, 8]).flatmap(cases).filter(lambda case: case[2].shards > 1)


def _reductions_and_gathers(case: tuple[ModelSpec, Job, Strategy]) -> None:
    model, job, s = case
    s = replace(s, grad_sync=None, reshard=None)
    how = sharding(layout(s, job, model.layers), PHALANX)
    m = s.accumulation(job)
    for place in range(s.pp):
        view = StepLayout(model, job, s).stage_view(place)
        cut, of_program = view.buckets, terms(view)
        reduced = sum(t.count for t in of_program if t.event.op == "reduce_scatter" and t.event.unit == "gradients")
        # Each end of a tied embedding fills its bucket where a rank has both in chunks of their own.
        ends = sum("embed" in units or "head" in units for units in view.chunks)
        again = sum(b.parameters[0].unit == "model" for b in cut) * max(ends - 1, 0)
        assert reduced == ((len(cut) + again) * m if how.reduces_each else len(cut))
        gathered = sum(t.count for t in of_program if t.event.unit == "parameters")
        kept = sum(b.unit in ("head", "model") for b in cut) if how.regathers else 0
        assert gathered == len(cut) * (m * (1 + how.regathers) if how.gathers_each else 1) - kept * m
        # At level 2 gradients are sharded where each micro-batch is reduced into shards, and only there.
        assert how.reduces_each == s.level.gradients


JOB = Job(512, 8192, Precision("bfloat16"))


def _price(line: str, stack: str = "megatron-core"):  # type: ignore[no-untyped-def]
    model = make_model({"preset": "llama3-70b"}, Path())[0]
    return estimate(model, preset("dgx-h100", 8), JOB, Strategy(**parse(line)), stack)


@pytest.mark.parametrize("stack", ["megatron-core", "phalanx"])
def test_sharded_gradients_are_reduced_in_every_micro_batch(stack: str) -> None:
    """64 micro-batches: what level 2 saves in memory it pays 64 times in traffic."""
    one, two = (_price(f"dp=8,zero={level},tp=4,sp=1,cp=2,ulysses=2", stack) for level in (1, 2))
    assert float(two.memory.steady) < float(one.memory.steady)
    assert float(two.step.terms["dp"]) > 20 * float(one.step.terms["dp"])


def test_who_reduces_once_keeps_unsharded_gradients() -> None:
    """fully_shard under a pipeline: 4 bytes of every parameter of a rank, beside its share of the state."""
    few = _price("dp=16,zero=3,pp=4", "torchtitan-compiled")
    rank = float(few.shape.params) / 4
    assert float(few.memory.steady) > 4 * rank
    assert float(few.step.terms["dp"]) < float(_price("dp=16,zero=3,pp=4", "phalanx").step.terms["dp"])


@pytest.mark.parametrize(
    ("stack", "line", "field"),
    [
        ("megatron-deepspeed-2022", "dp=16,zero=2,pp=4", "zero"),
        ("megatron-deepspeed-2022", "dp=16,zero=3,pp=4", "zero"),
        ("nanotron", "dp=64,zero=3", "zero"),
        ("nanotron", "dp=16,pp=4,schedule=interleaved,virtual=5", "schedule"),
        ("nanotron", "dp=32,cp=2,ulysses=2", "ulysses"),
        ("torchtitan-compiled", "dp=64,zero=1", "zero"),
        ("torchtitan-compiled", "dp=16,zero=2,pp=4", "zero"),
        ("llm-foundry", "dp=16,pp=4", "pp"),
        ("megatron-2021", "dp=64,zero=1", "zero"),
    ],
)
def test_what_a_stack_refuses_is_refused_by_name(stack: str, line: str, field: str) -> None:
    with pytest.raises(InputError, match=f"strategy.{field} = .*{stack}"):
        _price(line, stack)


def _sharded_levels() -> Iterator[tuple[str, str, list[int]]]:
    """Yield (stack, strategy, levels) where a stack shards at two levels or more. From 0 to a sharded optimizer less
    is sent: parameters come back in 2 bytes, gradients would in 4."""
    for name, stack in STACKS.items():
        can = stack.as_priced
        for line, levels in (("dp=64", can.zero), ("dp=16,pp=4", can.zero_in_pipeline)):
            sharded = [level for level in levels if level > 0]
            if len(sharded) > 1 and ("pp" not in line or "1f1b" in can.schedules):
                yield name, line, sharded


@pytest.mark.parametrize(("stack", "line", "levels"), list(_sharded_levels()))
def test_no_level_of_zero_is_a_free_lunch(stack: str, line: str, levels: list[int]) -> None:
    """A level with less state sends more, in any stack that runs it; with and without a pipeline."""
    model = make_model({"preset": "llama3-8b"}, Path())[0]
    rows = [Strategy(**parse(f"{line},zero={level}")) for level in levels]
    e = estimate_all(model, preset("dgx-h100", 8), JOB, rows, stack)
    how = sharding(e.layout, e.profile.policy)
    m, n = e.layout.micro_batches, np.array([float(e.shape.params)] * len(rows))
    sent = n * (e.profile.gradient_bytes * np.where(how.reduces_each > 0, m, 1) * np.where(how.state, 1, 2))
    sent = sent + n * e.profile.parameter_bytes * np.where(how.gathers_each > 0, m * (1 + how.regathers), how.state)
    held = np.broadcast_to(e.memory.steady, len(rows))
    assert all(sent[1:] >= np.where(held[1:] < held[:-1], sent[:-1] * (1 - 1e-9), 0)), rows
    assert all(held[1:] <= held[:-1]), rows


def test_the_state_of_experts_under_hsdp_is_the_runtime_s() -> None:
    """They shard over the ranks with the same experts, 8 here, whatever the shards of all else are."""
    model, s = make_model({"preset": "mixtral-8x7b"}, Path())[0], Strategy(**parse("dp=64,zero=3,shard=8,ep=8"))
    job = Job(256, 4096, Precision("bfloat16"))
    exact = model_state(StepLayout(model, job, s).stage_view())
    own = exact.parameters + exact.master + exact.gradients + exact.optimizer
    found = estimate(model, preset("dgx-h100", 8), job, s, "phalanx").memory.terms["state"]
    assert float(found) == pytest.approx(own, rel=1e-3)


def test_weak_scaling_is_nearly_flat() -> None:
    """GPT-3 with eight times the replicas and sequences, as published (1.61 s for 128, 192 and 256 replicas)."""
    model, line = make_model({"preset": "gpt3-175b"}, Path())[0], "zero=1,tp=8,sp=1,pp=8,recompute=selective"
    steps = []
    for dp in (64, 512):
        job, s = Job(16 * dp, 2048, Precision("bfloat16")), Strategy(**parse(f"dp={dp},{line}"))
        steps.append(float(estimate(model, preset("dgx-a100", 8 * dp), job, s, "megatron-core").seconds))
    assert steps[0] < steps[1] < 1.01 * steps[0]


_SMALL = {"layers": 4, "hidden": 64, "heads": 4, "kv_heads": 4, "ffn": 128, "vocab": 64, "max_seq": 64}


@pytest.mark.parametrize(
    ("line", "residuals"),
    [
        ("dp=8,compression=int8", 1 + 1 / 8),
        ("dp=8,zero=2,compression=int8", 1),
        ("dp=8,zero=2,shard=4,compression=int8", 1 + 1 / 4),
        ("dp=8,compression=int8:nofeedback", 0),
        ("dp=8,compression=topk:0.01", 1),
    ],
)
def test_a_residual_is_kept_for_each_time_that_gradients_are_coded(line: str, residuals: float) -> None:
    """Of the gradients, and of a rank's part of sums that are sent on; not of what stays in its shard."""
    model, _ = make_model({"family": "llama", **_SMALL}, Path())
    assert compressed_gradients(model, Strategy(**parse(line))).kept == residuals


def test_experts_that_are_repeated_alone_are_computed_once_more() -> None:
    """In the blocks that have experts: what wider ones add, they add once for each time that they are computed. Of
    four that a token chooses among eight with weights and eight without, two compute on average."""

    def products(ffn: int, recompute: str, **chosen: int) -> float:
        experts = {"count": 8, "top_k": 2, "ffn": ffn, "dense_layers": [0], **chosen}
        model, _ = make_model({"family": "llama", **_SMALL, "experts": experts}, Path())
        how = layout(Strategy(**parse(f"dp=2,recompute={recompute}")), Job(4, 64), model.layers)
        kinds = shape(model)
        return float(rank_flops(kinds, how, PHALANX, whole_model(kinds.kinds)).products)

    forward = 2.0 * (4 * 64 // 2) * 3 * 2 * 3 * 64 * 100  # tokens, blocks, routes, matrices, hidden, wider by 100
    for recompute, times in (("none", 3), ("selective:moe", 4), ("selective:mlp", 3)):
        for chosen in ({}, {"top_k": 4, "identity": 8}):
            wider = products(300, recompute, **chosen) - products(200, recompute, **chosen)
            assert wider == pytest.approx(times * forward)
