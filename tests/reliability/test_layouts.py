"""A search that takes failures in: the layout with the fewest days wins, not that with the shortest step."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support.in_process_cli import phalanx

import phalanx as face
from phalanx.answers.search.model_plan import ModelPlan
from phalanx.reliability.answer import goodput
from phalanx.reliability.conditions_by_name import conditions_in
from phalanx.reliability.losses import losses_under

_JOB = {"model": "llama3-70b", "cluster": "dgx-h100", "gpus": 256, "batch": 512, "seq": 8192}
_LINE = "plan " + " ".join(f"--{name} {value}" for name, value in _JOB.items())
_ELASTIC = "mttf=12h, spares=0, elastic, repair=2d"


def _plan(conditions: str, objective: str = "days") -> ModelPlan:
    return face.plan(**_JOB, wishes=face.Wishes(objective, "1T", losses=losses_under(conditions)))  # type: ignore[arg-type]


def test_more_replicas_win_where_a_replica_is_lost() -> None:
    """Without spares an elastic job of 16 replicas waits twice as long for a node as one of 32."""
    chosen = _plan(_ELASTIC)
    fastest = min(chosen.ranked + chosen.front, key=lambda p: p.step_time_s)
    assert chosen.best.step_time_s > fastest.step_time_s
    assert chosen.strategy.dp > fastest.strategy.dp
    assert chosen.best.training
    assert fastest.training
    assert chosen.best.training.days < fastest.training.days
    assert chosen.plan.strategy == chosen.strategy


def test_the_shares_are_those_of_goodput() -> None:
    planned = _plan("restart=job").best
    assert planned.training
    assert planned.training.losses
    lost = planned.training.losses
    alone = goodput(**_JOB, strategy=str(planned.strategy), tokens=1e12, given=conditions_in("restart=job"), trials=1)  # type: ignore[arg-type]
    assert lost.effective_share == pytest.approx(alone.effective_closed_form_share, rel=1e-6)
    assert lost.checkpoint_bytes == alone.checkpoint_bytes
    parts = lost.effective_share + lost.saving_share + lost.again_share + lost.down_share
    assert parts == pytest.approx(1, rel=1e-9)


def test_days_grow_by_what_is_lost_and_spares_are_paid() -> None:
    with_failures, without = _plan("spares=4").best.training, face.plan(**_JOB, wishes=face.Wishes("days", "1T"))  # type: ignore[arg-type]
    assert with_failures
    assert with_failures.losses
    assert without.best.training
    assert with_failures.days == pytest.approx(without.best.training.days / with_failures.losses.effective_share)
    assert with_failures.gpu_hours == pytest.approx(with_failures.days * 24 * (256 + 32))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--goodput", "--tokens|say how long it is"),
        ("--tokens 1T --goodput --objective memory", "ask for days or money"),
        ("--tokens 1T --conditions mttf=3h", "add --goodput"),
        ("--tokens 1T --goodput --conditions mtff=3h", "did you mean mttf"),
        ("--tokens 1T --goodput --conditions elastic=1", "is no condition with its value"),
        ("--tokens 1T --goodput --conditions mttf", "is no condition with its value"),
        ("--tokens 1T --goodput --conditions spares=x", "is no number of nodes"),
        ("--tokens 1T --goodput --conditions mttf=1s,restart=manual", "0.0% of its time on work"),
        ("--tokens 1T --goodput --deadline 20", "about 512 GPUs would do"),
        ("--tokens 1T --goodput --deadline 0.01", "fail less"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, options: str, words: str) -> None:
    code, _, stderr = phalanx(tmp_path, f"{_LINE} {options}")
    assert code == 2
    assert len(stderr.strip().splitlines()) == 1
    assert re.search(words, stderr), stderr


def test_why_is_shown(tmp_path: Path) -> None:
    code, stdout, stderr = phalanx(tmp_path, f"{_LINE} --tokens 1T --goodput --conditions", _ELASTIC)
    assert code == 0, stderr
    assert "of them work" in stdout
    assert re.search(r"not dp=16.*shorter: it takes .* more of the time", stdout)
    code, stdout, _ = phalanx(tmp_path, f"{_LINE} --tokens 1T --goodput --json")
    assert 0.9 < json.loads(stdout)["best"]["training"]["losses"]["effective_share"] < 1
