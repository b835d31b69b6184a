"""A teacher's set: a mix that every student gets with numbers of their own, answers apart, mistakes in one line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support.in_process_cli import phalanx

from phalanx.textbook import exam
from phalanx.textbook.exercises import TEXTS

SET = """title = "Midterm"
seed = 7
students = ["Ada", "Grace Hopper"]
[mix]
ring = 3
memory = 2
"level 4" = 3
[[own]]
question = "Whose ranks move as one?"
answer = "A phalanx's."
"""


def _set(folder: Path, text: str = SET) -> Path:
    file = folder / "exam.toml"
    file.write_text(text)
    return file


def test_every_student_gets_the_mix_with_numbers_of_their_own(tmp_path: Path) -> None:
    given = exam.read(_set(tmp_path))
    sheets = {s: exam.exercises_of(given, s) for s in given.students}
    assert sheets["Ada"] == exam.exercises_of(given, "Ada")
    assert sheets["Ada"] != sheets["Grace Hopper"]
    for drawn in sheets.values():
        questions = [e.question for e in drawn]
        assert len(set(questions)) == len(questions) == 3 + 2 + 3 + 1
        assert sum(q.startswith("A ring all-reduces") and "GB does each" in q for q in questions) == 3
        assert sum(e.level == 4 for e in drawn) >= 3
        assert sum(e.topic == "memory" for e in drawn) >= 2
    assert exam.exercises_of(exam.read(_set(tmp_path, SET.replace("seed = 7", "seed = 8"))), "Ada") != sheets["Ada"]


def test_sheets_have_no_answers_and_the_answers_are_apart(tmp_path: Path) -> None:
    _set(tmp_path)
    code, out, _ = phalanx(tmp_path, "learn quiz --set exam.toml --sheets sheets")
    assert code == 0
    assert out.split() == ["sheets/ada.md", "sheets/grace_hopper.md", "sheets/answers.md"]
    answers = (tmp_path / "sheets/answers.md").read_text()
    asked = json.loads(phalanx(tmp_path, "learn quiz --set exam.toml --student Ada --json")[1])
    sheet = (tmp_path / "sheets/ada.md").read_text()
    for e in asked:
        assert e["question"] in sheet
        assert e["answer"] in answers
        assert e["answer"] not in sheet


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("[mix]\nrings = 1", "mix.rings = 1: is no exercise, topic or level"),
        ("[mix]\nring = 0", "mix.ring = 0: must be from 1"),
        ("[mix]\nring = 50", "mix.ring = 50: are more than there are: 12"),
        ("[mix]\nring = true", "mix.ring"),
        ("", "mix: is missing"),
        ("title = 3", "title = 3: should be a text"),
        ("mixx = 1", "mixx = 1: is no field of an exam; did you mean mix?"),
        ("[mix", "cannot be read"),
        ('students = ["Ada", "ADA"]\n[mix]\nring = 1', "students"),
        ('students = ["answers"]\n[mix]\nring = 1', "students"),
        ('[[own]]\nquestion = "?"', "own"),
    ],
)
def test_a_set_with_a_mistake_is_one_line(tmp_path: Path, wrong: str, says: str) -> None:
    _set(tmp_path, wrong)
    code, _, err = phalanx(tmp_path, "learn quiz --set exam.toml --student Ada")
    assert code == 2
    assert says in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--student Ada", "name it with --set"),
        ("--set exam.toml", "--student: is missing"),
        ("--set exam.toml --student Bob", "is not among the exam's"),
        ("--set exam.toml --student Ada --level 2", "is the set's own"),
        ("--set nope.toml --student Ada", "cannot be read"),
        ("--set exam.toml --sheets exam.toml", "cannot be written"),
    ],
)
def test_options_that_do_not_go_together(tmp_path: Path, options: str, says: str) -> None:
    _set(tmp_path)
    code, _, err = phalanx(tmp_path, f"learn quiz {options}")
    assert (code, says in err) == (2, True), err


def test_twenty_questions_whose_figures_their_commands_print(tmp_path: Path) -> None:
    questions = {name: text for name, text in TEXTS.items() if text.level == 4}
    assert len(questions) == 20
    for name, text in questions.items():
        assert 2 <= len(re.findall(r"[.?!](?:\s|$)", text.answer)) <= 3, name
        code, out, _ = phalanx(tmp_path, *text.command.split())
        figures = {n for n in re.findall(r"\d[\d,.]*\d", text.answer) if n not in text.question}
        assert (code, {n for n in figures if n not in out}) == (0, set()), name
