"""`serve plan --from`: the answer of a server's and a benchmark's lines is that of the same question in options."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.in_process_cli import error_of, phalanx
from support.sizes import examples

from phalanx.serving.lines.reading import read

_GIVEN = {"cluster": "dgx-h100"}
_SGLANG = "python -m sglang.launch_server --model"
_FIRST = "--disaggregation-mode prefill"
_DRAWN = "prepare_dataset.py token-norm-dist --num-requests 50 --input-mean 90 --output-mean 30 --input-stdev 9"
_DRAWN += " --output-stdev 3"
_GUIDED = "guidellm benchmark --model llama3-8b --data prompt_tokens=90,output_tokens=30"
_BENCH = "vllm bench serve --model meta-llama/Llama-3.1-8B-Instruct --random-input-len 500 --random-output-len 60"


def _read(tmp_path: Path, text: str, **given: Any) -> dict[str, Any]:
    (tmp_path / "run.sh").write_text(text)
    return dict(read([tmp_path / "run.sh"], _GIVEN | given).fields)


@examples(4, 60)
def test_lines_and_options_give_one_answer(examples: int, tmp_path: Path) -> None:
    draw = np.random.default_rng(11)
    for _ in range(examples):
        tp, n, slots = int(draw.choice((1, 2))), int(draw.integers(5, 60)), int(draw.choice((7, 64)))
        load = draw.choice(("--request-rate 30", "--request-rate inf", "--max-concurrency 8", ""))
        rate = {"--request-rate 30": "30"}.get(str(load), "inf")
        server = f"vllm serve meta-llama/Llama-3.1-8B-Instruct -tp {tp} --max-num-seqs {slots}"
        server += " --max-num-batched-tokens 4096"
        (tmp_path / "run.sh").write_text(f"{server} &\n{_BENCH} --num-prompts {n} {load}\n")
        same = [
            "--model",
            "meta-llama/Llama-3.1-8B-Instruct",
            "--gpus",
            str(tp),
            "--layout",
            f"tp={tp}",
            "--input",
            "500",
            "--output",
            "60",
        ]
        same += [
            "--requests",
            str(n),
            "--rate",
            rate,
            "--weights",
            "bf16",
            "--mode",
            "aggregated",
        ]
        same += ["--slots", str(slots), "--chunk", "4096", *(["--concurrency", "8"] if "max" in str(load) else [])]
        ask = ["serve", "plan", "--cluster", "dgx-h100", "--json"]
        answers = [phalanx(tmp_path, *ask, *how) for how in (["--from", "run.sh"], same)]
        assert [code for code, *_ in answers] == [0, 0], answers
        assert json.loads(answers[0][1]) == json.loads(answers[1][1])


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        (
            "vllm serve meta-llama/Llama-3.1-70B-Instruct-FP8 -tp 4 -pp 2",
            {
                "model": "meta-llama/Llama-3.1-70B-Instruct-FP8",
                **{"layout": "tp=4,pp=2", "gpus": 8, "weights": "fp8", "chunk": 8192, "slots": 1024},
            },
        ),
        ("vllm serve meta-llama/Llama-3.1-8B -dp 4", {"layout": "tp=1", "gpus": 4}),
        (
            "vllm serve deepseek-ai/DeepSeek-V3 -dp 8 --enable-expert-parallel",
            {"layout": "tp=1,dp=8,ep=8", "gpus": 8, "weights": "fp8"},
        ),
        (
            f"{_SGLANG} deepseek-ai/DeepSeek-R1 --tp 16 --dp 16 --enable-dp-attention --max-running-requests 64",
            {"layout": "tp=1,dp=16", "gpus": 16, "slots": 4},
        ),
        (
            "python -m sglang.launch_server --model meta-llama/Llama-3.1-8B --tp 2 --dp 2",
            {"layout": "tp=2", "gpus": 4},
        ),
        ("trtllm-serve meta-llama/Llama-3.1-8B --tp_size 2", {"engine": "trtllm", "slots": 2048, "chunk": 8192}),
        (
            "vllm serve casperhansen/llama-3-70b-instruct-awq --kv-cache-dtype fp8_e5m2",
            {"weights": "int4", "cache": "fp8"},
        ),
        (
            "trtllm-serve meta-llama/Llama-3.1-8B --kv_cache_free_gpu_memory_fraction 0.8",
            {"memory": 0.8, "cache": "bf16"},
        ),
        ("vllm serve nvidia/Llama-3.1-8B-Instruct-FP8", {"weights": "fp8", "cache": "fp8"}),
        ("vllm serve nvidia/Llama-3.1-8B-Instruct-FP8 --kv-cache-dtype bfloat16", {"cache": "bf16"}),
    ],
)
def test_a_server_says_model_layout_and_limits(tmp_path: Path, text: str, fields: dict[str, Any]) -> None:
    got = _read(tmp_path, text, input=100, output=10)
    assert {name: got.get(name) for name in fields} == fields


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        (
            "vllm bench serve --model llama3-8b",
            {"requests": 1000, "rate": float("inf"), "input": 1024, "output": 128},
        ),
        ("vllm bench serve --model llama3-8b --random-range-ratio 0.5", {"input": "512:1536", "output": "64:192"}),
        ("benchmark_serving.py --model llama3-8b --dataset-name random --random-range-ratio 1.0", {"input": 1024}),
        (
            "vllm bench serve --model llama3-8b --dataset-name sharegpt",
            {"input": 220, "output": 200, "variation": 1.0, "requests": 1000},
        ),
        (
            "vllm bench serve --model llama3-8b --dataset-name sharegpt --sharegpt-output-len 64",
            {"input": 220, "output": 64},
        ),
        ("python -m sglang.bench_serving --model llama3-8b --num-prompt 9", {"input": 300, "output": 195}),
        ("benchmark_throughput.py --dataset a/ShareGPT.json --model llama3-8b", {"input": 220, "variation": 1.0}),
        ("vllm bench throughput --model llama3-8b --dataset-path a.json --output-len 8", {"input": 220, "output": 8}),
        ("vllm bench throughput --model llama3-8b --input-len 9 --output-len 8", {"input": 9, "variation": None}),
        (
            "vllm bench serve --model llama3-8b --random-prefix-len 1024 --burstiness 0.5",
            {"input": 2048, "reuse": 0.5, "burstiness": 0.5},
        ),
        (
            "vllm bench serve --model llama3-8b --random-prefix-len 7999 --random-input-len 1",
            {"input": 8000, "reuse": 0.99},
        ),
        (
            "python -m sglang.bench_serving --model llama3-8b --dataset-name random",
            {"input": "1:1024", "output": "1:1024"},
        ),
        (
            "python -m sglang.bench_serving --model llama3-8b --dataset-name random --random-range-ratio 1",
            {"input": 1024},
        ),
        (
            "vllm bench latency --model llama3-8b --batch-size 4",
            {"requests": 4, "input": 32, "gpus": 1, "layout": "tp=1"},
        ),
        (
            "python -m sglang.bench_one_batch_server --model-path llama3-8b --batch-size 16 --tp 2",
            {"requests": 16, "output": 16, "gpus": 2},
        ),
        (
            "genai-perf profile -m llama3-8b --osl 100 --request-rate 5 --request-rate-mode constant",
            {"input": 550, "burstiness": float("inf"), "rate": 5.0},
        ),
        (
            f"{_DRAWN}\ntrtllm-bench -m llama3-8b throughput --concurrency 5",
            {"requests": 50, "input": 90, "output": 30, "concurrency": 5, "variation": 0.1},
        ),
    ],
)
def test_a_benchmark_says_its_load(tmp_path: Path, text: str, fields: dict[str, Any]) -> None:
    got = _read(tmp_path, text)
    assert {name: got.get(name) for name in fields} == fields


def test_sglang_keeps_latents_with_an_index_in_8_bits_on_blackwell(tmp_path: Path) -> None:
    line = f"{_SGLANG} deepseek-ai/DeepSeek-V3.2 --tp 8 --dp 8 --enable-dp-attention"
    sizes = {"input": 100, "output": 10}
    caches = [_read(tmp_path, line, cluster=c, **sizes)["cache"] for c in ("dgx-b200", "dgx-h200")]
    assert caches == ["fp8", "bf16"]


def test_lengths_of_a_published_data_set_are_assumed_and_said(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("vllm bench serve --model llama3-8b --dataset-name sharegpt")
    for given, said in (({}, "means of 220 and 200"), ({"input": 9}, "means of 9 and 200")):
        (caveat,) = (c for c in read([tmp_path / "run.sh"], _GIVEN | given).caveats if "lengths of sharegpt" in c)
        assert said in caveat
    known = read([tmp_path / "run.sh"], _GIVEN | {"input": 9, "output": 8})
    assert "variation" not in known.fields
    assert not any("lengths" in c for c in known.caveats)


def test_options_go_before_lines(tmp_path: Path) -> None:
    got = _read(tmp_path, f"{_BENCH} --request-rate 3", model="llama3-70b", concurrency=9, input=77)
    assert (got["model"], got["concurrency"], got["input"], got.get("rate")) == ("llama3-70b", 9, 77, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "starts no server and no benchmark"),
        ("python train.py --lr 3", "starts no server and no benchmark; give a line of vllm serve,"),
        ("vllm serve llama3-8b\nvllm serve llama3-70b", "starts 2 servers, in lines 1, 2; leave one of them"),
        (
            "for C in 1 4; do vllm bench throughput --model llama3-8b --input-len $C --output-len 9; done",
            "line 1 starts 2 benchmarks, in a loop; leave it one value",
        ),
        (
            f"{_SGLANG} llama3-8b {_FIRST}\n{_SGLANG} llama3-8b --tp 2 {_FIRST}",
            "the servers in lines 1, 2 prefill and decode apart, and are not read as two parts; leave one line of",
        ),
        (
            f"{_SGLANG} llama3-8b {_FIRST}\n{_SGLANG} llama3-70b --disaggregation-mode decode",
            "the servers of lines 1 and 2 differ in model",
        ),
        ("vllm bench serve --model foo/bar", "--model: foo/bar is not a model that is known; give its config.json"),
        ("vllm bench serve", "--model: missing: the file does not say it"),
        ("vllm bench serve --model llama3-8b --dataset-name custom", "--input: missing: the lengths of custom"),
        ("vllm serve llama3-8b -tp 0", "line 1: tp must be a whole number, at least 1"),
        ("vllm serve llama3-8b -tp two", "line 1: tp must be a whole number, at least 1"),
        (
            "python -m sglang.launch_server --model llama3-8b --tp 4 --dp 3 --enable-dp-attention",
            "does not divide tp 4",
        ),
        (
            f"{_GUIDED} --profile concurrent --rate {','.join(map(str, range(1, 99)))}",
            "= 98: are more loads than are answered, 32; leave some of them",
        ),
        ("vllm bench serve --model llama3-8b --random-range-ratio 7", "the ratio of lengths must be from 0 to 1"),
        ('vllm bench serve --model "llama3-8b', "quote"),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "run.sh").write_text(text)
    err = error_of(tmp_path, "serve plan --from run.sh --cluster dgx-h100")
    assert err.count("\n") == 1
    assert message in err


def test_strict_fails_where_something_matters(tmp_path: Path) -> None:
    server = "vllm serve meta-llama/Llama-3.1-8B --max-num-seqs 64"
    for extra, code in (("", 0), (" --monokernel", 1), (" --frobnicate 3", 1)):
        (tmp_path / "run.sh").write_text(f"{server}{extra}\n{_BENCH} --num-prompts 20\n")
        ask = ("serve", "plan", "--from", "run.sh", "--cluster", "dgx-h100", "--strict")
        got, out, _ = phalanx(tmp_path, *ask)
        assert got == code
        assert out.startswith({"": "vLLM on", " --monokernel": "not modelled:"}.get(extra, "not judged:"))
        caveats = json.loads(phalanx(tmp_path, *ask, "--json")[1])["caveats"]
        assert bool(caveats) == bool(extra)


@pytest.mark.parametrize(("cluster", "chunk"), [("dgx-h100", 8192), ("dgx-b200", 16384), ("l4", 4096)])
def test_sglang_chooses_the_tokens_of_a_step_of_prompts_by_the_gpu(tmp_path: Path, cluster: str, chunk: int) -> None:
    line = f"{_SGLANG} meta-llama/Llama-3.1-8B-Instruct"
    assert _read(tmp_path, f"{line}\n{_BENCH}", cluster=cluster)["chunk"] == chunk
    assert _read(tmp_path, f"{line} --chunked-prefill-size 1000\n{_BENCH}", cluster=cluster)["chunk"] == 1000


@pytest.mark.parametrize(
    ("text", "loads"),
    [
        (f"{_GUIDED} --rate-type synchronous --max-requests 7", [{"concurrency": 1, "requests": 7}]),
        (f"{_GUIDED} --profile concurrent --rate 2,8", [{"concurrency": 2}, {"concurrency": 8}]),
        (f"{_GUIDED} --profile throughput --rate 64", [{"concurrency": 64}]),
        (
            f"{_GUIDED} --profile constant --rate 2 --max-seconds 30",
            [{"rate": 2.0, "requests": 60, "burstiness": math.inf}],
        ),
        (f"{_GUIDED} --profile poisson --rate 2 --rate 3.5", [{"rate": 2.0, "burstiness": None}, {"rate": 3.5}]),
        (_GUIDED, [{"concurrency": 1}, {"concurrency": 512}]),
        (
            "guidellm run --model llama3-8b --profile kind=constant,rate=9 --override profile.rate 2,4 --constraint "
            'kind=max_duration,seconds=5 --data \'{"prompt_tokens": 90, "output_tokens": 30}\'',
            [{"rate": 2.0, "requests": 10}, {"rate": 4.0, "requests": 20}],
        ),
        (
            "guidellm run --model llama3-8b --profile '{kind: concurrent, streams: [1, 4]}' --data "
            "kind=synthetic_text,prompt_tokens=90,output_tokens=30,prompt_tokens_stdev=9,output_tokens_stdev=3",
            [{"concurrency": 1, "variation": 0.1}, {"concurrency": 4}],
        ),
        (
            "for C in 1 4; do vllm bench serve --model llama3-8b --random-input-len 90 --random-output-len 30 "
            "--num-prompts $C --max-concurrency $C; done",
            [{"concurrency": 1, "requests": 1}, {"concurrency": 4, "requests": 4}],
        ),
        (
            "python -m sglang.bench_one_batch --model llama3-8b --batch 1 16 --input-len 90 --output-len 30",
            [{"requests": 1}, {"requests": 16}],
        ),
    ],
)
def test_a_file_may_have_several_loads(tmp_path: Path, text: str, loads: list[dict[str, Any]]) -> None:
    (tmp_path / "run.sh").write_text(f"vllm serve llama3-8b\n{text}\n" if "bench_one" not in text else text)
    found = read([tmp_path / "run.sh"], _GIVEN)
    every = found.sweep or (found.fields,)
    assert [{name: got.get(name) for name in load} for got, load in zip(every, loads, strict=True)] == loads
    assert {(got["input"], got["output"]) for got in every} == {(90, 30)}
    assert bool(found.rates) == (text == _GUIDED)
    assert not any("not judged" in caveat for caveat in found.caveats)


def test_a_data_set_of_guidellm_has_no_lengths(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("guidellm benchmark --model llama3-8b --data a/b --profile synchronous")
    assert "the lengths of a/b are not in the line" in error_of(tmp_path, "serve plan --from run.sh --cluster h100")


@pytest.mark.parametrize(
    ("server", "graphs"),
    [
        ("vllm serve meta-llama/Llama-3.1-8B --enforce-eager", 0),
        ("vllm serve meta-llama/Llama-3.1-8B --no-enforce-eager", None),
        ("vllm serve meta-llama/Llama-3.1-8B --max-cudagraph-capture-size 64", 64),
        ("vllm serve meta-llama/Llama-3.1-8B --max-cudagraph-capture-size 64 --enforce-eager", 0),
        ("python -m sglang.launch_server --model-path meta-llama/Llama-3.1-8B --disable-cuda-graph", 0),
        ("vllm bench throughput --model meta-llama/Llama-3.1-8B --enforce-eager --input-len 9 --output-len 9", 0),
    ],
)
def test_a_server_without_graphs_is_priced_so_and_says_what_it_assumes(
    tmp_path: Path, server: str, graphs: int | None
) -> None:
    (tmp_path / "run.sh").write_text(f"{server}\n{_BENCH if 'throughput' not in server else ''}\n")
    answer = read([tmp_path / "run.sh"], {"cluster": "dgx-h100"})
    assert answer.fields.get("graphs") == graphs
    assert any("without CUDA graphs" in caveat for caveat in answer.caveats) == (graphs == 0)
    assert not any("eager" in caveat or "disable-cuda-graph" in caveat for caveat in answer.caveats)


_ROLE = '--kv-transfer-config \'{{"kv_connector": "NixlConnector", "kv_role": "kv_{}"}}\''
_PRODUCER, _CONSUMER = _ROLE.format("producer"), _ROLE.format("consumer")


@pytest.mark.parametrize(
    ("text", "layout", "gpus"),
    [
        (
            f"{_SGLANG} llama3-8b --disaggregation-mode prefill --port 1\n"
            f"{_SGLANG} llama3-8b --tp 2 --disaggregation-mode decode --port 2",
            "1 x tp=1 + 1 x tp=2",
            3,
        ),
        (  # the part that decodes may be first, and equal lines on other ports are more workers
            f"{_SGLANG} llama3-8b --tp 2 --disaggregation-mode decode --port 1\n"
            f"for P in 2 3 4; do {_SGLANG} llama3-8b --disaggregation-mode prefill --port $P & done",
            "3 x tp=1 + 1 x tp=2",
            5,
        ),
        (  # the nodes of one server listen on hosts of their own
            *(
                "\n".join(
                    f"{_SGLANG} llama3-8b --tp 8 --nnodes 2 --node-rank {rank} --host h{rank} --dist-init-addr h0:5 "
                    "--disaggregation-mode prefill"
                    for rank in (0, 1)
                )
                + f"\n{_SGLANG} llama3-8b --disaggregation-mode decode",
                "1 x tp=8 + 1 x tp=1",
                9,
            ),
        ),
        (f"vllm serve llama3-8b {_PRODUCER}\nvllm serve llama3-8b -tp 4 {_CONSUMER}", "1 x tp=1 + 1 x tp=4", 5),
        (
            f"python -m dynamo.vllm --model llama3-8b --is-prefill-worker &\nvllm serve llama3-8b -tp 2 {_CONSUMER}",
            "1 x tp=1 + 1 x tp=2",
            3,
        ),
    ],
)
def test_servers_that_prefill_and_decode_apart_are_one_question(
    tmp_path: Path, text: str, layout: str, gpus: int
) -> None:
    (tmp_path / "run.sh").write_text(f"{text}\n")
    answer = read([tmp_path / "run.sh"], {"cluster": "dgx-h100", "input": 100, "output": 10})
    got = answer.fields
    assert (got["layout"], got["gpus"], got["mode"]) == (layout, gpus, "disaggregated")
    assert not any("disaggregation-mode" in caveat or "kv-transfer" in caveat for caveat in answer.caveats)


def test_limits_are_each_of_the_server_that_they_bind(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(
        f"vllm serve llama3-8b --max-num-batched-tokens 4096 --max-num-seqs 7 {_PRODUCER}\n"
        f"vllm serve llama3-8b --max-num-batched-tokens 9999 --max-num-seqs 33 {_CONSUMER}\n"
        f"{_BENCH} --max-concurrency 8 --num-prompts 40\n"
    )
    code, out, err = phalanx(tmp_path, "serve", "plan", "--from", "run.sh", "--cluster", "dgx-h100", "--json")
    assert not code, err
    plan = json.loads(out)
    first, then = plan["best"]["workers"]
    assert [w["count"] for w in (first, then)] == [1, 1]
    assert first["step_tokens"] == 4096
    assert then["slots"] <= 33
    assert not plan["likely"]  # no such run is published
