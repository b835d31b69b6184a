"""`phalanx validate kernels`: the kernel model beside kernels that were measured alone, and what must hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.in_process_cli import json_of, phalanx, text_of

from phalanx.cost.kernels.all_reduce import AllReduceLibrary, LinkConstants, node_all_reduce_s
from phalanx.cost.kernels.attention import AttentionLibrary, DecodeConstants, Heads, decode_attention_s, pairs_of
from phalanx.cost.kernels.chip import constants, generation_of, kernel_chip, library
from phalanx.cost.kernels.product import ProductConstants, product_s
from phalanx.spec.cluster.chips import CHIPS
from phalanx.spec.errors import InputError
from phalanx.validate.kernels import kernel_scores, measured, predicted

LEFT_OUT = {"product": 13, "prompt attention": 15, "decode attention": 18, "mla prompt": 13, "mla decode": 13}
"""Largest median error in percent by constants fitted without the chip."""


def test_errors_left_out_by_gpu_stay_where_they_are() -> None:
    scores = kernel_scores()
    for kind, most in {**LEFT_OUT, "experts": 21, "all-reduce": 15}.items():
        assert scores["by_kind"][kind]["left_out"]["median"] < most, kind
        assert scores["by_kind"][kind]["median"] < scores["by_kind"][kind]["left_out"]["median"] + 1
    assert scores["kernels"]["left_out"]["median"] < 15
    rows = sum(len(r) for r in measured()[0].values())
    assert rows == scores["kernels"]["n"] + scores["by_kind"]["all-reduce"]["n"]
    for of in (lambda each: each, lambda each: each["left_out"]):  # a mean error is that of its parts
        kinds = {kind: each for kind, each in scores["by_kind"].items() if kind != "all-reduce"}
        for whole, parts in (
            *((each, each["by_gpu"]) for each in scores["by_kind"].values()),
            (scores["kernels"], kinds),
            (scores["kernels"], scores["by_gpu"]),
        ):
            counts = [of(part)["n"] for part in parts.values()]
            assert sum(counts) == of(whole)["n"]
            mean = np.average([of(part)["bias"] for part in parts.values()], weights=counts)
            assert of(whole)["bias"] == pytest.approx(mean)


def test_a_row_is_priced_alike_alone_and_among_others() -> None:
    for rows in measured()[0].values():
        some = rows.only(np.arange(0, len(rows), len(rows) // 7))
        alone = [predicted(some.only(np.array([i])))[0] for i in range(len(some))]
        assert alone == pytest.approx(list(predicted(some)), rel=1e-12)


@pytest.mark.parametrize("name", sorted(CHIPS))
def test_no_kernel_beats_the_datasheet(name: str) -> None:
    """On every chip, measured or not: a product takes at least its FLOPs at the peak, and a large one no more than
    three times that."""
    chip = kernel_chip(name)
    c = constants(ProductConstants, "product", generation_of(name))
    for m, n, k in ((1, 4096, 4096), (128, 8192, 8192), (8192, 8192, 8192)):
        seconds = float(product_s(m, n, k, chip, c, 2.0, chip.half))
        assert seconds > 2 * m * n * k / chip.half
        assert seconds > 2 * n * k / chip.memory_bytes_per_s * 0.5  # the cache gives no more than twice
    assert float(product_s(8192, 8192, 8192, chip, c, 2.0, chip.half)) < 3 * 2 * 8192**3 / chip.half


def test_more_work_takes_longer() -> None:
    chip = kernel_chip("H100")
    c = constants(DecodeConstants, "decode attention", "hopper")
    lib = library(AttentionLibrary, "decode attention", "flash-attention 3")
    heads = Heads(32.0, 8.0, 128.0, 128.0, 2048.0)
    times = [float(decode_attention_s(64, s, heads, chip, c, lib)) for s in (128, 1024, 8192)]
    assert times == sorted(times)
    seen = decode_attention_s(64, 8192, replace(heads, window=1024.0), chip, c, lib)
    assert float(seen) == pytest.approx(times[1])  # a window reads no more than itself
    links, nccl = constants(LinkConstants, "all-reduce", "hopper"), library(AllReduceLibrary, "all-reduce", "nccl")
    own = library(AllReduceLibrary, "all-reduce", "vllm graph")
    small, large = 16384.0, 2.0**28
    assert float(node_all_reduce_s(small, 8, chip, links, own)) < float(
        node_all_reduce_s(small, 8, chip, links, nccl)
    )
    busbw = 2 * 7 / 8 * large / float(node_all_reduce_s(large, 8, chip, links, nccl))
    assert 0.6 * chip.link_bytes_per_s < busbw < 1.2 * chip.link_bytes_per_s


def test_pairs_of_queries_and_keys() -> None:
    """Counted one by one."""
    for tokens, past, window in ((5, 0, 0), (5, 3, 0), (7, 0, 3), (1, 9, 4)):
        counted = sum(min(past + i + 1, window or past + i + 1) for i in range(tokens))
        assert float(pairs_of(tokens, past, window)) == counted


def test_unknown_names_are_refused() -> None:
    with pytest.raises(InputError, match="did you mean"):
        kernel_chip("H10O")
    with pytest.raises(InputError, match="nccl"):
        library(AllReduceLibrary, "all-reduce", "ncl")


def test_the_command(tmp_path: Path) -> None:
    assert json_of(tmp_path, "validate kernels --json")["by_gpu"]["H200"]["left_out"]["n"] > 5000
    assert phalanx(tmp_path, "validate kernels --runs x.csv")[0] == 2
    out = text_of(tmp_path, "validate kernels")
    assert "all-reduce in a node" in out
