"""A line's server that does not start, and what is said of one without a load."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.in_process_cli import phalanx, text_of

from phalanx.planning.lookup import model_named
from phalanx.serving.answer import serve_plan
from phalanx.serving.launch.arguments import published
from phalanx.serving.simulation.engines import engine, state_pages

_MOE = "vllm serve Qwen/Qwen3-30B-A3B -dp 2 --enable-expert-parallel --max-model-len"
_LOAD = ["--input", "1024", "--output", "8", "--requests", "4"]
_ASK = ["serve", "plan", "--from", "run.sh", "--cluster", "dgx-h100"]


@pytest.mark.parametrize("load", [[], _LOAD])
def test_a_server_that_does_not_start_fails_and_leaves_no_plan(tmp_path: Path, load: list[str]) -> None:
    """The verdict is the first line, and no speed of it is printed."""
    (tmp_path / "run.sh").write_text(f"{_MOE} 262144 --gpu-memory-utilization 0.55")
    code, out, err = phalanx(tmp_path, *_ASK, *load, "--launch", "engine")
    assert (code, out.splitlines()[0].partition(":")[0]) == (1, "does not start")
    assert "no serving plan is written" in err
    assert not (tmp_path / "serving.json").exists()
    assert "tokens/s" not in out
    assert "TTFT" not in out
    assert "vllm serve Qwen" not in out
    code, out, _ = phalanx(tmp_path, *_ASK, *load, "--json")
    assert (code, json.loads(out)["caveats"][0].partition(":")[0]) == (1, "does not start")


def test_without_a_load_the_cache_and_the_longest_request_are_said(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(f"{_MOE} 8192")
    code, out, _ = phalanx(tmp_path, *_ASK)
    assert code == 0
    first, *rest = out.splitlines()
    assert first == "starts, as far as memory says: tp=1,dp=2,ep=2, bf16, 2 x GPU"
    said = "".join(rest)
    assert "the longest request of 8,192 tokens fits" in said
    assert "92% of 79.6 GiB" in said
    assert f"by the default of vLLM {published('vllm').version}" in said
    room = json.loads(phalanx(tmp_path, *_ASK, "--json")[1])
    assert f"{room['cache_tokens']:,} tokens in each of 2 replicas, {2 * room['cache_tokens']:,}" in said
    loaded = serve_plan(source=[tmp_path / "run.sh"], cluster="dgx-h100", input=8191, output=1, requests=2)
    assert room["cache_tokens"] == loaded.plan.workers[0].cache_tokens // 2
    assert loaded.requests_that_fit == 2 * (room["cache_tokens"] // 8192)


def test_weights_that_leave_no_cache_do_not_start(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("python -m sglang.launch_server --model meta-llama/Llama-3.1-70B --tp 1")
    code, out, _ = phalanx(tmp_path, *_ASK)
    assert (code, out.startswith("does not start: weights take 131.")) == (1, True)


@pytest.mark.parametrize(
    ("name", "words", "weights"),
    [
        ("qwen3.6-35b-a3b-nvfp4", "--quantization modelopt", "nvfp4"),
        ("qwen3.6-35b-a3b", "--quantization modelopt", "fp8"),
        ("qwen3.6-35b-a3b-nvfp4", "--quantization fp8", "fp8"),
    ],
)
def test_of_modelopts_formats_the_checkpoint_says_which(tmp_path: Path, name: str, words: str, weights: str) -> None:
    """On an RTX 5090, where weights of 8 bits leave no cache (noonghunna/club-3090#612). A checkpoint of which only
    the name is known may keep more in 16 bits, which is said."""
    (tmp_path / "run.sh").write_text(
        f"vllm serve ~/models/{name} {words} --kv-cache-dtype fp8 --max-model-len 131072"
    )
    code, out, _ = phalanx(tmp_path, "serve plan --from run.sh --cluster rtx-5090")
    assert code == (0 if weights == "nvfp4" else 1)
    assert out.startswith(
        f"starts, as far as memory says: tp=1, {weights}" if code == 0 else "does not start: weights"
    )
    assert ("assumed: all matrices of the layers are in nvfp4" in out) == (weights == "nvfp4")


@pytest.mark.parametrize(
    "bench",
    [
        "inference-benchmarker --no-console --url http://a --max-vus 800 --rates 1.0 --rates 10.0",
        "inference-perf --config_file c.yml",
        "python token_benchmark_ray.py --model x --max-num-completed-requests 9",
    ],
)
def test_a_benchmark_that_is_not_read_is_named(tmp_path: Path, bench: str) -> None:
    (tmp_path / "run.sh").write_text(f"{_MOE} 8192 &\n{bench}\n")
    name = bench.removeprefix("python ").split()[0].removesuffix(".py")
    for load in ([], _LOAD):
        code, out, _ = phalanx(tmp_path, *_ASK, *load)
        assert code == 0
        assert f"not judged: line 2 starts {name}: its load is not read" in out
    assert phalanx(tmp_path, *_ASK, "--strict")[0] == 1


def test_a_benchmark_of_a_file_still_needs_its_lengths(tmp_path: Path) -> None:
    bench = "vllm bench serve --model Qwen/Qwen3-30B-A3B --dataset-name custom --num-prompts 5"
    (tmp_path / "run.sh").write_text(f"{_MOE} 8192 &\n{bench}\n")
    code, _, err = phalanx(tmp_path, *_ASK)
    assert (code, "the lengths of custom are not in the line" in err) == (2, True)


def test_attention_groups_of_a_neighbour_share_a_step_of_prompts(tmp_path: Path) -> None:
    """SGLang's chunked_prefill_size is of all groups: with a whole one for each, its own rule left no room for
    weights (16 % of a GPU), though the same server by its own line starts."""
    launched = "python3 -m sglang.launch_server --model deepseek-ai/DeepSeek-V3 --tp 8"
    (tmp_path / "run.sh").write_text(f"{launched}\n")
    ask = dict(source=[tmp_path / "run.sh"], cluster="dgx-h200", input=128, output=16, requests=8)
    neighbours = {n.change: n for n in serve_plan(**ask).neighbours}
    assert neighbours["attention data parallelism"].candidate is not None
    (tmp_path / "run.sh").write_text(f"{launched} --enable-dp-attention --dp-size 8\n")
    assert serve_plan(**ask).plan.workers[0].attention_dp == 8


def test_money_has_the_range_of_the_tokens(tmp_path: Path) -> None:
    """A burst has a range of tokens/s, and so have a million of them; a load that is kept up with has neither."""
    ask = dict(model="llama3-8b", cluster="dgx-h100", gpus=1, input=256, output=64, engine="vllm")
    burst = serve_plan(**ask, requests=40, rate=float("inf"))
    rate = next(r for r in burst.likely if r.figure == "tokens_per_s")
    cost = burst.expense
    assert cost.money is not None
    assert cost.money_low is not None
    assert cost.money_high is not None
    assert cost.money_low * rate.high == pytest.approx(cost.money * burst.tokens_per_s)
    assert cost.money_high * rate.low == pytest.approx(cost.money * burst.tokens_per_s)
    assert serve_plan(**ask, rate=1.0).expense.money_low is None


@pytest.mark.parametrize(
    ("line", "cluster", "tokens", "said"),
    [
        # vllm-project/vllm#12569: 1,381 blocks of 16
        (
            "neuralmagic/Meta-Llama-3.1-70B-Instruct-quantized.w8a8 --max-model-len 2048 "
            "--gpu-memory-utilization 0.98",
            *("dgx-h100", 22_096, "weights of int8 take the bytes"),
        ),
        # vllm-project/vllm#34076: 24 GiB of 262,144 tokens
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct-FP8 -pp 2", "pcie-rtx5090", 289_000, "longest request of 262,144 tokens"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507-FP8 -pp 2", "pcie-rtx5090", 289_000, "longest request of 262,144 tokens"),
        ("Qwen/Qwen3-30B-A3B-FP8 -pp 2", "pcie-rtx5090", 289_000, "longest request of 40,960 tokens"),
    ],
)
def test_a_checkpoint_by_name_has_its_own_types_and_context(
    tmp_path: Path, line: str, cluster: str, tokens: int, said: str
) -> None:
    (tmp_path / "s.sh").write_text(f"vllm serve {line}\n")
    out = text_of(tmp_path, f"serve plan --from s.sh --cluster {cluster}")
    assert said in out
    cached = int(out.partition("KV cache: ")[2].partition(" tokens")[0].replace(",", ""))
    assert cached == pytest.approx(tokens, rel=0.05)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (
            "docker run --gpus all vllm/vllm-openai:v0.6.3 --model Qwen/Qwen3-8B",
            "where the script has 0.6.3, whose prompts have steps of their own",
        ),
        ("pip install vllm==0.11.0\nvllm serve Qwen/Qwen3-8B", "where the script has 0.11.0\n"),
        ('pip install "sglang[all]==0.4.6"\npython -m sglang.launch_server --model Qwen/Qwen3-8B', "has 0.4.6\n"),
        ("docker run vllm/vllm-openai:latest --model Qwen/Qwen3-8B", ""),
        (f"pip install vllm=={published('vllm').version}\nvllm serve Qwen/Qwen3-8B", ""),
    ],
)
def test_an_older_release_is_said_whose_defaults_are_not_taken(tmp_path: Path, script: str, said: str) -> None:
    (tmp_path / "s.sh").write_text(f"{script}\n")
    out = text_of(tmp_path, "serve plan --from s.sh --cluster dgx-h100")
    assert said in out
    assert ("assumed: the defaults of" in out) == bool(said)


@pytest.mark.parametrize(
    ("line", "most"),
    [
        ("sglang serve --model-path Qwen/Qwen3-8B --cuda-graph-max-bs 64", 64),
        ("vllm serve Qwen/Qwen3-8B --max-cudagraph-capture-size 256", 256),
        ("trtllm-serve Qwen/Qwen3-8B", 32),
        ("vllm serve Qwen/Qwen3-8B", None),
    ],
)
def test_a_line_says_how_many_sequences_graphs_are_captured_for(tmp_path: Path, line: str, most: int | None) -> None:
    (tmp_path / "s.sh").write_text(f"{line}\n")
    load = dict(input=500, output=50, concurrency=8, gpus=1)
    answer = serve_plan(source=[tmp_path / "s.sh"], cluster="dgx-h100", **load)  # type: ignore[arg-type]
    assert answer.search.question.graphs == most
    assert any(f"graphs are priced for up to {most}" in note for note in answer.notes) == (most is not None)


@pytest.mark.parametrize(
    ("words", "card", "counted", "first"),
    [
        ("Qwen/Qwen3.8-27B --gpu-memory-utilization 0.95", "rtx-pro-6000", 556, "does not start"),
        ("Qwen/Qwen3.8-27B-FP8", "rtx-pro-6000", 939, "uncertain"),
        ("Qwen/Qwen3.5-4B --gpu-memory-utilization 0.50", "rtx-4090", 73, "does not start"),
        ("Qwen/Qwen3.8-27B-FP8 --enforce-eager", "rtx-pro-6000", 0, ""),
        ("Qwen/Qwen3.8-27B-FP8 --max-num-seqs 512", "rtx-pro-6000", 939, ""),
        ("Qwen/Qwen3-32B-FP8", "rtx-pro-6000", 0, ""),
    ],
)
def test_requests_at_once_need_a_page_of_recurrent_states(
    tmp_path: Path, words: str, card: str, counted: int, first: str
) -> None:
    """vLLM 0.20 and later stop where fewer are left than --max-num-seqs, by default 1,024 or 256. The number of which
    it is said that it starts is at most what engines counted (vllm-project/recipes#831, and a log of Qwen3.5-4B)."""
    (tmp_path / "run.sh").write_text(f"vllm serve {words} --max-model-len 8192")
    code, out, _ = phalanx(tmp_path, "serve plan --from run.sh --cluster", card)
    said = next((line for line in out.splitlines() if "recurrent states" in line), "")
    assert said.startswith(first)
    assert (code, bool(said)) == (int(first == "does not start"), bool(first))
    if said:
        assert 0.5 * counted < int(said.partition("--max-num-seqs ")[2].partition(",")[0]) <= counted


def test_pages_of_states_are_as_many_as_a_server_counted() -> None:
    """Qwen3.5 of 9 B in vLLM 0.27.1: "max_num_seqs (256) exceeds available Mamba cache blocks (108)" of 1.74 GiB."""
    model, _ = model_named("Qwen/Qwen3.5-9B")
    assert state_pages(engine("vllm"), model, 1.74 * 2**30, 1, 1) == 108
