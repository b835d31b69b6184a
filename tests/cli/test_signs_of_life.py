"""A command that takes long says every ten seconds what it is doing, and for how long."""

from __future__ import annotations

import sys
import time

import pytest

from phalanx.cli import terminal
from phalanx.cli.terminal import announce, exit_on_error
from phalanx.progress import progress_line
from phalanx.textbook.cli import quiz


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "_SILENT_S", 0.1)
    monkeypatch.delenv("RANK", raising=False)


def test_progress_has_a_rate_and_the_time_left() -> None:
    assert progress_line(120, "schedules proved", 6.0, 480) == (
        "[#####---------------] 120 of 480 schedules proved, 20/s, 18 s left ..."
    )
    assert progress_line(3, "trainings studied", 6.0, None) == "3 trainings studied in 6 s, 2.0 s each ..."


def test_silence_is_broken(capsys: pytest.CaptureFixture[str]) -> None:
    said = ""

    def until(text: str, times: int = 1) -> None:
        nonlocal said
        deadline = time.monotonic() + 30  # a busy machine may let the other thread wait
        while said.count(text) < times:
            said += capsys.readouterr().err
            assert time.monotonic() < deadline, said
            time.sleep(0.01)

    with exit_on_error():
        until("working: ")
        announce("measuring ... (1 of 2)")
        announce("reading ...")
        begun = time.monotonic()
        until("reading: ", 2)
        assert time.monotonic() - begun >= 2 * terminal._SILENT_S
    assert said.splitlines()[0].startswith("working: ")
    assert "measuring: " not in said  # what was said last goes on
    assert all(line.endswith(" s so far ...") for line in said.splitlines() if ": " in line)
    capsys.readouterr()
    time.sleep(0.15)
    assert capsys.readouterr().err == ""  # it ends with the command


@pytest.mark.parametrize("rank", ["0", "1"])
def test_who_speaks_for_itself_is_left_alone(
    rank: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And of the ranks that torchrun started, the first one speaks."""
    monkeypatch.setenv("RANK", rank)
    with exit_on_error(speaks=rank == "0"):
        time.sleep(0.15)
    assert capsys.readouterr().err == ""


def test_a_prompt_waits_in_silence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def reply(prompt: str) -> str:
        time.sleep(0.05)
        return ""

    monkeypatch.setattr("builtins.input", reply)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    quiz(json=False, level=3, seed=1, answers=False)
    out, err = capsys.readouterr()
    assert "right; --seed 2 draws others" in out
    assert err == ""
