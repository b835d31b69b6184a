"""The timeline of a step: what is exposed, what is hidden, and the file that shows it."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import rank_cases
from support.rank_pool import Pool
from support.sizes import combined

from phalanx.report.measured.runs import step_times
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.comm.recorder import RunningPass
from phalanx.runtime.comm.timeline import COMPUTE, WAITING, Span, intersection, total_length
from phalanx.runtime.process.environment import ALONE
from phalanx.runtime.tracing import timelines
from phalanx.runtime.tracing.timelines import RankTimeline, passes
from phalanx.spec.files.job_file import build
from phalanx.spec.job import Job
from phalanx.spec.model.families import complete
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy
from phalanx.training.training_step import Training

LATE, BUSY = 0.2, 0.5  # seconds
TRANSPORTS = ["native", "p2p", "shm"]
SIZES = {"family": "llama", "vocab": 61, "hidden": 16, "layers": 2, "heads": 2, "ffn": 40, "max_seq": 16}
SPEC = build(ModelSpec, complete(SIZES), "model")
POINTS = st.lists(st.integers(0, 30), max_size=12, unique=True).map(
    lambda p: [(float(a), float(b)) for a, b in zip(*[iter(sorted(p))] * 2, strict=False)]
)


@given(POINTS, POINTS)
def test_what_two_lists_of_intervals_share(a: list[tuple[float, float]], b: list[tuple[float, float]]) -> None:
    def cells(intervals: list[tuple[float, float]]) -> set[int]:
        return {i for low, high in intervals for i in range(int(low), int(high))}

    found = intersection(a, b)
    assert cells(found) == cells(a) & cells(b)
    assert total_length(found) == len(cells(found))
    assert all(low < high for low, high in found)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_late_peer_is_exposed_to_whoever_waits_at_once(pool: Pool, transport: str) -> None:
    found = pool.run(2, rank_cases.late_peer, transport, LATE, 0.0)
    axis, whole = found[0]["axes"]["world"], found[0]
    assert LATE * 0.9 <= axis["exposed_s"] <= whole["exposed_s"] + 1e-9
    assert axis["overlap"] < 0.1
    assert found[1]["axes"]["world"]["exposed_s"] < LATE / 2
    assert whole["compute_s"] < LATE / 2


@pytest.mark.parametrize(("op", "transport"), combined(sorted(rank_cases.RINGS), ["native", "p2p"]))
def test_a_late_peer_is_hidden_from_whoever_computes_meanwhile(pool: Pool, transport: str, op: str) -> None:
    first = pool.run(2, rank_cases.late_peer, transport, LATE, BUSY, op)[0]
    axis = first["axes"]["world"]
    assert axis["exposed_s"] < LATE / 2
    # Over when the peer has come, not when its caller comes to ask.
    assert LATE * 0.9 <= axis["active_s"] < (LATE + BUSY) / 2
    assert axis["overlap"] > 0.5
    assert first["hidden_s"] >= LATE * 0.5
    assert first["compute_s"] >= BUSY * 0.9


def test_shared_memory_hides_nothing(pool: Pool) -> None:
    """It is worked on while somebody waits: what lies published meanwhile is not under way."""
    first = pool.run(2, rank_cases.late_peer, "shm", LATE, BUSY)[0]
    assert first["axes"]["world"]["overlap"] == pytest.approx(0, abs=1e-6)
    assert first["axes"]["world"]["active_s"] < LATE / 2
    assert first["hidden_s"] == pytest.approx(0, abs=1e-6)


def test_what_another_wait_completes_is_exposed_there(pool: Pool) -> None:
    """The wait for an operation over one axis does the work of an earlier one over another."""
    found = pool.run(4, rank_cases.completed_by_another, LATE)
    for rank in found:
        for times in rank["axes"].values():
            assert times["exposed_s"] == pytest.approx(times["active_s"])
    assert found[0]["axes"]["dp_shard"]["exposed_s"] >= LATE * 0.9
    # One wait, though both axes were waited for in it.
    assert found[0]["exposed_s"] < found[0]["axes"]["dp_shard"]["exposed_s"] + LATE / 2


def test_what_is_not_over_goes_on_in_the_next_step(pool: Pool) -> None:
    first, second, third = pool.run(2, rank_cases.two_steps, LATE)[0]
    assert first["hidden_s"] < LATE / 2  # not what lies between the steps
    assert second["axes"]["world"]["exposed_s"] >= LATE * 0.9
    assert second["axes"]["world"]["active_s"] < LATE * 1.7
    assert third["axes"] == {}  # what was issued between steps is no part of one


@pytest.mark.parametrize(("zero", "transport"), combined([0, 1, 2, 3], TRANSPORTS))
def test_the_trace_of_a_step(pool: Pool, tmp_path: Path, transport: str, zero: int) -> None:
    strategy = Strategy(dp=4, zero=zero, shard=2 if zero else None, micro_batch=1, bucket=0.002)
    job = Job(global_batch=8, seq=8)
    told = pool.run(4, rank_cases.traced_step, SPEC, job, strategy, transport)
    timelines.write(tmp_path / "trace.json", [t for t, _ in told], {"step": 3})
    written = json.loads((tmp_path / "trace.json").read_text())
    assert [p.name for p in tmp_path.iterdir()] == ["trace.json"]
    assert written["otherData"] == {"step": 3}
    names, drawn = read(written)
    axes = {"dp_shard", "dp_replicate"} if zero else {"dp_replicate"}
    for rank, (_, events) in enumerate(told):
        assert names[rank][None].startswith(f"rank {rank} (dp_replicate ")
        rows = {names[rank][tid].split(" (")[0] for pid, tid in drawn if pid == rank}
        assert rows == {COMPUTE, WAITING, "world", *axes}
        # Every collective that the recorder saw is there, but for those over which the step ended.
        spans = [e for (pid, tid), row in drawn.items() if pid == rank for e in row]
        collectives = sum(e["name"].startswith("issue ") for e in spans)
        assert collectives == events
        assert all(e["args"]["transport"] == transport for e in spans if e["cat"] in axes)
        passes = [(e["args"].get("micro_batch"), e["name"]) for e in drawn[rank, 0]]
        units = ["embed", "blocks.0", "blocks.1", "head"]
        once = [f"forward {u}" for u in units] + [f"backward {u}" for u in reversed(units)]
        assert passes == [*((i, name) for i in (0, 1) for name in once), (None, "optimizer")]


def read(written: dict[str, Any]) -> tuple[dict[int, dict[int | None, str]], dict[tuple[int, int], list[Any]]]:
    """Names by rank and row (None: of the rank), spans by both; no row draws two spans across each other."""
    names: dict[int, dict[int | None, str]] = {}
    drawn: dict[tuple[int, int], list[Any]] = {}
    for event in written["traceEvents"]:
        if event["ph"] == "X":
            row = drawn.setdefault((event["pid"], event["tid"]), [])
            assert event["dur"] >= 0
            assert not row or event["ts"] >= row[-1]["ts"] + row[-1]["dur"] - 1e-6
            assert event["ts"] >= 0
            row.append(event)
        elif event["name"] == "process_name":
            names.setdefault(event["pid"], {})[None] = event["args"]["name"]
        elif event["name"] == "thread_name":
            names[event["pid"]][event["tid"]] = event["args"]["name"]
    return names, drawn


def test_what_runs_at_once_has_rows_of_its_own() -> None:
    spans = [Span(str(i), "tp", start, stop) for i, (start, stop) in enumerate([(0, 4), (1, 2), (2, 3), (1.5, 5)])]
    spans.append(Span("f", COMPUTE, 3, 4))
    rows = timelines.rows(spans)
    assert {name: [s.name for s in row] for name, row in rows.items()} == {
        COMPUTE: ["f"],
        "tp": ["0"],
        "tp (2)": ["1", "2"],
        "tp (3)": ["3"],
    }


def test_hosts_are_aligned_by_the_time_of_day(tmp_path: Path) -> None:
    """Two hosts that were started at different times: their own clocks differ, the time of day does not."""
    one = RankTimeline(0, "", 10**18, (Span("a", COMPUTE, 5.0, 6.0),))
    two = RankTimeline(1, "", 10**18 + 3 * 10**9, (Span("b", COMPUTE, 2.5, 3.0),))
    timelines.write(tmp_path / "trace.json", [one, two], {})
    _, drawn = read(json.loads((tmp_path / "trace.json").read_text()))
    assert drawn[0, 0][0]["ts"] == 0
    assert drawn[1, 0][0]["ts"] == pytest.approx(0.5e6)


def test_hooks_go_and_nothing_is_kept() -> None:
    strategy = Strategy(micro_batch=2)
    comm = Comm(ALONE, mesh(strategy))
    state = Training(SPEC, Job(2, 8), strategy, comm, seed=0)
    batch = [torch.zeros(2, 9, dtype=torch.int64)]

    def hooks() -> int:
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in state.model.modules())

    def live() -> int:
        gc.collect()
        return sum(issubclass(type(found), torch.Tensor) for found in gc.get_objects())

    state.step(batch, 1e-3)
    before = hooks(), live()
    comm.timeline.begin()
    with passes(state.model.units(), state.optimizer, comm.timeline, lambda: RunningPass(0, "F")):
        state.step(batch, 1e-3)
    seconds, times = comm.timeline.end(), comm.timeline.times()
    assert times is not None
    assert (times.compute_s, times.axes) == (seconds, {})
    spans = comm.timeline.spans()
    assert sum(s.stop - s.start for s in spans) <= seconds
    assert (hooks(), live()) == before
    state.step(batch, 1e-3)
    assert comm.timeline.spans() == spans  # outside of a step nothing is added


def test_one_line_says_where_the_time_goes() -> None:
    timeline = {
        "compute_s": 0.28,
        "exposed_communication_s": 0.0123,
        "hidden_communication_s": 0.0302,
        "overlap": 0.0302 / 0.0425,
    }
    assert step_times(0.2958, timeline, "runs/quickstart/trace.json") == (
        "a step of 295.8 ms: compute 280.0 ms, exposed communication 12.3 ms, hidden communication 30.2 ms"
        " (overlap 71%); timeline in runs/quickstart/trace.json"
    )
    alone = dict.fromkeys(timeline, 0) | {"overlap": None}
    assert step_times(1.5, alone, "") == "a step of 1.50 s: compute, no communication"
