"""What an export wrote, its notes, and what is to be filled in."""

from __future__ import annotations

from phalanx.answers.export import Export
from phalanx.report.view import View


def view(e: Export) -> View:
    """Return the lines of an export."""
    where = f"{e.folder}/ has " if e.folder is not None else ""
    notes = (f"note: {note}" for note in e.program.notes)
    blanks = [f"to fill in: {', '.join(e.blanks)}"] if e.blanks else []
    return View([f"{e.program.title}: {where}{', '.join(e.files)}", *notes, *blanks])
