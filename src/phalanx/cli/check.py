"""`phalanx check`: this machine, or named questions in a phalanx.toml with assertions about their answers.

    [checks.llama-70b-fits]
    ask = "predict train.sbatch --cluster dgx-h100"
    assert = "memory<75GiB, step<20s, fits"

Commands run in the file's folder. Only commands that compute are allowed: nothing is trained, observed or sent.
"""

import io
import os
import shlex
import tomllib
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import typer

from phalanx.cli.command import command
from phalanx.cli.forms import forms
from phalanx.cli.output import Printed
from phalanx.cli.terminal import FAILED, announce, print_json

_QUESTIONS = (
    *("predict", "plan", "explain", "verify", "compare", "simulate", "serve plan"),
    *("lint", "read"),
)
"""Commands that compute an answer and run no program of the user's."""
_ASSERTING = _QUESTIONS[:-2]
_LARGEST = 2**20  # bytes of a file


@command
def of_answers(output: Printed, file: Path = Path("phalanx.toml"), only: list[str] | None = None) -> None:
    """Ask the questions of a file and check the answers; exit code 1 if an assertion fails or a question has no
    answer.

    file [FILE]: The checks.
    --only NAME: Run this check alone; may be repeated.
    """
    from phalanx.spec.errors import InputError, nearest

    checks = _read(file)
    for name in only or ():
        if name not in checks:
            raise InputError("only", name, f"is no check of {file}", nearest(name, checks))
    results = []
    for name, words in checks.items():
        if only and name not in only:
            continue
        code, reasons = _run_line(words, file.resolve().parent)
        results.append({"name": name, "ok": code == 0, "reasons": reasons if code else []})
        if not output.json:
            print("\n    ".join([f"{'FAILED' if code else 'ok'}  {name}", *(reasons if code else ())]))
    failed = sum(not result["ok"] for result in results)
    if output.json:
        print_json(results)
    announce(f"{len(results)} checks, {failed} failed")
    if failed:
        raise typer.Exit(FAILED)


def _read(file: Path) -> dict[str, list[str]]:
    """Return the words of each check's command line. Raises InputError."""
    from phalanx.answers.assertions import parse
    from phalanx.spec.errors import InputError

    if file.stat().st_size > _LARGEST:
        raise InputError("file", str(file), "is larger than 1 MiB", "name a phalanx.toml")
    try:
        tables = tomllib.loads(file.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError("file", str(file), f"is no TOML: {error}") from None
    checks = tables.get("checks")
    if not isinstance(checks, Mapping) or not checks:
        raise InputError("file", str(file), "has no [checks.NAME]", 'write ask = "predict ..." under one')
    return {name: _words(name, table, parse) for name, table in checks.items()}


def _words(name: str, table: Any, parse: Any) -> list[str]:
    from phalanx.spec.errors import InputError, nearest

    field = f"checks.{name}"
    if not isinstance(table, Mapping) or not isinstance(table.get("ask"), str):
        raise InputError(f"{field}.ask", None, "is missing", 'e.g. ask = "predict run.sh --cluster dgx-h100"')
    for key in table:
        if key not in ("ask", "assert"):
            raise InputError(f"{field}.{key}", table[key], "is no key of a check", nearest(key, ("ask", "assert")))
    try:
        words = shlex.split(table["ask"])
    except ValueError as error:
        raise InputError(f"{field}.ask", table["ask"], f"is no command line: {error}") from None
    words = words[1:] if words[:1] == ["phalanx"] else words
    asked = next((each for each in _QUESTIONS if words[: each.count(" ") + 1] == each.split()), None)
    if asked is None:
        raise InputError(f"{field}.ask", table["ask"], "does not only compute", f"one of {', '.join(_QUESTIONS)}")
    if "assert" in table:
        if asked not in _ASSERTING:
            reason = f"{asked} has its own exit code"
            raise InputError(f"{field}.assert", table["assert"], reason, f"of {', '.join(_ASSERTING)}")
        parse(str(table["assert"]))
        words += ["--assert", str(table["assert"])]
    return words


def _run_line(words: list[str], folder: Path) -> tuple[int, list[str]]:
    """Return (exit code of a command line in a folder, its lines of errors and failed assertions)."""
    from phalanx.cli.app import app

    before, stderr, code = Path.cwd(), io.StringIO(), 0
    os.chdir(folder)
    try:
        with TemporaryDirectory() as scratch, redirect_stdout(io.StringIO()), redirect_stderr(stderr):
            # A plan that is only checked is not kept.
            scratched = "plan" in words[:2] and not any(word.partition("=")[0] == "--out" for word in words)
            app([*words, "--out", f"{scratch}/plan.json"] if scratched else words)
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else 1
    finally:
        os.chdir(before)
    lines = [line for line in stderr.getvalue().splitlines() if line.startswith(("failed:", "error:"))]
    return code, lines or [f"exit code {code} of phalanx {shlex.join(words)}"]


@command
def of_machine(output: Printed) -> None:
    """Say what this machine has, what is missing and how to get it; exit code 1 if something needed is missing."""
    from phalanx.answers.machine.inventory import look_around

    machine = look_around()
    output.show(machine, failed=not machine.good)


check = forms(
    "Ask the questions of a file and check the answers, or say what this machine has and what is missing.",
    lambda _: "answers",
    default="answers",
    answers=of_answers,
    machine=of_machine,
)
