"""`phalanx learn quiz`: exercises of three levels, with computed answers."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from phalanx.cli.options import Json
from phalanx.cli.terminal import exit_on_error, print_json


def quiz(
    level: Annotated[
        int | None,
        typer.Option(help="1: a formula; 2: two steps; 3: choose and say why. By default all.", show_default=False),
    ] = None,
    seed: Annotated[int, typer.Option(help="Which numbers to draw.")] = 1,
    answers: Annotated[bool, typer.Option("--answers", help="Print the answers too, and ask nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Ask exercises on distributed training with drawn numbers, and check the replies; every answer is computed."""
    with exit_on_error():
        from dataclasses import asdict

        from phalanx.spec.errors import InputError
        from phalanx.textbook.exercises import exercises, right

        if level not in (None, 1, 2, 3):
            raise InputError("--level", level, "is no level", "use 1, 2 or 3")
        drawn = exercises(seed, level)
        if as_json:
            print_json([asdict(e) for e in drawn])
            return
        asking, correct = sys.stdin.isatty() and not answers, 0
        for number, e in enumerate(drawn, 1):
            print(f"{number}. [{e.topic}, level {e.level}] {e.question}")
            if asking:
                said = input("   your answer: ")
                good = right(e, said)
                correct += good
                print(f"   {'right' if good else 'not quite' if e.value is not None else 'compare'}: {e.answer}")
            elif answers:
                print(f"   {e.answer}")
            if asking or answers:
                print(f"   phalanx {e.command}\n")
        if asking:
            counted = sum(e.value is not None or ":" in e.answer[:5] for e in drawn)
            print(f"{correct} of {counted} right; --seed {seed + 1} draws others")
