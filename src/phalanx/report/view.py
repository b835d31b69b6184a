"""How an answer is shown to people: lines, tables, pictures and a page, each made when it is needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.planning.tables.table import Sheet

if TYPE_CHECKING:
    from rich.text import Text

    from phalanx.report.pictures.figure import Picture


Part = str | Sheet | Callable[[int], "Text"]
"""A line, a table, or a drawing in characters of at most so many columns."""


@dataclass(frozen=True)
class View:
    """Lines, tables and drawings in the order in which they are read."""

    parts: Sequence[Part]
    subject: str = ""
    """What a picture of the tables is named after."""
    pictures: Callable[[], list[Picture]] | None = None
    """Pictures of the subject, where there is more to draw than columns."""
    html: Callable[[], str] | None = None
    """The page, where it holds more than the tables."""

    @property
    def sheets(self) -> list[Sheet]:
        """The tables."""
        return [part for part in self.parts if isinstance(part, Sheet)]

    def page(self) -> str:
        """Return the page: one HTML file that needs nothing else."""
        from phalanx.report.html.sheets import report

        return self.html() if self.html is not None else report(self.sheets, self._pictures())

    def draw(self, file: Path) -> None:
        """Draw the pictures, or else the columns over the first one, as the file's name asks. Raises InputError."""
        from phalanx.report.pictures.files import write
        from phalanx.report.plots import picture

        if file.suffix.lower() == ".html" and (self.sheets or self.html is not None):
            file.write_text(self.page())
        else:
            write(self._pictures() or [picture(self.sheets, self.subject)], file)

    def _pictures(self) -> list[Picture]:
        return self.pictures() if self.pictures is not None else []
