"""Export, then read: the same strategy, model, job and options, for drawn plans of every stack that is exported.

What cannot come back is set aside: the name of a model's family, which only some frameworks have, the longest
sequence of a model in Megatron-Bridge and MaxText, and a value that changes none of the files
(tests/support/exports/same.py).
"""

from __future__ import annotations

import random
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.exports import draw
from support.exports.same import canonical

from phalanx.answers.configurations.export import TARGETS, export, export_plan, write
from phalanx.answers.question.read import read
from phalanx.answers.question.stated import job_of, model_of, options_of, strategy_of
from phalanx.frameworks.launchers.export import LAUNCHERS
from phalanx.frameworks.registry import DOCUMENTED
from phalanx.frameworks.writing.subject import subject
from phalanx.spec.errors import InputError
from phalanx.spec.files.plan import Plan
from phalanx.spec.job import Precision
from phalanx.spec.model.presets import PRESETS
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.optimizers import Optimizer

MODELS = {
    "torchtitan": (
        "llama3-8b",
        "llama3-70b",
        "llama3-405b",
        "qwen3-32b",
        "qwen3-30b-a3b",
        "deepseek-v2",
        "deepseek-v3",
    ),
    "maxtext": ("llama-7b", "llama3-8b", "qwen2-7b", "qwen3-30b-a3b", "mixtral-8x7b", "deepseek-v3"),
    "nanotron": ("llama-7b", "llama2-70b", "llama3-8b", "qwen2-7b"),
}
"""Models that these frameworks have; the others have all of them, or say what they have not."""


def drawn(to: str, stack: str, rng: random.Random) -> Plan:
    """Return a plan of this stack that the framework can express, with a job of its own. Most can be expressed."""
    for _ in range(40):
        plan = draw.plan(DOCUMENTED[stack], rng, MODELS.get(to, tuple(PRESETS)))
        a = Optimizer(betas=(0.9, rng.choice((0.95, 0.98))), weight_decay=rng.choice((0.0, 0.1)))
        job = replace(plan.job, precision=Precision("bfloat16"), optimizer=a, clip=rng.choice((0.5, 1.0)))
        plan = replace(plan, job=job)
        try:
            export(plan, to)
        except InputError:
            continue
        return plan
    raise AssertionError(f"{to} refuses 40 plans of {stack}, one after the other")


def unnamed(model: ModelSpec, to: str) -> ModelSpec:
    return replace(model, family="any", max_seq=1 if to in ("bridge", "maxtext") else model.max_seq)


PAIRS = [(to, stack) for to, t in TARGETS.items() for stack in t.stacks]


@pytest.mark.parametrize(("to", "stack"), PAIRS)
@settings(max_examples=2)
@given(seed=st.integers(0, 2**32))
def test_an_export_is_read_as_the_plan_that_it_is_of(to: str, stack: str, seed: int) -> None:
    held(to, stack, seed)


@pytest.mark.long
@pytest.mark.parametrize(("to", "stack"), PAIRS)
@settings(max_examples=200)
@given(seed=st.integers(0, 2**32))
def test_many_exports_are_read_as_the_plans_that_they_are_of(to: str, stack: str, seed: int) -> None:
    held(to, stack, seed)


@pytest.mark.parametrize("by", LAUNCHERS)
@settings(max_examples=3)
@given(pair=st.sampled_from(PAIRS), seed=st.integers(0, 2**32))
def test_what_starts_an_export_is_read_as_the_plan_that_it_is_of(by: str, pair: tuple[str, str], seed: int) -> None:
    plan = drawn(*pair, random.Random(seed))
    try:
        result = export_plan(plan, pair[0], by)
    except InputError:  # a GPU that SkyPilot does not rent
        return
    with tempfile.TemporaryDirectory() as folder:
        write(result, Path(folder) / "out")
        (started,) = (name for name in result.files if name in (*_STARTS, f"{by}.yaml"))
        whole = read([Path(folder) / "out"]).configuration
        c = read([Path(folder) / "out" / started]).configuration
    assert (c.layout, c.options, c.fields, c.job) == (whole.layout, whole.options, whole.fields, whole.job)
    assert (c.spec, c.unknown) == (whole.spec, {})
    assert c.layout.world == plan.strategy.world


_STARTS = ("launch.sh", "job.sbatch", "task.yaml")
"""Files of launchers that have names of their own."""


def held(to: str, stack: str, seed: int) -> None:
    plan = drawn(to, stack, random.Random(seed))
    with tempfile.TemporaryDirectory() as folder:
        write(export(plan, to), Path(folder) / "out")
        c = read([Path(folder) / "out"]).configuration
    layout = c.layout
    assert layout.world == plan.strategy.world
    assert layout.global_batch is not None
    assert layout.seq is not None
    s = strategy_of(c, layout.world)
    assert (s, options_of(c, s)) == canonical(plan, to, DOCUMENTED[stack])
    assert job_of(c, layout.global_batch, layout.seq) == plan.job
    assert unnamed(model_of(c, None)[0], to) == unnamed(subject(plan, DOCUMENTED[stack]).model, to)
    assert not c.unknown


def test_a_vocabulary_that_bridge_pads_is_read_as_it_was_planned() -> None:
    held("bridge", "megatron-bridge", 400)
