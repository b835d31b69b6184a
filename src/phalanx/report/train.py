"""The result of a training: predicted against measured, and where a step's time goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from phalanx.report.style import empty_table, seconds, size


@dataclass(frozen=True)
class Comparison:
    """One quantity, predicted and measured."""

    name: str
    predicted: float
    measured: float | None
    """None if it was not measured."""
    text: str
    """How to write the values: "s", "memory" or "bytes"."""

    @property
    def error(self) -> float | None:
        """Relative error of the prediction; None if nothing was measured."""
        if self.measured is None:
            return None
        if self.measured == 0:
            return 0.0 if self.predicted == 0 else float("inf")
        return self.predicted / self.measured - 1

    def write(self, value: float | None) -> str:
        """Write a value of this quantity with its unit."""
        if value is None:
            return "not measured"
        return {"s": seconds(value), "memory": size(value), "bytes": f"{value:,.0f} B"}[self.text]


def comparison(rows: Sequence[Comparison]) -> Table:
    """Tabulate quantities, predicted against measured, with relative errors."""
    table = empty_table("predicted against measured")
    for name in ("", "predicted", "measured", "error"):
        table.add_column(name, justify="left" if not name else "right")
    for row in rows:
        error = row.error
        exact = row.text == "bytes" and error == 0
        shown = "" if error is None else ("exact" if exact else f"{error:+.1%}")
        table.add_row(row.name, row.write(row.predicted), row.write(row.measured), shown)
    return table


def step_times(step_time_s: float, timeline: dict[str, Any], trace: str) -> str:
    """Say in one line where a step's time goes. `trace` names the file with the timeline, or is ""."""
    exposed, hidden = timeline["exposed_communication_s"], timeline["hidden_communication_s"]
    line = f"a step of {seconds(step_time_s)}: "
    if exposed + hidden:
        line += f"compute {seconds(timeline['compute_s'])}, exposed communication {seconds(exposed)}, "
        line += f"hidden communication {seconds(hidden)} (overlap {timeline['overlap']:.0%})"
    else:
        line += "compute, no communication"
    return line + (f"; timeline in {trace}" if trace else "")
