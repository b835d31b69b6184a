"""The tables of docs/stacks.md are what the commands print."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from phalanx.cli.app import app

PAGE = (Path(__file__).parents[2] / "docs" / "stacks.md").read_text()
QUESTION = "--model llama3-70b --cluster dgx-h100 --gpus 64 --batch 512 --seq 8192"


def lines(text: str) -> list[str]:
    """Return lines without their spaces: the width of columns depends on the terminal."""
    return [re.sub(r"\s+", "", line) for line in text.splitlines() if line.strip()]


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.chdir(tmp_path)


def test_all_stacks() -> None:
    done = CliRunner().invoke(app, ["plan", *QUESTION.split(), "--stack", "all"])
    assert done.exit_code == 0, done.output
    table = lines(done.stdout)
    assert set(table) <= set(lines(PAGE)), set(table) - set(lines(PAGE))


def test_chunks_and_number_types_of_a_plan() -> None:
    done = CliRunner().invoke(app, ["plan", *QUESTION.split()])
    assert done.exit_code == 0, done.output
    printed = done.stdout
    table = printed[printed.index("narrower number types") : printed.index("why not")]
    assert set(lines(table)) <= set(lines(PAGE)), table
    printed = CliRunner().invoke(app, ["plan", *QUESTION.split(), "--where", "virtual=2"]).stdout
    chunks = re.search(r"its chunks, in order: (.+), which the plan lists; equal ones take (\S+) s", printed)
    assert chunks is not None
    step = re.search(r"a step of (\S+) s", printed)
    assert step is not None
    times = f"it takes {step[1]} s, where equal chunks take {chunks[2]} s"
    sentence = f"the chunks of the 70B plan with `--where virtual=2` are {chunks[1]}; {times}"
    assert sentence in PAGE.replace("\n", " ")
