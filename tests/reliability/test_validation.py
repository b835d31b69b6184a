"""Published jobs and checkpoints: predicted from what is not the result."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from support.in_process_cli import phalanx

from phalanx.planning.tables.table import Sheet
from phalanx.reliability.report import scores as shown
from phalanx.reliability.validation import PUBLISHED, goodput_scores

_COLUMNS = next(csv.reader(PUBLISHED.open()))


def _file(folder: Path, *rows: dict[str, object], columns: list[str] = _COLUMNS) -> Path:
    path = folder / "rows.csv"
    with path.open("w") as out:
        writer = csv.DictWriter(out, columns, restval="")
        writer.writeheader()
        writer.writerows(
            {"row_id": f"T{i}", "record": "job", "source_family": "t", **row} for i, row in enumerate(rows)
        )
    return path


def test_the_published_rows() -> None:
    scores = goodput_scores()
    bounds = [f for f in scores.figures if f.quantity == "effective time"]
    assert next(f for f in bounds if f.row == "G001").error == 0  # over 90 %
    (pair,) = scores.pairs
    assert pair.published == (0.7783, 0.9881)
    assert pair.predicted[1] - pair.predicted[0] > 0.1
    assert abs(pair.predicted[1] - pair.published[1]) < 0.01
    assert scores.errors["checkpoint size"]["median"] < 13
    sheets = {part.title: part.rows for part in shown(scores).parts if isinstance(part, Sheet)}
    assert all(sheets.values())
    assert sheets["rows without a figure that is predicted"] == list(scores.left_out.items())
    told = {row[0]: row[3:5] for row in sheets["errors by quantity"]}
    assert told == {
        name: tuple(None if e[key] is None else pytest.approx(e[key] / 100) for key in ("median", "bias"))
        for name, e in scores.errors.items()
    }


def test_an_error_is_relative_but_of_shares_a_difference_and_nothing_where_a_bound_holds() -> None:
    for f in goodput_scores().figures:
        share = f.quantity in ("effective time", "uptime")
        off = f.predicted - f.published if share else f.predicted / f.published - 1
        assert f.error == pytest.approx(0.0 if f.bound and f.predicted >= f.published else off)


def test_a_job_is_up_while_it_saves_and_while_it_does_work_again(tmp_path: Path) -> None:
    """Of a job that saves seldom most of what it loses is work done again, which its uptime has."""
    row = {"gpus": 4096, "days": 30, "params_b": 70, "hardware": "H100-SXM-80GB", "effective_pct": 90}
    kinds = [{**row, "effective_kind": kind, "checkpoint_interval_s": 20_000} for kind in ("uptime", "effective")]
    uptime, effective = (f.predicted for f in goodput_scores(_file(tmp_path, *kinds)).figures if f.published == 0.9)
    assert 0.1 < uptime - effective < 1 - effective


def test_a_result_never_predicts_itself(tmp_path: Path) -> None:
    """The same figures come out whatever the row says that they are."""
    row = {"gpus": 4096, "days": 30, "params_b": 70, "hardware": "H100-SXM-80GB", "effective_kind": "effective"}
    said = [{"effective_pct": 50, "checkpoint_gb": 100}, {"effective_pct": 99, "checkpoint_gb": 900}]
    size, time = (
        [f.predicted for f in goodput_scores(_file(tmp_path, *({**row, k: one[k]} for one in said))).figures]
        for k in ("checkpoint_gb", "effective_pct")
    )
    assert len(set(size)) == 1
    assert len(set(time)) == 1
    counted = [{**row, "interruptions_unexpected": n} for n in (3, 3000)]
    assert len({f.predicted for f in goodput_scores(_file(tmp_path, *counted)).figures}) == 1


def test_a_source_does_not_predict_itself() -> None:
    for figure in goodput_scores().figures:
        if figure.family == "meta-rsc":
            assert "rsc" not in figure.why


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"effective_pct": "high"},
        {"gpus": 0, "effective_pct": 90},
        {"gpus": 8, "effective_pct": 90, "parallelism": "TP 0"},
        {"gpus": 100_000, "effective_pct": 90, "detect_s": 1e9},
        {"record": "checkpoint", "checkpoint_save_s": 3},
        {"record": "checkpoint", "checkpoint_save_s": 3, "model": "nobody/knows", "params_b": 3},
        {"record": "curve", "mttf_h": 3, "mttf_gpus": 64},
    ],
)
def test_rows_may_say_little(tmp_path: Path, row: dict[str, object]) -> None:
    scores = goodput_scores(_file(tmp_path, row))
    assert scores.figures or scores.left_out


def test_a_stated_time_between_failures_is_in_hours(tmp_path: Path) -> None:
    """Or as a count over days: every 3 hours of work then cost more than an hour and a half."""
    row = {"gpus": 1024, "effective_pct": 60, "detect_s": 0, "restart_s": 5400, "checkpoint_save_s": 1}
    by_hours, by_days = {**row, "mttf_h": 3}, {**row, "days": 10, "interruptions": 80}
    figures = goodput_scores(_file(tmp_path, by_hours, by_days)).figures
    effective = [f.predicted for f in figures if f.quantity == "effective time"]
    assert effective == [pytest.approx(3 / 4.5, abs=0.1)] * 2
    assert max(effective) < 3 / 4.5
    node, unknown = ({**by_hours, "gpus": gpus} for gpus in (8, ""))
    assert len({f.predicted for f in goodput_scores(_file(tmp_path, node, unknown)).figures[::2]}) == 1


def test_columns_may_be_missing(tmp_path: Path) -> None:
    columns = ["row_id", "record", "source_family", "gpus", "effective_pct"]
    path = _file(tmp_path, {"gpus": 1024, "effective_pct": 95}, columns=columns)
    code, stdout, _ = phalanx(tmp_path, f"validate --goodput {path} --json")
    assert code == 0
    assert "failures of llama3-h100" in stdout
    code, _, stderr = phalanx(tmp_path, "validate --goodput nowhere.csv")
    assert (code, len(stderr.strip().splitlines())) == (2, 1)
