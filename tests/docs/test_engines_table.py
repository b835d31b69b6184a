"""Figures of docs/prediction.md, "Engines against each other", computed again: what the engines say of the questions
on which they disagreed. The other rows say `equal`; the tests that they name hold them."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from phalanx.cost.analytic.chips import system_of
from phalanx.cost.analytic.estimate import Estimate, estimate
from phalanx.cost.analytic.stacks import STACKS, capabilities
from phalanx.cost.collectives.measured import seconds
from phalanx.cost.collectives.nccl_model import collective_s
from phalanx.cost.ledger.pipeline_formulas import NAMES, in_flight
from phalanx.cost.step.predict import predict
from phalanx.cost.step.terms import terms
from phalanx.plan.search import refine
from phalanx.plan.search.column_pricing import Pricing
from phalanx.plan.search.priced import price
from phalanx.schedule.layout import Layout
from phalanx.spec.cluster.presets import preset
from phalanx.spec.cluster.spec import GIB
from phalanx.spec.files.job_file import build, make_model
from phalanx.spec.job import Job, Precision
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy, parse
from phalanx.spec.strategy.stack_options import StackOptions
from phalanx.spec.strategy.stack_options import parse as parse_options

PAGE = (Path(__file__).parents[2] / "docs" / "prediction.md").read_text()
BF16 = Precision("bfloat16")
QUESTION = Job(512, 8192, BF16)
DGX = preset("dgx-h100", 8)


def now(row: str) -> str:
    """Return the cell `now` of the row whose first cell begins so."""
    lines = [line for line in PAGE.splitlines() if line.startswith(f"| {row}")]
    assert len(lines) == 1, row
    return lines[0].split("|")[4].strip()


@cache
def _model(name: str) -> ModelSpec:
    return make_model({"preset": name}, Path())[0]


def _estimate(
    name: str, line: str, job: Job = QUESTION, stack: str = "phalanx", cluster: str = "dgx-h100"
) -> Estimate:
    s = Strategy(**parse(line))
    return estimate(_model(name), preset(cluster, s.world // 8), job, s, stack)


def test_zero_3_is_not_hidden_whole() -> None:
    both = [name for name in STACKS if {1, 3} <= set(capabilities(name).zero)]
    times = {
        name: [float(_estimate("llama3-8b", f"dp=64,zero={z}", stack=name).seconds) for z in (1, 3)] for name in both
    }
    faster = sum(three < one for one, three in times.values())
    assert now("zero=3 without a pipeline hidden") == f"on {faster} of {len(both)}"
    shown = _estimate("deepseek-v3", "dp=2048,zero=3,ep=64", Job(15360, 4096, BF16), "megatron-core")
    cell = now("DeepSeek-V3 on 2,048 H800")
    assert cell == f"{float(shown.step.terms['dp']):.1f} of {float(shown.seconds):.1f} s (2,048 H100, ep=64)"


def test_levels_of_zero_in_both_engines() -> None:
    lines = [f"dp=64,zero={z}" for z in (1, 2, 3)]
    exact = [predict(_model("llama3-8b"), DGX, QUESTION, Strategy(**parse(line))).step_time_s for line in lines]
    formulas = [_estimate("llama3-8b", line).seconds for line in lines]
    shown = "; ".join(", ".join(f"{float(t):.1f}" for t in times) for times in (exact, formulas))
    assert now("8B on 64 H100 at zero 1, 2, 3") == f"{shown} s"


def _both(op: str, ranks: int) -> tuple[float, float]:
    exact = seconds(DGX, mesh(Strategy(dp=ranks)), op, "dp_replicate", 1, 1e9)
    return 1e3 * float(exact), 1e3 * float(collective_s(op, 1e9, ranks, 1, system_of(DGX)))


def test_collectives_in_both_engines() -> None:
    (a, b), (c, d) = (_both("reduce_scatter", ranks) for ranks in (16, 64))
    assert now("reduce-scatter of 1 GB") == f"{a:.1f} and {c:.1f} ms; {b:.1f} and {d:.1f}"
    a, b = _both("all_reduce", 64)
    assert now("all-reduce of 1 GB") == f"{a:.1f} ms; {b:.1f}"


def test_published_questions() -> None:
    line = "zero=1,tp=8,sp=1,pp=8,recompute=selective"
    steps = [
        float(
            _estimate("gpt3-175b", f"dp={dp},{line}", Job(16 * dp, 2048, BF16), "megatron-core", "dgx-a100").seconds
        )
        for dp in (64, 512)
    ]
    assert now("ZeRO-1's gradients over many ranks") == f"{steps[0]:.2f} to {steps[1]:.2f} s"
    job = Job(256, 4096, BF16)
    mixtral = _estimate("mixtral-8x7b", "dp=64,zero=1", job, "megatron-core")
    router = f"{float(mixtral.step.terms['ep']):.2f} of {float(mixtral.seconds):.1f} s"
    assert now("router and dispatch at ep=1") == router
    state = float(_estimate("mixtral-8x7b", "dp=64,zero=3,shard=8,ep=8", job).memory.terms["state"]) / GIB
    assert now("experts' state under HSDP") == f"state {state:.2f} and {state:.2f} GiB"


@pytest.mark.parametrize(
    ("row", "seq", "lines"),
    [
        ("peak of our own runtime", 8192, ["dp=16,zero=1,tp=4,sp=1,recompute=full"]),
        ("the same at ZeRO-3, and at ZeRO-2", 4096, ["dp=64,zero=3", "dp=64,zero=2"]),
        ("the same under pipelines", 8192, ["dp=8,zero=1,tp=4,sp=1,pp=2"]),
    ],
)
def test_peaks(row: str, seq: int, lines: list[str]) -> None:
    job = Job(128, seq, BF16)
    peaks = [float(_estimate("llama3-8b", line, job).memory.peak) / GIB for line in lines]
    assert now(row) == "; ".join(f"{peak:.1f}" for peak in peaks)


def test_zero_bubble_with_few_micro_batches() -> None:
    """The formula against the actions."""
    ratios = []
    for name in ("zb-v", "zb-h1"):
        for m in range(2, 17, 2):
            pricing = Pricing(_model("gpt3-175b"), preset("dgx-a100", 128), Job(16 * m, 2048, BF16), "phalanx")
            s = Strategy(dp=16, zero=1, tp=8, sp=True, pp=8, schedule=name)  # type: ignore[arg-type]
            (found,), ((timed, _),) = price(pricing, [s]), refine.refined(pricing, [s])
            ratios.append(found.seconds / timed.seconds - 1)
    off = " to ".join(f"{100 * r:+.1f}" for r in (min(ratios), max(ratios)))
    held = float(in_flight(NAMES.index("zb-v"), 8, 16)[0])
    assert now("zb-v, zb-h1 with few") == f"{off} % (8 ranks, m = 2 to 16); {held:.1f}"


def test_the_answer_that_started_it() -> None:
    """Reductions of gradients and their bytes on rank 0, which `verify` holds equal to what is recorded."""
    for line in re.findall(r"^\| (?:before|now) \| .*$", PAGE, re.M):
        _, which, strategy, predicted, reductions, _ = (cell.strip() for cell in line.split("|"))
        written, _, options = strategy.strip("`").partition("`, `")
        s = Strategy(**parse(written))
        view = Layout(_model("llama3-70b"), QUESTION, s).stage_view()
        reduced = [t for t in terms(view) if t.event.op == "reduce_scatter" and t.event.unit == "gradients"]
        count, bytes_ = sum(t.count for t in reduced), sum(t.bytes for t in reduced)
        assert reductions.startswith(f"{count:,} on a rank, {bytes_ / 1e9:,.1f} GB"), line
        if which == "now":
            assert predicted == f"{_refined(s, build(StackOptions, parse_options(options), 'options')):.2f} s"


def _refined(s: Strategy, options: StackOptions) -> float:
    pricing = Pricing(_model("llama3-70b"), DGX, QUESTION, "megatron-core", extra=options)
    ((found, _),) = refine.refined(pricing, [s])
    return found.seconds
