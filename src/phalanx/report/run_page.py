"""What `phalanx report` does: the page of a run, from what lies in its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

from phalanx.answers.measured import MeasuredQuantity
from phalanx.report.html.run import report
from phalanx.runs.folder import metrics
from phalanx.spec.documents import read_json
from phalanx.spec.errors import InputError
from phalanx.spec.files import plan

NAME = "report.html"
_MOST_BYTES = 64 * 2**20
"""Of a timeline that is read: a larger one is a trace of its own viewer."""


def of_run(folder: Path) -> str:
    """Return the page of a run that has ended, was interrupted or still trains. Raises InputError."""
    if not folder.is_dir():
        raise InputError("RUN", str(folder), "is no folder of a run", "name one, such as runs/NAME")
    trained = plan.read(folder / "plan.json")
    steps = metrics(folder) if (folder / "metrics.jsonl").exists() else []
    for i, row in enumerate(steps):
        numbers = ("step", "step_time_s", "tokens_per_s", "mem_bytes")
        if not all(_is_amount(row.get(key)) for key in numbers) or not _is_loss(row.get("loss", "")):
            raise InputError("RUN", str(folder), f"line {i + 1} of metrics.jsonl is of no run of this version")
    taken = [row for row in steps if row["loss"] is not None]  # the others were skipped
    return report(
        folder.name, trained, taken, compared(trained.prediction, _json(folder / "recorded.json")), _events(folder)
    )


def _is_amount(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e18


def _amount(value: Any) -> float | None:
    return float(value) if _is_amount(value) else None


def _is_loss(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and abs(value) < 1e18)


def _events(folder: Path) -> list[dict[str, Any]]:
    """Return the events of a run's timeline that its page draws. Raises InputError for one that is none."""
    trace = _json(folder / "trace.json")
    events = trace.get("traceEvents", []) if isinstance(trace, dict) else trace or []
    try:
        named = {e["pid"]: str(e["args"]["name"]) for e in events if e.get("name") == "process_name"}
        spans = [e for e in events if e.get("ph") == "X"]
        sound = all(
            _is_amount(e["ts"])
            and _is_amount(e["dur"])
            and isinstance(e["name"], str)
            and isinstance(e.get("args", {}), dict)
            for e in spans
        )
        sound = sound and all(isinstance(pid, int) for pid in named)
        return events if sound else _damaged(folder, "an event without a time")
    except (KeyError, TypeError, AttributeError) as error:
        return _damaged(folder, repr(error))


def _damaged(folder: Path, why: str) -> NoReturn:
    raise InputError("RUN", str(folder / "trace.json"), f"is no timeline ({why})", "is the run still writing it?")


def compared(predicted: dict[str, Any], recorded: Any) -> list[MeasuredQuantity]:
    """Return a run's step time, memory and its parts beside their predictions; none before the run has recorded."""
    if not isinstance(recorded, dict):
        return []
    timeline = recorded.get("timeline")
    timeline = timeline if isinstance(timeline, dict) else {}
    rows = [
        ("step time (median)", "step_time_s", recorded.get("step_time_s"), "s"),
        ("exposed communication", "exposed_communication_s", timeline.get("exposed_communication_s"), "s"),
        ("peak memory", "memory_bytes", recorded.get("memory_bytes"), "memory"),
    ]
    return [
        MeasuredQuantity(name, float(predicted[key]), _amount(measured), text)
        for name, key, measured, text in rows
        if key in predicted
    ]


def _json(path: Path) -> Any:
    """Return a file's JSON; None if there is no such file. Raises InputError."""
    if not path.exists():
        return None
    if path.stat().st_size > _MOST_BYTES:
        return None
    return read_json(path, "RUN")
