"""Figures of docs/prediction.md, "Engines against each other", computed again: what engines say of one question."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from phalanx.cost.analytic.chips import system_of
from phalanx.cost.analytic.estimate import Estimate, estimate
from phalanx.cost.analytic.stacks import STACKS, capabilities
from phalanx.cost.collectives.measured import seconds
from phalanx.cost.collectives.nccl_model import collective_s
from phalanx.cost.step.predict import predict
from phalanx.cost.step.terms import terms
from phalanx.planning.search import refine
from phalanx.planning.search.column_pricing import Pricing
from phalanx.planning.search.priced import price
from phalanx.schedule.layout import Layout
from phalanx.spec.cluster.presets import preset
from phalanx.spec.files.job_file import make_model
from phalanx.spec.job import Job, Precision
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy, parse

PAGE = (Path(__file__).parents[2] / "docs" / "prediction.md").read_text()
PROSE = " ".join(PAGE.split())
BF16 = Precision("bfloat16")
QUESTION = Job(512, 8192, BF16)
DGX = preset("dgx-h100", 8)


def cells(question: str) -> list[str]:
    """Return what the table says of a question: by the exact engine, and by the formulas."""
    lines = [line for line in PAGE.splitlines() if line.startswith(f"| {question}")]
    assert len(lines) == 1, question
    return [cell.strip() for cell in lines[0].split("|")[2:4]]


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
    assert f"zero=3 without a pipeline is faster than zero=1 on {faster} of {len(both)} stacks" in PROSE
    shown = _estimate("deepseek-v3", "dp=2048,zero=3,ep=64", Job(15360, 4096, BF16), "megatron-core")
    traffic, step = float(shown.step.terms["dp"]), float(shown.seconds)
    assert f"zero=3 takes {traffic:.1f} of DeepSeek-V3's {step:.1f} s on 2,048 H100 at ep=64" in PROSE


def test_levels_of_zero_in_both_engines() -> None:
    lines = [f"dp=64,zero={z}" for z in (1, 2, 3)]
    exact = [predict(_model("llama3-8b"), DGX, QUESTION, Strategy(**parse(line))).step_time_s for line in lines]
    formulas = [_estimate("llama3-8b", line).seconds for line in lines]
    shown = [", ".join(f"{float(t):.1f}" for t in times) + " s" for times in (exact, formulas)]
    assert cells("step of Llama 3 8B on 64 H100 at zero 1, 2, 3") == shown


def _both(op: str, ranks: int) -> tuple[float, float]:
    exact = seconds(DGX, mesh(Strategy(dp=ranks)), op, "dp_replicate", 1, 1e9)
    return 1e3 * float(exact), 1e3 * float(collective_s(op, 1e9, ranks, 1, system_of(DGX)))


def test_collectives_in_both_engines() -> None:
    (a, b), (c, d) = (_both("reduce_scatter", ranks) for ranks in (16, 64))
    assert cells("reduce-scatter of 1 GB") == [f"{a:.1f} and {c:.1f} ms", f"{b:.1f} and {d:.1f} ms"]
    a, b = _both("all_reduce", 64)
    assert cells("all-reduce of 1 GB") == [f"{a:.1f} ms", f"{b:.1f} ms"]


def test_published_questions() -> None:
    line = "zero=1,tp=8,sp=1,pp=8,recompute=selective"
    steps = [
        float(
            _estimate("gpt3-175b", f"dp={dp},{line}", Job(16 * dp, 2048, BF16), "megatron-core", "dgx-a100").seconds
        )
        for dp in (64, 512)
    ]
    assert f"GPT-3's step (tp=8, pp=8) takes {steps[0]:.2f} s on dp=64 and {steps[1]:.2f} s on dp=512" in PROSE
    job = Job(256, 4096, BF16)
    mixtral = _estimate("mixtral-8x7b", "dp=64,zero=1", job, "megatron-core")
    router, step = float(mixtral.step.terms["ep"]), float(mixtral.seconds)
    assert f"Router and dispatch take {router:.2f} of Mixtral's {step:.1f} s on 64 H100 even at ep=1" in PROSE


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
    assert cells("step of zb-v and zb-h1, 8 ranks, 2 to 16 micro-batches") == ["", f"{off} % of the actions'"]


def test_reductions_of_gradients() -> None:
    """Reductions of gradients and their bytes on rank 0, which `verify` holds equal to what is recorded."""
    sentence = PROSE[PROSE.index("Sharded gradients (zero=2") : PROSE.index("Who reduces once")]
    lines = re.findall(r"`(dp=\S+)`", sentence)
    assert len(lines) == 2
    for line in lines:
        view = Layout(_model("llama3-70b"), QUESTION, Strategy(**parse(line))).stage_view()
        reduced = [t for t in terms(view) if t.event.op == "reduce_scatter" and t.event.unit == "gradients"]
        count, bytes_ = sum(t.count for t in reduced), sum(t.bytes for t in reduced)
        assert re.search(rf"`{line}` (reduces gradients )?{count:,} times", sentence), count
        assert f"{bytes_ / 1e9:,.1f} GB" in sentence
