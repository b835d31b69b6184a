"""Attention without a flash kernel: scores that are kept, and their traffic."""

from __future__ import annotations

import pytest

from phalanx.cost.analytic.estimate import Estimate, estimate
from phalanx.planning.lookup import model_named
from phalanx.spec.cluster.presets import preset
from phalanx.spec.job import Job, Precision
from phalanx.spec.strategy.spec import Strategy
from phalanx.spec.strategy.stack_options import StackOptions

MODEL, _ = model_named("gpt2-large")
SEQ = 1024


def price(core: str, stack: str = "accelerate", compute: str = "bfloat16", **strategy: object) -> Estimate:
    job = Job(16, SEQ, Precision(compute))  # type: ignore[arg-type]
    s = Strategy(**{"dp": 2, "micro_batch": 8} | strategy)  # type: ignore[arg-type]
    on = preset("dgx-a100", s.world)
    return estimate(MODEL, on, job, s, stack, options=StackOptions(attention=core))  # type: ignore[arg-type]


@pytest.mark.parametrize("stack", ["accelerate", "deepspeed", "megatron-core", "maxtext"])
@pytest.mark.parametrize(("compute", "width"), [("bfloat16", 2), ("float32", 4)])
def test_scores_are_kept_and_move(stack: str, compute: str, width: int) -> None:
    flash, unfused = price("flash", stack, compute), price("unfused", stack, compute)
    # Before and after the softmax, and its mask: 5 bytes a score in 16 bits.
    scores = MODEL.layers * 8 * MODEL.heads * SEQ**2 * 5 * width / 2
    assert unfused.memory.terms["activations"] - flash.memory.terms["activations"] == pytest.approx(scores)
    moved = 2 * MODEL.layers * 8 * MODEL.heads * SEQ**2 * 10 * width / 2 / 2.039e12
    assert unfused.step.terms["attention"] > moved
    assert price("auto", stack, compute).step.terms == flash.step.terms


def test_recomputation_frees_scores() -> None:
    flash, unfused = (price(core, "megatron-core", recompute="selective").memory for core in ("flash", "unfused"))
    block = 8 * MODEL.heads * SEQ**2 * 5
    assert unfused.peak - flash.peak <= block  # of the one that runs


def test_scores_of_fp32_move_twice_the_bytes() -> None:
    half, wide = (price("unfused", compute=compute).step.terms["attention"] for compute in ("bfloat16", "float32"))
    assert wide > 2 * half
