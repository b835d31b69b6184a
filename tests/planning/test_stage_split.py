"""A pipeline on a cluster: which blocks in which chunk, what the schedule then costs, and that the plan says so."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
from support.fitted_cluster import laptop

from phalanx.cost.pipeline_time import Costs, price
from phalanx.cost.step.expand import expand
from phalanx.cost.step.predict import predict
from phalanx.cost.step.predict_pipeline import PricedPipeline, price_pipeline
from phalanx.cost.step.terms import terms
from phalanx.planning.auto import stage_split
from phalanx.planning.search import best_first
from phalanx.schedule.layout import Layout
from phalanx.schedule.pipeline.schedules import build
from phalanx.schedule.pipeline.stages import rank_of
from phalanx.spec.cluster import presets as clusters
from phalanx.spec.cluster.spec import Rates
from phalanx.spec.files.job_file import build as make
from phalanx.spec.files.job_file import make_strategy
from phalanx.spec.job import Job, Precision
from phalanx.spec.model.families import complete
from phalanx.spec.model.presets import preset
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.spec import Strategy

LLAMA = make(ModelSpec, complete(preset("llama3-8b")), "model")
JOB = Job(64, 4096, Precision("bfloat16"))
CLUSTER = clusters.preset("dgx-h100", nodes=8)


def _strategy(line: str) -> Strategy:
    found = make_strategy(line)
    assert found is not None
    return found


def _priced(s: Strategy) -> PricedPipeline:
    views = Layout(LLAMA, JOB, s).stage_views()
    return price_pipeline(views, [terms(view) for view in views], CLUSTER)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_each_pass_waits_for_its_own_collectives(schedule: str) -> None:
    """In nodes half as fast, forward passes and gradients of inputs take longer; gradients of weights do not."""
    strategy = _strategy(f"pp=4,tp=8,dp=2,schedule={schedule}")
    views = Layout(LLAMA, JOB, strategy).stage_views()
    inner, *outer = CLUSTER.tiers
    bandwidth = inner.bandwidth_bytes_per_s_per_gpu_per_direction / 2
    slow = replace(CLUSTER, tiers=(replace(inner, bandwidth_bytes_per_s_per_gpu_per_direction=bandwidth), *outer))
    fast, late = (price_pipeline(views, [terms(v) for v in views], cluster).costs for cluster in (CLUSTER, slow))
    assert all(a > b for a, b in zip(late.forward, fast.forward, strict=True))
    assert all(a > b for a, b in zip(late.input_grad, fast.input_grad, strict=True))
    assert late.weight_grad == fast.weight_grad


def test_a_device_without_a_communication_engine_moves_bytes_itself() -> None:
    strategy = _strategy("pp=4,schedule=interleaved,virtual=2")
    views = Layout(LLAMA, JOB, strategy).stage_views()
    alone, own = (
        price_pipeline(
            views,
            [terms(v) for v in views],
            replace(CLUSTER, device=replace(CLUSTER.device, own_communication_engine=engine)),
        )
        for engine in (True, False)
    )
    assert (alone.costs.overhead, own.costs.overhead) == (0.0, own.costs.transfer)
    assert own.priced.bubble_fraction > alone.priced.bubble_fraction


def test_ranks_that_share_cores_are_faster_while_others_wait() -> None:
    """The pace is from the rates measured with as many ranks at work; published rates, of one level, give none."""
    few, most = (replace(k, concurrent=n) for k, n in zip(laptop(4).kernels, (2, 4), strict=True))
    slow = replace(most, forward=twice(most.forward), backward=twice(most.backward))
    host = replace(laptop(4), kernels=(few, slow))
    views = Layout(LLAMA, replace(JOB, precision=Precision()), _strategy("pp=4")).stage_views()
    found = [price_pipeline(views, [terms(v) for v in views], c) for c in (host, replace(host, kernels=(slow,)))]
    assert found[0].costs.pace == pytest.approx([2, 2, 4 / 3, 1])
    assert found[1].costs.pace == ()
    assert found[0].step_time_s < found[1].step_time_s


def twice(rates: Rates) -> Rates:
    return replace(rates, **{name: 2 * x for name, x in asdict(rates).items() if isinstance(x, float)})


@pytest.mark.parametrize("line", ["pp=4,tp=2", "pp=8", "pp=4,schedule=interleaved,virtual=2", "pp=4,schedule=zb-v"])
def test_the_slowest_rank_is_as_fast_as_may_be(line: str) -> None:
    """No block moved from one of its chunks to another chunk makes it faster; what others move leaves it as it is."""
    s, why = stage_split.resolve(LLAMA, CLUSTER, JOB, _strategy(line))
    blocks = [int(n) for n in s.layers.split("/")]
    assert sum(blocks) == LLAMA.layers
    assert "slowest rank" in why
    work = list(_priced(s).priced.work)
    slowest = max(work)
    for i in (chunk for chunk, rank in enumerate(rank_of(s)) if rank == work.index(slowest)):
        for j in range(len(blocks)):
            moved = [n + (c == j) - (c == i) for c, n in enumerate(blocks)]
            if i != j and min(moved) >= 1:
                other = replace(s, layers="/".join(map(str, moved)))
                assert max(_priced(other).priced.work) >= slowest * (1 - 1e-9)


def test_memory_limits_move_blocks_to_where_there_is_room() -> None:
    """The first rank of 1f1b holds the most micro-batches: on a device that is full it gets fewer blocks."""
    s = _strategy("pp=4,tp=4,micro_batch=2")
    wide, _ = stage_split.resolve(LLAMA, CLUSTER, JOB, s)
    need = predict(LLAMA, CLUSTER, JOB, wide).memory_bytes
    device = replace(CLUSTER.device, usable_bytes=int(need * 0.95))
    tight, _ = stage_split.resolve(LLAMA, replace(CLUSTER, device=device), JOB, s)
    assert int(tight.layers.split("/")[0]) < int(wide.layers.split("/")[0])
    assert predict(LLAMA, CLUSTER, JOB, tight).memory_bytes < need


@pytest.mark.parametrize("line", ["pp=4,schedule=gpipe", "pp=2,tp=2,schedule=zb-h1", "pp=4,schedule=dualpipe-v,dp=2"])
def test_the_step_is_the_schedules(line: str) -> None:
    s, _ = stage_split.resolve(LLAMA, CLUSTER, JOB, _strategy(line))
    found = _priced(s)
    schedule = build(s.schedule, s.pp, s.accumulation(JOB))
    assert price(schedule, found.costs).times == found.priced.times
    alike = price(schedule, Costs.equal(schedule.chunks)).bubble_fraction
    assert found.priced.bubble_fraction == pytest.approx(alike, abs=0.08)  # chunks are nearly alike
    prediction = predict(LLAMA, CLUSTER, JOB, s)
    assert prediction.step_time_s > found.priced.makespan
    assert prediction.bubble_fraction == found.priced.bubble_fraction
    views = Layout(LLAMA, JOB, s).stage_views()
    assert prediction.memory_bytes == max(expand(view).peak_bytes for view in views)
    assert predict(LLAMA, CLUSTER, JOB, Strategy(dp=2)).bubble_fraction == 0


def test_the_plan_says_what_each_chunk_costs() -> None:
    found = best_first.price(LLAMA, CLUSTER, JOB, _strategy("pp=4,tp=2"))
    assert found.strategy.layers != "auto"
    assert found.as_requested == replace(_strategy("pp=4,tp=2"), bucket=found.as_requested.bucket)
    said = stage_split.explanation(LLAMA, CLUSTER, JOB, found.strategy, found.layers_reason)
    assert said is not None
    chunks = said["chunks"]
    assert [c["rank"] for c in chunks] == [0, 1, 2, 3]
    assert chunks[0]["embed"]
    assert chunks[3]["head"]
    assert chunks[0]["bytes"] == pytest.approx(predict(LLAMA, CLUSTER, JOB, found.strategy).memory_bytes, rel=0.1)
