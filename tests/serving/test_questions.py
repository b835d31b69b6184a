"""A question about serving as a user spells it: what is read, and in which words the rest is refused."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from phalanx.planning.lookup import model_named
from phalanx.serving.answer import serve_plan
from phalanx.serving.cost.checkpoint import published_weights
from phalanx.serving.cost.layout import ServingLayout
from phalanx.serving.cost.workspace import rounded_share
from phalanx.serving.question import (
    adapters,
    ask,
    layout,
    lengths,
    pair_of,
    price_of,
    seconds,
    speculation,
    survive,
)
from phalanx.serving.request import ServingRequest
from phalanx.serving.simulation.deployment import Speculation
from phalanx.spec.errors import InputError

_ASK: dict[str, Any] = {"model": "llama3-8b", "cluster": "dgx-h100", "gpus": 2, "input": 1000, "output": 100}


@pytest.mark.parametrize(
    ("read", "known", "refused"),
    [
        (
            lambda text: seconds("ttft", text),
            {
                None: None,
                "1s": 1.0,
                " 30 ms ": 0.03,
                "5us": 5e-6,
                "5µs": 5e-6,
                "2.5e-3s": 2.5e-3,
                "999999s": 999_999.0,
            },
            {
                "1 h": "is not a time; write 1s or 30ms",
                "0s": "is not a time",
                "1e6s": "is not a time",
                "1000000s": "is not a time",
                "1.2.3s": "is not a time",
                "30": "has no unit; write 30s or 30ms",
            },
        ),
        (
            speculation,
            {None: (0, 0.0), "3:0.7": (3, 0.7), "1:0": (1, 0.0), "64:1": (64, 1.0)},
            dict.fromkeys(("65:0.5", "0:0.5", "3:1.1", "3:-0.1", "3", "x:1", ""), "is not drafted tokens (1 to 64)"),
        ),
        (
            survive,
            {
                None: (0, "node"),
                "1 node": (1, "node"),
                "2 GPUs": (2, "gpu"),
                "1 copy": (1, "copy"),
                "2 copies": (2, "copy"),
                "999 replicas": (999, "copy"),
            },
            dict.fromkeys(("0 nodes", "node", "1000 nodes", "1 rack"), "is not what may be lost; write '1 node'"),
        ),
        (
            adapters,
            {None: (0, 0), "32:4": (32, 4), "8": (8, 8), "1000000:1": (1_000_000, 1)},
            dict.fromkeys(("4:8", "0", "1000001:1", "8:0", "x"), "is not adapters and how many of them a b"),
        ),
        (
            layout,
            {
                "tp=4,pp=2": ServingLayout(4, 2, 1, 4, 1),
                "tp=1, dp=8, ep=8": ServingLayout(1, 1, 8, 1, 8),
                "dp=4,tp=2,ep=4": ServingLayout(2, 1, 4, 2, 4),
                "tp=1000000": ServingLayout(10**6, 1, 1, 10**6, 1),
            },
            {
                "xp=2": "'xp' is not a degree; known: dp, ep, pp, tp",
                "tp=0": "tp must be a whole number, at least 1",
                "tp=x": "tp must be a whole number",
                "tp=1000001": "tp must be a whole number",
                "tp": "tp must be a wh",
                "tp=2,ep=3": "ep = 3 does not divide tp x dp = 2",
                "tp=2,dp=3,ep=4": "ep = 4 does not divide tp x dp = 6",
            },
        ),
        (
            lambda given: lengths("input", given),
            {4000: (4000, 4000), "4k": (4096, 4096), "1:1024": (1, 1024), "7:7": (7, 7)},
            {
                "9:1": "goes from the larger to the smaller; write 1:9",
                "1:2:3": "is not a number of tokens; write 4000",
                "x": "is not a number of tokens",
                "1:x": "is not a number of tokens",
                0: "must be",
            },
        ),
    ],
    ids=["seconds", "speculation", "survive", "adapters", "layout", "lengths"],
)
def test_words_with_units(read: Callable[[Any], Any], known: dict[Any, Any], refused: dict[Any, str]) -> None:
    assert [read(text) for text in known] == [pytest.approx(v) if type(v) is float else v for v in known.values()]
    for text, why in refused.items():
        with pytest.raises(InputError, match=re.escape(why)):
            read(text)


@pytest.mark.parametrize(
    ("legal", "beyond", "words"),
    [
        ({}, {"objective": "speed"}, "--objective = 'speed': is not known"),
        ({"mode": "aggregated"}, {"mode": "apart"}, "--mode = 'apart': is not known"),
        ({"large_ep": "on"}, {"large_ep": "yes"}, "--large-ep = 'yes': is not known"),
        ({"percentile": 99}, {"percentile": 95}, "percentile = 95: is not reported; 50, 90 or 99"),
        ({"reuse": 0.99}, {"reuse": 0.995}, "--reuse = 0.995: must be from 0 to 0.99"),
        ({"reuse": 0.0}, {"reuse": -0.1}, "--reuse = -0.1: must be from 0 to 0.99"),
        ({"variation": 3.0}, {"variation": 3.1}, "--variation = 3.1: must be from 0 to 3"),
        ({"rate": 1e6}, {"rate": 1.1e6}, "rate = 1100000.0: must be from 1e-6 to 1,000,000 requests per second, or"),
        ({"rate": 1e-6}, {"rate": 0.9e-6}, "rate = 9e-07: must be from"),
        ({"rate": math.inf, "requests": 9}, {"rate": math.inf}, "rate = 'inf': would never end; say how many"),
        ({"burstiness": 1e-9}, {"burstiness": 0.0}, "burstiness = 0.0: must be positive; 1 is a Poisson process"),
        ({"rate": 1.0}, {"rate": 1.0, "concurrency": 2}, "--rate = 1.0: excludes --concurrency; choose one load"),
        ({"rate": 1.0, "concurrency": 2, "requests": 9}, {"concurrency": -1}, "concurrency = -1: must be"),
        ({"chunk": 1}, {"chunk": 0}, "chunk = 0: must be"),
        ({"slots": 1}, {"slots": 0}, "slots = 0: must be"),
        (
            {"requests": 1_000_000},
            {"requests": 1_000_001},
            "requests = 1000001: must be at most 1,000,000: each is si",
        ),
        ({"memory": 1.0}, {"memory": 1.01}, "memory = 1.01: must be a share of the GPU's memory, from 0.05 to 1"),
        ({"seed": 0}, {"seed": -1}, "seed = -1: must be"),
        ({"gpus": 1}, {"gpus": 0}, "gpus = 0: must be"),
        ({}, {"input": None}, "input: missing; or give a trace in place of input and output"),
        ({}, {"output": None, "input": None}, "input, output: missing"),
        (
            {"input": "1:9"},
            {"input": "1:9", "variation": 0.5},
            "variation = 0.5: does not go with a range of lengths",
        ),
        ({"input": 8092}, {"input": 8093}, "input, output: a request of 8,193 tokens is longer than the model's con"),
        ({"weights": "bf16, fp8"}, {"weights": "nvfp4"}, "weights = 'nvfp4': "),
        (
            {"layout": "tp=2"},
            {"layout": "tp=4"},
            "layout = 'tp=4': takes 4 GPUs of 2; on 2 GPUs use tp=2,pp=1 or tp=",
        ),
        ({"layout": "pp=2"}, {"layout": "pp=2,dp=2"}, "layout = 'pp=2,dp=2': "),
    ],
)
def test_what_is_asked_has_bounds(legal: dict[str, Any], beyond: dict[str, Any], words: str) -> None:
    assert ask(ServingRequest(**{**_ASK, **legal})).model_name == "llama3-8b"
    with pytest.raises(InputError) as refused:
        ask(ServingRequest(**{**_ASK, **beyond}))
    assert str(refused.value).startswith(words)


def test_a_question_is_what_its_words_say() -> None:
    q = ask(ServingRequest(**_ASK)).question
    assert (q.input, q.output, q.longest, q.rate, q.concurrency, q.requests) == (1000, 100, 1100, 0.0, 0, 0)
    assert (q.weights, q.modes, q.slots, q.ttft_s) == (("bf16", "fp8"), ("aggregated", "disaggregated"), 0, None)
    assert ask(ServingRequest(**{**_ASK, "cluster": "dgx-a100"})).question.weights == ("bf16",)
    more = {"input": "100:300", "output": "10:31", "rate": math.inf, "requests": 40, "ttft": "1s", "tpot": "30ms"}
    q = ask(
        ServingRequest(**{**_ASK, **more, "deadline": "20s", "survive": "1 gpu", "slots": 7, "chunk": 512})
    ).question
    assert (q.input, q.output, q.longest, q.ranges) == (200, 20, 331, ((100, 300), (10, 31)))
    assert (q.rate, q.concurrency, q.requests, q.slots, q.chunks) == (0.0, 40, 40, 7, (512,))
    assert (q.ttft_s, q.tpot_s, q.deadline_s, q.lost) == (1.0, 0.03, 20.0, (1, "gpu"))
    few = ask(ServingRequest(**{**_ASK, "concurrency": 64, "requests": 8})).question
    assert (few.concurrency, ask(ServingRequest(**{**_ASK, "concurrency": 64})).question.concurrency) == (8, 64)
    varied = ask(ServingRequest(**{**_ASK, "variation": 0.5})).question
    assert varied.longest == 4400  # four times the mean is taken to be the longest
    assert ask(ServingRequest(**{**_ASK, "input": 4000, "variation": 0.5})).question.longest == 8192


@pytest.mark.parametrize(
    ("memory", "legal"), [(0.05, True), (1.0, True), (0.049, False), (1.01, False), (None, True)]
)
def test_the_share_of_memory_has_bounds(memory: float | None, legal: bool) -> None:
    if legal:
        assert price_of("llama3-8b", "dgx-h100", 1, "bf16", "bf16", memory).cluster.ranks_per_node == 8
    else:
        with pytest.raises(
            InputError, match=f"^memory = {memory}: must be a share of the GPU's memory, from 0.05 to 1$"
        ):
            price_of("llama3-8b", "dgx-h100", 1, "bf16", "bf16", memory)


@pytest.mark.parametrize(
    ("requests", "mean", "longest"), [(None, 300, 550), (5, 300, 550), (3, 200, 330), (1, 100, 110)]
)
def test_of_a_trace_the_first_requests_are_replayed(
    tmp_path: Path, requests: int | None, mean: int, longest: int
) -> None:
    rows = "".join(f"{n},{100 * n},{10 * n}\n" for n in range(1, 6))
    (tmp_path / "trace.csv").write_text(f"arrival,input,output\n{rows}")
    asked = {**_ASK, "input": None, "output": None, "trace": tmp_path / "trace.csv", "requests": requests}
    named = ask(ServingRequest(**asked))
    q = named.question
    assert (q.input, q.output, q.longest, q.trace is not None and len(q.trace)) == (
        mean,
        mean // 10,
        longest,
        requests or 5,
    )
    said = f"the first {requests} of 5 requests are replayed; --requests says how many"
    assert (said in named.notes) == ((requests or 5) < 5)


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 1.0])
def test_drafted_tokens_yield_those_up_to_the_first_that_is_not_accepted(acceptance: float) -> None:
    assert Speculation(3, acceptance).mean == pytest.approx(sum(acceptance**n for n in range(4)))


@pytest.mark.parametrize(
    ("model", "cluster", "weights", "said"),
    [
        ("openai/gpt-oss-120b", "dgx-h100", ("mxfp4",), "assumed: weights in mxfp4, the type of its experts"),
        ("gpt-oss-20b", "dgx-a100", ("mxfp4",), "assumed: weights in mxfp4"),
        ("moonshotai/Kimi-K2-Instruct", "dgx-h100", ("fp8",), "assumed: weights in fp8"),
        ("moonshotai/Kimi-K2.5", "dgx-h100", ("int4",), "assumed: weights in int4"),
        ("MiniMaxAI/MiniMax-M2.5", "dgx-h100", ("fp8",), "assumed: weights in fp8"),
        ("deepseek-v3", "dgx-h100", ("fp8",), "assumed: weights in fp8"),
        ("deepseek-v3", "dgx-a100", ("fp8",), "assumed: weights in fp8"),  # unpacked by Marlin's kernels
        (
            "nvidia/Llama-3.3-70B-Instruct-FP4",
            "dgx-a100",
            ("bf16",),
            "in bf16: A100 has no tensor cores",
        ),
        ("Qwen/Qwen3-32B-FP8", "dgx-h100", ("fp8",), ""),
        ("Qwen/Qwen3-32B", "dgx-h100", ("bf16", "fp8"), ""),
    ],
)
def test_a_named_model_has_the_weights_of_its_published_checkpoint(
    model: str, cluster: str, weights: tuple[str, ...], said: str
) -> None:
    """Those of another type that are asked for are taken in their place."""
    request = {**_ASK, "model": model, "cluster": cluster}
    asked = ask(ServingRequest(**request))
    assert asked.question.weights == weights
    assert (said in asked.caveats[0]) if said else not asked.caveats
    other = ask(ServingRequest(**request, weights="bf16"))
    assert (other.question.weights, other.caveats) == (("bf16",), ())


@pytest.mark.parametrize(
    ("table", "weights"),
    [
        ('{"quant_method": "mxfp4"}', "mxfp4"),
        ('{"quant_method": "awq", "bits": 4}', "int4"),
        ('{"quant_method": "modelopt", "quant_algo": "NVFP4"}', "nvfp4"),
        ('{"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 8, '
         '"type": "float"}}}}', "fp8"),
        ("{}", "bf16"),
        ('{"quant_method": 3, "config_groups": [1]}', "bf16"),
    ],
)  # fmt: skip
def test_a_config_says_the_type_of_its_weights(tmp_path: Path, table: str, weights: str) -> None:
    path = tmp_path / "model" / "config.json"
    path.parent.mkdir()
    path.write_text(f'{{"quantization_config": {table}}}')
    assert published_weights(str(path)) == published_weights(str(path.parent)) == weights
    assert published_weights(str(tmp_path / "Some-AWQ" / "config.json")) == "int4"


@pytest.mark.parametrize(("engine", "takes"), [("vllm", True), ("sglang", True), ("trtllm", False)])
def test_weights_of_8_bits_are_unpacked_on_ampere_by_engines_that_can(engine: str, takes: bool) -> None:
    request = ServingRequest(**{**_ASK, "model": "Qwen/Qwen3-32B-FP8", "cluster": "dgx-a100"}, engine=engine)
    assert ask(request).question.weights == (("fp8",) if takes else ("bf16",))
    if takes:
        price = price_of("Qwen/Qwen3-32B-FP8", "dgx-a100", 1, "fp8", "bf16", name=engine)
        assert price.chip.weights == price.chip.half  # products of 16 bits


@pytest.mark.parametrize(("model", "gib"), [("openai/gpt-oss-120b", 60.8), ("gpt-oss-20b", 12.8)])
def test_only_the_experts_of_gpt_oss_are_in_4_bits(model: str, gib: float) -> None:
    """`gib`: of the checkpoint, arXiv 2508.10925, table 1."""
    price = price_of(model, "dgx-h100", 1, "mxfp4", "bf16", name="sglang")
    assert price.shape.whole == price.shape.attention > 0
    assert price.shape.whole_expert == 0 < price.shape.expert
    assert price.weight_bytes(ServingLayout()) == pytest.approx(gib * 2**30, rel=0.005)


@pytest.mark.parametrize(("cluster", "gib"), [("dgx-h100", 64.38), ("dgx-a100", 65.97)])
def test_vllm_rounds_the_widths_of_mxfp4_experts_up(cluster: str, gib: float) -> None:
    """`gib`: what loading gpt-oss-120b took by vLLM's log: with Triton's kernels on an H100, vllm-project/vllm#33155;
    with Marlin's, which an A100 has too, #23278."""
    price = price_of("openai/gpt-oss-120b", cluster, 1, "mxfp4", "bf16")
    assert price.weight_bytes(ServingLayout()) == pytest.approx(gib * 2**30, rel=0.004)


