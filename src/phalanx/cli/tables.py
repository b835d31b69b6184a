"""What the commands that print tables share: tables as text, JSON, CSV or pictures, and checks of their options."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.cli.terminal import announce, console, print_json

if TYPE_CHECKING:
    from phalanx.answers.question import Question
    from phalanx.planning.tables.table import Sheet
    from phalanx.report.pictures.figure import Picture


Pictures = Callable[[], list["Picture"]]
OF_A_STRATEGY = (
    "plan",
    "strategy",
    "model",
    "cluster",
    "gpus",
    "batch",
    "seq",
    "stack",
    "precision",
    "options",
)
"""What a table of a strategy reads."""

RANKS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Ranks of a table's rows, where none are asked for."""


def print_sheets(
    sheets: Iterable[Sheet],
    as_json: bool,
    as_csv: bool,
    plot: Path | None = None,
    asked: Question | None = None,
    of: str = "",
    pictures: Pictures | None = None,
) -> None:
    """Print sheets; `asked`: the question that they are about; `of`: the command; `pictures`: makes what
    --plot draws, if that is more than the columns."""
    sheets = list(sheets)
    if plot is not None:
        _draw(of, sheets, pictures, plot)
        announce(f"wrote {plot}")
    if as_json:
        about = {} if asked is None else {"question": asked.as_json()}
        print_json([{**about, "title": s.title, "rows": s.records(), "note": s.note} for s in sheets])
    elif as_csv:
        print("\n".join(s.as_csv() for s in sheets), end="")
    else:
        from phalanx.report.sheets import drawn

        out = console()
        if asked is not None:
            out.print(asked.heading, highlight=False, soft_wrap=True)
        for sheet in sheets:
            out.print(drawn(sheet))


def _draw(of: str, sheets: list[Sheet], pictures: Pictures | None, file: Path) -> None:
    """Draw tables as the file's name asks: the pictures of their subject, or the columns over the first one.

    Raises InputError."""
    from phalanx.report.pictures.files import write
    from phalanx.report.plots import picture

    drawn = pictures() if pictures is not None else []
    if file.suffix.lower() == ".html":
        from phalanx.report.html.sheets import report

        file.write_text(report(sheets, drawn))
    else:
        write(drawn or [picture(sheets, of)], file)


def require_positive(numbers: dict[str, float | None]) -> None:
    """Require that options which were given are positive and finite. Raises InputError."""
    from phalanx.spec.errors import InputError

    for name, value in numbers.items():
        if value is not None and not 0 < value < float("inf"):
            raise InputError(name, value, "must be positive")
