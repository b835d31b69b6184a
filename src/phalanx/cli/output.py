"""The output of a command: one answer as text or JSON, and in files by their suffixes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli.terminal import FAILED, announce, console, print_json, require_writable
from phalanx.spec.errors import InputError

if TYPE_CHECKING:
    from phalanx.report.pictures.figure import Picture
    from phalanx.report.view import View

_PRINTED = Path("csv")
"""Value of --save that prints the tables as CSV."""


@dataclass(frozen=True)
class Display:
    """The options of a command's output."""

    json: bool = False
    save: Sequence[Path] | None = None
    strict: bool = False
    assertions: str | None = None

    def require_writable(self) -> None:
        """Require that the files can be written and the assertions parsed, before anything starts. Raises
        InputError."""
        if self.assertions is not None:
            from phalanx.answers.assertions import parse

            parse(self.assertions)
        if files := _files(self.save):
            from phalanx.report.pictures.files import KINDS

            require_savable(files, (*KINDS, ".csv"))

    def show(self, answer: Any, failed: bool = False, **details: Any) -> None:
        """Print an answer with its notes and write its files; `details`: further arguments of its view. Exits as
        `check` does."""
        from phalanx.answers.answer import plain

        def view() -> View:
            from phalanx.report.view import view_of

            return view_of(answer, **details)

        show_notes(getattr(answer, "notes", ()))
        self.put(view, lambda: plain(answer))
        self.check(answer, failed)

    def check(self, answer: Any, failed: bool = False) -> None:
        """Exit with 1 if `failed`, if the answer did not pass or an assertion fails, or if it has caveats and the
        command line is strict."""
        from phalanx.answers.answer import plain
        from phalanx.answers.assertions import failures

        wrong = failures(self.assertions, plain(answer)) if self.assertions is not None else []
        for line in wrong:
            announce(f"failed: {line}")
        if failed or wrong or not getattr(answer, "passed", True) or (self.strict and answer.doubts):
            raise typer.Exit(FAILED)

    def put(self, view: Callable[[], View], data: Callable[[], Any]) -> None:
        """Print a view, or the data that it shows as JSON, and write its files."""
        content = data()
        require_finite(content)
        for file in _files(self.save):
            view().write(file)
            announce(f"wrote {file}")
        if self.json:
            print_json(content)
        elif self.save and _PRINTED in self.save:
            print(view().csv(), end="")
        else:
            show_view(view())


Printed = Annotated[Display, "json"]
Saved = Annotated[Display, "json", "save"]


def require_finite(content: Any, field: str = "answer") -> None:
    """Require that every number of an answer is finite: numbers in a question that are too large or too small make
    others. Raises InputError."""
    if isinstance(content, float) and not math.isfinite(content):
        raise InputError(field, content, "is not finite for what was asked", "give numbers of a usual size")
    parts = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for name, part in parts:
        require_finite(part, f"{field}.{name}")


def _files(save: Sequence[Path] | None) -> list[Path]:
    return [file for file in save or () if file != _PRINTED]


def require_savable(save: Sequence[Path] | None, kinds: Sequence[str] = ()) -> None:
    """Require that --save's files can be written, that a command writes their kinds (by default pictures), and that
    a browser for PNG is installed. Raises InputError."""
    if not save:
        return
    from phalanx.report.pictures.files import KINDS, require_browser

    for file in save:
        require_writable("--save", file)
        if file.suffix.lower() not in (kinds or KINDS):
            remedy = f"name a {' or '.join(kinds or KINDS)} file"
            raise InputError("--save", str(file), "is of no kind that is written", remedy)
        require_browser(file)


def save_pictures(pictures: list[Picture], save: Sequence[Path] | None) -> None:
    """Draw pictures in the files of --save."""
    from phalanx.report.pictures.files import write

    for file in save or ():
        write(pictures, file)
        announce(f"wrote {file}")


def show_view(view: View) -> None:
    """Print a view in the terminal: its lines and tables."""
    from phalanx.planning.tables.table import Sheet
    from phalanx.report.style import terminal_table

    screen = console()
    for part in view.parts:
        if isinstance(part, str):
            screen.print(part, highlight=False, soft_wrap=True)
        elif isinstance(part, Sheet):
            screen.print(terminal_table(part))
        else:
            screen.print(part(screen.width), soft_wrap=True)


def show_notes(notes: Sequence[str]) -> None:
    """Print notes to stderr."""
    for note in notes:
        announce(f"note: {note}")
