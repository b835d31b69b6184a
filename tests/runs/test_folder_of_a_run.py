"""A run's folder: which lines of its metrics count, and who started it."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.runs import folder, resume
from phalanx.runs.folder import metrics
from phalanx.runs.resume import resume_point, strategy_for_ranks, was_started_by
from phalanx.spec.errors import InputError
from phalanx.spec.files.job_file import build
from phalanx.spec.job import Job
from phalanx.spec.optimizers import OuterOptimizer
from phalanx.spec.strategy.spec import Strategy, divisors, parse


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
    assert was_started_by(["a"], "none") is False
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


def _long_run(folder: Path, steps: int) -> list[dict[str, object]]:
    rows = [{"step": n, "loss": f"{n:07}"} for n in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return rows


@pytest.mark.parametrize(("steps", "count"), [(60, 4), (400, 10), (401, 37)])
def test_of_a_long_run_lines_are_drawn_evenly_and_all_of_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int, count: int
) -> None:
    rows = _long_run(tmp_path, steps)
    size = (tmp_path / "metrics.jsonl").stat().st_size
    tail = steps // 3
    last = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)[-tail:]
    monkeypatch.setattr(folder, "_TAIL", len(b"".join(last)) + 1)
    monkeypatch.setattr(folder, "_WHOLE", size)
    assert metrics(tmp_path, count) == rows  # of this size it is read whole
    monkeypatch.setattr(folder, "_WHOLE", size - 1)
    drawn = [int(row["step"]) for row in metrics(tmp_path, count)]
    assert [rows[n - 1] for n in drawn] == metrics(tmp_path, count)
    assert drawn == sorted(set(drawn))
    assert drawn[0] == 1
    assert drawn[-tail:] == list(range(steps - tail + 1, steps + 1))
    assert count <= len(drawn) - tail <= count + 1
    assert drawn[count - 1] >= (steps - tail) * (count - 1) // count
    gaps = {b - a for a, b in pairwise(drawn[:count])}
    assert max(gaps) - min(gaps) <= 2  # lines are not equally long


@pytest.mark.parametrize("line", ["dp=4", "dp=8,micro_batch=2", "dp=4,tp=2", "dp=8,zero=3,shard=4", "dp=2,pp=2,tp=2"])
@pytest.mark.parametrize("ranks", [1, 2, 4, 6, 8, 10, 12, 16, 20])
def test_a_run_on_other_ranks_is_its_strategy_with_other_replicas(line: str, ranks: int) -> None:
    old, job = build(Strategy, parse(line), "strategy"), Job(48, 16)
    replica = old.world // old.dp
    if ranks % replica:
        with pytest.raises(InputError, match=f"a replica has {replica}; use a multiple of {replica}$"):
            strategy_for_ranks(old, job, ranks)
        return
    if 48 % (ranks // replica):
        with pytest.raises(
            InputError, match=r"cannot share job.global_batch = 48 evenly; use one of [0-9, ]+$"
        ) as no:
            strategy_for_ranks(old, job, ranks)
        assert [
            strategy_for_ranks(old, job, int(n)).world // replica for n in no.value.remedy[11:].split(",")
        ] == divisors(48)
        return
    new = strategy_for_ranks(old, job, ranks)
    assert (new.world, new.dp) == (ranks, ranks // replica)
    assert replace(new, dp=old.dp, shard=old.shard, micro_batch=old.micro_batch) == old
    assert new == old or ranks != old.world
    assert new.shard in (None, old.shard)
    assert job.global_batch % (new.dp * new.micro_batch) == 0
    assert old.micro_batch % new.micro_batch == 0


@pytest.mark.parametrize(
    ("field", "value", "none"), [("momentum", 0.5, 0), ("fragments", 2, 1), ("mix", 0.25, 0), ("lr", 0.5, None)]
)
def test_an_outer_state_that_no_checkpoint_has_is_asked_of_none(field: str, value: float, none: int | None) -> None:
    outer = replace(OuterOptimizer(momentum=0), **{field: value})
    resumed: Any = SimpleNamespace(strategy=Strategy(dp=2, local=4), job=replace(Job(8, 16), outer=outer))
    resume._outer_state(resumed, resumed)
    kept_nothing: Any = SimpleNamespace(
        strategy=resumed.strategy, job=replace(Job(8, 16), outer=OuterOptimizer(momentum=0))
    )
    stepped_together: Any = SimpleNamespace(strategy=Strategy(dp=2), job=resumed.job)
    for before in (kept_nothing, stepped_together):
        if none is None:
            assert resume._outer_state(resumed, before) is None
            continue
        reason = "needs state of the outer optimizer, and the checkpoint has none"
        said = f"^job.outer.{field} = {value}: {reason}; use {none}, or train it anew$"
        with pytest.raises(InputError, match=said):
            resume._outer_state(resumed, before)


def test_a_run_goes_on_with_the_buckets_that_it_had() -> None:
    old = Strategy(dp=2, bucket=7)
    assert resume._as_before(None, old) == resume._as_before(replace(old, bucket="auto"), old) == old
    other = replace(old, bucket=9)
    assert resume._as_before(other, old) == other
