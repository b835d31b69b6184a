"""`phalanx validate kernels`: the kernel model beside kernels that were measured alone, and what must hold."""

from __future__ import annotations

import csv
import lzma
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.in_process_cli import json_of, phalanx, text_of

from phalanx.cost.kernels.all_reduce import AllReduceLibrary, LinkConstants, node_all_reduce_s
from phalanx.cost.kernels.attention import (
    AttentionLibrary,
    DecodeConstants,
    Heads,
    decode_attention_s,
    query_key_pairs,
)
from phalanx.cost.kernels.chip import constants, generation_of, kernel_chip, library
from phalanx.cost.kernels.product import ProductConstants, product_s
from phalanx.spec.cluster.chips import CHIPS
from phalanx.spec.errors import InputError
from phalanx.validate.kernel_rows import KERNELS, shipped_rows
from phalanx.validate.kernels import kernel_scores, predicted_seconds
from phalanx.validate.scores import errors

LEFT_OUT = {"product": 13, "prompt attention": 15, "decode attention": 18, "mla prompt": 13, "mla decode": 13}
"""Largest median error in percent by constants fitted without the chip."""


def test_errors_left_out_by_gpu_stay_where_they_are() -> None:
    scores = kernel_scores()
    for kind, most in {**LEFT_OUT, "experts": 21, "all-reduce": 15}.items():
        assert scores["by_kind"][kind]["left_out"]["median"] < most, kind
        assert scores["by_kind"][kind]["median"] < scores["by_kind"][kind]["left_out"]["median"] + 1
    assert scores["kernels"]["left_out"]["median"] < 15
    rows = sum(len(r) for r in shipped_rows().by_kind.values())
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
    for rows in shipped_rows().by_kind.values():
        some = rows.only(np.arange(0, len(rows), len(rows) // 7))
        alone = [predicted_seconds(some.only(np.array([i])))[0] for i in range(len(some))]
        assert alone == pytest.approx(list(predicted_seconds(some)), rel=1e-12)


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
        assert float(query_key_pairs(tokens, past, window)) == counted


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


def _file(path: Path, *rows: dict[str, object]) -> str:
    with lzma.open(KERNELS, "rt") as shipped:
        names = shipped.readline().strip().split(",")
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names, restval="")
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


def test_a_file_of_shipped_rows_is_scored_as_they_are(tmp_path: Path) -> None:
    with lzma.open(KERNELS, "rt", newline="") as file:
        some = [row for n, row in enumerate(csv.DictReader(file)) if n % 997 == 0]
    scores = json_of(tmp_path, "validate", "--kernels", _file(tmp_path / "k.csv", *some), "--json")
    known, of = {row["gpu"] for row in some}, scores["by_kind"]
    assert sum(each["n"] for each in of.values()) + scores["not_modelled"] == len(some) > 50
    assert {gpu for each in of.values() for gpu in each["by_gpu"]} == known
    assert scores["refused"] == {}
    whole = shipped_rows().by_kind["product"]
    every = errors(predicted_seconds(whole), whole.seconds)
    assert of["product"]["median"] == pytest.approx(every["median"], abs=10)  # a draw of a thousandth


def test_rows_that_cannot_be_predicted_are_left_out_with_their_reason(tmp_path: Path) -> None:
    good = {"gpu": "H800", "kind": "gemm", "dtype": "bfloat16", "m": 4096, "n": 4096, "k": 4096, "time_us": 230}
    bad = (
        {"gpu": "H1000"},
        {"n": "abc"},
        {"time_us": -3},
        {"kind": "gemv"},
        {"kind": "moe", "distribution": "zipf"} | dict.fromkeys(("tokens", "hidden", "inter", "topk"), 8),
        {"kind": "all_reduce", "batch": 8, "dtype": "complex64"},
    )
    path = _file(tmp_path / "k.csv", good, *(good | change for change in bad))
    scores = json_of(tmp_path, "validate", "kernels", "--kernels", path, "--json")
    assert scores["kernels"]["n"] == 1
    assert scores["kernels"]["left_out"]["median"] == scores["kernels"]["median"]  # no fitted row is of an H800
    assert sum(scores["refused"].values()) == len(bad)
    said = " ".join(scores["refused"])
    for word in (
        "gpu = 'H1000' (row 2)",
        "n = 'abc' (row 3)",
        "time_us = '-3' (row 4)",
        "'gemv'",
        "experts",
        "'complex64'",
    ):
        assert word in said
    none = _file(tmp_path / "none.csv", good | bad[0])
    assert "none of these rows can be predicted" in text_of(tmp_path, "validate", "--kernels", none)


@pytest.mark.parametrize("form", ["kernels", "collectives"])
def test_a_file_of_something_else_is_refused(tmp_path: Path, form: str) -> None:
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    code, _, err = phalanx(tmp_path, "validate", f"--{form}", "other.csv")
    assert code == 2
    assert err.startswith(f"error: --{form} = 'other.csv': has no column ")


def test_collectives_of_a_file_are_scored_by_chip(tmp_path: Path) -> None:
    shipped = json_of(tmp_path, "validate", "collectives", "--json")
    counts = [each["n"] for by_op in shipped["by_chip"].values() for each in by_op.values()]
    assert sum(counts) == shipped["all"]["n"] > 180
    rows = "hardware,collective,bytes,gpus,time_us,interconnect,nodes\n"
    rows += "H800-SXM,all_reduce,1073741824,8,9000,NVLink,1\nGTX 1080,all_reduce,1024,2,5,PCIe,1\n"
    (tmp_path / "c.csv").write_text(rows)
    mine = json_of(tmp_path, "validate", "--collectives", "c.csv", "--json")
    assert list(mine["by_chip"]) == ["H800"]
    assert mine["all"]["n"] == 1
    assert sum(mine["refused"].values()) == 1
