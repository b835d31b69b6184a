"""A job's number types and optimizer in the formulas' price, against the exact price of our own runtime."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.cost.analytic.estimate import estimate
from phalanx.cost.analytic.option_effects import with_number_types
from phalanx.cost.analytic.profile import profile
from phalanx.cost.memory.state import model_state
from phalanx.cost.step.predict import predict
from phalanx.frameworks.registry import STACKS
from phalanx.planning.search import strategy_columns
from phalanx.planning.search.column_pricing import Pricing
from phalanx.schedule.layout import Layout
from phalanx.spec.cluster.presets import preset
from phalanx.spec.files.job_file import make_model
from phalanx.spec.job import Job, Precision
from phalanx.spec.optimizers import Optimizer
from phalanx.spec.strategy.spec import Strategy, parse

MODEL = make_model({"preset": "llama3-8b"}, Path())[0]
CLUSTER = preset("dgx-h100", 2)
TYPES = {
    "mixed": Precision("bfloat16"),
    "half": Precision("float16"),
    "single": Precision("float32"),
    "double": Precision("float64"),
    "all bf16": Precision("bfloat16", "bfloat16", "bfloat16", "bfloat16"),
    "bf16 gradients": Precision("bfloat16", "bfloat16", "bfloat16"),
    "bf16 reduced apart": Precision("bfloat16", "bfloat16"),
}
OPTIMIZERS = {"adamw": Optimizer(), "momentum": Optimizer("sgd"), "plain": Optimizer("sgd", (0.0, 0.9))}
LINES = ("dp=16,zero=0", "dp=16,zero=1", "dp=4,tp=4,sp=1,zero=1", "dp=16,zero=2", "dp=16,zero=3")


@pytest.mark.parametrize("types", TYPES)
def test_state_is_that_of_the_runtime(types: str) -> None:
    """Weights, gradients, masters and moments of every type, optimizer and level."""
    for optimizer, line in itertools.product(OPTIMIZERS.values(), LINES):
        job, s = Job(64, 8192, TYPES[types], optimizer), Strategy(**parse(line))
        exact = model_state(Layout(MODEL, job, s).stage_view())
        own = exact.parameters + exact.master + exact.gradients + exact.optimizer
        state = float(
            Pricing(MODEL, CLUSTER, job, "phalanx").memory(strategy_columns.columns_of([s])).terms["state"][0]
        )
        apart = job.precision.reduce_dtype != job.precision.accumulate_dtype and s.zero >= 2
        # Where gradients are reduced in another type than they are accumulated in, a sharded level holds that type in
        # buffers; the formulas count it as a shard.
        assert state == pytest.approx(own, rel=0.01 + 0.09 * apart), (types, optimizer.name, line)


def test_the_first_pass_prices_products_in_the_job_s_type() -> None:
    """Products in fp32 run outside of tensor cores: within a quarter of the exact price, once a tenth of it."""
    s = Strategy(**parse("dp=16,zero=3,recompute=full"))
    for types, most in (("mixed", 0.10), ("single", 0.25)):
        job = Job(64, 8192, TYPES[types])
        exact = float(predict(MODEL, CLUSTER, job, s).step_time_s)
        first = float(Pricing(MODEL, CLUSTER, job, "phalanx").seconds(strategy_columns.columns_of([s]))[0])
        alone = float(estimate(MODEL, CLUSTER, job, s, "phalanx").seconds)
        assert first == pytest.approx(exact, rel=most), types
        assert alone == pytest.approx(first, rel=1e-9)


@pytest.mark.parametrize("stack", STACKS)
def test_mixed_precision_is_what_constants_are_for(stack: str) -> None:
    by, job = profile(stack), Job(64, 8192, Precision("bfloat16"))
    assert with_number_types(by, job) is by
    wide = with_number_types(by, replace(job, precision=Precision("float32")))
    assert wide.parameter_bytes == by.parameter_bytes + 2
    assert wide.shard_bytes == by.shard_bytes - 4
