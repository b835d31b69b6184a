"""A predicted step divided into the parts that a trace has too, and the mesh axes of a trace's process groups."""

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from phalanx.answers.prediction import Prediction
from phalanx.answers.question.question import Question
from phalanx.planning.explain.program_traffic import program_flows
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy
from phalanx.traces.breakdown import AxisOf
from phalanx.traces.rank_trace import TracedCollective

_TERMS = {
    **dict.fromkeys(("matmul", "recurrence", "head", "reference"), "products"),
    **{"attention": "attention"},
    **{"memory": "memory", "adapters": "memory", "optimizer": "optimizer", "launch": "launches", "other": "host"},
    **{"tp": "over tp", "cp": "over cp", "ep": "over ep", "dp": "over dp", "coding": "over dp"},
    **{"bubble": "pipeline", "transfers": "pipeline"},
}
"""Term of the formulas -> part of the step."""
_EXACT = {
    "forward passes": "forward",
    "backward passes": "backward",
    "the update": "optimizer",
    "waiting for other stages": "pipeline",
}
_EXPOSED = "communication that nothing hides"


def planned_parts(question: Question, prediction: Prediction) -> dict[str, float]:
    """Return the predicted seconds of a step by part; they sum to the step."""
    parts: defaultdict[str, float] = defaultdict(float)
    if question.exact is not None:
        for name, seconds in prediction.terms_s.items():
            if name != _EXPOSED:
                parts[_EXACT[name]] += seconds
        exposed = prediction.terms_s.get(_EXPOSED, 0.0)
        alone = {axis: question.exact.exposed_seconds(axis) for axis in prediction.bytes_per_axis}
        total = sum(alone.values())
        for axis, seconds in alone.items():
            parts[f"over {axis_name(axis)}"] += exposed * seconds / total if total else 0.0
    else:
        for name, seconds in prediction.terms_s.items():
            shares = _recomputed_shares(question, prediction.factors) if name == "recompute" else {_TERMS[name]: 1.0}
            for part, share in shares.items():
                parts[part] += seconds * share
    return {part: seconds for part, seconds in parts.items() if seconds}


def _recomputed_shares(question: Question, factors: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return the share of each part in recomputation; where whole blocks are recomputed, its share in the forward
    pass."""
    assert question.strategy is not None
    if question.strategy.recompute == "selective":
        return {"products" if np.any(question.pricing.profile.per_op) else "attention": 1.0}
    forward: dict[str, float] = {}
    for name, of in factors.items():
        term = name.partition(",")[0]
        if term in _TERMS and {"micro_batches", "blocks", "forward_s"} <= of.keys() and term != "launch":
            seconds = of["micro_batches"] * of["blocks"] * of["forward_s"]
            forward[_TERMS[term]] = forward.get(_TERMS[term], 0.0) + seconds
    total = sum(forward.values())
    return {part: seconds / total for part, seconds in forward.items()} if total else {"products": 1.0}


@dataclass(frozen=True)
class PlannedAxis:
    """What a rank sends over an axis in a planned step."""

    calls: float = 0.0
    """Collectives and messages."""
    bytes: float = 0.0
    alone_s: float = 0.0
    """Seconds without overlap."""


def planned_axes(question: Question, prediction: Prediction) -> dict[str, PlannedAxis]:
    """Return what a rank sends in a planned step, by axis."""
    axes: defaultdict[str, PlannedAxis] = defaultdict(PlannedAxis)

    def add(axis: str, calls: float, size: float, alone_s: float) -> None:
        old = axes[axis_name(axis)]
        axes[axis_name(axis)] = PlannedAxis(old.calls + calls, old.bytes + size, old.alone_s + alone_s)

    if (x := question.exact) is not None:
        for flow in program_flows(x.model, x.job, x.chosen.strategy):
            add(flow.axis, flow.times[0], 0.0, 0.0)
        for axis, size in prediction.bytes_per_axis.items():
            add(axis, 0.0, size, x.exposed_seconds(axis))
        return axes
    for row in question.subject.flows:
        add(row.axis, row.count, row.count * row.payload, row.seconds)
    return axes


_OUR_AXES = {
    **dict.fromkeys(("dp", "dp_shard", "dp_replicate", "dp_local", "edp"), "dp"),
    **dict.fromkeys(("cp", "ring", "ulysses"), "cp"),
    **{"tp": "tp", "etp": "tp", "ep": "ep", "pp": "pp", "embed": "pp", "world": "world"},
}


def axis_name(axis: str) -> str:
    """Return the axis of the formulas that an axis of the mesh belongs to, such as dp for dp_shard+cp."""
    return next((_OUR_AXES[part] for part in axis.split("+") if part in _OUR_AXES), axis)


_GROUP_NAMES = tuple(
    (re.compile(pattern, re.I), axis)
    for pattern, axis in (
        (r"(expert|ep|moe).*(data|dp)", "dp"),
        (r"(data|dp|fsdp|hsdp|replicate|shard)(?!.*expert)", "dp"),
        (r"tensor|(^|_)tp", "tp"),
        (r"context|(^|_)cp|ulysses|sequence", "cp"),
        (r"expert|(^|_)ep|moe", "ep"),
        (r"pipeline|(^|_)pp|embedding", "pp"),
    )
)
"""Patterns of the names of process groups in Megatron's parallel_state.py, torch's DeviceMesh (mesh_tp) and Phalanx,
and their axes."""


def axis_of(strategy: Strategy | None) -> AxisOf:
    """Return a function that names the axis of a call: by its group's name, its ranks in the mesh, the only
    axis of that size, or the operation."""
    degrees: dict[str, int] = {}
    if strategy is not None:
        s = strategy
        degrees = {"tp": s.tp, "cp": s.cp, "ep": s.ep, "pp": s.pp, "dp": s.dp * s.cp}
        degrees = {axis: n for axis, n in degrees.items() if n > 1}
    grid = None if strategy is None else mesh(strategy)

    def name(call: TracedCollective) -> str:
        if all(part in _OUR_AXES for part in call.group.split("+")):
            return axis_name(call.group)
        for pattern, axis in _GROUP_NAMES:
            if call.group and call.group != "default_pg" and pattern.search(call.group):
                return axis
        if grid is not None and len(call.ranks) > 1:
            for axis in ("tp", "cp", "ep", "dp_shard", "dp_replicate", "dp_local"):
                sizes = dict(grid.axes)
                if axis not in sizes and axis != "ep":
                    continue
                if tuple(map(int, grid.group_of(call.ranks[0], axis))) == call.ranks:
                    return axis_name(axis)
        if call.op == "send" and "pp" in degrees:
            return "pp"
        fitting = [axis for axis, n in degrees.items() if not call.size or n == call.size]
        if call.op == "all_to_all":
            fitting = [axis for axis in fitting if axis in ("ep", "cp")] or fitting
        if len(fitting) > 1:
            fitting = [axis for axis in fitting if axis not in ("pp", "ep")] or fitting
        if len(fitting) == 1:
            return fitting[0]
        return "unnamed groups" if strategy is None or fitting else "other groups"

    return name
