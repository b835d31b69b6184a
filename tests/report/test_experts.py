"""`phalanx runs experts`: a run's balance over time, from its metrics."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.in_process_cli import error_of, phalanx, text_of

from phalanx.answers.runs.experts import stretches
from phalanx.report.measured.runs import _bars, balance
from phalanx.runs import folder as runs
from phalanx.spec.errors import InputError


def write(folder: Path, rows: list[dict[str, object]], half: str = "") -> Path:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + half)
    return folder


def row(step: int, *loads: list[int], dropped: float = 0.0) -> dict[str, object]:
    return {"step": step, "expert_tokens": {str(b): load for b, load in enumerate(loads)}, "expert_dropped": dropped}


def test_bars_reach_from_one_token_to_the_busiest() -> None:
    assert _bars(range(9)) == "·▁▂▃▄▅▆▇█"
    assert _bars([0, 1, 50, 99]) == "·▁▅█"


def test_stretches_add_up_and_are_even() -> None:
    found = stretches([row(i + 1, [i, 10], [5, 5], dropped=0.1 * (i == 19)) for i in range(20)])
    assert [(part.first_step, part.last_step) for part in found] == [(i + 1, min(20, i + 3)) for i in range(0, 20, 3)]
    assert found[0].chosen == {"0": [0 + 1 + 2, 30], "1": [15, 15]}
    assert found[-1].dropped == pytest.approx(0.05)
    assert len(balance(found).rows) == 3  # two layers, and what was dropped


def test_it_is_shown(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", [row(1, [8, 0], [4, 4]), row(2, [8, 0], [6, 2])], half='{"step": 3, "exp')
    shown = text_of(tmp_path, "runs experts", str(folder))
    assert "block 0" in shown
    assert "2.00" in shown
    told = json.loads(phalanx(tmp_path, "runs experts", str(folder), "--json")[1])
    assert told["stretches"][1]["busiest"] == {"0": 2.0, "1": 1.5}
    assert phalanx(tmp_path, "runs experts", str(folder), "--save", "e.svg")[0] == 0
    drawn = (tmp_path / "e.svg").read_text()
    assert "1.50 x the mean" in drawn
    assert "expert 1" in drawn


def test_what_has_no_experts_is_refused_in_a_line(tmp_path: Path) -> None:
    dense = write(tmp_path / "dense", [{"step": 1, "loss": 2.0}])
    for folder, reason in ((dense, "its metrics hold nothing about experts"), (tmp_path / "none", "has no metrics")):
        said = error_of(tmp_path, "runs experts", str(folder))
        assert reason in said
        assert "Traceback" not in said


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", [], half='{"step": 1\n{"step": 2}\n')
    with pytest.raises(InputError, match=r"line 1 of metrics\.jsonl is not JSON"):
        runs.metrics(folder)
