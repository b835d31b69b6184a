"""A run's folder: which lines of its metrics count, and who started it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phalanx.runs import resume
from phalanx.runs.folder import metrics
from phalanx.runs.resume import resume_point, was_started_by
from phalanx.spec.errors import InputError


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ('{"step": 1}\n{"step": 2}\n', [1, 2]),
        ('{"step": 1}\n{"step": 2}', [1, 2]),
        ('{"step": 1}\n{"st', [1]),
        ('{"step": 1}\n{"st\n', [1]),
        ('{"st\n{"step": 2}\n', None),
        ('{"step": 1}\n\n{"step": 2}\n', None),
        ('{"step": "1"}\n', None),
        ("[1]\n{}\n", None),
    ],
)
def test_only_a_last_line_may_be_half_written(tmp_path: Path, text: str, steps: list[int] | None) -> None:
    (tmp_path / "metrics.jsonl").write_text(text)
    if steps is None:
        with pytest.raises(InputError, match=r"line \d of metrics\.jsonl is not"):
            metrics(tmp_path)
    else:
        assert [row["step"] for row in metrics(tmp_path)] == steps


def test_who_started_a_run_is_in_its_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "RUNS", tmp_path)
    assert not was_started_by(["a"], "none")
    monkeypatch.setattr(resume.plan, "read", lambda path: json.loads(path.read_text(), object_hook=_Plan))
    (tmp_path / "one").mkdir()
    for started, asked, was in (
        (["a", "b"], ["b"], True),
        (["a"], ["b"], False),
        ([], ["b"], False),
        (["a"], [], False),
    ):
        (tmp_path / "one" / "plan.json").write_text(json.dumps({"choices": started}))
        assert was_started_by(asked, "one") == was


class _Plan:
    def __init__(self, content: dict[str, list[str]]) -> None:
        self.choices = {"launchers": content["choices"]}


def test_a_restarted_run_says_where_it_goes_on(tmp_path: Path) -> None:
    assert resume_point(tmp_path) == "the run starts over: nothing was saved yet"
