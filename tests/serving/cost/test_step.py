"""The price of a serving step: what it reads, how its parts grow, and published facts about models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from phalanx.planning.lookup import model_named
from phalanx.serving.cost.engines import engine, release_of
from phalanx.serving.cost.layout import ServingLayout
from phalanx.serving.cost.roofline import ServingPrice
from phalanx.serving.cost.shape import ServingShape, shape_of
from phalanx.serving.cost.steady_state import SteadyLoad, aggregated, disaggregated, slots
from phalanx.serving.cost.step import (
    ChipRates,
    GpuSplit,
    StepLoad,
    all_reduce_s,
    cache_bytes,
    request_bytes,
    state_bytes,
    step_parts,
    weight_bytes,
)
from phalanx.serving.simulation.engines import ENGINES, page_tokens
from phalanx.spec.cluster.presets import preset
from phalanx.spec.errors import InputError
from phalanx.spec.files.job_file import make_model
from phalanx.spec.model.presets import PUBLISHED
from phalanx.spec.model.spec import ModelSpec, parameters

H200 = ChipRates(4.8e12, 989e12, 1979e12, 1979e12, 450e9, 50e9, 8)
BF16 = replace(H200, weights=H200.half, experts=H200.half)


def model(name: str, **fields: object) -> ModelSpec:
    return make_model({"preset": name, **fields}, Path())[0]


GQA, MOE, MLA = (
    shape_of(model(n)) for n in ("meta-llama/Llama-3.1-70B", "openai/gpt-oss-120b", "deepseek-ai/DeepSeek-V3")
)


def one(**fields: float) -> GpuSplit:
    return GpuSplit(**({"tp": 1, "attention_dp": 1, "pp": 1, "moe_tp": 1, "moe_ep": 1} | _TYPES | fields))


_TYPES = {"weight_bytes": 1.0, "expert_bytes": 1.0, "cache_bytes": 2.0}


def decode(m: ServingShape, x: GpuSplit, sequences: float, each: float) -> dict[str, float]:
    return step_parts(m, x, H200, engine("vllm"), StepLoad(0.0, 0.0, 0.0, sequences, sequences * each))


SERVED = [name for name, fields in PUBLISHED.items() if "streams" not in fields]
"""Residual streams are not priced in serving."""


@pytest.mark.parametrize("name", ["llama3-70b", "qwen3-32b", "deepseek-v3", "mixtral-8x7b", "gpt2-xl", *SERVED])
def test_the_price_reads_every_matrix_of_a_model_once(name: str) -> None:
    m = shape_of(model(name))
    left_out = ("conv", "position")
    matrices = sum(p.numel for p in parameters(model(name)) if len(p.shape) > 1 and p.role not in left_out)
    assert m.attention + m.replicated + m.mlp + m.expert + m.ends == matrices


@pytest.mark.parametrize("name", ["llama3-8b", "openai/gpt-oss-120b", "deepseek-ai/DeepSeek-V3", "mixtral-8x7b"])
def test_a_pair_of_tokens_takes_a_product_with_keys_and_one_with_values(name: str) -> None:
    """Heads x (key + value) / 2, / 4 of its FLOPs. In decoding over latents every head has all of a latent for its
    key, with the part that turns, and again for its value; a layer with a window attends alike in both."""
    spec = model(name)
    m, latent = shape_of(spec), spec.latent
    each = spec.heads * (2 * spec.head_dim if latent is None else latent.nope_dim + latent.rope_dim + latent.v_dim)
    assert m.prompt_width + m.window_width == spec.layers * each / 2
    whole = m.layers if latent else m.prompt_width / each * 2
    decoded = 2 * spec.head_dim if latent is None else 2 * latent.kv_rank + latent.rope_dim
    assert m.decode_width == whole * spec.heads * decoded / 2


def test_layers_with_and_without_a_window_have_caches_of_their_own() -> None:
    """MiMo-V2-Flash: 9 layers of 4 key heads, 39 of 8 that see 128 tokens; keys of 192 and values of 128. Gemma 4
    26B: 5 layers of 2 heads of 512, whose values have no matrix; 25 of 8 heads of 256."""
    mimo, gemma = shape_of(model("XiaomiMiMo/MiMo-V2-Flash")), shape_of(model("google/gemma-4-26B-A4B"))
    assert (mimo.cache, mimo.window_cache) == (9 * 4 * 320, 39 * 8 * 320)
    assert (gemma.cache, gemma.window_cache) == (5 * 2 * 1024, 25 * 8 * 512)
    assert cache_bytes(mimo, one(tp=8), 1000) == 2 * (9 * 320 * 1000 + 39 * 320 * 128)
    assert cache_bytes(gemma, one(tp=4), 500) == 2 * 500 * (5 * 1024 + 25 * 2 * 512)


def test_recurrent_states_take_room_and_make_pages() -> None:
    """Qwen3.5-4B: vLLM says "Setting attention block size to 528 tokens" (its issue 40696)."""
    delta = {"kind": "delta", "key_heads": 16, "value_heads": 32, "key_dim": 128, "value_dim": 128}
    small = model(
        "Qwen/Qwen3.5-27B", hidden=2560, layers=32, heads=16, ffn=9216, mixers=[{"name": "delta", **delta}], tied=True
    )
    m = shape_of(small)
    states, inputs = 24 * 32 * 128 * 128, 24 * 3 * (2 * 16 + 32) * 128
    assert state_bytes(m, one(tp=2)) == (4 * states + 2 * inputs) / 2
    assert request_bytes(m, one(), 1000) == 1000 * 8 * 4 * 512 * 2 + 4 * states + 2 * inputs
    pages = {name: page_tokens(row, small, 2.0) for name, row in ENGINES.items()}
    assert pages == {"vllm": 528, "sglang": 1, "trtllm": 32}
    assert page_tokens(ENGINES["vllm"], model("llama3-8b"), 2.0) == 16
    load = replace(LOAD, input=1000.0, output=200.0)
    assert slots(m, one(), load) < 0.8 * slots(replace(m, state=0, inputs=0), one(), load)


def test_what_one_sum_does_not_describe_is_refused_by_name() -> None:
    two = [{"name": f"by{n}", "kind": "attention", "window": n} for n in (64, 128)]
    with pytest.raises(InputError, match=r"model\.mixers.*window: 64 and 128"):
        shape_of(model("llama2-7b", mixers=two, pattern=["by64+mlp", "by128+mlp"]))
    reader = {"name": "reader", "kind": "attention", "own_keys": False}
    with pytest.raises(InputError, match="earlier layer's keys is not priced"):
        shape_of(model("llama2-7b", mixers=[reader], pattern=["attention+mlp", "reader+mlp"]))
    table = {"name": "own", "kind": "layer_embedding", "width": 8, "vocab": 100}
    with pytest.raises(InputError, match="embeddings for each layer"):
        shape_of(model("llama2-7b", mixers=[table], pattern=["attention+mlp+own"]))


def test_an_unknown_model_or_engine_is_refused_with_the_nearest() -> None:
    with pytest.raises(InputError, match="did you mean"):
        model("Qwen/Qwen3-33B")
    with pytest.raises(InputError, match="did you mean vllm"):
        engine("vlm")
    assert release_of("trtllm", "1.0.0rc3") == "trtllm 1.0"
    assert release_of("trtllm", "1.2.0rc6") == "trtllm"


def test_a_small_batch_reads_the_weights_once() -> None:
    """Llama 3.1 70B in 8 bits on one H200: no step is shorter than reading 69 GB, and most of it is that."""
    parts = decode(GQA, one(), 1, 100)
    least = (GQA.attention + GQA.mlp) / H200.memory_bytes_per_s
    assert least < parts["projections"] + parts["mlp"] < 1.5 * least


def test_tensor_parallelism_splits_heads_but_not_latents() -> None:
    assert cache_bytes(GQA, one(tp=8), 1) == 80 * 2 * 8 * 128 * 2 / 8
    assert cache_bytes(GQA, one(tp=16), 1) == cache_bytes(GQA, one(tp=8), 1)
    assert cache_bytes(MLA, one(tp=8), 1) == 61 * (512 + 64) * 2
    assert weight_bytes(GQA, one(tp=8)) == pytest.approx(weight_bytes(GQA, one()) / 8)


def test_the_cache_is_read_in_proportion_to_the_context_and_windows_cut_it() -> None:
    assert decode(GQA, one(), 8, 8000)["cache"] == pytest.approx(8 * decode(GQA, one(), 8, 1000)["cache"])
    whole = decode(replace(MOE, window=8000), one(), 8, 8000)["cache"]
    assert decode(MOE, one(), 8, 8000)["cache"] == pytest.approx(whole * (0.5 + 0.5 * 128 / 8000))


def test_few_tokens_reach_few_experts() -> None:
    few, many, more = (decode(MOE, one(), n, 1)["experts"] for n in (1, 64, 512))
    assert few < many / 5
    assert more < 1.8 * many  # all are read by then


def test_all_reduces_grow_with_ranks_and_are_dear_across_the_network() -> None:
    inside, across = (float(decode(GQA, one(tp=n), 4, 100)["collectives"]) for n in (8, 16))
    assert decode(GQA, one(), 4, 100)["collectives"] == 0
    assert across > 3 * inside > 0


def test_columns_are_priced_as_single_steps_are() -> None:
    batch = StepLoad(
        np.array([0.0, 512.0]), np.array([0.0, 131328.0]), np.array([0.0, 1.0]), np.full(2, 8.0), np.full(2, 8e3)
    )
    both = sum(step_parts(GQA, one(tp=4), H200, engine("sglang"), batch).values())
    alone = [
        sum(step_parts(GQA, one(tp=4), H200, engine("sglang"), StepLoad(t, p, min(t, 1.0), 8.0, 8e3)).values())
        for t, p in ((0.0, 0.0), (512.0, 131328.0))
    ]
    assert both == pytest.approx(alone)


LOAD = SteadyLoad(32.0, 1024.0, 512.0, 143771 * 2**20, 0.0, 0.0, 8192.0, 1.0)


def test_prompts_delay_tokens_and_a_full_cache_delays_prompts() -> None:
    price = engine("vllm")
    tpot, ttft = aggregated(GQA, one(tp=4), H200, price, LOAD)
    longer, _ = aggregated(GQA, one(tp=4), H200, price, replace(LOAD, output=4096.0))
    assert longer < tpot < ttft
    fit = float(slots(GQA, one(tp=1), LOAD))
    _, queued = aggregated(GQA, one(tp=1), H200, price, replace(LOAD, concurrency=2 * fit))
    token, free = aggregated(GQA, one(tp=1), H200, price, replace(LOAD, concurrency=fit))
    assert queued - free > 0.8 * LOAD.output * token


def test_a_token_reads_half_of_its_text_on_the_mean() -> None:
    x, price, texts = one(tp=4), engine("vllm"), replace(LOAD, concurrency=1.0, input=1.0, output=2e5)
    token = sum(decode(GQA, x, 1.0, 1.0 + 1e5).values())
    assert aggregated(GQA, x, H200, price, texts)[0] == pytest.approx(token, rel=1e-3)
    assert disaggregated(GQA, (x, 1.0), (x, 1.0), H200, price, texts)[0] == pytest.approx(token, rel=1e-3)


@pytest.mark.parametrize(("copies", "steps"), [(1, 0), (4, 3)])
def test_copies_of_attention_wait_until_prompts_are_balanced(copies: int, steps: float) -> None:
    x, price = one(tp=4 // copies, attention_dp=copies, moe_ep=4), engine("sglang")
    tpot, at_once = aggregated(MOE, x, H200, replace(price, balance_steps=0.0), LOAD)
    _, ttft = aggregated(MOE, x, H200, replace(price, balance_steps=3.0), LOAD)
    assert ttft - at_once == pytest.approx(steps * tpot)


def test_workers_apart_keep_prompts_from_delaying_tokens() -> None:
    price, x = engine("sglang"), one(tp=4)
    alone, _ = disaggregated(GQA, (x, 1.0), (x, 1.0), H200, price, LOAD)
    mixed, _ = aggregated(GQA, x, H200, price, LOAD)
    assert alone < mixed
    _, one_worker = disaggregated(GQA, (x, 1.0), (x, 1.0), H200, price, replace(LOAD, concurrency=512.0))
    _, four = disaggregated(GQA, (x, 4.0), (x, 1.0), H200, price, replace(LOAD, concurrency=512.0))
    assert four < 0.6 * one_worker


@pytest.mark.parametrize(
    ("link", "ranks", "size", "measured"),
    [
        (32e9, 2, 8 << 20, 429e-6),
        (32e9, 8, 64 << 20, 53e-3),
        (64e9, 2, 64 << 20, 1.84e-3),
        (64e9, 8, 64 << 20, 4.93e-3),
    ],
)
def test_all_reduces_over_a_bus_take_what_nccl_tests_say(link: float, ranks: int, size: int, measured: float) -> None:
    """L40S and RTX PRO 6000: NCCL's better time of the published points."""
    bus = replace(H200, link_bytes_per_s=link)
    assert float(all_reduce_s(bus, engine("vllm"), ranks, size)) == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize("m", [GQA, MOE, MLA])
