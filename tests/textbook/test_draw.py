"""`phalanx learn draw` and the pictures of other commands' --save, from the command line."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest
from support.in_process_cli import error_of, phalanx

from phalanx.textbook.answers import PICTURES


def test_the_list_names_every_picture(tmp_path: Path) -> None:
    listed = json.loads(phalanx(tmp_path, "learn draw --json")[1])
    _, out, _ = phalanx(tmp_path, "learn draw")
    assert all(row["name"] in out for row in listed)
    assert max(map(len, out.splitlines())) <= 80
    assert {"fsdp", "memory-wall", "roofline", "hsdp", "decision-tree"} <= {row["name"] for row in listed}


def test_without_a_name_all_are_drawn(tmp_path: Path) -> None:
    assert phalanx(tmp_path, "learn draw --save all.html")[2] == "wrote all.html\n"
    assert (tmp_path / "all.html").read_text().count("<svg") == len(PICTURES)


def test_a_picture_is_text_file_and_data(tmp_path: Path) -> None:
    code, out, err = phalanx(tmp_path, "learn draw parameter-bytes --params 10B --save p.svg")
    assert (code, err) == (0, "wrote p.svg\n")
    assert "5.5 B, 55 GB" in out
    assert "5.5 B, 55 GB" in (tmp_path / "p.svg").read_text()
    data = json.loads(phalanx(tmp_path, "learn draw parameter-bytes --json")[1])
    assert [panel["kind"] for panel in data["panels"]] == ["bars", "bars"]
    assert phalanx(tmp_path, "learn draw stack --save p.html")[0] == 0
    assert "<svg" in (tmp_path / "p.html").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("learn", "draw", "stck"), "did you mean stack?"),
        (("learn", "draw", "stack", "--model", "gpt2"), "it takes no options"),
        (("learn", "draw", "--model", "gpt2"), "name one"),
        (("learn", "draw", "fsdp", "--model", "mixtral-8x7b"), "name a dense model"),
        (("learn", "draw", "hsdp", "--gpus", "7"), "use 16"),
        *(
            (("learn", "draw", "sequence-parallel", "--ranks", ranks, "--seq", seq), "use 2 or 4, a divisor of --seq")
            for ranks, seq in (("3", "8193"), ("4", "8190"))
        ),
        (
            ("learn", "draw", "parameter-bytes", "--ranks", "1" + 10 * "0"),
            "is too much to draw; use at most 10,000,000",
        ),
        (("learn", "draw", "stack", "--save", "x.gif"), "name a .svg or .html or .png or .csv file"),
        (("collectives", "show", "ring", "--ranks", "12", "--save", "x.svg"), "at most 8 ranks"),
        (("collectives", "table", "--op", "barrier", "--save", "x.svg"), "name a preset"),
        (("pipeline", "show", "1f1b", "--micro-batches", "501", "--save", "x.svg"), "at most 4,000"),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    assert said in error_of(tmp_path, *words)
    assert not (tmp_path / "x.svg").exists()


_PLOTS = (
    (("tables", "roofline"), "H100: 295"),
    (("tables", "roofline", "--params", "7B"), "infiniband: 19,788"),
    (("learn", "tree"), "Serving, not training?"),
    (("tables", "clusters"), "TB/s of one GPU"),
    (("tables", "clusters", "dgx-h100"), "bisection 6.4 TB/s"),
    (("collectives", "show", "ring"), "round 6 of 6"),
    (("collectives", "show", "pairwise", "--op", "all_to_all"), "round 3 of 3"),
    (("collectives", "table", "--ranks", "64"), "rabenseifner from here"),
    (("pipeline", "show", "gpipe", "1f1b"), "bubble 27.3% of the step"),
    (("tables", "mesh", "--strategy", "tp=8,dp=2", "--cluster", "dgx-h100"), "node1"),
)


@pytest.mark.parametrize(("words", "said"), _PLOTS)
def test_a_command_draws_its_subject(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    assert phalanx(tmp_path, *words, "--save", "x.svg")[0] == 0
    text = (tmp_path / "x.svg").read_text()
    assert said in text
    assert "Source: " in text
    assert "prefers-color-scheme" in text
    ElementTree.fromstring(text)


@pytest.mark.long
@pytest.mark.skipif(not shutil.which("chromium"), reason="Chromium is not installed")
def test_a_png_is_drawn_by_chromium(tmp_path: Path) -> None:
    assert phalanx(tmp_path, "learn draw stack --save s.png")[0] == 0
    assert (tmp_path / "s.png").read_bytes()[:4] == b"\x89PNG"


def test_patterns_send_what_the_table_of_traffic_says(tmp_path: Path) -> None:
    drawn = json.loads(phalanx(tmp_path, "learn draw patterns --json")[1])["panels"][0]["bars"]
    job = "--model mixtral-8x7b --cluster dgx-h100 --gpus 8 --batch 8 --seq 4096"
    for way, line in (("pipeline", "pp=8"), ("expert", "dp=8,ep=8"), ("tensor", "tp=8,etp=8,micro_batch=8")):
        rows = json.loads(phalanx(tmp_path, f"tables comm {job} --strategy {line} --json")[1])["tables"][0]["rows"]
        (bar,) = [bar for bar in drawn if bar["label"] == way]
        inner = sum(row["sent_bytes"] for row in rows if row["hidden"] is not None)
        assert sum(size for _, size in bar["parts"]) == pytest.approx(inner / 2**30, rel=1e-6)


def test_stages_hold_every_block_once(tmp_path: Path) -> None:
    out = phalanx(tmp_path, "learn draw stages --model gpt2-xl --ranks 3")[1]
    spans = sorted(tuple(map(int, span)) for span in re.findall(r"blocks (\d+)-(\d+)", out))
    assert [i for first, last in spans for i in range(first, last + 1)] == list(range(48))


def test_steps_of_data_parallelism_cut_the_batch(tmp_path: Path) -> None:
    assert "48 to 63" in phalanx(tmp_path, "learn draw data-parallelism --batch 64")[1]
    assert "is not a multiple of 4 ranks" in error_of(tmp_path, "learn", "draw", "data-parallelism", "--batch", "6")


@pytest.mark.parametrize(
    "name",
    ["ring-all-reduce", "binomial-all-reduce", "pipelines", "fsdp", "ring-attention", "expert-dispatch"],
)
def test_a_picture_that_moves_shows_its_steps_in_order(tmp_path: Path, name: str) -> None:
    assert phalanx(tmp_path, f"learn draw {name} --moving --save moving.svg")[0] == 0
    assert phalanx(tmp_path, f"learn draw {name} --save still.svg")[0] == 0
    moving, still = ((tmp_path / f"{kind}.svg").read_text() for kind in ("moving", "still"))
    times = [float(t) for t in re.findall(r'keyTimes="0;([\d.]+)"', moving)]
    assert 0 < min(times) <= max(times) <= 0.8
    if "reduce" in name:
        assert times == sorted(times)
        assert len(times) == len(set(times)) == {"ring-all-reduce": 6, "binomial-all-reduce": 4}[name]
    assert "<animate" not in still
    assert re.sub(r"<g><animate[^>]*>|</g>|\n", "", moving) == re.sub(r"</g>|\n", "", still)


def test_what_has_no_steps_does_not_move(tmp_path: Path) -> None:
    for options in (
        "stages --moving --save x.svg",
        "ring-all-reduce --moving",
        "ring-all-reduce --moving --save x.png",
    ):
        code, _, err = phalanx(tmp_path, f"learn draw {options}")
        assert (code, err.count("\n")) == (2, 1)
