"""What a search of layouts leaves out, and what it never may."""

from __future__ import annotations

import heapq
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.in_process_cli import error_of, json_of, text_of

from phalanx.serving.search.pairs import workers_before

_QWEN = "serve plan --model Qwen/Qwen3-235B-A22B-FP8 --cluster dgx-h100 --gpus 8 --weights fp8 --json"
_SHORT = "serve plan --cluster dgx-h100 --gpus {} --input 200 --output 20 --concurrency 4 --mode aggregated"


def test_both_modes_find_what_either_finds(tmp_path: Path) -> None:
    """Steady states of pairs of workers promise more than their queues hold, and left aggregated layouts out."""
    ask = f"{_QWEN} --input 2000 --output 500 --concurrency 64 --chunk 2048 --mode"
    tokens = {mode: json_of(tmp_path, f"{ask} {mode}")["tokens_per_s"] for mode in ("aggregated", "both")}
    assert tokens["both"] >= tokens["aggregated"]


def test_blocks_that_share_a_scale_are_not_cut(tmp_path: Path) -> None:
    """vllm-project/vllm#17569: 1,536 columns of an expert over 8 ranks are one block and a half on each."""
    ask = _SHORT.format(8) + " --model Qwen/Qwen3-235B-A22B{} --weights {} --layout {} --engine {}"
    said = error_of(tmp_path, ask.format("-FP8", "fp8", "tp=8", "vllm"))
    assert "192 of the experts' width 1536 on a rank" in said
    assert "use ep=8, or a smaller tp" in said
    for suffix, weights, layout, engine in (
        ("-FP8", "fp8", "tp=8,ep=8", "vllm"),  # the remedies
        ("-FP8", "fp8", "tp=4", "sglang"),
        ("", "fp8", "tp=8", "vllm"),  # one scale a tensor, made as the weights are loaded
        ("-FP8", "bf16", "tp=8", "vllm"),
    ):
        assert text_of(tmp_path, ask.format(suffix, weights, layout, engine))


@pytest.mark.parametrize(("block", "refused"), [([128, 128], True), ([64, 64], False), (None, False)])
def test_blocks_are_those_of_the_config(tmp_path: Path, block: list[int] | None, refused: bool) -> None:
    sizes = {"hidden_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 32, "num_key_value_heads": 4}
    experts = {"moe_intermediate_size": 768, "intermediate_size": 6144, "num_experts": 128, "num_experts_per_tok": 8}
    config = {"model_type": "qwen3_moe", "head_dim": 128, "vocab_size": 2048, "max_position_embeddings": 4096}
    quantised = {"quantization_config": {"quant_method": "fp8", **({"weight_block_size": block} if block else {})}}
    (tmp_path / "config.json").write_text(json.dumps(sizes | experts | config | quantised | {"norm_topk_prob": True}))
    ask = f"{_SHORT.format(4)} --model config.json --weights fp8 --layout tp=4"
    if refused:
        assert "no whole blocks of 128" in error_of(tmp_path, ask)
    else:
        assert text_of(tmp_path, ask)


def _late(offered: float, rate: float, workers: int, wait_s: float) -> float:
    """Return the share of requests that wait longer before workers that take turns."""
    free, now, late = [0.0] * workers, 0.0, 0
    for gap in np.random.default_rng(1).exponential(1 / offered, 20_000).tolist():
        now += gap
        start = max(now, heapq.heappop(free))
        heapq.heappush(free, start + 1 / rate)
        late += start - now > wait_s
    return late / 20_000


@pytest.mark.parametrize(
    ("offered", "rate", "percentile", "wait_s"), [(10, 4.0, 90, 0.2), (40, 2.0, 99, 0.2), (3, 1.0, 99, 1.0)]
)
def test_as_many_workers_prefill_as_a_queue_needs(
    offered: float, rate: float, percentile: int, wait_s: float
) -> None:
    q: Any = SimpleNamespace(offered=offered, ttft_s=wait_s + 0.5, percentile=percentile)
    workers = workers_before(q, rate, 0.5)
    allowed = 1 - percentile / 100
    assert _late(offered, rate, workers, wait_s) <= allowed < _late(offered, rate, workers - 1, wait_s)