def test_each_further_stage_costs_another_hop(m: ServingShape) -> None:
    """A whole model on one GPU sends nothing; stages send what a step computes on, in one message each."""
    load = StepLoad(0.0, 0.0, 0.0, 16.0, 16.0 * 100)
    sent = [step_parts(m, one(pp=pp), H200, engine("vllm"), load)["collectives"] for pp in (1, 2, 3, 4)]
    assert sent[0] == 0
    assert sent[1] > m.hidden * 2.0 * 16 / H200.link_bytes_per_s
    assert sent[2:] == pytest.approx([2 * sent[1], 3 * sent[1]])


@pytest.mark.parametrize("m", [GQA, MOE, MLA])
def test_only_latents_of_8_bits_are_multiplied_faster_where_experts_are_many_gpus(m: ServingShape) -> None:
    def attends(**fields: float) -> float:
        many = one(cache_bytes=1.0, **fields)
        return float(step_parts(m, many, replace(H200, memory_bytes_per_s=1e30), engine("vllm"), load)["cache"])

    load = StepLoad(0.0, 0.0, 0.0, 16.0, 16.0 * 4000)
    assert attends() / attends(large_ep=1.0) == pytest.approx(2.0 if m.latent_layers else 1.0)


@pytest.mark.parametrize(
    ("model", "weights", "measured"),
    [
        ("mistralai/Ministral-3-3B", "fp8", 6.42e-3),
        ("mistralai/Ministral-3-14B", "fp8", 12.25e-3),
        ("Qwen/Qwen3-8B", "bf16", 9.46e-3),
    ],
)
def test_a_layer_is_launched_more_slowly_on_an_mi300x(model: str, weights: str, measured: float) -> None:
    """Medians of vLLM with 32 requests of 1,024 + 1,024 tokens (vllm-project/recipes#431, #476), of which one in 32
    steps has the prompt of the next request. As launched on NVIDIA's GPUs they were two thirds of the measured."""
    price = ServingPrice(model_named(model)[0], preset("mi300x", 1), "vllm", weights, "bf16")
    step = sum(price.parts(ServingLayout(), 0, 0, 32, 32 * 1536).values())
    first = sum(price.parts(ServingLayout(), 1024, 0, 32, 32 * 1536).values())
    assert step + (first - step) / 32 == pytest.approx(measured, rel=0.1)
