"""How an answer leaves a command: as text, JSON, CSV, a picture or a page, all of the same value."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from phalanx.cli.terminal import FAILED, announce, console, print_json, require_drawing, require_writable

if TYPE_CHECKING:
    from phalanx.report.view import View


@dataclass(frozen=True)
class Output:
    """What a command line asks of the output."""

    json: bool = False
    csv: bool = False
    plot: Path | None = None
    report: Path | None = None
    strict: bool = False

    def require_writable(self) -> None:
        """Require that the files can be written, before anything starts. Raises InputError."""
        require_drawing(self.plot)
        require_writable("--report", self.report)

    def show(self, answer: Any, **details: Any) -> None:
        """Print an answer and write its files; `details`: what its view shows beyond the usual. Exits with 1 where an
        answer has caveats and the command line is strict."""
        from phalanx.report.views import view_of

        if self.report is not None:
            self.report.write_text(view_of(answer, **details).page())
            announce(f"report: {self.report}")
        if self.plot is not None:
            view_of(answer, **details).draw(self.plot)
            announce(f"wrote {self.plot}")
        if self.json:
            from phalanx.answers.encode import plain

            print_json(plain(answer))
        elif self.csv:
            print("\n".join(sheet.as_csv() for sheet in view_of(answer, **details).sheets), end="")
        else:
            show_view(view_of(answer, **details))
        if self.strict and answer.doubts:
            raise typer.Exit(FAILED)


def show_view(view: View) -> None:
    """Print a view in the terminal: its lines and tables."""
    from phalanx.planning.tables.table import Sheet
    from phalanx.report.sheets import drawn

    screen = console()
    for part in view.parts:
        if isinstance(part, str):
            screen.print(part, highlight=False, soft_wrap=True)
        elif isinstance(part, Sheet):
            screen.print(drawn(part))
        else:
            screen.print(part(screen.width), soft_wrap=True)


def show_notes(notes: tuple[str, ...]) -> None:
    """Print notes to stderr."""
    for note in notes:
        announce(f"note: {note}")
