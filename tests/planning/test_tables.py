"""The textbook's tables: golden values of the teaching texts where they are right, corrected where they are not."""

from __future__ import annotations

import csv
import io
import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from support.in_process_cli import error_of, phalanx, text_of

from phalanx.planning.explain.explanation import regime
from phalanx.planning.lookup import cluster_named, model_named, pricing_by_gpus
from phalanx.planning.search.limits import conditions
from phalanx.planning.tables import switch_levels, textbook
from phalanx.planning.tables.roofline import level_of, levels_of, ridges
from phalanx.planning.tables.scaling import by_batch, by_gpus, sensitivity
from phalanx.spec.cluster.presets import preset


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


def test_bytes_of_a_parameter_by_kind():
    """M1: 12, 16, 18 and 20 are four policies; each is the sum of its kinds, and ZeRO shards them in turn."""
    rows = textbook.kinds(1e9, 16).rows
    assert [row[0] for row in rows] == [12, 16, 18, 20]
    for total, *kinds, in_all, _ in rows:
        assert (sum(kinds), in_all) == (total, total)
    assert textbook.zero_bytes(1.0, 1, 4, 12) == 2 + 2 + 8 / 4
    assert textbook.savings((8,), 16).rows[0][1:] == pytest.approx((2.909, 4.267, 8), abs=1e-3)


@pytest.mark.parametrize(("rate", "tokens"), [(450e9, 1319), (50e9, 11873)])
def test_the_smallest_batch_for_ninety_percent(rate, tokens):
    """M35: 0.9 of the ridge over 1.5 FLOP a byte and token, whatever the model."""
    for params in (7e9, 70e9):
        sheet = textbook.intensity(params, 1, (tokens,), 989.4e12, rate, "links")
        assert sheet.rows[0][-1] == pytest.approx(0.9, abs=1e-3)
        assert f"90 % from {tokens:,} tokens" in sheet.note


def test_four_regimes():
    assert [regime(r) for r in (0.1, 0.2, 0.79, 0.8, 1.19, 1.2)] == [
        "communication dominates",
        "communication-bound",
        "communication-bound",
        "balanced",
        "balanced",
        "compute-bound",
    ]


def test_levels_of_switches_carry_what_their_links_do():
    cluster = preset("sites-h100", 32)
    rows = {row[0]: row for row in switch_levels.sheet(cluster).rows}
    assert len(rows) == len(cluster.tiers)
    for tier in cluster.tiers:
        _, blocks, ranks, rate, carried, bisection, over = rows[tier.name]
        assert bisection == carried / 2
        assert carried * over == pytest.approx(ranks * rate)
        if tier.uplink_bandwidth_bytes_per_s_per_direction is not None:
            assert carried <= blocks * tier.uplink_bandwidth_bytes_per_s_per_direction


def test_memory_levels_grow_outwards_and_an_operator_is_held_in_one():
    for name in ("dgx-h100", "dgx-a100", "pcie-l4", "dgx-b200"):
        levels = levels_of(preset(name, 1))
        assert [level[0] for level in levels] == ["registers", "L1", "L2", "HBM"]
        assert levels[2][1] < levels[3][1]
        assert level_of(1.0, levels) == "registers"
        assert level_of(1e20, levels) == "HBM"


def test_scaling_loses_to_its_causes():
    """Efficiency is what computing in pieces, communication, bubble and imbalance leave, to a step of the first."""
    sheet = by_gpus(_question(64), (8, 32), weak=False)
    assert [c.name for c in sheet.columns][7:] == [
        "communication", "bubble", "imbalance", "computing", "GPU-hours a billion tokens"
    ]  # fmt: skip
    first, second = sheet.rows
    step, kept = second[3], 1 - sum(second[7:11])
    useful = first[3] * (1 - sum(first[7:10])) * 8 / 32  # a rank's computing, were it as fast as in the first row
    assert step * kept == pytest.approx(useful)
    assert second[11] / first[11] == pytest.approx(first[5] / second[5])


def test_one_stage_waits_for_no_slower_one():
    """The head is computed as all else is: imbalance is what the slowest rank of a pipeline has beyond the mean."""
    rows = []
    for line in ("pp=1", "pp=4, virtual=1, schedule=1f1b"):
        wanted = conditions(line)[0]
        sheet = by_gpus(lambda n, wanted=wanted: replace(_question(8)(n), wanted=wanted), (8,), weak=False)
        rows.append(dict(zip([c.name for c in sheet.columns], sheet.rows[0], strict=True)))
    alone, staged = rows
    assert (alone["imbalance"], alone["bubble"]) == (0, 0)
    assert 0 < staged["imbalance"] < 0.1


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


