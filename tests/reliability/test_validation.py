"""Published jobs and checkpoints: predicted from what is not the result."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest
from support.in_process_cli import phalanx

from phalanx.planning.tables.table import Sheet
from phalanx.reliability.presets import DEFAULT_FAILURES, FAILURES, HARDWARE
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
    assert {quantity: (e["n"], e["bounds"]) for quantity, e in scores.errors.items()} == {
        "effective time": (0, 2),
        "unexpected failures": (1, 0),
        "node failures": (2, 0),
        "time to failure": (6, 0),
        "uptime": (4, 0),
        "checkpoint size": (9, 0),
        "save": (6, 0),
        "share that fails": (2, 0),
        "load": (4, 0),
        "stall": (6, 0),
    }
    assert list(scores.left_out.values()) == [28, 10, 10, 1]
    within = {quantity: e["within_25_percent"] for quantity, e in scores.errors.items()}
    assert sum(within.values()) == sum(abs(f.error) <= 0.25 for f in scores.figures)
    assert within["checkpoint size"] == 9
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


_ROW = {"record": "checkpoint", "gpus": 64, "hardware": "H100-SXM-80GB", "params_b": 70}
_RATES = {"storage_write_gbs": 10, "storage_read_gbs": 20}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"checkpoint_gb": 980}, {"checkpoint size": 980}),  # 14 bytes a parameter
        ({"checkpoint_gb": 912.7}, {"checkpoint size": 980}),  # 980e9 bytes are 912.7 GiB
        ({"checkpoint_save_s": 100, **_RATES}, {"save": 98}),
        ({"checkpoint_load_s": 50, **_RATES}, {"load": 49}),
        ({"checkpoint_load_s": 50, "checkpoint_gb": 400, **_RATES}, {"checkpoint size": 980, "load": 20}),
        ({"checkpoint_stall_s": 1, "method": "asynchronous", **_RATES}, {"stall": 0.4 + 980 / 64 / 20}),
        ({"checkpoint_stall_s": 90, "method": "synchronous", **_RATES}, {"stall": 98}),
        ({"checkpoint_stall_s": 1, "method": "async", "gpus": "", **_RATES}, {"stall": 0.4 + 980 / 8 / 20}),
        ({"checkpoint_save_s": 0, "checkpoint_stall_s": 0, "checkpoint_load_s": 49, **_RATES}, {"load": 49}),
        ({"checkpoint_save_s": 9, "params_b": "", **_RATES}, {}),
    ],
)
def test_checkpoints_are_predicted_from_parameters_and_rates(
    tmp_path: Path, row: dict[str, object], expected: dict[str, float]
) -> None:
    scores = goodput_scores(_file(tmp_path, {**_ROW, **row}))
    assert {f.quantity: f.predicted for f in scores.figures} == pytest.approx(expected)
    why = {f.quantity: f.why for f in scores.figures}
    if "checkpoint size" in expected:
        gb = float(str(row["checkpoint_gb"]))
        reason = "agrees to 2 % in GiB" if gb == 912.7 else f"{gb / 70:.3g} bytes a parameter would explain it"
        assert why["checkpoint size"] == f"14 bytes a parameter; {reason}"
    if "gpus" in row:
        assert "one node of 8 GPUs" in why["stall"]
    assert bool(scores.left_out) == (not expected)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"record": "cause", "count": 3}, "a cause's count or share: what failure rates are made of"),
        ({"record": "restart"}, "a phase of a restart: what kinds of restart are made of"),
        ({"record": "detection"}, "a phase of a restart: what kinds of restart are made of"),
        ({"effective_pct": 90, "effective_kind": "utilisation"}, "utilisation of a cluster: also idle GPUs"),
        ({"effective_pct": 90}, "neither GPUs, days nor rates are stated"),
        ({"restarts": 3}, "neither GPUs, days nor rates are stated"),
        ({"mttf_gpus": 3}, "a ratio, a formula or a bound, and no figure of a job"),
        (
            {"gpus": 8, "effective_pct": 90, "checkpoint_interval_s": 1},
            "interval = '1 s': is shorter than a step, 10 s; save at most once a step",
        ),
    ],
)
def test_why_a_row_has_no_figure(tmp_path: Path, row: dict[str, object], words: str) -> None:
    scores = goodput_scores(_file(tmp_path, row))
    assert (scores.figures, scores.left_out) == ((), {words: 1})


def test_failures_are_counted_by_the_gpu_and_the_node(tmp_path: Path) -> None:
    counts = FAILURES[DEFAULT_FAILURES]
    job = {"hardware": "MI300X", "gpus": 100}
    rows: list[dict[str, object]] = [
        {**job, "days": 10, "interruptions_unexpected": 5},
        {**job, "days": 10, "interruptions": 5},
        {**job, "mttf_h": 3},
        {**job, "mttf_h": 3, "mttf_gpus": 50},
        {**job, "failures_per_1000_node_days": 2},
        *({**job, "record": "cause", "cause": f"{c} failures a {t}", "share_pct": 1} for c, t in _KINDS),
    ]
    found = [(f.quantity, f.predicted) for f in goodput_scores(_file(tmp_path, *rows)).figures]
    node = sum(counts.rate(c, 8, 1) for c in HARDWARE)
    gpu = counts.rate("gpu", 1, 0) + counts.rate("host", 0, 1) / 8
    nic = counts.rate("nic", 1, 0) + counts.rate("switch", 1, 0)
    shares = [100 * 86_400 * rate * days for rate, days in ((gpu, 1), (nic, 30), (node, 365))]
    assert found == [
        ("unexpected failures", pytest.approx(counts.per_s(100, 13) * 864_000)),
        ("unexpected failures", pytest.approx(counts.per_s(100, 13) * 864_000)),
        ("time to failure", pytest.approx(1 / counts.per_s(100, 13) / 3600)),
        ("time to failure", pytest.approx(1 / counts.per_s(50, 7) / 3600)),
        ("node failures", pytest.approx(node * 86_400 * 1000)),
        *(("share that fails", pytest.approx(share)) for share in shares),
    ]


_KINDS = (("GPU", "day"), ("NIC", "month"), ("node", "year"))


def test_a_miss_says_what_would_explain_it(tmp_path: Path) -> None:
    """With that length of a restart, or so many more failures, the published share is predicted."""
    row = {"gpus": 1024, "mttf_h": 30, "effective_pct": 90, "detect_s": 0, "restart_s": 600, "checkpoint_save_s": 1}
    row |= {"checkpoint_load_s": 0, "checkpoint_interval_s": 60}
    said = goodput_scores(_file(tmp_path, row)).figures[0].why
    cost, minutes, times = map(
        float, re.findall(r"costs ([\d.]+) min here; ([\d.]+) min would .* or ([\d.]+) times", said)[0]
    )
    assert 10 < cost < 25  # nodes are waited for, and corruption is seen late
    for change in ({"restart_s": 60 * minutes}, {"mttf_h": 30 / times}):
        predicted = goodput_scores(_file(tmp_path, {**row, **change})).figures[0].predicted
        assert predicted == pytest.approx(0.9, abs=0.03), change
    sized = goodput_scores(_file(tmp_path, row, {**row, "params_b": 70})).figures
    assert ["a checkpoint of 1 TB" in f.why for f in sized if f.quantity == "effective time"] == [True, False]
    assert ["14 bytes a parameter" in f.why for f in sized if f.quantity == "effective time"] == [False, True]
    better = goodput_scores(_file(tmp_path, {**row, "mttf_h": 10, "effective_pct": 100})).figures[0].why
    assert "no length of a restart alone explains it" in better
