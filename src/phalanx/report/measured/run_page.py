"""The page of a run, from the files in its folder: loss and throughput; predicted against measured; the measured
timeline of each rank under the predicted passes.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

from phalanx.answers.runs.experts import MeasuredQuantity
from phalanx.report.html.page import Section, page
from phalanx.report.measured.runs import quantity
from phalanx.report.pictures.figure import Lane, LaneBlock, Lines, PlotAxis, Series, Timeline
from phalanx.report.style import BYTES, largest_unit, seconds, size
from phalanx.runs.folder import metrics
from phalanx.spec.documents import read_json
from phalanx.spec.errors import InputError
from phalanx.spec.files import plan
from phalanx.spec.files.plan import Plan
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy

_MOST_POINTS = 2000
_MOST_STEPS = 10_000
"""About the most steps that are read; of a longer run, a sample."""
_MOST_RANKS = 16
"""The most ranks whose timelines are all drawn; of more, the first and the slowest of each pipeline stage."""
_KINDS = ("forward", "backward", "communication", "optimizer", "other")
_SLOW = 1.1
"""Ratio to the median rank's computing from which the slowest rank is named."""


def report(
    name: str,
    plan: Plan,
    steps: Sequence[Mapping[str, Any]],
    compared: Sequence[MeasuredQuantity],
    trace: Sequence[Mapping[str, Any]],
    taken: int,
) -> str:
    """Return the page of a run.

    `steps`: the lines of metrics.jsonl, or a sample of them; `taken`: number of steps of the run; `compared`:
    quantities predicted and measured; `trace`: events of trace.json, empty if there is none."""
    prediction = plan.prediction
    byte, binary = largest_unit(max((float(row["mem_bytes"]) for row in steps), default=0.0), BYTES)
    in_units = [{**row, "mem": float(row["mem_bytes"]) / binary} for row in steps]
    sections = [
        _summary(name, plan, steps, taken),
        _lines("Loss", "nats a token", {"training": "loss"}, steps),
        _lines("Throughput", "tokens/s", {"all ranks": "tokens_per_s"}, steps, zero=True),
        _lines("Memory", f"{byte}, the fullest rank", {"peak": "mem"}, in_units, zero=True),
        Section(
            "Predicted against measured",
            columns=("", "predicted", "measured", "error"),
            rows=[
                (row.name, quantity(row, row.predicted), quantity(row, row.measured), _error(row)) for row in compared
            ],
        ),
        *_timeline(plan, trace),
    ]
    return page(f"Run {name}", "run", sections, {"strategy": str(plan.strategy), "prediction": dict(prediction)})


def _error(row: MeasuredQuantity) -> str:
    return "" if row.error is None else f"{row.error:+.1%}"


def _summary(name: str, plan: Plan, steps: Sequence[Mapping[str, Any]], taken: int) -> Section:
    text = [f"{name}: {plan.strategy} on {plan.cluster.name}, {taken:,} steps of {plan.job.global_batch} sequences"]
    if steps:
        times = [float(row["step_time_s"]) for row in steps]
        last, middle = steps[-1], median(times)
        text.append(
            f"loss {float(last['loss']):.3f} after step {last['step']}; a step takes {seconds(middle)} in "
            f"the median, {seconds(min(times))} at best; memory {size(float(last['mem_bytes']))}"
        )
        slow = sum(t > 1.5 * middle for t in times)
        if slow:
            text.append(f"{slow:,} of {len(times):,} steps took over 1.5 times the median")
        if taken > len(steps):
            text.append(f"what is said and drawn of steps is of {len(steps):,}, spread evenly over the run")
    else:
        text.append("no step has been written yet")
    return Section("The run", text=tuple(text))