def test_memory_that_strategies_leave_free_is_told():
    """Where there is any: as many strategies fit as `phalanx plan` finds."""
    for headroom in (0.0, 0.1):
        sheet = by_gpus(lambda n, h=headroom: replace(_question(64)(n), headroom=h), (8,), weak=False)
        assert ("10% of the memory free" in sheet.note) == (headroom > 0)


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
        ("tables", "memory", "--model", "gpt3-175b"),
        ("tables", "memory", "--params", "25M"),
        ("tables", "comm", "--params", "7B"),
        ("tables", "comm", *_STRATEGY, "--strategy", "dp=4,zero=1,tp=2,sp=1,pp=2"),
        ("tables", "roofline"),
        ("tables", "roofline", "--params", "7B", "--seq", "4096"),
        ("tables", "scaling", "--params", "7B", "--tokens", "1T", "--gpus", "8,64"),
        ("tables", "roofline", *_STRATEGY, "--strategy", "dp=16,zero=2"),
        (
            "tables",
            "scaling",
            "--model",
            "gpt2",
            "--gpus",
            "2",
            "--batch",
            "2",
            "--seq",
            "64",
            "--devices",
            "a100,h100",
        ),
    ],
    ids=lambda words: " ".join(words[:3]),
)
def test_each_table_prints_as_text_json_and_csv(tmp_path, words):
    out = text_of(tmp_path, *words)
    assert "─" in out
    sheets = json.loads(phalanx(tmp_path, *words, "--json")[1])["tables"]
    text = phalanx(tmp_path, *words, "--save", "csv")[1]
    read = [list(csv.DictReader(io.StringIO(part))) for part in text.split("\n\n")]
    assert [len(part) for part in read] == [len(sheet["rows"]) for sheet in sheets]
    assert list(read[0][0]) == list(sheets[0]["rows"][0])


def test_a_device_is_faster_by_its_rates(tmp_path):
    """Tokens/s of a job on an A100 over a V100, and what each of its published rates would make of it."""
    words = ("tables", "scaling", "--model", "gpt2", "--gpus", "1", "--batch", "8", "--seq", "256")
    first, row = json.loads(phalanx(tmp_path, *words, "--devices", "v100,a100", "--json")[1])["tables"][-1]["rows"]
    names = list(row)
    assert [first[name] for name in names[-4:]] == [1.0] * 4
    assert row[names[-4]] == pytest.approx(row[names[4]] / first[names[4]])
    assert [row[name] for name in names[-3:]] == pytest.approx([312 / 125, 2039 / 897, 300 / 150], rel=0.01)


