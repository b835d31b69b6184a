"""The textbook's tables: golden values of the teaching texts where they are right, corrected where they are not."""

from __future__ import annotations

import csv
import io
import itertools
import json
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest
from support.in_process_cli import phalanx

from phalanx.plan.question import cluster_named, model_named, pricing_by_gpus
from phalanx.plan.tables import textbook
from phalanx.plan.tables.roofline import ridges
from phalanx.plan.tables.scaling import by_batch, by_gpus, sensitivity


@pytest.mark.parametrize(
    ("params", "ranks", "gb"),
    [
        (10e9, 8, (160, 55, 37.5, 20)),  # C1
        (7e9, 8, (112, 38.5, 26.25, 14)),  # C2
        (175e9, 1, (2800, 2800, 2800, 2800)),  # G1
        (70e9, 1, (1120, 1120, 1120, 1120)),  # C11
    ],
)
def test_state_by_zero_stage(params, ranks, gb):
    assert [textbook.zero_bytes(params, stage, ranks) / 1e9 for stage in range(4)] == pytest.approx(list(gb))


def test_reduction_of_zero_has_its_limits():
    """4x and 8x are limits: at 64 ranks 3.82 and 7.21."""
    whole = textbook.zero_bytes(1, 0, 64)
    assert [round(whole / textbook.zero_bytes(1, stage, 64), 2) for stage in (1, 2, 3)] == [3.82, 7.21, 64.0]


@pytest.mark.parametrize(
    ("tp", "sp", "recompute", "gb"),
    [
        (1, False, "none", 275.41),  # G3
        (1, False, "selective", 82.14),
        (8, False, "none", 55.57),
        (8, True, "none", 34.43),
        (1, False, "full", 4.83),
    ],
)
def test_activations_of_gpt3(tp, sp, recompute, gb):
    model, _ = model_named("gpt3-175b")
    assert textbook.activation_bytes(model, 1, 2048, tp, sp, recompute) / 1e9 == pytest.approx(gb, abs=0.006)


def test_gradients_on_their_way():
    """G5: 1 GB over 4 and 1,024 ranks; C9: 700 GB of gradients at 25 GB/s take 56 s there and back."""
    sent = {row[0]: row[2] for row in textbook.gradient_traffic(0.5e9, (4, 1024), 25e9).rows}
    assert sent == {4: pytest.approx(1.5), 1024: pytest.approx(1.998, abs=1e-3)}
    (row,) = textbook.gradient_traffic(350e9, (1024,), 25e9).rows
    assert row[1] == pytest.approx(700)
    assert row[3] == pytest.approx(2 * 28, rel=2e-3)


def test_ridges_are_dense_and_of_one_direction():
    """C10, 33-35: H100 2,199 over NVLink and 19,788 over its port; A100 1,040."""
    rows = {row[0]: row for row in ridges().rows}
    assert rows["dgx-h100"][5] == pytest.approx(2198.7, abs=0.1)
    assert rows["dgx-h100"][7] == pytest.approx(19788)
    assert rows["dgx-a100"][5] == pytest.approx(1040)
    assert rows["dgx-a100"][3] == pytest.approx(153.0, abs=0.1)


def _question(batch: int):
    return pricing_by_gpus(model_named("llama3-8b")[0], cluster_named("dgx-h100"), batch, 8192, "megatron-core")


def test_scaling_is_what_it_is_defined_as():
    strong, weak = (by_gpus(_question(64), (8, 16, 32), weak) for weak in (False, True))
    for sheet in (strong, weak):
        rate = [row[4] for row in sheet.rows]
        assert [row[5] for row in sheet.rows] == pytest.approx(
            [r / n / (rate[0] / 8) for r, n in zip(rate, (8, 16, 32), strict=True)]
        )
    assert [row[1] for row in strong.rows] == [64, 64, 64]
    assert [row[1] for row in weak.rows] == [16, 32, 64]  # what was asked for, on the GPUs that were asked for
    assert weak.rows[2][2:4] == strong.rows[2][2:4]
    for sheet in (strong, weak):
        above = any(row[5] is not None and row[5] > 1.0005 for row in sheet.rows)
        assert above == ("above 100 %: " in sheet.note)


def test_critical_batch_is_the_first_that_reaches_ninety_percent():
    sheet = by_batch(_question(64), 64, (8, 16, 64, 512))
    first = next(row[1] for row in sheet.rows if row[5] is not None and row[5] >= 0.9)
    assert sheet.note.endswith(f": {first}")


def test_a_slower_network_never_helps():
    change = {row[0]: row[3] for row in sensitivity(_question(64), 64).rows}
    assert change["network at half"] >= 0 >= change["network at double"]
    assert change["inside the node at half"] >= 0 >= change["inside the node at double"]


_STRATEGY = ("--model", "llama3-8b", "--cluster", "dgx-h100", "--gpus", "16", "--batch", "64", "--seq", "8192")


