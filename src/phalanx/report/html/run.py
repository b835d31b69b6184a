"""The report of a run: loss and throughput; predicted against measured; the measured timeline of each rank under the
predicted passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from phalanx.report.html.page import Section, page
from phalanx.report.style import seconds, size
from phalanx.report.train import Comparison
from phalanx.spec.files.plan import Plan

_MOST_POINTS = 2000
_MOST_RANKS = 16
"""Ranks whose timelines are drawn: of more, the first ones."""


def report(
    name: str,
    plan: Plan,
    steps: Sequence[Mapping[str, Any]],
    compared: Sequence[Comparison],
    trace: Sequence[Mapping[str, Any]],
) -> str:
    """Return the page of a run.

    `steps`: the lines of metrics.jsonl; `compared`: predicted against measured; `trace`: events of trace.json, empty
    if there is none."""
    prediction = plan.prediction
    sections = [
        _summary(name, plan, steps),
        _lines("Loss", "nats a token", {"training": "loss"}, steps),
        _lines("Throughput", "tokens/s", {"all ranks": "tokens_per_s"}, steps, zero=True),
        Section(
            "Predicted against measured",
            "table",
            columns=("", "predicted", "measured", "error"),
            rows=[(row.name, row.write(row.predicted), row.write(row.measured), _error(row)) for row in compared],
        ),
        *_timeline(prediction, trace),
    ]
    return page(f"Run {name}", "run", sections, {"strategy": str(plan.strategy), "prediction": dict(prediction)})


def _error(row: Comparison) -> str:
    return "" if row.error is None else f"{row.error:+.1%}"


def _summary(name: str, plan: Plan, steps: Sequence[Mapping[str, Any]]) -> Section:
    text = [
        f"{name}: {plan.strategy} on {plan.cluster.name}, {len(steps):,} steps of {plan.job.global_batch} sequences"
    ]
    if steps:
        times = [float(row["step_time_s"]) for row in steps]
        last = steps[-1]
        text.append(
            f"loss {float(last['loss']):.3f} after step {last['step']}; a step takes {seconds(median(times))} in "
            f"the median, {seconds(min(times))} at best; memory {size(float(last['mem_bytes']))}"
        )
        slow = sum(t > 1.5 * median(times) for t in times)
        if slow:
            text.append(f"{slow} of {len(times)} steps took over 1.5 times the median")
    else:
        text.append("no step has been written yet")
    return Section("The run", "text", text=tuple(text))


def _lines(
    title: str, unit: str, fields: Mapping[str, str], steps: Sequence[Mapping[str, Any]], zero: bool = False
) -> Section:
    every = max(1, len(steps) // _MOST_POINTS)
    series = [
        {
            "name": name,
            "points": [[row["step"], row[key]] for row in steps[::every] if isinstance(row.get(key), int | float)],
        }
        for name, key in fields.items()
    ]
    rows = [
        (str(row["step"]), *(f"{row[key]:.4g}" for key in fields.values() if row.get(key) is not None))
        for row in steps[-10:]
    ]
    chart = {"x": "step", "y": unit, "series": series, "zero": zero}
    return Section(
        title,
        "lines",
        "the numbers: of the last steps",
        columns=("step", *fields),
        rows=rows,
        chart=chart if steps else {},
    )


def _timeline(prediction: Mapping[str, Any], trace: Sequence[Mapping[str, Any]]) -> list[Section]:
    """Draw the traced step of each rank, compute and communication apart, under what was predicted."""
    spans = [e for e in trace if e.get("ph") == "X"]
    if not spans:
        return []
    names = {e["pid"]: e["args"]["name"] for e in trace if e.get("name") == "process_name"}
    rows, at = [], 0.0
    for what, key, kind in (
        ("forward passes", "forward_s", "forward"),
        ("backward passes", "backward_s", "backward"),
        ("exposed communication", "exposed_communication_s", "communication"),
        ("update", "optimizer_s", "optimizer"),
    ):
        took = float(prediction.get(key) or 0.0) * 1e3
        if took:
            rows.append({"row": "predicted", "start": at, "end": at + took, "kind": kind, "label": what})
        at += took
    ranks = sorted(names)[:_MOST_RANKS]
    begin = min(float(e["ts"]) for e in spans)
    busy: dict[str, dict[str, float]] = {}
    for e in spans:
        if e["pid"] not in ranks:
            continue
        args = e.get("args", {})
        kind = str(args.get("op", "")) if e.get("cat") == "compute" else "communication"
        kind = kind if kind in ("forward", "backward", "optimizer", "communication") else "other"
        start, took = (float(e["ts"]) - begin) / 1e3, float(e["dur"]) / 1e3
        lane = "" if e.get("cat") == "compute" else ", communication"
        rank = str(names[e["pid"]])
        rows.append({"row": f"{rank}{lane}", "start": start, "end": start + took, "kind": kind, "label": e["name"]})
        busy.setdefault(rank, {}).setdefault(kind, 0.0)
        busy[rank][kind] += took
    kinds = ("forward", "backward", "communication", "optimizer", "other")
    table = [(rank, *(f"{parts.get(kind, 0.0):.2f}" for kind in kinds)) for rank, parts in busy.items()]
    predicted = {row["kind"]: float(row["end"]) - float(row["start"]) for row in rows if row["row"] == "predicted"}  # type: ignore[arg-type]
    table.insert(0, ("predicted", *(f"{predicted.get(kind, 0.0):.2f}" for kind in kinds)))
    hidden = len(names) - len(ranks)
    return [
        Section(
            "The predicted step over the measured one",
            "timeline",
            "one traced step; predicted passes are drawn in a row, with the communication that nothing hides"
            + (f"; {hidden} more ranks are in trace.json" if hidden else ""),
            columns=("ms", *kinds),
            rows=table,
            chart={"unit": "milliseconds", "rows": rows},
        )
    ]