def test_tables_are_drawn(tmp_path):
    words = ("tables", "memory", "--params", "7B", "--save", "memory.svg")
    assert phalanx(tmp_path, *words)[0] == 0
    drawn = ElementTree.parse(tmp_path / "memory.svg").getroot()
    of_ranks = drawn.findall("{*}svg")[2]  # after the bytes of a parameter and the memory wall
    names = [t.text for t in of_ranks.iter("{http://www.w3.org/2000/svg}text")]
    assert {"ZeRO-0", "ZeRO-1", "ZeRO-2", "ZeRO-3"} <= set(names)
    lines = [p for p in of_ranks.iter("{http://www.w3.org/2000/svg}path") if p.attrib["d"].count("L") == 10]
    assert len(lines) == 4  # levels of ZeRO, over 11 numbers of ranks
    places = [tuple(map(float, point.split())) for point in lines[3].attrib["d"][1:].split("L")]
    assert len(places) == 11
    # ZeRO-3 falls as 1/P: on two logarithmic axes the steps are equal.
    steps = {(round(b[0] - a[0]), round(b[1] - a[1])) for a, b in itertools.pairwise(places)}
    assert len({x for x, _ in steps}) <= 2
    assert max(y for _, y in steps) - min(y for _, y in steps) <= 1
    words = (
        "tables",
        "scaling",
        "--model",
        "gpt2",
        "--gpus",
        "2,4",
        "--batch",
        "8",
        "--seq",
        "64",
        "--save",
        "s.svg",
    )
    assert phalanx(tmp_path, *words)[0] == 0
    text = (tmp_path / "s.svg").read_text()
    assert all(f">{name}</text>" in text for name in ("efficiency", "MFU", "communication", "strong: one batch"))
    assert phalanx(tmp_path, "tables roofline --save r.svg")[0] == 0
    assert "H100: 295" in (tmp_path / "r.svg").read_text()
    line = ("tables", "comm", "--params", "7B", "--save", "r.gif")
    assert "name a .svg or .html or .png or .csv file" in error_of(tmp_path, *line)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("tables", "memory", "--params", "7B", "--save", "no/where.svg"), "make its folder first"),
        (
            ("tables", "scaling", "--params", "7B", "--tokens", "1T", "--save", "no/where.svg"),
            "make its folder first",
        ),
        (("tables", "memory", "--seq", "8"), "--model, --cluster"),
        (("tables", "memory", "--model", "gpt2", "--seq", "0"), "--seq = 0: must be positive"),
        (("tables", "memory", "--model", "gpt2", "--micro-batch", "-1"), "--micro-batch = -1: must be positive"),
        (("tables", "memory", "--params", "7B", "--card", "0"), "--card = 0.0: must be positive"),
        (("tables", "comm", "--params", "7B", "--rate", "0"), "--rate = 0.0: must be positive"),
        (("tables", "comm", "plan.json", "--batch", "8"), "--batch = 8: is already set by the plan.json"),
        (("explain", "plan.json", "--model", "gpt2"), "--model = 'gpt2': is already set by the plan.json"),
        (("tables", "memory", "--params", "many"), "write 25M"),
        (("tables", "memory", "--params", "7B", "--bytes-per-parameter", "14"), "use 12, 16, 18 or 20"),
        (("tables", "scaling", "--model", "llama3-8b"), "--gpus"),
        (
            ("tables", "scaling", "--model", "llama3-8b", "--gpus", "x", "--batch", "8", "--seq", "64"),
            "not a list of numbers",
        ),
        (("tables", "comm", "--model", "llama3-8b"), "--cluster"),
        (("tables", "scaling", "--params", "7B"), "--tokens: is missing"),
        (("tables", "scaling", "--params", "7B", "--tokens", "all"), "'all': is not a number of tokens"),
        (("tables", "scaling", "--params", "7B", "--tokens", "1T", "--tflops", "0"), "--tflops = 0"),
        (("tables", "roofline", "--params", "7B", "--seq", "0"), "--seq = 0"),
        (("tables", "roofline", "--params", "7B", "--cluster", "dgx-h10"), "did you mean dgx-h100"),
    ],
)
def test_wrong_words_get_one_line(tmp_path, words, said):
    shutil.copy(Path(__file__).parent / "data" / "plan.json", tmp_path / "plan.json")
    code, out, err = phalanx(tmp_path, *words)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


def test_a_table_of_nothing_says_what_it_may_be_of(tmp_path):
    for words in (("tables", "memory"), ("tables", "comm"), ("tables", "scaling"), ("plan",)):
        code, out, err = phalanx(tmp_path, *words)
        assert (code, out) == (2, "")
        assert "--params" in err or "JOB.toml" in err


def test_what_hides_communication_is_said_of_each_axis(tmp_path):
    """Exposed and covered add up to what the axis takes alone; a pipeline of one chunk a rank hides nothing."""
    words = "tables comm --model gpt3-175b --cluster dgx-a100 --gpus 1024 --batch 1536 --seq 2048 --strategy"
    line = "dp=8,zero=1,tp=8,sp=1,pp=16,micro_batch=1"
    sent, hidden = json.loads(phalanx(tmp_path, *words.split(), line, "--json")[1])["tables"]
    rows = {row["axis"]: row for row in hidden["rows"]}
    assert set(rows) == {"tp", "dp", "pp"}
    assert rows["pp"]["covered_s"] == 0
    assert "1 of 192 micro-batches" in rows["dp"]["what_can_cover_it"]
    for axis, row in rows.items():
        of_axis = [r for r in sent["rows"] if r["axis"] == axis and r["by"] == "inner ranks"]
        assert of_axis
        assert {r["hidden"] for r in of_axis if r["hidden"] is not None} <= {row["hidden"]}
        assert row["covered_s"] == pytest.approx(row["hidden"] * (row["exposed_s"] + row["covered_s"]))
    several = phalanx(tmp_path, *words.split(), f"{line},virtual=3,schedule=interleaved", "--json")[1]
    cover = {row["axis"]: row for row in json.loads(several)["tables"][1]["rows"]}
    assert cover["pp"]["covered_s"] > 0
    assert "other chunks" in cover["pp"]["what_can_cover_it"]
    assert "nothing" in rows["pp"]["what_can_cover_it"]
    drawn = phalanx(tmp_path, *words.split(), line, "--save", "sent.svg")
    assert drawn[0] == 0
    assert "exposed" in (tmp_path / "sent.svg").read_text()
