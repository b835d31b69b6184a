"""fp32 and TF32 on every stack: activations and messages of 4 bytes, products at the chip's rate of the type."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.answers.question.precision import in_precision, precision_on
from phalanx.cost.analytic.estimate import Estimate, estimate
from phalanx.cost.analytic.kernels import Products
from phalanx.frameworks.registry import DOCUMENTED
from phalanx.planning.lookup import model_named
from phalanx.planning.search.column_pricing import Pricing
from phalanx.spec.cluster.presets import preset
from phalanx.spec.errors import InputError
from phalanx.spec.job import Job
from phalanx.spec.strategy.spec import Strategy

MODEL, _ = model_named("llama2-7b")
STACKS = [name for name in DOCUMENTED if name != "phalanx"]


def price(stack: str, precision: str, s: Strategy, cluster: str = "dgx-a100") -> Estimate:
    on = preset(cluster, s.world)
    p = in_precision(Pricing(MODEL, on, Job(4 * s.dp, 4096), stack), precision_on(precision, on))
    return estimate(MODEL, on, p.job, s, stack, p.number_format)


@pytest.mark.parametrize("stack", STACKS)
def test_products_run_at_the_rate_of_their_type(stack: str) -> None:
    of = {name: price(stack, name, Strategy(dp=2)) for name in ("bf16", "fp16", "tf32", "fp32")}
    seconds = {name: e.step.terms["matmul"] for name, e in of.items()}
    assert seconds["fp16"] == seconds["bf16"]
    # Of an A100: 312, 156 and 19.5 TFLOP/s.
    assert seconds["tf32"] / seconds["bf16"] == pytest.approx(2, rel=0.02)
    assert seconds["fp32"] / seconds["tf32"] == pytest.approx(8, rel=0.02)
    for term in ("attention", "head"):
        assert of["fp32"].step.terms[term] > 2 * of["tf32"].step.terms[term] > 2 * of["bf16"].step.terms[term]
    assert of["fp32"].memory.peak == of["tf32"].memory.peak > of["bf16"].memory.peak
    kept = {name: e.memory.terms["activations"] for name, e in of.items()}
    by = of["bf16"].profile  # what is in fp32 whatever the type: norms of several operations, autocast's copies
    alike = (2 * by.kept_norm, by.kept_casts)
    wide = {"fp32": alike[0], "bf16": sum(alike)}
    kept = {name: kept[name] - MODEL.layers * 4096 * MODEL.hidden * n for name, n in wide.items()}
    assert kept["fp32"] / kept["bf16"] == pytest.approx(2, rel=0.02)


@pytest.mark.parametrize("stack", STACKS)
def test_messages_are_of_four_bytes(stack: str) -> None:
    has = DOCUMENTED[stack].strategy
    if has["tp"].values is None:
        s = Strategy(tp=8)
        wide, half = (price(stack, name, s).step.terms["tp"] for name in ("tf32", "bf16"))
        assert wide > 1.5 * half
    if 3 in (has["zero"].values or ()):
        s = Strategy(dp=16, zero=3)
        wide, half = (price(stack, name, s).step.of["dp"]["gather_s"] for name in ("fp32", "bf16"))
        assert wide == pytest.approx(2 * half, rel=0.1)


def test_a_precision_that_a_chip_lacks_or_that_has_no_rate_is_refused() -> None:
    volta, blackwell = preset("dgx-1v", 1), preset("dgx-b200", 1)
    with pytest.raises(InputError, match="is a type that V100-SXM2-32GB lacks; use fp16"):
        precision_on("tf32", volta)
    assert precision_on("fp32", volta) == "fp32"
    ultra = replace(blackwell, device=replace(blackwell.device, name="B300-SXM-270GB"))
    with pytest.raises(InputError, match="has no published rate on B300"):
        precision_on("fp32", ultra)


def test_a_product_is_cut_where_its_collective_is() -> None:
    """Forward always; backward that of the input's gradient, where it is said: as many parts are as many kernels."""
    system = price("megatron-core", "bf16", Strategy(dp=2)).system
    whole, cut = (Products(system, 0.7 * system.peak_bf16, 2, parts=parts) for parts in (1.0, 4.0))
    plain = whole.linear(300, 1024, 2048)
    assert whole.linear(300, 1024, 2048, back=True) == plain
    assert cut.linear(300, 1024, 2048).backward == plain.backward
    assert cut.linear(300, 1024, 2048, back=True).backward != plain.backward
    assert cut.linear(300, 1024, 2048).forward != plain.forward
