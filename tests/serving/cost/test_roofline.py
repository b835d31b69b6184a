"""The price of a serving step: figures of the textbook to the byte, and what must hold of any price."""

from __future__ import annotations

import numpy as np
import pytest

from phalanx.planning.lookup import cluster_named, model_named
from phalanx.serving.cost.adapters import adapter_bytes
from phalanx.serving.cost.layout import ServingLayout
from phalanx.serving.cost.roofline import ServingPrice


def _price(
    model: str, weights: str = "bf16", cache: str = "bf16", cluster: str = "dgx-h100", gpus: int = 16
) -> ServingPrice:
    return ServingPrice(model_named(model)[0], cluster_named(cluster)(gpus), "vllm", weights, cache)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("gpt3-175b", 2 * 12288 * 96 * 2),  # 4,718,592: keys and values of all heads
        ("llama3-70b", 2 * 8 * 128 * 80 * 2),  # 327,680: of 8 heads instead of 64
        ("deepseek-v3", (512 + 64) * 61 * 2),  # 70,272: a latent and a rotary key
    ],
)
def test_cache_bytes_per_token(model: str, expected: int) -> None:
    assert _price(model).cache_bytes_per_token == expected
    assert _price(model, cache="fp8").cache_bytes_per_token == expected / 2


@pytest.mark.parametrize("model", ["llama3-8b", "llama3-70b", "gpt2", "mixtral-8x7b", "deepseek-v3", "gpt-oss-120b"])
def test_all_weights_are_on_the_gpus(model: str) -> None:
    """One GPU holds every matrix once, in 16 bits (but for norms and biases); a split holds no less in sum."""
    price = _price(model)
    matrices = 0.99 * 2 * price.model.parameter_count
    assert price.weight_bytes(ServingLayout()) >= matrices
    tables = 4 * price.model.vocab * price.model.hidden
    assert price.weight_bytes(ServingLayout()) <= 2.2 * price.model.parameter_count + tables
    for x in (ServingLayout(2, 1, 1, 2, 1), ServingLayout(1, 2), ServingLayout(2, 2, 1, 2, 1)):
        assert x.gpus * price.weight_bytes(x) >= matrices
    whole = _price(model, "fp8").weight_bytes(ServingLayout())
    assert whole < price.weight_bytes(ServingLayout())


@pytest.mark.parametrize("model", ["llama3-70b", "mixtral-8x7b", "deepseek-v3", "gpt-oss-120b"])
def test_more_work_takes_longer_and_more_gpus_do_not_add_work(model: str) -> None:
    price, draw = _price(model), np.random.default_rng(1)
    for x in (
        ServingLayout(),
        ServingLayout(4, 1, 1, 4, 1),
        ServingLayout(2, 2, 1, 2, 1),
        ServingLayout(1, 1, 4, 1, 4),
    ):
        tokens, past, batch, mean = (np.rint(10 ** draw.uniform(0, high, 200)) for high in (4, 4, 2.5, 4))
        base = price.seconds(x, tokens, past, batch, batch * mean)
        assert np.all(base > 0)
        for more in (
            price.seconds(x, tokens * 2, past, batch, batch * mean),
            price.seconds(x, tokens, past + 1000, batch, batch * mean),
            price.seconds(x, tokens, past, batch * 2, batch * mean),
            price.seconds(x, tokens, past, batch, batch * mean * 2),
        ):
            assert np.all(more >= base * (1 - 1e-9))
        parts = price.parts(x, tokens, past, batch, batch * mean)
        np.testing.assert_allclose(sum(parts.values()), base)


def test_a_decoding_step_reads_all_weights_and_the_cache() -> None:
    """At batch 1 a dense model takes at least the time to read its weights once; at most 1.3 times that."""
    price = _price("llama3-70b", cluster="dgx-h200")
    bound = 2 * price.model.parameter_count / price.cluster.device.memory_bandwidth_bytes_per_s
    step = float(price.seconds(ServingLayout(), 0, 0, 1, 1000))
    assert bound < step < 1.45 * bound


def test_a_pipeline_does_not_shorten_a_token_and_tensor_parallelism_does_within_a_node() -> None:
    price = _price("llama3-70b")
    one, two, eight, pipe, across = (
        float(price.seconds(x, 0, 0, 1, 4000))
        for x in (
            ServingLayout(),
            ServingLayout(2, 1, 1, 2, 1),
            ServingLayout(8, 1, 1, 8, 1),
            ServingLayout(1, 8),
            ServingLayout(16, 1, 1, 16, 1),
        )
    )
    assert pipe >= one
    assert two < one / 1.5
    assert eight < two / 1.5
    assert across > eight  # 160 all-reduces over the network cost more than half of the weights' time saves


def test_uneven_prompts_cost_more_than_even_ones() -> None:
    price = _price("deepseek-v3", "fp8", cluster="dgx-h200", gpus=8)
    x = ServingLayout(1, 1, 8, 1, 8)
    even, one = (float(price.seconds(x, 8000, 0, 0, 0, uneven)) for uneven in (1.0, 8.0))
    assert 1.5 * even < one < 8 * even


def test_an_adapter_has_a_column_and_a_row_for_each_matrix() -> None:
    """Llama 3 8B: q, k, v, o, gate, up and down of 32 layers, at rank 16 in 16 bits."""
    h, kv, ffn = 4096, 1024, 14336
    each = (h + h) * 2 + (h + kv) * 2 + (h + ffn) * 3
    assert adapter_bytes(model_named("llama3-8b")[0]) == 2 * 16 * each * 32


@pytest.mark.parametrize("cluster", ["pcie-a100", "pcie-rtx4090", "pcie-l4", "dgx-h100", "dgx-a100", "gb200-nvl72"])
def test_an_all_reduce_over_more_ranks_is_never_cheaper(cluster: str) -> None:
    """In bytes as in latency: what leaves a socket or a host crosses it too."""
    price = ServingPrice(model_named("llama2-13b")[0], cluster_named(cluster)(128), "vllm", "bf16", "bf16")
    for size in (1e3, 1e6, 1e9):
        seconds = [float(price.all_reduce_s(ranks, size)) for ranks in (1, 2, 4, 8, 16, 32)]
        assert seconds == sorted(seconds)
