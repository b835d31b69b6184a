"""The exact engine and the formulas, asked the same questions, give answers close to each other."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Literal

import pytest

from phalanx.cost.analytic.chips import system_of
from phalanx.cost.analytic.estimate import Estimate, estimate
from phalanx.cost.collectives.measured import seconds
from phalanx.cost.collectives.nccl_model import collective_s
from phalanx.cost.step.predict import predict
from phalanx.frameworks.registry import STACKS
from phalanx.planning.search import refine
from phalanx.planning.search.column_pricing import Pricing
from phalanx.planning.search.priced import price
from phalanx.spec.cluster.presets import preset
from phalanx.spec.files.job_file import make_model
from phalanx.spec.job import Job, Precision
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy, parse

BF16 = Precision("bfloat16")
JOB = Job(512, 8192, BF16)
DGX = preset("dgx-h100", 8)


@cache
def _model(name: str) -> ModelSpec:
    return make_model({"preset": name}, Path())[0]


def _estimate(line: str, stack: str) -> Estimate:
    return estimate(_model("llama3-8b"), DGX, JOB, Strategy(**parse(line)), stack)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_step_at_each_level_of_zero(zero: int) -> None:
    line = f"dp=64,zero={zero}"
    exact = predict(_model("llama3-8b"), DGX, JOB, Strategy(**parse(line))).step_time_s
    assert float(_estimate(line, "phalanx").seconds) == pytest.approx(exact, rel=0.05)


@pytest.mark.parametrize("model", ["llama3-8b", "mixtral-8x7b", "deepseek-v2-lite"])
@pytest.mark.parametrize("gather", ["compute", "float8"])
def test_the_memory_of_a_strategy(model: str, gather: Literal["compute", "float8"]) -> None:
    """With products in 8 bits, so that shards of ZeRO-3 may be gathered in 8 bits too."""
    job = Job(512, 2048, Precision("bfloat16", products="float8", gather=gather))
    lines = ["dp=64,zero=3", "dp=16,tp=4,sp=1,zero=3", "dp=16,cp=4,zero=3", "dp=16,tp=4,sp=1,zero=1"]
    lines += ["dp=64,zero=0", "dp=64,zero=2", "dp=8,pp=4,tp=2,zero=1"] * (gather == "compute")
    lines += ["dp=64,ep=8,zero=3"] * bool(_model(model).experts)
    pricing = Pricing(_model(model), DGX, job, "phalanx")
    for s in (Strategy(**parse(line)) for line in lines):
        (searched,), exact = price(pricing, [s]), predict(_model(model), DGX, job, s)
        assert searched.bytes_ == pytest.approx(exact.memory_bytes, rel=0.065), s


@pytest.mark.parametrize(("op", "ranks"), [("reduce_scatter", 16), ("reduce_scatter", 64), ("all_reduce", 64)])
def test_a_collective_of_1_gb(op: str, ranks: int) -> None:
    exact = float(seconds(DGX, mesh(Strategy(dp=ranks)), op, "dp_replicate", 1, 1e9))
    assert float(collective_s(op, 1e9, ranks, 1, system_of(DGX))) == pytest.approx(exact, rel=0.3)


@pytest.mark.parametrize("stack", [name for name, stack in STACKS.items() if {1, 3} <= set(stack.as_priced.zero)])
def test_zero_3_alone_is_no_faster_than_zero_1(stack: str) -> None:
    """Its gathers are not hidden completely."""
    assert float(_estimate("dp=64,zero=3", stack).seconds) >= float(_estimate("dp=64,zero=1", stack).seconds)


@pytest.mark.parametrize("schedule", ["zb-v", "zb-h1"])
@pytest.mark.parametrize("micro_batches", range(2, 17, 2))
def test_the_formula_of_a_zero_bubble_schedule_is_its_makespan(schedule: str, micro_batches: int) -> None:
    pricing = Pricing(_model("gpt3-175b"), preset("dgx-a100", 128), Job(16 * micro_batches, 2048, BF16), "phalanx")
    s = Strategy(dp=16, zero=1, tp=8, sp=True, pp=8, schedule=schedule)  # type: ignore[arg-type]
    (formula,), ((timed, _),) = price(pricing, [s]), refine.refine(pricing, [s])
    assert formula.seconds == pytest.approx(timed.seconds, rel=0.02)


@pytest.mark.parametrize(
    "line",
    ["dp=64,zero=3,shard=8", "dp=64,zero=1,shard=8", "dp=16,tp=4,sp=1", "dp=64,zero=2,shard=2", "dp=8,tp=2,pp=4"],
)
def test_a_synchronisation_of_replicas_that_step_alone(line: str) -> None:
    """As far apart as their collectives are."""
    once, hardly = (
        predict(_model("llama3-8b"), DGX, JOB, Strategy(**parse(f"{line},local={steps}"))).step_time_s
        for steps in (1, 10**6)
    )
    outer = _estimate(f"{line},local=1", "phalanx").step.terms["outer"]
    assert float(outer) == pytest.approx(once - hardly, rel=0.3)
