"""`phalanx serve validate`: what is scored, what is refused, and how far off predictions may be."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from support.in_process_cli import json_of, text_of

from phalanx.serving.validation.predictions import LEFT_OUT, case_of, cases, load_runs, scorable
from phalanx.serving.validation.scores import OTHER_PREDICTOR, compare, floor, scores

ROWS = load_runs()


@pytest.fixture(scope="module")
def summary() -> dict:
    return scores(*compare(ROWS))


MEDIANS = {
    "vllm aggregated": (7, 8, 18, 21),
    "trtllm aggregated": (11, 14, 31, 36),
    "sglang aggregated": (9, 12, 28, 33),
    "trtllm disaggregated": (12, 14, 38, 41),
    "sglang disaggregated": (14, 19, 40, 43),
}
"""Largest median errors in percent: time per token, left out; time to first token, left out."""


@pytest.mark.parametrize("engine", MEDIANS)
def test_errors_stay_where_they_are(summary: dict, engine: str) -> None:
    scored = summary["by_engine"][engine]
    found = [of[q]["median"] for q in ("tpot", "ttft") for of in (scored, scored["left_out"])]
    assert all(f <= most for f, most in zip(found, MEDIANS[engine], strict=True)), found
    assert scored["tpot"]["n"] == scored["left_out"]["tpot"]["n"]  # every group is left out once
    assert engine in OTHER_PREDICTOR


def test_what_was_computed_from_measurements_is_never_an_input() -> None:
    row = next(r for r in ROWS if r["spec_decode"] == "none_assumed")
    for column in ("spec_decode", "repeat_conflict", "same_config_tpot_ratio", "tpot_suspect", "ttft_suspect"):
        other = type(row)({**row.cells, column: "1"})
        assert vars(case_of(other)) | {"row": None} == vars(case_of(row)) | {"row": None}
    alone = (type(row)({**row.cells, "pp": pp}) for pp in ("", "1"))
    assert len({case_of(each).decode for each in alone}) == 1
    for column in ("ttft_ms", "tpot_ms"):
        other = type(row)({**row.cells, column: "1"})
        assert vars(case_of(other)) | {"row": None} == vars(case_of(row)) | {"row": None}


def test_rows_are_left_out_as_their_columns_say() -> None:
    row = ROWS[0]
    assert scorable(row) == (True, True)
    assert scorable(type(row)({**row.cells, "spec_decode": "likely_mtp"})) == (False, False)
    assert scorable(type(row)({**row.cells, "ttft_suspect": "1"})) == (True, False)
    usable, skipped = cases(ROWS)
    assert len(usable) + len(skipped) == len(ROWS) == 2336
    partial = sum(r["topology"] == "partial" for r in ROWS)
    assert len(skipped) == partial
    assert {c.row["topology"] for c in usable}.isdisjoint({"partial"})


def test_repeats_of_a_configuration_set_a_floor() -> None:
    row = next(r for r in ROWS if r["spec_decode"] == "none_assumed")
    twice = [type(row)({**row.cells, "tpot_ms": t}) for t in ("8", "12")]
    assert floor(compare(twice)[0]) == pytest.approx(100 * (0.25 + 1 / 6) / 2)
    assert floor(compare(twice)[0], "ttft") is None  # the times to first token are one measurement


def test_every_left_out_group_is_a_group_of_the_rows() -> None:
    groups = {" | ".join(c.group) for c in cases(ROWS)[0] if scorable(c.row)[0]}
    assert set(json.loads(LEFT_OUT.read_text())) == groups


def test_bad_rows_are_listed_with_their_reason_and_the_others_scored(tmp_path: Path) -> None:
    good = next(r for r in ROWS if r["gpu"] == "H200" and r["framework"] == "vllm")
    changes = {
        "framework": "vlm",
        "gpu": "H900",
        "model": "Qwen/Qwen3-33B",
        "weights_dtype": "nvfp4",
        "isl": "",
        "tp": "0",
    }
    rows = [dict(good.cells)]
    for column, value in changes.items():
        more = {"model_path": ""} if column == "model" else {}
        rows.append({**good.cells, column: value, **more, "id": f"bad {column}"})
    path = tmp_path / "mine.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(good.cells))
        writer.writeheader()
        writer.writerows(rows)
    summary = json_of(tmp_path, "serve validate --runs mine.csv --json")
    assert summary["by_engine"]["vllm aggregated"]["tpot"]["n"] >= 1
    reasons = summary["skipped"]["rows"]
    assert "did you mean vllm" in reasons["bad framework"]
    assert "not a chip" in reasons["bad gpu"]
    assert "did you mean" in reasons["bad model"]
    assert "needs Blackwell" in reasons["bad weights_dtype"]
    assert "missing" in reasons["bad isl"]
    out = text_of(tmp_path, "serve validate --runs mine.csv")
    assert "other rows" in out
