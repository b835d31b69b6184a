"""What `phalanx report` does: the page of a run, from what lies in its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from phalanx.report.html.run import report
from phalanx.report.train import Comparison
from phalanx.runs.folder import metrics
from phalanx.spec.errors import InputError
from phalanx.spec.files import plan

NAME = "report.html"
_MOST_BYTES = 64 * 2**20
"""Of a timeline that is read: a larger one is a trace of its own viewer."""


def of_run(folder: Path) -> str:
    """Return the page of a run that has ended, was interrupted or still trains. Raises InputError."""
    if not folder.is_dir():
        raise InputError("RUN", str(folder), "is no folder of a run", "name one, such as runs/NAME")
    made = plan.read(folder / "plan.json")
    steps = metrics(folder) if (folder / "metrics.jsonl").exists() else []
    for i, row in enumerate(steps):
        numbers = ("step", "loss", "step_time_s", "tokens_per_s", "mem_bytes")
        if not isinstance(row, dict) or not all(isinstance(row.get(key), int | float) for key in numbers):
            raise InputError("RUN", str(folder), f"line {i + 1} of metrics.jsonl is of no run of this version")
    trace = _json(folder / "trace.json")
    events = trace.get("traceEvents", []) if isinstance(trace, dict) else trace or []
    return report(folder.name, made, steps, compared(made.prediction, _json(folder / "recorded.json")), events)


def compared(predicted: dict[str, Any], recorded: Any) -> list[Comparison]:
    """Return a run's step time, memory and its parts beside their predictions; none before the run has recorded."""
    if not isinstance(recorded, dict):
        return []
    timeline = recorded.get("timeline") or {}
    rows = [
        ("step time (median)", "step_time_s", recorded.get("step_time_s"), "s"),
        ("exposed communication", "exposed_communication_s", timeline.get("exposed_communication_s"), "s"),
        ("peak memory", "memory_bytes", recorded.get("memory_bytes"), "memory"),
    ]
    return [
        Comparison(name, float(predicted[key]), None if measured is None else float(measured), text)
        for name, key, measured, text in rows
        if key in predicted
    ]


def _json(path: Path) -> Any:
    """Return a file's JSON; None if there is no such file. Raises InputError."""
    if not path.exists():
        return None
    if path.stat().st_size > _MOST_BYTES:
        return None
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError("RUN", str(path), f"cannot be read ({error})", "is the run still writing it?") from None
