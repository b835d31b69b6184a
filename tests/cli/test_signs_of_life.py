"""A command that takes long says every ten seconds what it is doing, and for how long."""

from __future__ import annotations

import time

import pytest

from phalanx.cli import terminal
from phalanx.cli.terminal import announce, exit_on_error


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "_SILENT_S", 0.1)
    monkeypatch.delenv("RANK", raising=False)


def test_silence_is_broken(capsys: pytest.CaptureFixture[str]) -> None:
    with exit_on_error():
        time.sleep(0.15)
        announce("measuring ... (1 of 2)")
        announce("reading ...")
        time.sleep(0.35)
    lines = capsys.readouterr().err.splitlines()
    assert lines[:3] == ["working: 0 s so far ...", "measuring ... (1 of 2)", "reading ..."]
    assert 2 <= lines.count("reading: 0 s so far ...") <= 3
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
