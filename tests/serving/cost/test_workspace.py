"""What an engine keeps beyond weights and cache follows from its steps, the model and the GPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from phalanx.planning.lookup import model_named
from phalanx.serving.cost.layout import ServingLayout
from phalanx.serving.cost.roofline import ServingPrice
from phalanx.serving.cost.workspace import GRAPHS, step_limits, workspace_bytes
from phalanx.spec.cluster.chips import MIB
from phalanx.spec.cluster.presets import preset
from phalanx.spec.cluster.spec import GIB


def _gib(model: str, cluster: str, **limits: int) -> float:
    return workspace_bytes(model_named(model)[0], preset(cluster, 1).device, **limits) / GIB


def test_it_is_what_vllm_measured() -> None:
    """Within 0.4 GiB, without graphs. Llama-3.1-8B on an RTX 3090 under vLLM 0.6, whose prompts of 20,000 and 29,000
    tokens came whole: 2.07 and 2.99 GiB over 14.99 of weights, 0.35 of libraries (vllm-project/vllm#10517).
    gpt-oss-20B
    on an A100 under 0.19: 1.23 GiB (65 % of 79.25 less 13.72 of weights and 36.56 of cache; myoceane.fr, 2026)."""
    graphs = GRAPHS / GIB
    for tokens, measured in ((20_000, 2.07 + 0.35), (29_000, 2.99 + 0.35)):
        assert _gib("llama3-8b", "pcie-rtx3090", tokens=tokens) - graphs == pytest.approx(measured, abs=0.4)
    assert _gib("gpt-oss-20b", "dgx-a100") - graphs == pytest.approx(1.23, abs=0.4)


@pytest.mark.parametrize("cluster", ["pcie-rtx4090", "pcie-rtx3090", "pcie-a10", "pcie-l4"])
def test_a_card_of_24_gb_keeps_no_4_gib(cluster: str) -> None:
    """4 GiB were taken of every GPU."""
    assert 1.1 < _gib("llama3-8b", cluster) < 1.9
    assert step_limits(preset(cluster, 1).device) == (2048, 256)
    price = ServingPrice(model_named("llama3-8b")[0], preset(cluster, 1), "vllm", "bf16", "bf16")
    assert f"less {_gib('llama3-8b', cluster):.1f} GiB of workspace" in price.room(ServingLayout())


@pytest.mark.parametrize(
    ("model", "layout", "measured"),
    [
        ("Qwen/Qwen3.5-35B-A3B", ServingLayout(1, 1, 8, 1, 8), 4.06),
        ("zai-org/GLM-5", ServingLayout(4, 1, 4, 1, 16), 6.56),
    ],
)
def test_experts_keep_what_an_engine_asked_for(model: str, layout: ServingLayout, measured: float) -> None:
    """FlashInfer's kernels on B200 (flashinfer-ai/flashinfer#4916): what they failed to allocate, in GiB, with the
    16,384 tokens of every attention group."""
    found, device = model_named(model)[0], preset("dgx-b200", 2).device
    grouped = workspace_bytes(found, device, layout=layout)
    alone = workspace_bytes(found, device, layout=replace(layout, attention_dp=1))
    assert (grouped - alone) / GIB * layout.attention_dp / (layout.attention_dp - 1) == pytest.approx(
        measured, rel=0.1
    )


def test_experts_keep_their_rows_on_hopper_too() -> None:
    """Qwen3-235B-A22B-FP8 over four H100 under vLLM 0.9: 8.11 GiB for the cache (vllm-project/vllm#21348), when
    kernels took 32,768 tokens at a time whatever the step's, and graphs came after."""
    model, x = model_named("Qwen/Qwen3-235B-A22B")[0], ServingLayout(4, 1, 1, 4, 1)
    price = ServingPrice(model, preset("dgx-h100", 1), "vllm", "fp8", "bf16", memory_share=0.9)
    left = price.bytes_for_weights(x) - price.weight_bytes(x) + GRAPHS

    def kept(tokens: int) -> float:
        whole, dense = (
            workspace_bytes(m, price.cluster.device, tokens, 1, x) for m in (model, replace(model, experts=None))
        )
        return whole - dense

    assert (left - kept(32_768) + kept(8192)) / GIB == pytest.approx(8.11, abs=0.8)
    split, whole = (workspace_bytes(model, price.cluster.device, layout=y) for y in (x, ServingLayout(4, 1, 1, 1, 4)))
    assert split == whole  # a rank's part of an expert is narrower than the hidden state, whichever way they lie


def test_it_grows_with_what_it_is_made_of() -> None:
    model, device = model_named("llama3-8b")[0], preset("dgx-h100", 1).device
    usual = workspace_bytes(model, device)
    assert workspace_bytes(replace(model, vocab=2 * model.vocab), device) > 1.5 * usual
    assert workspace_bytes(model, device, requests=256) < 0.5 * usual
    assert workspace_bytes(model, device, tokens=131_072) > 3 * usual
    few, many = (workspace_bytes(model, device, n, 8) for n in (8192, 16384))
    assert many - few == pytest.approx(8192 * (6 * model.ffn + 4 * model.hidden))


@pytest.mark.parametrize(
    ("measured", "model", "cluster", "gpus", "engine", "types", "layout", "limits"),
    [
        (16.46, "Qwen/Qwen3-235B-A22B", "dgx-h100", 4, "sglang", ("fp8", "bf16"), ServingLayout(4, 1, 1, 4, 1),
         {"memory_share": 0.93}),
        (52.51, "meta-llama/Llama-3.1-8B", "dgx-h100", 1, "trtllm", ("fp8", "fp8"), ServingLayout(),
         {"memory_share": 0.8, "step_tokens": 23_552, "slots": 4096}),
    ],
)  # fmt: skip
def test_an_engine_has_as_much_for_its_cache_as_its_log_says(
    measured: float, model: str, cluster: str, gpus: int, engine: str, types: tuple[str, str],
    layout: ServingLayout, limits: dict[str, Any],
) -> None:  # fmt: skip
    """Within 4 %, in GiB of a GPU. SGLang at --mem-fraction-static 0.93 (vllm-project/vllm#21348: K and V size of
    8.23 GB each); TensorRT-LLM's largest batch of CUDA graphs was 4,096 (NVIDIA/TensorRT-LLM#6294)."""
    price = ServingPrice(model_named(model)[0], preset(cluster, 1), engine, *types, **limits)
    room = price.cache_tokens(layout) * price.cache_bytes_per_gpu(layout) / GIB
    assert room == pytest.approx(measured, rel=0.04)


def _share(model: str, cluster: str, layout: ServingLayout) -> float:
    found = ServingPrice(model_named(model)[0], preset(cluster, 1), "sglang", "bf16", "bf16")
    return found.bytes_for_weights(layout) / found.cluster.device.usable_bytes


def test_sglang_chooses_its_share_by_its_own_rule() -> None:
    """0.828 of an H100 for Qwen3-32B (sgl-project/sglang#29092), which is its rule over two; and less where attention
    groups pad."""
    assert _share("Qwen/Qwen3-32B", "dgx-h100", ServingLayout(2, 1, 1, 2, 1)) == pytest.approx(0.828, abs=5e-4)
    apart = ServingLayout(1, 1, 8, 8, 1)
    assert _share("deepseek-ai/DeepSeek-V3.2", "dgx-b200", apart) < 0.76
    assert _share("llama3-8b", "pcie-rtx4090", ServingLayout()) > _share("llama3-8b", "pcie-rtx4090", apart)


def _kept(model: str, cluster: str, x: ServingLayout, **limits: Any) -> float:
    """Return the MiB that SGLang leaves."""
    price = ServingPrice(model_named(model)[0], preset(cluster, 1), "sglang", "bf16", "bf16", **limits)
    device = price.cluster.device
    return (1 - price.bytes_for_weights(x) / device.usable_bytes) * device.memory_bytes / MIB


def test_what_sglang_leaves_grows_by_its_rates() -> None:
    """A token of a step and attention group takes 1.5 MiB, a GPU 128, a captured batch two; of a large GPU at least
    10 GiB are left. A graph of prompts takes 8: captured every 4 tokens up to 32, every 16 up to 256, and so on;
    models over latents have none."""
    x = ServingLayout(2, 1, 1, 2, 1)

    def dense(tokens: int, x: ServingLayout = x, cluster: str = "dgx-a100-40gb") -> float:
        return _kept("llama3-8b", cluster, x, step_tokens=tokens)

    graphs = [(dense(tokens) - dense(2048)) / 8 for tokens in (16, 32, 256, 512, 1024)]
    assert [later - sooner for sooner, later in pairwise(graphs)] == pytest.approx([4, 14, 8, 8])
    assert dense(8192) - dense(4096) == pytest.approx(4096 * 1.5 + 8 * 4096 / 512)
    four, eight = (dense(8192, ServingLayout(n, 1, 1, n, 1)) for n in (4, 8))
    assert eight - four == pytest.approx(4 * 128)
    staged = dense(8192, ServingLayout(2, 2, 1, 2, 1))
    assert four - staged == pytest.approx(2 * (160 - 32))  # larger batches are captured over four GPUs
    latents = [_kept("deepseek-v3", "dgx-b200", x, step_tokens=tokens) for tokens in (16_384, 32_768)]
    assert latents[1] - latents[0] == pytest.approx(1.5 * 16_384)
    assert dense(16, cluster="dgx-h100") == pytest.approx(10 * 1024)
    apart = [_kept("llama3-8b", "dgx-b200", ServingLayout(1, 1, n, n, 1), step_tokens=16_384 // n) for n in (4, 8)]
    assert apart[1] - apart[0] == pytest.approx(4 * 128 + 4 * 512 * 4.5)


def test_an_engine_is_told_its_share_in_its_own_words() -> None:
    model, cluster, x = model_named("llama3-8b")[0], preset("dgx-h100", 1), ServingLayout()
    told = {e: ServingPrice(model, cluster, e, "bf16", "bf16", memory_share=0.85) for e in ("sglang", "trtllm")}
    usable = cluster.device.usable_bytes
    assert told["sglang"].bytes_for_weights(x) == pytest.approx(0.85 * usable)
    assert "85.0% of 77.6 GiB: --mem-fraction-static" in told["sglang"].room(x)
    assert "the cache has 85% of what weights leave" in told["trtllm"].room(x)
    half = ServingPrice(model, cluster, "trtllm", "bf16", "bf16", memory_share=0.425)
    assert told["trtllm"].cache_tokens(x) == pytest.approx(2 * half.cache_tokens(x), rel=1e-4)


def test_keys_of_an_index_are_in_8_bits_whatever_the_cache_is() -> None:
    """DeepSeek-V3.2 under SGLang: 43.67 GB of 975,424 tokens (sgl-project/sglang#11309), 788 bytes a layer; in 16
    bits the latents double, and the index's keys do not."""
    model, cluster = model_named("deepseek-ai/DeepSeek-V3.2")[0], preset("dgx-b200", 8)
    each = {kv: ServingPrice(model, cluster, "sglang", "fp8", kv).cache_bytes_per_token for kv in ("fp8", "bf16")}
    assert each == {"fp8": 61 * 788, "bf16": 61 * (2 * 576 + 132)}
    assert each["fp8"] == pytest.approx(43.67 * GIB / 975_424, rel=2e-4)
    dense = ServingPrice(model_named("deepseek-v3")[0], cluster, "sglang", "fp8", "fp8")
    assert dense.cache_bytes_per_token == 61 * 576


@pytest.mark.parametrize(
    ("engine", "cluster", "tp", "most"),
    [
        ("vllm", "dgx-h100", 1, 512),
        ("sglang", "dgx-h100", 1, 256),
        ("sglang", "dgx-h100", 4, 512),
        ("sglang", "pcie-l40s", 1, 32),
        ("trtllm", "dgx-h100", 1, 100_000),
    ],
)
def test_a_step_beyond_the_graphs_of_an_engine_takes_what_its_launches_take(
    engine: str, cluster: str, tp: int, most: int
) -> None:
    price, x = (
        ServingPrice(model_named("llama3-8b")[0], preset(cluster, 4), engine, "bf16", "bf16"),
        ServingLayout(tp),
    )
    within, beyond = (float(price.seconds(x, 0, 0, n, n * 100)) for n in (min(most, 1000), min(most, 1000) + 1))
    launches = 32 * price.constants.eager_decode_s
    assert (beyond > launches > 2 * within) == (most < 1000)
    wide = replace(price, graphs=2048)
    assert float(wide.seconds(x, 0, 0, most + 1, most * 100)) < 1.1 * float(price.seconds(x, 0, 0, most, most * 100))


@pytest.mark.parametrize(("engine", "tp"), [("vllm", 1), ("sglang", 4)])
def test_without_graphs_a_short_step_takes_its_launches_and_a_long_one_hides_them(engine: str, tp: int) -> None:
    price = ServingPrice(model_named("llama3-8b")[0], preset("dgx-h100", 4), engine, "bf16", "bf16")
    eager, x = replace(price, graphs=0), ServingLayout(tp)
    captured, launched = (float(p.seconds(x, 0, 0, 1, 100)) for p in (price, eager))
    assert launched > 32 * price.constants.uncaptured_s > captured
    prompts = [[float(p.seconds(x, n, n * n / 2, 0, 0)) for p in (price, eager)] for n in (100, 1000, 16_000)]
    slower = [b / a for a, b in prompts]
    assert slower[0] > slower[1] > slower[2] > 0.999
    assert slower[2] < 1.05


@pytest.mark.parametrize(
    ("model", "cluster", "weights", "context", "seconds"),
    [
        ("qwen3-14b", "dgx-a100", "int4", 16_100, 20.6e-3),  # vllm-project/vllm#20469
        ("qwen2.5-7b", "dgx-a800", "bf16", 500, 22.5e-3),  # vllm-project/vllm-omni#7960, the thinker
        ("openai/gpt-oss-120b", "dgx-spark", "mxfp4", 300, 38.5e-3),  # conselara.dev/notes/dgx-spark-benchmarks
    ],
)
def test_published_steps_without_graphs_are_met_within_a_half(
    model: str, cluster: str, weights: str, context: int, seconds: float
) -> None:
    price = ServingPrice(model_named(model)[0], preset(cluster, 1), "vllm", weights, "bf16", graphs=0)
    assert 2 / 3 < float(price.seconds(ServingLayout(), 0, 0, 1, context)) / seconds < 1.5
