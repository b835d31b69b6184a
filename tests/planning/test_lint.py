"""`phalanx lint` and `phalanx explain`: every anti-pattern is found, with numbers, and its mended twin is silent."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.in_process_cli import error_of, phalanx

from phalanx.frameworks.registry import DOCUMENTED
from phalanx.planning.explain import explanation, operators
from phalanx.planning.explain.analytic import AnalyticSubject
from phalanx.planning.explain.lint import LINTS, lint
from phalanx.planning.explain.traffic import flows
from phalanx.planning.lookup import cluster_named, model_named, pricing_by_gpus
from phalanx.planning.search import strategy_columns
from phalanx.planning.search.column_pricing import Pricing
from phalanx.spec.files.job_file import make_strategy
from phalanx.spec.job import Precision

# (lint, model, GPUs, batch, seq, strategy, its mended twin, what is said)
_GPT3 = ("gpt3-175b", 1024, 1536, 2048)
_LLAMA8 = ("llama3-8b", 64, 512, 8192)
_CASES = [
    (
        "too-large",
        ("llama3-70b", 64, 512, 8192),
        "dp=4,zero=1,tp=8,sp=1,pp=2,micro_batch=8",
        "dp=4,zero=1,tp=8,sp=1,pp=2,micro_batch=8,recompute=full",
        "214.6 GiB do not fit in the 78.0 GiB",
    ),
    (
        "tight-memory",
        ("llama3-8b", 8, 512, 8192),
        "dp=4,zero=1,tp=2,sp=1,micro_batch=2",
        "dp=4,zero=1,tp=2,sp=1",
        "of 78.0 GiB leave 2.6% free, and plan would leave 5%",
    ),
    ("wide-tp", _GPT3, "dp=8,zero=1,tp=16,sp=1,pp=8", "dp=16,zero=1,tp=8,sp=1,pp=8", "tp=16 leaves the 8 ranks"),
    ("straddling", ("gpt2", 24, 48, 1024), "dp=8,zero=1,tp=3", "dp=6,zero=1,tp=4", "do not divide a node of 8"),
    (
        "few-micro-batches",
        _GPT3,
        "dp=16,zero=1,tp=8,sp=1,pp=8,micro_batch=16",
        "dp=16,zero=1,tp=8,sp=1,pp=8",
        "6 micro",
    ),
    (
        "not-interleaved",
        _GPT3,
        "dp=16,zero=1,tp=8,sp=1,pp=8,micro_batch=4",
        "dp=16,zero=1,tp=8,sp=1,pp=8,micro_batch=4,schedule=interleaved,virtual=6",
        "fewer than 4P = 32",
    ),
    (
        "small-micro-batch",
        ("gpt2-xl", 8, 512, 512),
        "dp=8,zero=1",
        "dp=8,zero=1,micro_batch=8",
        "512 tokens at a time",
    ),
    (
        "needless-accumulation",
        ("gpt2-xl", 8, 128, 512),
        "dp=8,zero=1,micro_batch=2",
        "dp=8,zero=1,micro_batch=16",
        "sequences at once fit",
    ),
    (
        "uneven-heads",
        ("llama3-70b", 64, 512, 8192),
        "dp=4,zero=1,tp=16,sp=1",
        "dp=8,zero=1,tp=8,sp=1",
        "share 8 key heads",
    ),
    ("unbalanced-stages", ("llama-7b", 64, 512, 2048), "dp=8,zero=1,pp=8", "dp=32,zero=1,pp=2", "more than the mean"),
    ("mesh-order", _LLAMA8, "dp=8,zero=3,cp=8,order=cp/pp/dp/tp", "dp=8,zero=3,cp=8", "order=cp/pp/dp/tp"),
    ("small-buckets", _LLAMA8, "dp=64,zero=1,bucket=1", "dp=64,zero=1,bucket=512", "below the crossover"),
    ("idle-gpus", _LLAMA8, "dp=32,zero=2", "dp=64,zero=2", "32 of 64 GPUs"),
    (
        "needless-recompute",
        ("llama3-8b", 64, 512, 2048),
        "dp=64,zero=1,recompute=full",
        "dp=64,zero=1",
        "and recompute=none fits as well",
    ),
    ("needless-zero3", ("llama3-8b", 64, 512, 512), "dp=64,zero=3", "dp=64,zero=1", "zero=1 fits as well"),
    (
        "losing-compressor",
        _LLAMA8,
        "dp=64,zero=1,compression=topk:0.05",
        "dp=64,zero=1,compression=topk:0.005",
        "travels by all-gather",
    ),
]


def _subject(where, line: str, reduce=None) -> AnalyticSubject:
    model, gpus, batch, seq = where
    larger = pricing_by_gpus(model_named(model)[0], cluster_named("dgx-a100"), batch, seq, "megatron-core")

    def reduced(n: int) -> Pricing:
        p = larger(n)
        return replace(p, job=replace(p.job, precision=Precision("bfloat16", reduce))) if reduce else p

    strategy = make_strategy(line)
    assert strategy is not None
    return AnalyticSubject(reduced, strategy, gpus)


@pytest.mark.parametrize(("name", "where", "line", "mended", "said"), _CASES, ids=[c[0] for c in _CASES])
def test_each_lint_speaks_and_is_silent_on_its_twin(name, where, line, mended, said):
    found = list(LINTS[name](_subject(where, line)))
    assert [f.name for f in found] == [name]
    assert said in found[0].problem
    assert found[0].remedy
    assert list(LINTS[name](_subject(where, mended))) == []


def test_two_chunks_are_enough_to_interleave() -> None:
    """Of 32 blocks on 16 stages, more than two each cannot be made."""
    (found,) = LINTS["not-interleaved"](_subject(("llama3-8b", 64, 64, 8192), "dp=4,zero=1,pp=16"))
    assert found.remedy.startswith("virtual=2,schedule=interleaved saves ")


def test_a_remedy_is_of_what_the_stack_has() -> None:
    """Three replicas of 13 billion parameters, which no configuration of DeepSpeed or accelerate splits."""

    def remedies(stack: str, batch: int = 6) -> str:
        larger = pricing_by_gpus(model_named("llama2-13b")[0], cluster_named("dgx-a100"), batch, 4096, stack)
        strategy = make_strategy("dp=3,zero=2" if stack != "megatron-core" else "dp=3,zero=1")
        assert strategy is not None
        return "".join(f.remedy for f in LINTS["too-large"](AnalyticSubject(larger, strategy, 3)))

    of = {stack: remedies(stack) for stack in ("deepspeed", "accelerate", "megatron-core")}
    assert re.fullmatch(
        r"zero=3,recompute=\w+ fits; or (zero=3,)?optimizer_offload=1 fits; or more GPUs", of["deepspeed"]
    )
    assert "accumulate=sharded fits" in of["accelerate"]
    assert "parameter_offload=1" in remedies("accelerate", batch=3)  # one micro-batch; both offload together there
    assert not re.search(r"\b(tp|pp)=", of["deepspeed"] + of["accelerate"])
    assert "parameter_offload" not in of["megatron-core"]


def test_what_fits_without_the_host_is_not_sent_there() -> None:
    """Llama 8B on 8 A100 under Megatron-Core: zero=1 with recomputation fits, so nothing has to go to the host."""
    x = pricing_by_gpus(model_named("llama3-8b")[0], cluster_named("dgx-a100"), 64, 8192, "megatron-core")
    now, fitting = (make_strategy(line) for line in ("dp=8", "dp=8,zero=1,recompute=full"))
    assert now is not None
    assert fitting is not None
    subject = AnalyticSubject(x, now, 8)
    assert subject.alternative(fitting) is not None
    (found,) = LINTS["too-large"](subject)
    assert "offload" not in found.remedy


def test_gradients_reduced_in_fp32():
    for line in ("dp=64,zero=1", "dp=2"):
        wide = list(LINTS["wide-gradients"](_subject(_LLAMA8, line, "float32")))
        assert "float32: " in wide[0].problem
    assert not list(LINTS["wide-gradients"](_subject(_LLAMA8, "dp=64,zero=1", "bfloat16")))


def test_every_lint_has_its_case():
    assert {case[0] for case in _CASES} | {"wide-gradients"} == set(LINTS)


def test_flows_are_the_taught_volumes():
    """C3: GPT-3, B = 1, S = 2048, T = 8: 4 all-reduces a layer, 352.32 MB on the wire; 33.82 GB over 96 layers."""
    x = _subject(("gpt3-175b", 8, 1, 2048), "tp=8")
    tp = next(f for f in flows(x.pricing, x.strategy) if f.what.startswith("outputs of layers"))
    assert tp.sent / 96 == pytest.approx(352.32e6, rel=1e-4)
    assert tp.sent == pytest.approx(33.82e9, rel=1e-3)
    assert tp.count == 4 * 96
    # C15: Mixtral, 4,096 tokens, top-2 over ep = 8: 234.9 MB a layer and step.
    x = _subject(("mixtral-8x7b", 8, 8, 4096), "dp=8,ep=8")
    sent = sum(f.sent for f in flows(x.pricing, x.strategy) if f.axis == "ep")
    assert sent / 32 == pytest.approx(234.9e6, rel=1e-3)


def test_time_of_data_parallel_flows_is_that_of_its_term():
    """Without overlap the flows of the data axis take what the price says."""
    x = _subject(_LLAMA8, "dp=64,zero=1")
    of = x.pricing.step(strategy_columns.columns_of([x.strategy])).of["dp"]
    alone = sum(float(np.max(of[name])) for name in ("scatter_s", "again_s", "gather_s"))
    whole = sum(f.seconds for f in x.flows if f.axis == "dp")
    assert whole == pytest.approx(alone, rel=1e-6)


def test_the_data_axis_is_compute_bound_from_its_critical_batch_on():
    """At the critical batch intensity is the ridge; above it the regime changes."""
    for batch, regime in ((64, "communication dominates"), (16384, "compute-bound")):
        (dp,) = explanation.axes(_subject(("llama3-8b", 64, batch, 128), "dp=64,zero=1"))
        assert dp.regime == regime
        assert dp.critical_batch == pytest.approx(batch * dp.ridge / dp.intensity)


def test_operators_on_the_roofline():
    """Worked: 2048 x 12288 x 12288 has 1,536 FLOP per byte; decoding at batch 1 has 1 at most."""
    x = _subject(("gpt3-175b", 8, 1, 2048), "tp=8")
    alone = _subject(("gpt3-175b", 1, 1, 2048), "dp=1")
    one = next(o for o in operators.training(alone.pricing, alone.strategy) if o.name == "attention out")
    assert one.intensity == pytest.approx(1536)
    assert one.bound == "compute"
    decoded = operators.decoding(x.pricing, x.strategy, 1, 2048)
    assert all(o.bound == "memory" and o.intensity < 2.1 for o in decoded)


@pytest.mark.parametrize("name", ["deepseek-ai/DeepSeek-V3.2", "deepseek-ai/DeepSeek-V4-Flash"])
def test_every_operator_takes_time(name: str) -> None:
    """Layers of DeepSeek-V4 whose keys are compressed without an index score no pairs."""
    x = _subject((name, 8, 8, 4096), "dp=8,zero=3")
    assert all(o.seconds > 0 for o in operators.training(x.pricing, x.strategy))


def test_explain_and_lint_read_a_plan(tmp_path):
    words = ("--model", "llama3-8b", "--cluster", "dgx-h100", "--gpus", "16", "--batch", "64", "--seq", "8192")
    assert phalanx(tmp_path, "plan", *words)[0] == 0
    code, out, _ = phalanx(tmp_path, "explain plan.json --json")
    found = json.loads(out)
    assert code == 0
    assert found["losses"]
    assert found["neighbours"]
    assert {t["name"] for t in found["targets"]} >= {"MFU", "bubble", "exposed communication"}
    predicted = found["prediction"]
    assert sum(predicted["terms_s"].values()) == pytest.approx(predicted["step_time_s"], rel=1e-6)
    code, out, _ = phalanx(tmp_path, "explain plan.json")
    assert "why not its neighbours" in out
    code, out, _ = phalanx(tmp_path, "lint plan.json --strategy dp=8,zero=3 --json")
    assert code == 1
    assert "idle-gpus" in {f["name"] for f in json.loads(out)["findings"]}
    code, _, err = phalanx(tmp_path, "explain plan.json --gpus 0")
    assert (code, err) == (2, "error: --gpus = 0: must be at least 1\n")
    err = error_of(tmp_path, "lint --model llama3-8b")


def test_a_pipeline_is_timed_in_its_own_order():
    """Tensor parallelism over far links makes the passes of a pipeline slower, in the second pass of pricing too."""
    near, far = (_subject(_LLAMA8, f"dp=4,tp=8,pp=2,order={order}") for order in ("pp/dp/cp/tp", "tp/dp/cp/pp"))
    assert far.seconds > 2 * near.seconds
    assert far.run.makespan > 2 * near.run.makespan


def test_an_alternative_takes_what_predict_says_of_it():
    line = "dp=2,zero=1,tp=8,sp=1,pp=4,recompute=full"
    plain, interleaved = (
        _subject(("llama3-70b", 64, 512, 8192), line + more) for more in ("", ",virtual=5,schedule=interleaved")
    )
    other = plain.alternative(interleaved.strategy)
    assert other is not None
    assert other.seconds == interleaved.seconds


def test_neighbours_leave_free_what_a_search_leaves():
    """What lint and explain offer, plan would take: no neighbour fits into memory that a search leaves free."""
    x = _subject(("llama3-8b", 8, 512, 8192), "dp=4,zero=1,tp=2,sp=1")
    twice = replace(x.strategy, micro_batch=2)
    (found,) = [p for _, p in x.neighbours if p.strategy == twice]
    assert 0.95 * x.memory[1] < found.bytes_ < x.memory[1]  # else this shows nothing
    assert not found.fits
    assert x.alternative(twice) is None
    assert replace(x, headroom=0.0).alternative(twice) is not None
    assert "(78.0 less 5%)" in next(why for _, p, why in explanation.why_not(x) if p.strategy == twice)


@pytest.mark.parametrize(
    ("stack", "line"),
    [
        ("megatron-core", "dp=8,zero=1,tp=8,order=tp/cp/dp/pp"),
        ("megatron-core", "dp=4,zero=1,tp=4,cp=2,pp=2,order=dp/tp/pp/cp"),
        ("megatron-core", "dp=8,zero=1,cp=8,order=cp/pp/dp/tp"),
        ("torchtitan", "dp=64,zero=3"),
        ("nanotron", "dp=8,zero=1,tp=8,order=tp/cp/dp/pp"),
    ],
)
def test_no_remedy_is_what_the_stack_refuses(stack: str, line: str) -> None:
    """A remedy had named an order, or a ZeRO level, that the same stack's export and plan refuse."""
    model, strategy = model_named("llama3-8b")[0], make_strategy(line)
    assert strategy is not None
    x = AnalyticSubject(pricing_by_gpus(model, cluster_named("dgx-h100"), 512, 512, stack), strategy, 64)
    row = DOCUMENTED[stack]
    for found in lint(x):
        for name, value in re.findall(r"\b(order|zero)=([\w/]+)", found.remedy):
            entry = row.strategy[name]
            assert entry.allows(int(value) if name == "zero" else value), found


def test_a_wide_tp_and_a_wrong_order_have_one_remedy() -> None:
    x = _subject(_LLAMA8, "dp=8,zero=1,tp=8,order=tp/cp/dp/pp")
    found = {f.name: re.findall(r"order=([\w/]+)", f.remedy) for f in lint(x)}
    assert found["wide-tp"] == found["mesh-order"] == ["pp/dp/cp/tp"]


def test_products_in_fp32_are_priced_in_16_bits(tmp_path: Path) -> None:
    """NVIDIA/Megatron-LM#1000: 20 TFLOP/s a GPU, since the script has no --bf16."""
    asked = "lint --model {} --cluster {} --gpus 8 --batch 64 --seq 1024 --strategy {} --precision {}"
    split = "zero=1,tp=8,sp=1"
    for words, half in ((("llama3-8b", "dgx-a100", split), "bf16"), (("gpt2-xl", "dgx-2", "zero=1"), "fp16")):
        found = phalanx(tmp_path, asked.format(*words, "fp32"))[1]
        assert f"precision={half} saves" in found, found
    assert "precision=" not in phalanx(tmp_path, asked.format("llama3-8b", "dgx-a100", split, "bf16"))[1]
