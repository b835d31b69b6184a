"""When a run evaluates, saves, compares replicas and says what it does: its loop, with what it calls noted."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.spec.job import Train
from phalanx.training import trainer
from phalanx.training.trainer import Trainer


def _loop(
    folder: Path, monkeypatch: pytest.MonkeyPatch, start: int = 0, stop_at: int | None = None, **settings: Any
) -> tuple[list[tuple[str, int]], list[dict[str, Any]], tuple[bool, float | None]]:
    """Run the loop of a trainer; return (what it did at which step, its metrics, what it returned)."""
    calls: list[tuple[str, int]] = []
    loop = Trainer.__new__(Trainer)
    at = [start]
    losses = settings.pop("losses", {})

    def step(number: int, stop: Any) -> list[dict[str, Any]]:
        at[0] = number + 1
        row = {"step": number + 1, "loss": 1.0, "step_time_s": 1.0, "tokens_per_s": 1.0, "mem_bytes": 1, "lr": 1.0}
        return [row | {"grad_norm": 1.0, "mfu": 0.1, "stop": number + 1 == stop_at}]

    def evaluate() -> float:
        calls.append(("evaluated", at[0]))
        return float(losses.get(at[0], at[0]))

    job = SimpleNamespace(global_batch=2, seq=8)
    train = Train(data="x", **settings)
    saver = SimpleNamespace(check=lambda: None, wait=lambda: calls.append(("waited", at[0])), save=lambda *_: None)
    values: dict[str, Any] = {
        "plan": SimpleNamespace(train=train, job=job),
        "first": True,
        "start": start,
        "saved": start,
        "folder": folder,
        "saver": saver,
        "_issued": None,
        "training": SimpleNamespace(owned=lambda: None, numerics=lambda: None),
        "comm": SimpleNamespace(status=SimpleNamespace(now=lambda what: calls.append((what, at[0])))),
        "_within_memory": step,
        "_evaluate": evaluate,
        "_compare_replicas": lambda done: calls.append(("compared", done)),
    }
    for name, value in values.items():
        monkeypatch.setattr(loop, name, value, raising=False)
    said: list[str] = []
    progress = SimpleNamespace(say=said.append, step=lambda row: None, close=lambda: calls.append(("closed", at[0])))
    monkeypatch.setattr(trainer, "Progress", lambda *_: progress)
    returned = loop._steps(SimpleNamespace())  # type: ignore[arg-type]
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    calls += [(line, 0) for line in said]
    return calls, rows, returned


def _at(calls: list[tuple[str, int]], what: str) -> list[int]:
    return [step for name, step in calls if name.startswith(what)]


def test_a_run_evaluates_and_saves_every_so_often_and_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, rows, returned = _loop(tmp_path, monkeypatch, steps=11, eval_every=3, save_every=4, check_sync=5)
    assert _at(calls, "evaluated") == [3, 6, 9, 11]
    assert _at(calls, "compared") == [5, 10]
    assert [name for name, _ in calls if name.startswith("writing the checkpoint")] == [
        f"writing the checkpoint of step {n}" for n in (4, 8, 11)
    ]
    assert [row["step"] for row in rows] == list(range(1, 12))
    assert {row["step"]: row["eval_loss"] for row in rows if "eval_loss" in row} == {3: 3, 6: 6, 9: 9, 11: 11}
    assert returned == (False, 11.0)
    assert calls[-1] == ("closed", 11)
    waits = [i for i, (name, _) in enumerate(calls) if name == "waited"]  # each said before, of the last one saved
    assert [calls[i - 1][0] for i in waits] == [f"waiting for the checkpoint of step {n}" for n in (0, 4, 8)]


def test_without_an_interval_only_the_end_is_evaluated_and_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, _, _ = _loop(tmp_path, monkeypatch, start=2, steps=5, eval_every=0, save_every=0, check_sync=0)
    assert (_at(calls, "evaluated"), _at(calls, "compared"), _at(calls, "writing the check")) == ([5], [], [5])


def test_a_run_that_is_stopped_saves_and_does_not_evaluate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, rows, returned = _loop(tmp_path, monkeypatch, stop_at=4, steps=9, eval_every=2, save_every=0)
    assert (_at(calls, "evaluated"), _at(calls, "writing the check")) == ([2], [4])
    assert ([row["step"] for row in rows], returned) == ([1, 2, 3, 4], (True, 2.0))
    assert not any("stop" in row for row in rows)


def test_a_loss_that_is_not_finite_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, rows, returned = _loop(tmp_path, monkeypatch, steps=4, eval_every=2, losses={4: math.inf})
    assert [row.get("eval_loss") for row in rows] == [None, 2.0, None, None]
    assert returned == (False, None)
    assert ("step 4: the loss on held-out sequences is not finite", 0) in calls
