"""`phalanx serve plan` as a user types it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from support.in_process_cli import error_of, json_of, phalanx, text_of

from phalanx import serve_plan
from phalanx.serving import plan_file
from phalanx.serving.cost.engines import EngineConstants
from phalanx.spec.errors import InputError

_ASK = ["--model", "llama3-8b", "--cluster", "dgx-h100", "--gpus", "2", "--input", "1000", "--output", "100"]


def test_a_plan_is_found_written_and_launched(tmp_path: Path) -> None:
    words = (
        "serve",
        "plan",
        *_ASK,
        "--requests",
        "400",
        "--ttft",
        "1s",
        "--tpot",
        "30ms",
        "--price",
        "2.5",
        "--json",
    )
    code, out, err = phalanx(tmp_path, *words)
    assert (code, err) == (0, "serving plan: serving.json\n")
    found = json.loads(out)
    best = found["best"]["prediction"]
    assert best["ttft"]["p90"] <= 1.0
    assert best["tpot"]["p90"] <= 0.030
    assert best["expense"]["money"] == pytest.approx(2.5 * 2 / 3600 / best["tokens_per_s"] * 1e6)
    assert found["kv_bytes_per_token"] == 2 * 2 * 8 * 128 * 32
    for other in found["alternatives"]:
        assert other["prediction"]["ttft"]["p90"] <= 1.0
        assert other["prediction"]["tokens_per_s"] <= best["tokens_per_s"]
    fronts = [(f["prediction"]["tpot"]["p50"], f["prediction"]["tokens_per_s_per_gpu"]) for f in found["front"]]
    assert fronts == sorted(fronts)
    assert {"twice the tensor parallelism"} <= {n["change"] for n in found["neighbours"]}
    assert phalanx(tmp_path, *words)[1] == out
    for what, word in (("engine", "vllm serve meta-llama/Meta-Llama-3-8B"), ("dynamo", "DynamoGraphDeployment")):
        out = text_of(tmp_path, "serve launch serving.json --for", what)
        assert word in out
    again = text_of(tmp_path, *words[:-1], "--launch", what)
    assert again.endswith(out)
    assert again != out


def test_limits_loads_and_objectives_change_the_answer(tmp_path: Path) -> None:
    def best(*more: str, requests: int = 400) -> dict[str, object]:
        words = ("serve", "plan", *_ASK, "--mode", "aggregated", "--requests", str(requests), "--json")
        code, out, err = phalanx(tmp_path, *words, *more)
        assert code == 0, err
        return json.loads(out)["best"]["prediction"]  # type: ignore[no-any-return]

    free, strict = best(), best("--tpot", "5ms")
    assert strict["tokens_per_s"] < free["tokens_per_s"]  # type: ignore[operator]
    fast = best("--objective", "latency", "--concurrency", "1")
    assert fast["latency"]["p50"] <= strict["latency"]["p50"]  # type: ignore[index]
    slow = best("--rate", "2", "--ttft", "2s", requests=1500)
    assert slow["requests_per_s"] == pytest.approx(2, rel=0.15)
    of_16 = ("--concurrency", "16")
    plain, speculating, reusing = best(*of_16), best(*of_16, "--speculate", "3:0.8"), best(*of_16, "--reuse", "0.9")
    assert speculating["tpot"]["p50"] < plain["tpot"]["p50"]  # type: ignore[index]
    assert reusing["ttft"]["p50"] < plain["ttft"]["p50"]  # type: ignore[index]


@pytest.mark.parametrize("mode", ["both", "aggregated", "disaggregated"])
def test_neighbours_are_of_the_modes_that_are_asked_for(mode: str) -> None:
    ask: dict[str, Any] = {"model": "llama3-8b", "cluster": "dgx-h100", "gpus": 2, "weights": "bf16"}
    a = serve_plan(**ask, input=500, output=50, concurrency=8, requests=100, mode=mode)
    why = {n.change: n.reason for n in a.neighbours}
    apart = len(a.best.workers) > 1
    others = {"prefill and decode together" if apart else "prefill and decode apart"} if mode == "both" else set()
    assert {change for change in why if change.startswith("prefill")} == others
    if mode == "disaggregated":
        assert why["twice the tensor parallelism"] == "takes 2 GPUs of 2: none are left to prefill"


@pytest.mark.parametrize(("objective", "says"), [("cost", True), ("energy", True), ("throughput", False)])
def test_what_is_sought_is_printed(tmp_path: Path, objective: str, says: bool) -> None:
    line = "serve plan --model llama3-8b --cluster dgx-h100 --gpus 1 --input 100 --output 10 --layout tp=1"
    text = text_of(tmp_path, f"{line} --weights fp8 --chunk 4096 --requests 4 --rate inf --objective {objective}")
    assert ("a million tokens generated: " in text and " a GPU-hour; " in text) is says


def test_energy_is_an_objective() -> None:
    """Workers that only decode draw less: more GPUs may take less energy than fewer."""
    ask = {"model": "llama3-8b", "cluster": "dgx-h100", "gpus": 64, "input": 4000, "output": 500, "rate": 30.0}
    found = {o: serve_plan(**ask, ttft="1s", tpot="30ms", objective=o) for o in ("cost", "energy", "carbon")}
    cost, energy = found["cost"], found["energy"]
    assert cost.gpus < energy.gpus
    assert (cost.expense.energy_kwh or 0) > (energy.expense.energy_kwh or 0)
    assert found["carbon"].best == energy.best
    with pytest.raises(InputError, match="watts"):
        serve_plan(**ask | {"cluster": "mi300x"}, objective="energy")


def test_a_benchmark_is_answered_whatever_its_rate(tmp_path: Path) -> None:
    def seen(*more: str) -> dict[str, Any]:
        ask = (
            "serve plan",
            *_ASK,
            "--mode",
            "aggregated",
            "--layout",
            "tp=2",
            "--weights",
            "bf16",
            "--chunk",
            "8192",
        )
        return json_of(tmp_path, *ask, "--requests", "300", *more, "--json")["best"]["prediction"]  # type: ignore[no-any-return]

    slow, fast, at_once = seen("--rate", "2"), seen("--rate", "1000"), seen("--rate", "inf")
    accepted_s = 300 * EngineConstants().accept_s  # before which none that comes at once begins
    assert slow["makespan_s"] > fast["makespan_s"] >= at_once["makespan_s"] - accepted_s
    assert fast["ttft"]["p90"] > slow["ttft"]["p90"]
    for each in (slow, fast, at_once):
        assert each["tokens_per_s"] == pytest.approx(300 * 100 / each["makespan_s"])
    few = seen("--rate", "inf", "--concurrency", "16")
    assert few == seen("--concurrency", "16")
    assert few["in_flight"] <= 16
    assert seen("--rate", "1000", "--concurrency", "16")["in_flight"] <= 16


def test_more_requests_at_once_than_two_prompts_have_tokens_are_answered(tmp_path: Path) -> None:
    ask = "--model llama3-8b --cluster dgx-h100 --gpus 1 --layout tp=1 --input 64 --output 16 --engine sglang"
    line = f"serve plan {ask} --requests 3000 --rate inf --mode aggregated --json"
    assert json_of(tmp_path, line)["requests_per_s"] > 100


def test_a_trace_faster_than_its_answers_is_answered_too(tmp_path: Path) -> None:
    rows = [f"{i / 500:.3f},2000,200" for i in range(400)]
    (tmp_path / "t.csv").write_text("\n".join(["arrival,input,output", *rows]) + "\n")
    out = text_of(tmp_path, "serve plan", *_ASK[:6], "--trace", "t.csv", "--mode", "aggregated")
    assert "501 requests/s are " in out
    assert " that can be answered: the queue grows as long as they come" in out


def test_a_trace_is_replayed(tmp_path: Path) -> None:
    rows = [f"{i * 0.3:.1f},{500 + 10 * (i % 30)},{20 + i % 50}" for i in range(300)]
    (tmp_path / "t.csv").write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    ask = [*_ASK[:6], "--trace", "t.csv", "--mode", "aggregated"]
    best = json_of(tmp_path, "serve plan", *ask, "--ttft", "2s", "--json")["best"]
    assert best["load"]["trace"] == "t.csv"
    assert best["prediction"]["requests_per_s"] == pytest.approx(1 / 0.3, rel=0.1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--input 9000",
            "9,100 tokens is longer than the model's context, 8,192; shorten it, or choose meta-llama/Llama-3.1-8B",
        ),
        ("--layout tp=64", "--layout = 'tp=64': tp = 64 is more than heads = 32"),
        ("--layout tp=3", "tp = 3 does not divide heads = 32; on 2 GPUs use tp=2,pp=1 or tp=1,pp=2"),
        ("--layout tp=1,ep=2", "ep = 2 does not divide tp x dp = 1"),
        ("--weights nvfp4", "--weights = 'nvfp4': H100 (hopper) has no tensor cores for it; it has bf16, fp8, int4"),
        (
            "--engine orca",
            "--engine = 'orca': is not a serving engine that Phalanx knows; known: sglang, trtllm, vllm",
        ),
        ("--ttft 1ms", "--ttft: no deployment on 2 GPUs stays within the limits for 90 % of requests; the nearest,"),
        ("--ttft soon", "--ttft = 'soon': is not a time; write 1s or 30ms"),
        ("--ttft 1s --tpot 30", "--tpot = '30': has no unit; write 30s or 30ms"),
        ("--tpot 0.1ms --ttft 1s", "x; relax a limit or shorten the prompts: more GPUs alone were not found to do"),
        ("--speculate 3", "--speculate = '3': is not drafted tokens"),
        ("--rate 3 --concurrency 2", "--rate = 3.0: excludes --concurrency; choose one load"),
        ("--rate inf", "--rate = 'inf': would never end; say how many requests come at once: --requests 600"),
        ("--rate inf --requests 2147483648", "--requests = 2147483648: must be at most 1,000,000"),
        ("--rate nan --requests 9", "--rate = nan: must be from 1e-6 to 1,000,000 requests per second, or inf"),
        ("--burstiness 0", "--burstiness = 0.0: must be positive; 1 is a Poisson process"),
        ("--input 1024:1", "--input = '1024:1': goes from the larger to the smaller; write 1:1024"),
        ("--input 1x", "--input = '1x': is not a number of tokens; write 4000 or 4k, or 1:1024 for lengths between"),
        ("--input 1:900 --variation 1", "--variation = 1.0: does not go with a range of lengths; give one of them"),
        ("--model gpt3-175b --input 100", "no layout holds a request"),
        ("--gpus 1 --mode disaggregated", "one that decodes need more; give more GPUs, or --mode aggregated"),
        ("--launch vllm", "--launch = 'vllm': is not known"),
        ("--survive everything", "--survive = 'everything': is not what may be lost; write '1 node', '2 gpus' or"),
        ("--survive '1 node'", "no copy is left when 1 node is lost; give more GPUs"),
        ("--large-ep maybe", "--large-ep = 'maybe': is not known"),
        ("--deadline 5", "--deadline = '5': has no unit"),
        ("--percentile 95", "--percentile = 95: is not reported; 50, 90 or 99"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, words: str, message: str) -> None:
    code, out, err = phalanx(tmp_path, "serve plan", *_ASK, *shlex.split(words))
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert message in err


def test_the_fewest_gpus_that_hold_a_model_are_named_and_no_cache_blamed_for_its_weights(tmp_path: Path) -> None:
    """DeepSeek-V3's 671 GB need 32 of these GPUs; a layout that is named has no more of them."""
    words = "serve plan --model deepseek-v3 --cluster pcie-rtx4090 --gpus 24 --input 1000 --output 200 --rate 1"
    found = error_of(tmp_path, words)
    assert "; 32 GPUs hold one; or use smaller weights (--weights)\n" in found
    fixed = error_of(tmp_path, f"{words} --layout tp=4,pp=6")
    assert "--layout = 'tp=4,pp=6,dp=1,ep=1': holds no request: in fp8, weights take" in fixed
    assert fixed.endswith("; another layout, or smaller weights (--weights)\n")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("-1,5,5", "--trace t.csv, row 2, arrival = '-1': must not be negative"),
        ("1,5,0", "row 2, output = '0': must be from 1 to 1e12"),
        ("1,5,5\n0.5,5,5", "row 3, arrival = '0.5': is before the row above; sort the trace by time"),
        ("1,x,5", "row 2, input = 'x': is not a number"),
        ("nan,5,5", "row 2, arrival = 'nan': must be from 0 to 1e12"),
        ("1,9000,5", "--trace: a request of 9,005 tokens is longer than the model's context, 8,192"),
        ("", "has no requests"),
    ],
)
def test_a_bad_trace_is_one_line(tmp_path: Path, row: str, message: str) -> None:
    (tmp_path / "t.csv").write_text(f"arrival,input,output\n{row}\n")
    err = error_of(tmp_path, "serve plan", *_ASK[:6], "--trace", "t.csv")
    assert err.count("\n") == 1
    assert message in err


def test_python_and_the_command_give_one_answer(tmp_path: Path) -> None:
    words = ["serve", "plan", *_ASK, "--mode", "aggregated", "--requests", "200", "--json"]
    printed = json.loads(phalanx(tmp_path, *words)[1])
    fields = dict(zip((option.removeprefix("--") for option in _ASK[::2]), _ASK[1::2], strict=True))
    numbers = {name: int(value) for name, value in fields.items() if value.isdigit()}
    answer = serve_plan(**(fields | numbers), mode="aggregated", requests=200)
    assert json.loads(json.dumps(answer.to_dict())) == printed
    assert answer.plan == plan_file.read(tmp_path / "serving.json")
