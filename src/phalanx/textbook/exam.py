"""A teacher's exam: a mix of exercises with other numbers for every student, and the answers in a file of their own.

title = "Midterm"
seed = 7
students = ["Ada", "Grace"]
[mix]                 # how many of what: an exercise by name, a topic, or a level
ring = 1
memory = 2
"level 4" = 3
[[own]]               # questions of one's own, the same for all
question = "..."
answer = "..."
"""

import random
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

from phalanx.spec.errors import InputError, nearest
from phalanx.textbook.exercises import TEXTS, Exercise, exercise

_FIELDS = {"title": str, "seed": int, "students": list, "mix": dict, "own": list}
_WORDS = {str: "a text", int: "a whole number", list: "a list", dict: "a table"}
_MOST_EXERCISES = 50
_MISSES = 200
"""Draws in a row without a new question after which none is expected: the last of twelve questions is missed with a
probability of 3e-8."""


@dataclass(frozen=True)
class Exam:
    """An exam, as read from its file."""

    title: str
    seed: int
    students: tuple[str, ...]
    mix: dict[str, int]
    """Exercise, topic or level -> number of questions."""
    own: tuple[Exercise, ...]


def read(path: Path) -> Exam:
    """Read an exam. Raises InputError for what cannot be asked, with the field."""
    try:
        table = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError("set", str(path), f"cannot be read: {error}", "give a TOML file with a [mix]") from None
    for key, value in table.items():
        if key not in _FIELDS:
            raise InputError(key, value, "is no field of an exam", nearest(key, _FIELDS))
        if not isinstance(value, _FIELDS[key]) or isinstance(value, bool):
            raise InputError(key, value, f"should be {_WORDS[_FIELDS[key]]}")
    mix, students = table.get("mix", {}), table.get("students", [])
    if not mix and not table.get("own"):
        raise InputError("mix", None, "is missing", "say how many of what: ring = 1, memory = 2")
    for name, count in mix.items():
        _require(name, count)
    files = [file_name(s) for s in students if isinstance(s, str)]
    if len(files) != len(students) or len(set(files)) != len(files) or not all(files) or "answers" in files:
        raise InputError("students", students, "must be names that make different files, none of them answers")
    own = tuple(_exercise(entry) for entry in table.get("own", []))
    return Exam(table.get("title", path.stem), table.get("seed", 1), tuple(students), mix, own)


def _exercise(entry: object) -> Exercise:
    if not isinstance(entry, dict) or set(entry) != {"question", "answer"}:
        raise InputError("own", entry, "is no question with its answer", 'give question = "..." and answer = "..."')
    return Exercise(0, "own", str(entry["question"]), str(entry["answer"]), None, "")


def _names(key: str) -> list[str]:
    """Return the exercises of an entry in the mix: one by its name, or all of a topic or level."""
    if key in TEXTS:
        return [key]
    return [name for name, text in TEXTS.items() if key in (text.topic, f"level {text.level}")]


def _require(key: str, count: object) -> None:
    names = _names(key)
    if not names:
        known = [*TEXTS, *(t.topic for t in TEXTS.values()), *(f"level {t.level}" for t in TEXTS.values())]
        raise InputError(f"mix.{key}", count, "is no exercise, topic or level", nearest(key, dict.fromkeys(known)))
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= _MOST_EXERCISES:
        raise InputError(f"mix.{key}", count, f"must be from 1 to {_MOST_EXERCISES}")


def exercises_of(exam: Exam, student: str) -> list[Exercise]:
    """Draw a student's exercises, none of them twice; the same again for the same seed and name.

    Raises InputError for a student who is not in the exam, and for a mix that asks for more than there is."""
    if exam.students and student not in exam.students:
        remedy = nearest(student, dict.fromkeys(exam.students))
        raise InputError("student", student, "is not among the exam's", remedy)
    choose = random.Random(f"{exam.seed} {student}")
    by_question: dict[str, Exercise] = {}
    for key, count in sorted(exam.mix.items(), key=lambda item: len(_names(item[0]))):  # the least choice first
        left, misses = count, 0
        while left and misses < _MISSES:
            drawing = exercise(choose.choice(_names(key)), choose.random())
            misses += 1
            if drawing.question not in by_question:
                by_question[drawing.question] = drawing
                left, misses = left - 1, 0
        if left:
            raise InputError(f"mix.{key}", count, f"are more than there are: {count - left}", "ask for fewer")
    return [*sorted(by_question.values(), key=lambda e: (e.level, e.topic)), *exam.own]


def file_name(student: str) -> str:
    """Return the name of a student's file, without its suffix."""
    return re.sub(r"\W+", "_", student.strip().lower()).strip("_")


def sheet(exam: Exam, student: str) -> str:
    """Return a student's questions as Markdown."""
    asked = (f"{i}. {e.question}\n" for i, e in enumerate(exercises_of(exam, student), 1))
    return "\n".join([f"# {exam.title}\n", f"{student}\n", *asked])


def answers(exam: Exam) -> str:
    """Return the answers of every student's sheet as Markdown."""
    lines = [f"# {exam.title}: answers\n"]
    for student in exam.students:
        answers_of = (f"{i}. {e.answer}" for i, e in enumerate(exercises_of(exam, student), 1))
        lines += [f"## {student}\n", *answers_of, ""]
    return "\n".join(lines)


def write(exam: Exam, folder: Path) -> list[Path]:
    """Write a sheet for every student, and answers.md. Raises InputError where a file cannot be written."""
    if not exam.students:
        raise InputError("students", None, "is missing", 'sheets are written for names, such as ["Ada", "Grace"]')
    texts = {file_name(s): sheet(exam, s) for s in exam.students} | {"answers": answers(exam)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / f"{name}.md").write_text(text)
    except OSError as error:
        raise InputError("sheets", str(folder), f"cannot be written: {error}") from None
    return [folder / f"{name}.md" for name in texts]
