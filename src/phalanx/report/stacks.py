"""The best strategy of every stack, the fastest first."""

from __future__ import annotations

from phalanx.answers.stack_comparison import StackComparison
from phalanx.planning.tables.table import Sheet, columns
from phalanx.report.view import View


def view(c: StackComparison) -> View:
    """Show what each stack would run, how long its step takes, and what it loses against the fastest."""
    least = c.stacks[0].step_time_s or 1.0
    rows = [
        (
            s.stack,
            s.strategy or s.reason,
            s.step_time_s,
            None if s.step_time_s is None or s.step_time_s <= least else s.step_time_s / least - 1,
            s.mfu,
            s.memory_bytes,
        )
        for s in c.stacks
    ]
    names = columns(
        "stack",
        ("strategy", "strategy"),
        ("step", "s"),
        ("over the best", "change"),
        ("MFU", "share"),
        ("memory", "bytes"),
    )
    note = "each by its own constants; phalanx plan --stack NAME has the rest"
    return View([Sheet("stacks", names, rows, note)])
