"""Timelines that are drawn: every second of a step is of the part that its span says, and all add up to the step."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phalanx.traces import kineto
from phalanx.traces.breakdown import SHORT_S, breakdown, with_waiting
from phalanx.traces.kineto import _call

_PARTS = {"forward": "forward", "backward": "backward", "loading": "loading", "optimizer": "optimizer"}


def _span(op: str, start: float, seconds: float, axis: str = "", size: int = 0) -> dict[str, Any]:
    category = "compute" if not axis else "waiting" if op == "wait" else axis
    args = {"op": op, "axis": axis, "bytes": size} if axis else {"op": op}
    return {
        "ph": "X",
        "cat": category,
        "name": f"{op} blocks.0",
        "pid": 3,
        "tid": 0,
        "args": args,
        "ts": 1e6 * start,
        "dur": 1e6 * seconds,
    }


@pytest.mark.parametrize("seed", range(8))
def test_parts_of_a_timeline_are_the_seconds_of_their_spans(tmp_path: Path, seed: int) -> None:
    """Nothing overlaps: what stands between two spans is of launches where it is short, and else the host's."""
    draw, at = np.random.default_rng(seed), 0.0
    events, parts, moved, calls = [], Counter[str](), Counter[str](), Counter[str]()
    for i in range(40):
        op = str(draw.choice(("forward", "backward", "loading", "optimizer", "copying", "all_reduce", "wait")))
        op = "forward" if i == 0 else op
        seconds, axis, size = float(draw.uniform(0.001, 0.1)), "", 0
        if op in ("all_reduce", "wait"):
            axis, size = str(draw.choice(("dp", "tp"))), int(draw.integers(1, 1000))
            if op == "all_reduce":
                calls[axis], moved[axis] = calls[axis] + 1, moved[axis] + size
        events.append(_span(op, at, seconds, axis, size))
        parts[f"over {axis}" if axis else _PARTS.get(op, "memory")] += seconds  # type: ignore[assignment]
        gap = float(draw.choice((0.0, 0.4 * SHORT_S, 0.9 * SHORT_S, 1.2 * SHORT_S, 20 * SHORT_S)))
        if i < 39:
            parts["launches" if gap <= SHORT_S else "host"] += gap  # type: ignore[assignment]
        at += seconds + (gap if i < 39 else 0)
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    (trace,) = kineto.read(tmp_path / "trace.json")
    own = breakdown(trace, lambda call: call.group)
    assert own.parts == pytest.approx({name: s for name, s in parts.items() if s})
    assert (own.rank, own.steps) == (3, 1)
    kinds = {"wait": "waiting", "all_reduce": "communication", "copying": "memory"}
    counts = Counter(kinds.get(e["args"]["op"], e["args"]["op"]) for e in events)
    assert own.counts == counts | {"forward attention": 0, "backward attention": 0}
    assert own.step_s == pytest.approx(sum(own.parts.values()))
    for axis, use in own.axes.items():
        if calls[axis]:
            assert (use.calls, use.bytes) == (calls[axis], moved[axis])
        assert use.exposed_s == pytest.approx(parts[f"over {axis}"])
        assert use.active_s == use.moving_s == pytest.approx(use.exposed_s)
    assert own.computing_s == pytest.approx(
        sum(parts[name] for name in ("forward", "backward", "optimizer", "memory"))
    )


@pytest.mark.parametrize(
    ("types", "size"),
    [("Float", 4), ("float", 4), ("c10::BFloat16", 2), ("Half", 2), ("double", 8), ("long int", 8), ("Byte", 1)],
)
def test_a_collective_moves_the_bytes_of_its_arguments_or_of_its_shapes(types: str, size: int) -> None:
    """Kineto's own count of elements goes first; where it says none, all tensors of the operator count."""
    counted = {"Collective name": "all_gather_base", "In msg nelems": 30, "Out msg nelems": 240, "dtype": types}
    shapes = {"Input Dims": [[8, 30], [2, 3, 5], [], "x", ["y"]], "Input type": [types, types, types, types, types]}
    assert _call("nccl:all_gather", counted, {}).bytes == 240 * size
    assert _call("nccl:all_gather", counted | shapes, {}).bytes == 240 * size
    assert _call("c10d::all_gather", shapes, {}).bytes == (240 + 30 + 1) * size  # a number has one element
    assert _call("c10d::all_gather", {}, {}).bytes == 0


@pytest.mark.parametrize("seed", range(6))
def test_what_is_longer_than_on_the_fastest_rank_is_waiting(tmp_path: Path, seed: int) -> None:
    """Of calls that nothing hides each rank waits for what the last to come takes, who waits for nobody; the rest is
    moving, the same on all. Waiting is moved to the stragglers, so that parts still add up to the step."""
    draw, ranks = np.random.default_rng(seed), int(np.random.default_rng(seed).integers(2, 5))
    calls = [(str(draw.choice(("dp", "tp"))), int(draw.choice((8, 800)))) for _ in range(12)]
    seconds = draw.uniform(0.01, 0.1, (ranks, len(calls)))
    events = []
    for rank, own in enumerate(seconds):
        at = 0.02
        events.append(_span("forward", 0.0, at) | {"pid": rank})
        for (axis, size), length in zip(calls, own, strict=True):
            events.append(_span("all_reduce", at, float(length), axis, size) | {"pid": rank})
            at += float(length)
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    traces = kineto.read(tmp_path / "trace.json")
    alone = [breakdown(trace, lambda call: call.group) for trace in traces]
    for rank, (before, after) in enumerate(
        zip(alone, with_waiting(traces, alone, lambda call: call.group), strict=True)
    ):
        waits = {axis: 0.0 for axis, _ in calls}
        for k, (axis, _) in enumerate(calls):
            waits[axis] += float(seconds[rank, k] - seconds[:, k].min())
        for axis, lost in waits.items():
            use = after.axes[axis]
            assert use.waiting_s == pytest.approx(lost, abs=1e-9)
            assert use.moving_s + use.waiting_s == pytest.approx(use.exposed_s)
            assert after.parts[f"over {axis}"] == pytest.approx(before.parts[f"over {axis}"] - lost)
        assert after.parts.get("stragglers", 0.0) == pytest.approx(sum(waits.values()), abs=1e-9)
        assert sum(after.parts.values()) == pytest.approx(before.step_s)