@pytest.mark.parametrize("cluster", ["dgx-h100", "dgx-a100", "dgx-b200", "pcie-rtx5090", "mi300x"])
def test_rounded_widths_are_never_narrower_and_even_ones_stay(cluster: str) -> None:
    generation = price_of("openai/gpt-oss-120b", cluster, 1, "mxfp4", "bf16").generation
    model = model_named("openai/gpt-oss-120b")[0]
    assert model.experts is not None
    assert all(1 < rounded_share(model, generation, ServingLayout(tp=tp)) < 1.3 for tp in (1, 2, 4, 8))
    even = replace(model, hidden=3072, experts=replace(model.experts, ffn=3072))
    assert rounded_share(even, generation, ServingLayout()) == 1


@pytest.mark.parametrize(
    ("text", "pair"),
    [
        ("tp=4", ()),
        ("tp=4 + tp=8", ((1, ServingLayout(tp=4, moe_tp=4)), (1, ServingLayout(tp=8, moe_tp=8)))),
        ("3 x tp=1+2 x tp=2,pp=2", ((3, ServingLayout()), (2, ServingLayout(tp=2, pp=2, moe_tp=2)))),
    ],
)
def test_a_layout_may_say_the_workers_that_prefill_and_that_decode(text: str, pair: object) -> None:
    assert pair_of(text) == pair


@pytest.mark.parametrize("text", ["tp=1 +", "tp=1 + tp=1 + tp=1", "0 x tp=1 + tp=1", "+"])
def test_another_number_of_parts_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="layout"):
        pair_of(text)


def test_given_workers_are_all_that_is_planned() -> None:
    load = {"gpus": 8, "concurrency": 16, "requests": 60}
    answer = serve_plan(**{**_ASK, **load}, layout="2 x tp=1 + 3 x tp=2")
    plans = (answer.best, *answer.alternatives)
    assert {tuple((w.role, w.count, w.tp) for w in p.workers) for p in plans} == {
        (("prefill", 2, 1), ("decode", 3, 2))
    }
    with pytest.raises(InputError, match="takes 8 GPUs of 4"):
        serve_plan(**{**_ASK, **load, "gpus": 4}, layout="2 x tp=1 + 3 x tp=2")
    with pytest.raises(InputError, match="apart"):
        serve_plan(**{**_ASK, **load}, layout="2 x tp=1 + 3 x tp=2", mode="aggregated")
