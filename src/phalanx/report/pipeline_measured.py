"""The pipeline of a real run: its schedule in the times of the step that was traced, and in the predicted ones."""

from __future__ import annotations

import json
from pathlib import Path

from phalanx.cost.pipeline_time import Priced
from phalanx.cost.step.predict_pipeline import pipelined
from phalanx.schedule.pipeline import stages
from phalanx.schedule.pipeline.sends import without
from phalanx.spec.errors import InputError
from phalanx.spec.files import plan as plans
from phalanx.spec.strategy.mesh import mesh

Spans = dict[tuple[str, int, int], tuple[float, float]]
"""Start and end of each pass in seconds, by kind, chunk and micro-batch."""


def of_run(folder: Path) -> tuple[Priced, Priced]:
    """(As measured, as predicted), of the pipeline that the run's first rank is part of. Raises InputError."""
    plan = plans.read(folder / "plan.json")
    s = plan.strategy
    if s.pp == 1:
        raise InputError("run", str(folder), f"was trained without a pipeline ({s})", "train with --strategy pp=2")
    path = folder / "trace.json"
    if not path.exists():
        raise InputError("run", str(folder), "has no trace.json", "it is written in a run's third step")
    ranks = mesh(s).group_of(0, "pp")
    spans: dict[int, Spans] = {rank: {} for rank in ranks}
    for event in json.loads(path.read_text())["traceEvents"]:
        if event.get("cat") == "schedule" and event["pid"] in spans:
            of = event["args"]
            start = event["ts"] / 1e6
            spans[event["pid"]][of["kind"], of["chunk"], of["micro_batch"]] = start, start + event["dur"] / 1e6
    predicted = pipelined(plan.model, plan.cluster, plan.job, s).priced
    schedule = without(stages.schedule(s, s.accumulation(plan.job)))
    try:
        times = [
            [spans[rank][a.kind, a.chunk, a.micro_batch] for a in own]
            for rank, own in zip(ranks, schedule.actions, strict=True)
        ]
    except KeyError as error:
        raise InputError("run", str(folder), f"its trace lacks {error.args[0]}", "train it again") from None
    begin = min(own[0][0] for own in times)
    measured = [[(start - begin, stop - begin) for start, stop in own] for own in times]
    return Priced(schedule, measured, predicted.messages, predicted.peak), predicted