@pytest.mark.parametrize(
    "words",
    [
        ("memory", "--model", "gpt3-175b"),
        ("memory", "--params", "25M"),
        ("comm", "--params", "7B"),
        ("comm", *_STRATEGY, "--strategy", "dp=4,zero=1,tp=2,sp=1,pp=2"),
        ("roofline",),
        ("roofline", "--params", "7B", "--seq", "4096"),
        ("scaling", "--params", "7B", "--tokens", "1T", "--gpus", "8,64"),
        ("roofline", *_STRATEGY, "--strategy", "dp=16,zero=2"),
        (
            "scaling",
            "--model",
            "llama3-8b",
            "--gpus",
            "8",
            "--batch",
            "64",
            "--seq",
            "8192",
            "--devices",
            "a100,h100",
        ),
    ],
    ids=lambda words: " ".join(words[:3]),
)
def test_each_table_prints_as_text_json_and_csv(tmp_path, words):
    code, out, err = phalanx(tmp_path, *words)
    assert code == 0, err
    assert "─" in out
    sheets = json.loads(phalanx(tmp_path, *words, "--json")[1])
    text = phalanx(tmp_path, *words, "--csv")[1]
    read = [list(csv.DictReader(io.StringIO(part))) for part in text.split("\n\n")]
    assert [len(part) for part in read] == [len(sheet["rows"]) for sheet in sheets]
    assert list(read[0][0]) == list(sheets[0]["rows"][0])


def test_tables_are_drawn(tmp_path):
    words = ("memory", "--params", "7B", "--plot", "memory.svg")
    assert phalanx(tmp_path, *words)[0] == 0
    drawn = ElementTree.parse(tmp_path / "memory.svg").getroot()
    lines = drawn.findall("{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 4  # levels of ZeRO, over 11 numbers of ranks
    places = [tuple(map(float, point.split(","))) for point in lines[3].attrib["points"].split()]
    assert len(places) == 11
    # ZeRO-3 falls as 1/P: on two logarithmic axes the steps are equal.
    steps = {(round(b[0] - a[0]), round(b[1] - a[1])) for a, b in itertools.pairwise(places)}
    assert len({x for x, _ in steps}) <= 2
    assert max(y for _, y in steps) - min(y for _, y in steps) <= 1
    words = ("scaling", "--model", "llama3-8b", "--gpus", "8,16", "--batch", "64", "--seq", "8192", "--plot", "s.svg")
    assert phalanx(tmp_path, *words)[0] == 0
    text = (tmp_path / "s.svg").read_text()
    assert all(f">{name}</text>" in text for name in ("step", "efficiency", "MFU", "tokens/s"))
    code, _, err = phalanx(tmp_path, "roofline", "--plot", "r.svg")
    assert (code, err.count("\n")) == (2, 1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("memory", "--params", "7B", "--plot", "no/where.svg"), "make its folder first"),
        (("scaling", "--plot", "no/where.svg"), "make its folder first"),
        (("memory",), "give either a model or --params"),
        (("memory", "--model", "gpt2", "--seq", "0"), "--seq = 0: must be positive"),
        (("memory", "--model", "gpt2", "--micro-batch", "-1"), "--micro-batch = -1: must be positive"),
        (("memory", "--params", "7B", "--card", "0"), "--card = 0.0: must be positive"),
        (("comm", "--params", "7B", "--rate", "0"), "--rate = 0.0: must be positive"),
        (("comm", "plan.json", "--batch", "8"), "--batch = 8: is already set by the plan.json"),
        (("explain", "plan.json", "--model", "gpt2"), "--model = 'gpt2': is already set by the plan.json"),
        (("memory", "--params", "many"), "write 25M"),
        (("memory", "--params", "7B", "--bytes-per-parameter", "12"), "use 16, 18 or 20"),
        (("scaling", "--model", "llama3-8b"), "--gpus"),
        (("scaling", "--model", "llama3-8b", "--gpus", "x", "--batch", "8", "--seq", "64"), "not a list of numbers"),
        (("comm", "--model", "llama3-8b"), "--cluster"),
        (("scaling", "--params", "7B"), "--tokens: is missing"),
        (("scaling", "--params", "7B", "--tokens", "all"), "'all': is not a number of tokens"),
        (("scaling", "--params", "7B", "--tokens", "1T", "--tflops", "0"), "--tflops = 0"),
        (("roofline", "--params", "7B", "--seq", "0"), "--seq = 0"),
        (("roofline", "--params", "7B", "--cluster", "dgx-h10"), "did you mean dgx-h100"),
    ],
)
def test_wrong_words_get_one_line(tmp_path, words, said):
    shutil.copy(Path(__file__).parents[1] / "spec" / "data" / "plan_v1.json", tmp_path / "plan.json")
    code, out, err = phalanx(tmp_path, *words)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1
