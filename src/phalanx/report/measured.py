"""What a run measured, in words: quantities with their units, and where a step's time goes."""

from __future__ import annotations

from typing import Any

from phalanx.answers.measured import MeasuredQuantity
from phalanx.report.style import seconds, size


def quantity(q: MeasuredQuantity, value: float | None) -> str:
    """Write a value of a quantity with its unit."""
    if value is None:
        return "not measured"
    return {"s": seconds(value), "memory": size(value), "bytes": f"{value:,.0f} B"}[q.text]


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
