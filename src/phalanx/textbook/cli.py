"""The commands `phalanx learn ...`: pictures, exercises, published trainings, and the tree of decisions."""

import sys
from pathlib import Path
from typing import Annotated

from phalanx.answers.question.query import Query
from phalanx.cli.command import command, command_with_progress
from phalanx.cli.forms import forms
from phalanx.cli.output import Printed, Saved
from phalanx.cli.terminal import announce

JOB_FIELDS = ("model", "cluster", "gpus", "batch", "seq")


@command
def draw(
    query: Annotated[Query, *JOB_FIELDS],
    output: Saved,
    name: str | None = None,
    ranks: int | None = None,
    params: str | None = None,
    moving: bool = False,
) -> None:
    """Draw a picture of the textbook: as text of 80 columns, and with --save as SVG, page or PNG.

    name: The picture; without one, all are listed, and drawn by --save.
    --ranks: Number of ranks.
    --moving: Its rounds, or its blocks over time, appear one after another in what --save writes.
    """
    from phalanx.spec.errors import InputError
    from phalanx.textbook.answers import drawing, pictures

    if moving and (name is None or not output.save or any(file.suffix == ".png" for file in output.save)):
        raise InputError("moving", None, "is for a picture as a file", "name it, with --save FILE.svg or FILE.html")

    options = {key: getattr(query, key) for key in JOB_FIELDS} | {"ranks": ranks, "params": params}
    given = {key: value for key, value in options.items() if value is not None}
    output.show(drawing(name, given, moving) if name is not None else pictures(given))


@command_with_progress  # the prompt waits for a person, not for us
def quiz(
    output: Printed,
    level: int | None = None,
    seed: int | None = None,
    answers: bool = False,
    exam: Path | None = None,
    student: str | None = None,
    sheets: Path | None = None,
) -> None:
    """Ask exercises on distributed training with drawn numbers, and check the replies; every answer is computed.

    --level: 1: a formula; 2: two steps; 3: choose and say why; 4: answer in sentences. By default all.
    --seed: Which numbers to draw; 1 by default.
    --answers: Print the answers too, and ask nothing.
    exam --set FILE.toml: A teacher's mix: how many of which exercises, topics and levels, and questions of one's own.
    --student: Whose numbers of the set.
    --sheets FOLDER: Write a sheet of the set for every student, and their answers apart.
    """
    from phalanx.spec.errors import InputError
    from phalanx.textbook.answers import Quiz
    from phalanx.textbook.exercises import LEVELS, exercises, right

    if level not in (None, *LEVELS):
        raise InputError("level", level, "is not a level", "use 1, 2, 3 or 4")
    if exam is None:
        for name, value in (("student", student), ("sheets", sheets)):
            if value is not None:
                raise InputError(name, str(value), "is of a set", "name it with --set FILE.toml")
        seed = 1 if seed is None else seed
        drawn = exercises(seed, level)
    else:
        from phalanx.textbook import exam as exams

        for name, number in (("level", level), ("seed", seed)):
            if number is not None:
                raise InputError(name, number, "is the set's own", f"write it into {exam}")
        given = exams.read(exam)
        if sheets is not None:
            print("\n".join(map(str, exams.write(given, sheets))))
            return
        if student is None:
            remedy = "name one, or --sheets FOLDER for all students of the set"
            raise InputError("student", None, "is missing", remedy)
        drawn = exams.exercises_of(given, student)
    if output.json or answers or not sys.stdin.isatty():
        output.show(Quiz(tuple(drawn)), answers=answers)
        return
    correct = 0
    for number, e in enumerate(drawn, 1):
        good = right(e, input(f"{number}. [{e.kind}] {e.question}\n   your answer: "))
        correct += good
        print(f"   {'right' if good else 'not quite' if e.value is not None else 'compare'}: {e.answer}")
        print(f"   phalanx {e.command}\n" if e.command else "")
    counted = sum(e.value is not None or ":" in e.answer[:5] for e in drawn)
    print(f"{correct} of {counted} right" + ("" if seed is None else f"; --seed {seed + 1} draws others"))


@command
def searched(output: Saved) -> None:
    """Compare the strategies of published trainings, as measured and as predicted, with what a search chooses."""
    from phalanx.answers.tables import Tables
    from phalanx.progress import in_progress
    from phalanx.textbook.case_studies import CASES, sheet, study

    studied = in_progress(map(study, CASES), "trainings studied", announce, len(CASES))
    output.show(Tables(None, (sheet(list(studied)),)))


@command
def published(output: Saved) -> None:
    """Say what was published of each training, without a search."""
    from phalanx.answers.tables import Tables
    from phalanx.textbook.case_studies import fact_sheet as sheet

    output.show(Tables(None, (sheet(),)))


@command
def rules(output: Saved) -> None:
    """Examine the usual rules of thumb, and list when each axis pays."""
    from phalanx.answers.tables import Tables
    from phalanx.textbook.case_studies import criteria, rule_sheet

    output.show(Tables(None, (rule_sheet(), criteria())))


@command
def ways(output: Saved) -> None:
    """Compare the ways to divide a training at a glance: what each splits, keeps, sends, hides, and when it pays."""
    from phalanx.answers.tables import Tables
    from phalanx.textbook.glance import glance

    output.show(Tables(None, glance()))


@command
def tree(query: Annotated[Query, *JOB_FIELDS], output: Saved) -> None:
    """Draw the usual tree of decisions; with --model, --cluster, --gpus, --batch and --seq, mark a job's path."""
    from phalanx.textbook.answers import decision_path

    output.show(decision_path(query))


cases = forms(
    "Compare the strategies of published trainings, as measured and as predicted, with what a search chooses.",
    lambda _: "searched",
    default="searched",
    searched=searched,
    published=published,
    rules=rules,
)
learn = forms(
    "Teaching: pictures, exercises, published trainings.", draw=draw, quiz=quiz, cases=cases, tree=tree, ways=ways
)
