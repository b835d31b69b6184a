"""The course: the last chapter's commands run in its order, those that train too (test_outputs.py runs the other
chapters); its arithmetic is right; every chapter has what a chapter needs; notebooks run the same commands."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.forked_cli import phalanx as forked
from support.in_process_cli import phalanx

from phalanx.textbook.answers import PICTURES

ROOT = Path(__file__).parents[2]
COURSE = ROOT / "docs" / "course"
CHAPTERS = sorted(COURSE.glob("[01]*.md"))
_TRAINS = ("train", "parity")


def _commands(page: str) -> Iterator[tuple[str, list[str]]]:
    """Yield (command, lines shown below it)."""
    command, shown = "", []
    for line in [*page.splitlines(), ""]:
        if line.startswith("    $ ") or not line.startswith("    "):
            if command:
                yield command, shown
            command, shown = line.removeprefix("    $ ") if line.startswith("    $ ") else "", []
        elif command:
            shown.append(line.strip())


def _squeezed(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.usefixtures("measured")
def test_plan_break_fix_train_break_fix(tmp_path: Path) -> None:
    here = tmp_path / "repository"
    here.mkdir()
    shutil.copytree(ROOT / "examples", here / "examples")
    commands = list(_commands((COURSE / "10_choosing.md").read_text()))
    assert len(commands) >= 10
    for command, shown in commands:
        words = command.split()
        if words[0] != "phalanx":
            subprocess.run(["bash", "-c", command], cwd=here, check=True)
            continue
        run = forked if words[1] in _TRAINS else phalanx
        code, out, err = run(here, *words[1:])
        expected = 2 if shown[0].startswith("error: ") else int("findings" in shown[-1])
        assert code == expected, f"{command}: {err}"
        printed = _squeezed(f"{out}\n{err}")
        parts = [_squeezed(part) for line in shown for part in line.split("...")]
        missing = [part for part in parts if part not in printed]
        assert not missing, f"{command} does not print {missing}:\n{printed}"


_ARITHMETIC = re.compile(r"`([-\d.e+*/() ]+) = (-?[\d.]+(?:e\d+)?)`")


def wrong_sums(text: str) -> list[str]:
    """Return the sums of a page, `2 * 3 = 6`, that are wrong in a digit that is written."""
    wrong = []
    for sum_, said in _ARITHMETIC.findall(text):
        digits, _, exponent = said.partition("e")
        unit = 10.0 ** (int(exponent or 0) - len(digits.partition(".")[2]))
        if abs(eval(sum_) - float(said)) > 0.5001 * unit:  # noqa: S307
            wrong.append(f"{sum_} = {eval(sum_)}, not {said}")  # noqa: S307
    return wrong


def test_a_wrong_sum_is_found() -> None:
    assert wrong_sums("`2 * 3 = 6` and `1 / 3 = 0.333`, `6 * 1e9 * 20e9 = 1.2e20`") == []
    assert len(wrong_sums("`2 * 3 = 7`, `1 / 3 = 0.334`")) == 2


@pytest.mark.parametrize("page", CHAPTERS, ids=lambda page: page.stem)
def test_a_chapter_has_what_a_chapter_needs(page: Path) -> None:
    text = page.read_text()
    assert 100 <= len(text.splitlines()) <= 200
    assert len(re.findall(r"^!\[", text, re.MULTILINE)) >= 1
    assert len(re.findall(r"^    \$ phalanx", text, re.MULTILINE)) >= 3
    assert "## For and against" in text
    assert "at a glance" in text
    exercises, solutions = (
        text.partition("## Exercises")[2],
        text.count("<details markdown><summary>Solution</summary>"),
    )
    assert (len(re.findall(r"^\*\*\d\.\*\*", exercises, re.MULTILINE)), solutions) == (3, 3)
    assert all(_ARITHMETIC.search(s) or "    $ phalanx" in s for s in exercises.split("<summary>")[1:])
    assert wrong_sums(text) == []


def test_there_are_ten_chapters_and_their_pictures() -> None:
    assert [page.stem[:2] for page in CHAPTERS] == [f"{i:02}" for i in range(1, 11)]
    shown = {name for page in CHAPTERS for name in re.findall(r"\.\./pictures/([\w-]+)\.svg", page.read_text())}
    assert shown <= set(PICTURES)


def test_notebooks_run_what_the_chapters_show() -> None:
    make = runpy.run_path(str(ROOT / "docs/site/notebooks.py"))["notebook"]
    for page in CHAPTERS:
        text = page.read_text()
        book = make(text)
        assert (book["nbformat"], len({cell["id"] for cell in book["cells"]})) == (4, len(book["cells"]))
        code = [cell["source"].splitlines()[0] for cell in book["cells"] if cell["cell_type"] == "code"]
        shown = re.findall(r"^    \$ (.*)", text, re.MULTILINE)
        drawn = re.findall(r"\.\./pictures/([\w-]+)\.svg", text)
        assert [c for c in code if " draw " not in c] == [f"!{line}" for line in shown]
        assert [c for c in code if " draw " in c] == [f"!phalanx learn draw {n} --save {n}.svg" for n in drawn]
        prose = "\n".join(cell["source"] for cell in book["cells"] if cell["cell_type"] == "markdown")
        assert "**3.**" in prose
        assert "────" not in prose  # what is printed is left to the cell
