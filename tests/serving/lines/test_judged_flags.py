"""Flags of engines and benchmarks: each has a verdict with its line, what a row takes has a price."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from phalanx.frameworks.verdicts import load
from phalanx.serving import lines as room
from phalanx.serving.launch.arguments import published
from phalanx.serving.lines.programs import PROGRAMS, Program, lines

_VERDICTS = Path(room.__file__).parent / "verdicts"


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_every_flag_of_an_engine_stands_in_its_list(engine: str) -> None:
    table, options = load(_VERDICTS / f"{engine}.toml"), published(engine)
    names = {name.lstrip("-").replace("-", "_") for name in (*options.flags, *options.values)} - {"help"}
    assert not names - table.keys()
    unjudged = [name for name in names if not table[name].effect]
    assert len(unjudged) <= 0.06 * len(names), unjudged
    for name, verdict in table.items():
        assert re.search(r"\.py:\w+$", verdict.source), name


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=list(PROGRAMS))
def test_what_a_program_takes_has_a_price(program: Program) -> None:
    for name in program.flags:
        verdict = program.verdict(name)
        assert verdict is not None, name
        assert verdict.effect in ("layout", "time", "memory"), name
    for other, name in program.also.items():
        assert program.full_name(other.replace("_", "-")) == name, other
        assert program.verdict(name) is not None, name
    assert program.source


@pytest.mark.parametrize(
    ("text", "title", "flags"),
    [
        ("vllm serve m/x -tp 4", "vllm_serve", {"model": "m/x", "tensor_parallel_size": 4}),
        ("A=2; vllm serve m/x --tensor-parallel-size=$A", "vllm_serve", {"model": "m/x", "tensor_parallel_size": 2}),
        (
            "vllm serve m/x -dp 8 -dpl 4 -ep -dcp 2 -n 2 -r 1",
            "vllm_serve",
            {
                "model": "m/x",
                "data_parallel_size": 8,
                "data_parallel_size_local": 4,
                "enable_expert_parallel": True,
                "decode_context_parallel_size": 2,
                "nnodes": 2,
                "node_rank": 1,
            },
        ),
        ("vllm serve --trust-remote-code m/x", "vllm_serve", {"model": "m/x", "trust_remote_code": True}),
        ("vllm serve m/x --enforce-eager $MORE", "vllm_serve", {"model": "m/x", "enforce_eager": True}),
        ("vllm serve m/x --max-model-len 99 $EXTRA_ARGS", "vllm_serve", {"model": "m/x", "max_model_len": 99}),
        (
            "nohup env X=1 python3 -m vllm.entrypoints.openai.api_server --model m/x &",
            "vllm_api_server",
            {"model": "m/x"},
        ),
        (
            "docker run --gpus all --name vllm -v a:b vllm/vllm-openai:v0.9 --model m/x",
            "vllm_serve",
            {"model": "m/x"},
        ),
        (
            "docker run lmsysorg/sglang python3 -m sglang.launch_server --model m/x",
            "sglang_server",
            {"model_path": "m/x"},
        ),
        (
            "srun -N 1 python -m sglang.launch_server --model-path m/x --tp 8",
            "sglang_server",
            {"model_path": "m/x", "tp_size": 8},
        ),
        (
            "mpirun -n 8 trtllm-llmapi-launch trtllm-serve m/x --tp_size 8",
            "trtllm_serve",
            {"model": "m/x", "tensor_parallel_size": 8},
        ),
        ("trtllm-serve serve m/x", "trtllm_serve", {"model": "m/x"}),
        (
            "vllm bench serve --num-prompts 9 \\\n --request-rate inf",
            "vllm_bench_serve",
            {"num_prompts": 9, "request_rate": "inf"},
        ),
        ("python a/b/benchmark_serving.py --num-prompts 9", "vllm_benchmark_serving", {"num_prompts": 9}),
        ("python -m sglang.bench_serving --random-input 5", "sglang_bench_serving", {"random_input_len": 5}),
        ("trtllm-bench -m m/x throughput --tp 2", "trtllm_bench", {"model": "m/x", "tp": 2}),
        ("genai-perf profile -m x --isl 7 -- -v --n 4", "genai_perf", {"model": "x", "prompt_input_tokens_mean": 7}),
        ("aiperf profile -m x --num-requests 7", "genai_perf", {"model": "x", "request_count": 7}),
    ],
)
def test_a_line_is_found_in_what_people_write(text: str, title: str, flags: dict[str, object]) -> None:
    (line,) = lines(text)
    assert (line.program.title, dict(line.flags)) == (title, flags)


@pytest.mark.parametrize(
    "text",
    [
        "docker run --gpus all --name vllm -v /a/vllm:/b -p 8000:8000 my/own-vllm --model m/x --seed 1",
        "docker run -p 8000:8000 --rm my/vllm:v2 --model=m/x --served-model-name vllm --seed 1",
        "registry.a.b:5000/c/vllm-cu12:nightly --model m/x --seed 1",
    ],
)
def test_an_image_named_after_an_engine_is_taken_to_start_it(text: str) -> None:
    (line,) = lines(text)
    assert line.program.title == "vllm_serve"
    assert (line.flags["model"], line.flags["seed"]) == ("m/x", 1)
    (caveat,) = line.caveats()
    assert caveat.startswith("assumed: the image ")
    assert caveat.endswith("starts vllm serve")


@pytest.mark.parametrize(
    "text",
    [
        "python my_vllm_test.py --model m/x",
        "docker run --name vllm -p 1:1 my/image --model m/x",
        "docker build -t my/vllm:v1 .",
        "docker run my/vllm:v1 sleep 5",
    ],
)
def test_other_lines_start_no_server(text: str) -> None:
    assert not lines(text)


def test_what_is_not_known_is_named_first() -> None:
    text = "vllm serve m/x --monokernel --tensor-paralel-size 4 --max-num-seqs $N --host a --frobnicate $MORE"
    (line,) = lines(text)
    caveats = list(line.caveats())
    assert caveats[0].startswith(
        "not judged: --tensor-paralel-size (did you mean --tensor-parallel-size?), --frobnicate"
    )
    assert caveats[1].startswith("not modelled: --monokernel (")
    assert caveats[2] == "missing: --max-num-seqs is $N, which the script does not set"
    assert caveats[3].startswith("missing: $MORE")
    assert len(caveats) == 4


def test_a_flag_of_a_new_release_is_not_taken_for_a_misspelt_one() -> None:
    (line,) = lines("vllm serve m/x --model-impl auto")
    assert next(iter(line.caveats())).startswith("not judged: --model-impl is a flag")


@pytest.mark.parametrize(
    "server", ["vllm serve m/x --speculative-config", "sglang serve --model m/x --speculative-algo"]
)
def test_what_a_flag_leaves_open_is_said_by_an_option(server: str) -> None:
    (line,) = lines(f"{server} a --enable-lora")
    drafts, adapters = line.caveats()
    assert "--speculate says it" in drafts
    assert "--adapters says it" in adapters
    assert list(line.caveats({"speculate": "2:0.7"})) == [adapters]
    assert list(line.caveats(("adapters", "speculate"))) == []


def test_a_variable_behind_a_flag_without_value_is_named() -> None:
    (line,) = lines("vllm serve m/x --trust-remote-code $MORE")
    assert list(line.caveats()) == ["missing: $MORE may hold more flags, and the script does not set it"]


@pytest.mark.parametrize(
    "text",
    [
        "export VLLM_PP_LAYER_PARTITION=16,32 VLLM_LOGGING_LEVEL=DEBUG\nvllm serve m/x",
        "VLLM_PP_LAYER_PARTITION=16,32 CUDA_DEVICE_ORDER=PCI_BUS_ID vllm serve m/x",
        "docker run -e VLLM_PP_LAYER_PARTITION=16,32 -e VLLM_API_KEY=s --gpus all vllm/vllm-openai --model m/x",
    ],
)
def test_what_an_engine_reads_of_its_environment_is_named(text: str) -> None:
    (line,) = lines(text)
    said = "not judged: VLLM_PP_LAYER_PARTITION in its environment: layout, time or memory may differ"
    assert list(line.caveats()) == [said]


def test_parts_of_one_server_are_one() -> None:
    text = "for R in 0 1; do ssh n$R vllm serve m/x --nnodes 2 --node-rank $R --master-addr n0; done"
    assert len(lines(text)) == 1
    assert len(lines("vllm serve a\nvllm serve b")) == 2
