"""What a machine has and what is missing, and how to get it."""

from __future__ import annotations

from phalanx.answers.doctor import MachineState
from phalanx.planning.tables.table import Sheet, columns
from phalanx.report.view import View


def view(a: MachineState) -> View:
    """Show what is there, then how to get what is missing."""
    rows = [("ok" if c.good else "MISSING", c.what, c.state) for c in a.checks]
    missing = [c for c in a.checks if c.remedy and (not c.good or "optional" in c.state)]
    return View(
        [Sheet("this machine", columns("", "what", "state"), rows), *(f"{c.what}: {c.remedy}" for c in missing)]
    )