def _lines(
    title: str, unit: str, fields: Mapping[str, str], steps: Sequence[Mapping[str, Any]], zero: bool = False
) -> Section:
    shown = steps[:: max(1, -(-len(steps) // _MOST_POINTS))]
    few = len(shown) < 100
    series = []
    for name, key in fields.items():
        measured = [row for row in shown if isinstance(row.get(key), int | float)]
        series.append(Series(name, [(float(row["step"]), float(row[key])) for row in measured], dots=few))
    rows = [
        (str(row["step"]), *(f"{row[key]:.4g}" for key in fields.values() if row.get(key) is not None))
        for row in steps[-10:]
    ]
    values = [y for one in series for _, y in one.points]
    low = None if zero else min(values, default=0.0)
    panel = Lines(PlotAxis("step", "count", low=1.0), PlotAxis(unit, "count", low=low), tuple(series))
    return Section(
        title,
        "the numbers: of the last steps",
        columns=("step", *fields),
        rows=rows,
        panels=(panel,) if values else (),
    )


def _timeline(plan: Plan, trace: Sequence[Mapping[str, Any]]) -> list[Section]:
    """Draw the traced step of each rank, compute and communication apart, under its predicted passes."""
    spans = [e for e in trace if e.get("ph") == "X"]
    if not spans:
        return []
    names = {e["pid"]: str(e["args"]["name"]) for e in trace if e.get("name") == "process_name"}
    busy = {pid: dict.fromkeys(_KINDS, 0.0) for pid in names}
    for e in spans:
        if e["pid"] in busy:
            busy[e["pid"]][_kind(e)] += float(e["dur"]) / 1e3
    classes = _classes(plan.strategy, busy)
    predicted, lanes = _predicted_parts(plan.prediction), []
    begin = min(float(e["ts"]) for e in spans)
    of_rank: dict[int, list[Mapping[str, Any]]] = {pid: [] for pid in classes}
    for e in spans:
        of_rank.get(e["pid"], []).append(e)
    for pid, events in of_rank.items():
        at, expected = 0.0, []
        for kind, (name, took) in predicted.items():
            expected.append(LaneBlock(at, at + took, name, kind))
            at += took
        lanes.append(Lane(f"{names[pid]}, predicted", expected))
        compute = [_block(e, begin) for e in events if e.get("cat") == "compute"]
        communication = [_block(e, begin) for e in events if e.get("cat") != "compute"]
        lanes += [Lane(names[pid], compute)] if compute else []
        lanes += [Lane(f"{names[pid]}, communication", communication)] if communication else []
    table = [("predicted", "", *(f"{predicted[k][1]:.2f}" if k in predicted else "0.00" for k in _KINDS))]
    for pid, count in classes.items():
        cells = (_against(busy[pid][k], predicted[k][1] if k in predicted else 0.0, k) for k in _KINDS)
        table.append((names[pid], f"{count:,}", *cells))
    note = "one traced step; predicted passes are drawn in a row, with the communication that nothing hides"
    if len(classes) < len(names):
        note += f"; of {len(names):,} ranks, the first and the slowest of each pipeline stage are drawn"
    return [
        Section(
            "The predicted step over the measured one",
            note,
            text=tuple(_slow(names, busy)),
            columns=("ms", "ranks", *_KINDS),
            rows=table,
            panels=(Timeline("milliseconds", tuple(lanes)),) if lanes else (),
        )
    ]


def _block(e: Mapping[str, Any], begin: float) -> LaneBlock:
    start = (float(e["ts"]) - begin) / 1e3
    return LaneBlock(start, start + float(e["dur"]) / 1e3, str(e["name"]), _kind(e))


def _kind(e: Mapping[str, Any]) -> str:
    kind = str(e.get("args", {}).get("op", "")) if e.get("cat") == "compute" else "communication"
    return kind if kind in _KINDS else "other"


def _predicted_parts(prediction: Mapping[str, Any]) -> dict[str, tuple[str, float]]:
    """Return kind -> (its name, predicted milliseconds), in the order of a step."""
    parts = {
        "forward": ("forward passes", "forward_s"),
        "backward": ("backward passes", "backward_s"),
        "communication": ("exposed communication", "exposed_communication_s"),
        "optimizer": ("update", "optimizer_s"),
    }
    timed = {kind: (what, float(prediction.get(key) or 0.0) * 1e3) for kind, (what, key) in parts.items()}
    return {kind: (what, took) for kind, (what, took) in timed.items() if took}


def _classes(s: Strategy, busy: Mapping[int, Mapping[str, float]]) -> dict[int, int]:
    """Return rank to draw -> number of ranks that it represents: all ranks where they are few, else the first of each
    pipeline stage, which represents its stage, and the slowest, which represents itself."""
    if len(busy) <= _MOST_RANKS:
        return dict.fromkeys(sorted(busy), 1)
    ranks = mesh(s)
    stages: dict[int, list[int]] = {}
    for pid in sorted(busy):
        stages.setdefault(ranks.coordinates(pid).get("pp", 0) if pid < ranks.world else -1, []).append(pid)
    shown: dict[int, int] = {}
    for members in list(stages.values())[: _MOST_RANKS // 2]:
        slowest = max(members, key=lambda pid: _computing(busy[pid]))
        shown[members[0]] = len(members) - (slowest != members[0])
        shown.setdefault(slowest, 1)
    return shown


def _computing(parts: Mapping[str, float]) -> float:
    return sum(took for kind, took in parts.items() if kind != "communication")


def _against(measured: float, predicted: float, kind: str) -> str:
    """Return a measured time in ms, with its difference from the predicted one; for communication without it, since
    all of it is measured but only the exposed part predicted."""
    if not predicted or kind == "communication":
        return f"{measured:.2f}"
    return f"{measured:.2f} ({measured / predicted - 1:+.0%})"


def _slow(names: Mapping[int, str], busy: Mapping[int, Mapping[str, float]]) -> Iterator[str]:
    """Yield a line on the rank that computes clearly longer than the others, and in which kind of work."""
    if len(busy) < 2:
        return
    slowest = max(busy, key=lambda pid: _computing(busy[pid]))
    usual = median(_computing(parts) for parts in busy.values())
    if usual and _computing(busy[slowest]) > _SLOW * usual:
        more = {k: busy[slowest][k] - median(parts[k] for parts in busy.values()) for k in _KINDS}
        kind = max((k for k in _KINDS if k != "communication"), key=lambda k: more[k])
        yield (
            f"{names[slowest]} computes longest: {_computing(busy[slowest]):.2f} ms, {usual:.2f} ms in the median; "
            f"{more[kind]:.2f} ms more in {kind}"
        )


NAME = "report.html"
_MOST_PIDS = 10**7
_MOST_BYTES = 64 * 2**20
"""The most bytes of a file that is read: a larger timeline needs a trace viewer."""


def of_run(folder: Path) -> str:
    """Return the page of a run that has ended, was interrupted or still trains. Raises InputError."""
    if not folder.is_dir():
        raise InputError("RUN", str(folder), "is not a folder of a run", "name one, such as runs/NAME")
    trained = plan.read(folder / "plan.json")
    steps = metrics(folder, _MOST_STEPS) if (folder / "metrics.jsonl").exists() else []
    for i, row in enumerate(steps):
        numbers = ("step", "step_time_s", "tokens_per_s", "mem_bytes")
        if not all(_is_amount(row.get(key)) for key in numbers) or not _is_loss(row.get("loss", "")):
            raise InputError("RUN", str(folder), f"line {i + 1} of metrics.jsonl is of no run of this version")
    kept = [row for row in steps if row["loss"] is not None]  # the others were skipped
    whole = not steps or steps[-1]["step"] - steps[0]["step"] < len(steps)
    figures = compare_quantities(trained.prediction, _json(folder / "recorded.json"))
    return report(
        folder.name, trained, kept, figures, _events(folder), len(kept) if whole else int(steps[-1]["step"])
    )


def _is_amount(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e18


def _amount(value: Any) -> float | None:
    return float(value) if _is_amount(value) else None


def _is_loss(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and abs(value) < 1e18)


def _events(folder: Path) -> list[dict[str, Any]]:
    """Return the events of a run's timeline. Raises InputError for a damaged one."""
    trace = _json(folder / "trace.json")
    events = trace.get("traceEvents", []) if isinstance(trace, dict) else trace or []
    try:
        named = [e for e in events if e.get("name") == "process_name" and isinstance(e["args"]["name"], str)]
        spans = [e for e in events if e.get("ph") == "X"]
        sound = all(
            _is_amount(e["ts"])
            and _is_amount(e["dur"])
            and isinstance(e["name"], str)
            and isinstance(e.get("args", {}), dict)
            for e in spans
        )
        sound = sound and all(type(e["pid"]) is int and 0 <= e["pid"] < _MOST_PIDS for e in (*named, *spans))
        return events if sound else _refuse_damaged(folder, "an event without a rank or a time")
    except (KeyError, TypeError, AttributeError) as error:
        return _refuse_damaged(folder, repr(error))


def _refuse_damaged(folder: Path, why: str) -> NoReturn:
    raise InputError("RUN", str(folder / "trace.json"), f"is not a timeline ({why})", "is the run still writing it?")


def compare_quantities(predicted: dict[str, Any], recorded: Any) -> list[MeasuredQuantity]:
    """Return a run's step time, exposed communication and memory with their predictions; [] before it recorded."""
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
    """Return a file's JSON; None if there is no such file, or it is too large. Raises InputError."""
    return read_json(path, "RUN") if path.exists() and path.stat().st_size <= _MOST_BYTES else None
