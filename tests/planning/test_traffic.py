"""What `comm` says that a job sends: the formulas of our own stack against its program; pipelines at their ends."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.cost.step.expand import expand
from phalanx.planning.explain.analytic import AnalyticSubject
from phalanx.planning.explain.exact import ExactSubject
from phalanx.planning.explain.program_traffic import bytes_sent
from phalanx.planning.explain.traffic import job_flows
from phalanx.planning.search.column_pricing import Pricing
from phalanx.planning.tables.communication import exact_sheet, sheet
from phalanx.schedule.event import INSIDE
from phalanx.schedule.layout import Layout
from phalanx.spec.cluster.presets import preset
from phalanx.spec.files.job_file import make_model, make_strategy
from phalanx.spec.job import Job, Precision
from phalanx.spec.strategy.spec import Strategy

_INSIDE = (*INSIDE, "pp", "edp", "embed")


def _asked(model: str, batch: int) -> Pricing:
    spec, _ = make_model({"preset": model}, Path())
    return Pricing(spec, preset("dgx-h100", 4), Job(batch, 1024, Precision("bfloat16")), "phalanx")


@pytest.mark.parametrize(
    ("model", "line"),
    [
        ("llama2-7b", "dp=8,zero=1"),
        ("llama2-7b", "dp=4,pp=2"),
        ("llama2-7b", "dp=2,pp=4,zero=1"),
        ("llama2-7b", "dp=2,pp=4,tp=2,virtual=2,schedule=interleaved"),
        ("llama2-7b", "dp=2,pp=4,schedule=zb-v"),
        ("llama2-7b", "pp=2,tp=2,sp=1,cp=2,dp=2,schedule=zb-v"),
        ("llama2-7b", "dp=2,tp=4,cp=2,ulysses=2,zero=3"),
        ("gpt2-xl", "dp=2,pp=4"),  # a tied embedding
        ("mixtral-8x7b", "dp=8,ep=8,zero=1"),
        ("mixtral-8x7b", "dp=4,pp=2,ep=4"),
    ],
)
def test_the_job_sends_what_its_program_sends(model: str, line: str) -> None:
    p, s = _asked(model, 32), make_strategy(line)
    assert s is not None
    by_formula: Counter[str] = Counter()
    for row in job_flows(p, s):
        by_formula[row.flow.axis] += row.job
    program: Counter[str] = Counter()
    for row in exact_sheet(ExactSubject(p.model, p.cluster, p.job, s, s.world)).records():
        if row["axis"] != "world":
            program[row["axis"] if row["axis"] in _INSIDE else "dp"] += row["all_ranks_bytes"]
    assert by_formula.keys() == program.keys()
    for axis, sent in program.items():  # buckets are padded to whole cache lines
        assert by_formula[axis] == pytest.approx(sent, rel=1e-3 if axis in ("dp", "edp", "embed") else 1e-9), axis


@pytest.mark.parametrize(
    ("line", "inner", "end", "boundaries"),
    [
        ("pp=2", None, 1, 1),
        ("pp=4", 2, 1, 3),
        ("pp=4,virtual=2,schedule=interleaved", 4, 3, 7),
        ("pp=4,schedule=zb-v", 4, 2, 6),
    ],
)
def test_the_ends_of_a_pipeline_send_less(line: str, inner: int | None, end: int, boundaries: int) -> None:
    """Messages of a rank per micro-batch, and of the job: over every boundary one forward and one backward."""
    p, s = _asked("llama2-7b", 32), make_strategy(line)
    assert s is not None
    rows = {row.where: row for row in job_flows(p, s) if row.flow.axis == "pp"}
    counts = {where: row.flow.count / 32 for where, row in rows.items()}
    assert counts == ({"both ends": end} if inner is None else {"inner ranks": inner, "both ends": end})
    message = next(iter(rows.values())).flow.payload
    assert sum(row.job for row in rows.values()) == pytest.approx(32 * 2 * boundaries * message)


@pytest.mark.parametrize("line", ["pp=4,dp=4,zero=1", "pp=4,dp=2,tp=2,virtual=2,schedule=interleaved"])
def test_an_inner_rank_sends_no_gradients_of_the_embedding(line: str) -> None:
    """Rows of inner ranks and of both ends are two ranks each: together what the job sends."""
    p, s = _asked("llama2-7b", 32), make_strategy(line)
    assert s is not None
    rows = [row for row in job_flows(p, s) if row.flow.axis == "dp"]
    by = {where: sum(row.flow.sent for row in rows if row.where == where) for where in ("inner ranks", "both ends")}
    assert 0 < by["inner ranks"] < by["both ends"]
    assert 2 * (by["inner ranks"] + by["both ends"]) * s.world / 4 == pytest.approx(
        sum(row.job for row in rows), rel=1e-4
    )


@pytest.mark.parametrize("slow", ["nvlink", "infiniband"])
def test_messages_are_bound_by_the_latency_of_their_own_links(slow: str) -> None:
    """Where links of one kind take a second to start, all their messages are bound by it, and no others."""
    p = _asked("llama2-7b", 32)
    tiers = [replace(t, latency_s=1.0 if t.name == slow else 0.0) for t in p.cluster.tiers]
    waits = replace(p, cluster=replace(p.cluster, tiers=tuple(tiers)))
    rows = sheet(AnalyticSubject(lambda _: waits, Strategy(dp=4, tp=8, zero=1), 32)).records()
    assert {row["links"] for row in rows} == {"nvlink", "infiniband"}
    assert {row["links"] for row in rows if row["bound_by"] == "latency"} == {slow}


def test_replicas_and_sharded_optimizers_send_equally_many_bytes() -> None:
    """An all-reduce is a reduce-scatter and an all-gather: DDP and ZeRO-1 of the same types send as much over dp."""
    spec, _ = make_model({"preset": "gpt2"}, Path())
    job = Job(8, 256, Precision("float32"))
    sent = []
    for zero in (0, 1):
        view = Layout(spec, job, Strategy(dp=4, zero=zero)).stage_view()
        sent.append({axis: n for axis, n in bytes_sent(expand(view).events).items() if axis.startswith("dp")})
    (whole,), (sharded,) = (list(axes.values()) for axes in sent)
    assert whole == pytest.approx(2 * 3 / 4 * 4 * spec.parameter_count, rel=0.001)
    assert sharded == pytest.approx(whole, rel=0.001)
