"""Pictures of collective schedules: who sends what to whom in each round, and what each rank then holds."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from rich import box
from rich.table import Table

from phalanx.plan.collectives import Comparison
from phalanx.report.tables import seconds
from phalanx.schedule.prove import Counts, Run, run
from phalanx.schedule.transfers import Schedule

_MOST = 26  # contributions are letters


def steps(schedule: Schedule) -> Iterator[tuple[str, Table]]:
    """(What happens, what each rank holds afterwards) for the start and every round."""
    symbolic = run(schedule)
    for number, counts in symbolic.states():
        title = "start" if number == 0 else f"round {number} of {schedule.rounds}"
        yield f"{title}{_messages(schedule, symbolic, number - 1)}", _holdings(symbolic, counts)


def drawable(schedule: Schedule) -> bool:
    return schedule.ranks <= _MOST


def _messages(s: Schedule, symbolic: Run, number: int) -> str:
    lines = []
    for i in np.nonzero(s.round == number)[0]:
        span = symbolic.span(int(s.offset[i]), int(s.length[i]))
        chunks = f"{span.start}" if span.stop - span.start == 1 else f"{span.start}-{span.stop - 1}"
        verb = "adds" if s.reduces[i] else "keeps"
        lines.append(f"\n  {s.source[i]} -> {s.destination[i]}: chunk {chunks}, {s.destination[i]} {verb} it")
    return "".join(lines)


def _holdings(symbolic: Run, counts: Counts) -> Table:
    """A row per rank, a column per chunk; A is rank 0's contribution, B rank 1's, and so on."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("rank", justify="right")
    for atom in range(counts.shape[1]):
        table.add_column(f"chunk {atom}")
    letters = np.array([chr(ord("A") + r) for r in range(counts.shape[0])])
    for rank in range(counts.shape[0]):
        cells = ["".join(letters[counts[rank, atom] > 0]) or "." for atom in range(counts.shape[1])]
        table.add_row(str(rank), *cells)
    return table


def comparison(found: Comparison, title: str) -> Table:
    """Fastest first; `x bound` is the distance from what no schedule can beat on these links."""
    table = Table(title=title, title_justify="left", header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    formulas = any(row.formula_seconds is not None for row in found.rows)
    for name in ("algorithm", "rounds", "most bytes sent", "time", "x bound", *(["formula"] if formulas else [])):
        table.add_column(name, justify="left" if name == "algorithm" else "right")
    for row in found.rows:
        published = "-" if row.formula_seconds is None else seconds(row.formula_seconds)
        formula = [published] if formulas else []
        distance = f"{row.seconds / row.bound:.2f}" if row.bound else "-"
        table.add_row(
            row.algorithm, f"{row.rounds:,}", f"{row.sent_bytes:,.0f}", seconds(row.seconds), distance, *formula
        )
    return table


def winners(found: Comparison) -> list[str]:
    """A line per range of sizes in which one algorithm is the fastest."""
    return [f"{_binary(low)} to {_binary(high)}: {name}" for low, high, name in found.winners]


def _binary(n: float) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n >= scale:
            return f"{n / scale:g} {unit}"
    return f"{n:g} B"
