"""`strategy = "auto"`: what is chosen is legal, runnable and fits, and nothing else that fits is faster."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.in_process_cli import error_of, json_of, phalanx
from support.strategies import models, with_experts

from phalanx.cost.ledger.pipeline_formulas import schedule_number
from phalanx.cost.pipeline_time import Costs
from phalanx.cost.pipeline_time import price as schedule_price
from phalanx.planning.explain.exact import ExactSubject
from phalanx.planning.explain.lint import lint
from phalanx.planning.search import best_first as searching
from phalanx.planning.search import branch_and_bound, space, strategy_columns
from phalanx.planning.search.best_first import OPTIONS, Bounds, _bounds, _corners, price, search
from phalanx.schedule.pipeline.schedules import SCHEDULES, build
from phalanx.schedule.pipeline.stages import check
from phalanx.spec.cluster import presets as clusters
from phalanx.spec.cluster.spec import ClusterSpec
from phalanx.spec.errors import InputError
from phalanx.spec.files import plan as plans
from phalanx.spec.files.job_file import make_model, make_strategy
from phalanx.spec.job import Job, Precision
from phalanx.spec.strategy.legality import require_runnable
from phalanx.spec.strategy.spec import Strategy

_JOB = """
[model]
family = "llama"
vocab = 300
hidden = 32
layers = 2
heads = 2
ffn = 48
max_seq = 32
[cluster]
preset = "local"
ranks = 2
[job]
global_batch = 4
seq = 16
"""


def _cluster(beside: bool, usable: float) -> ClusterSpec:
    """Four ranks of a slow chip, which can or cannot communicate beside computing."""
    found = clusters.preset("dgx-h100", 1)
    device = replace(found.device, own_communication_engine=beside, usable_bytes=int(usable))
    return replace(found, device=device, ranks_per_node=4)


@settings(max_examples=6)
@given(
    model=st.one_of(models(small=True), with_experts(small=True)),
    batch=st.sampled_from([2, 4, 6]),
    worlds=st.sampled_from([[1], [1, 2], [2], [3], [4]]),
    beside=st.booleans(),
    tight=st.sampled_from([None, None, 1.02, 1.3]),
    data=st.data(),
)
def test_nothing_that_fits_is_faster(model, batch, worlds, beside, tight, data):
    job, cluster = Job(batch, 8, Precision("float32")), _cluster(beside, 1e12)
    rows = [space.all_strategies(model, job, n, OPTIONS) for n in worlds if batch % n == 0 or n < 3]
    if not rows:
        return
    every = strategy_columns.concatenate(rows)
    picked = every.take(data.draw(st.lists(st.integers(0, len(every) - 1), min_size=5, max_size=5)))
    if tight:  # so little memory that of these the smallest fits, and hardly more
        sizes = [int(price(model, cluster, job, s).prediction.memory_bytes) for s in picked.strategies()]
        cluster = _cluster(beside, tight * min(sizes))
    bounds = Bounds(model, cluster, job)
    others = [price(model, cluster, job, s) for s in picked.strategies()]
    for c, least, state in zip(others, bounds.of_rows(picked)[0], bounds.bytes_of_rows(picked), strict=True):
        assert least <= bounds.of_strategy(c.as_requested)[0] <= c.seconds
        assert state <= float(c.prediction.memory_bytes)
    found = search(model, cluster, job, worlds)
    assert found.legal == len(every)
    best = found.best
    assert not best.reason
    check(best.strategy, model, job, best.strategy.world)
    require_runnable(best.strategy, job)
    assert best.strategy.world in worlds
    for c in [*found.candidates, *(others if found.exhaustive else ())]:
        assert c.reason or c.seconds >= best.seconds, (c.as_requested, best.as_requested)


@given(st.sampled_from(list(SCHEDULES)), st.lists(st.floats(1, 3), min_size=1, max_size=4), st.integers(1, 3))
def test_no_pipeline_on_shared_cores_is_faster_than_its_bound(name: str, slower: list[float], rounds: int) -> None:
    """Over two ranks with equal chunks the likely seconds of 1f1b are the price."""
    speeds = [*np.cumprod(slower)[::-1], 1.0]  # of 1, 2, ... ranks at work: nobody is faster for another one
    p, v = len(speeds), SCHEDULES[name].chunks if SCHEDULES[name].takes_virtual else 1
    m = 2 * p * rounds
    s = build(name, p, m)
    corners = _corners(speeds)
    each = p / s.chunks / 3  # T is p: a rank's part of a micro-batch takes 1
    costs = Costs(*[[each] * s.chunks] * 3)
    makespan = schedule_price(s, replace(costs, pace=speeds)).makespan
    columns = (np.array([n]) for n in (m, p, v, schedule_number(name)))
    least, likely = (float(x[0]) for x in _bounds(np.array([float(p)]), corners[None], *columns))
    assert least <= likely <= makespan * (1 + 1e-9)
    if name == "1f1b" and p == 2 and speeds[0] <= 2:  # one rank does no more than two
        assert likely == pytest.approx(makespan)


@given(
    st.sampled_from(list(SCHEDULES)),
    st.integers(2, 5),
    st.integers(1, 12),
    st.lists(st.floats(0.01, 1), min_size=10, max_size=10),
    st.booleans(),
)
def test_no_chunks_undercut_the_bound(name: str, p: int, m: int, seconds: list[float], heavy_first: bool) -> None:
    """However passes are spread over the chunks: at random, or so that no rank waits for those before it."""
    if SCHEDULES[name].refusal(p, m) is not None:
        return
    s = build(name, p, m)
    chunks = [(1 - 1 / (m + 1)) ** i for i in range(s.chunks)] if heavy_first else seconds[: s.chunks]
    makespan = schedule_price(s, Costs(*[[x / 3 for x in chunks]] * 3)).makespan
    columns = (np.array([n]) for n in (m, p, s.chunks // p, schedule_number(name)))
    least, likely = (float(x[0]) for x in _bounds(np.array([sum(chunks)]), np.ones((1, 1, 2)), *columns))
    assert least <= min(likely, makespan) * (1 + 1e-9)
    if (p, m, name) == (2, 1, "1f1b"):  # a single micro-batch takes all passes in turn
        assert least == pytest.approx(makespan)


def test_a_large_space_is_chosen_from_by_the_vectorised_terms(monkeypatch):
    model, job = make_model({"preset": "gpt2", "layers": 2}, Path())[0], Job(8, 256, Precision("bfloat16"))
    exact = search(model, clusters.preset("dgx-h100", 1), job, [4])
    monkeypatch.setattr(searching, "_LARGE", 0)
    found = search(model, clusters.preset("dgx-h100", 1), job, [4])
    assert not found.exhaustive
    assert found.legal == exact.legal
    assert exact.best.seconds <= found.best.seconds
    assert all(c.reason or c.seconds >= found.best.seconds for c in found.candidates)


def test_a_pipeline_that_might_be_a_little_faster_hides_nothing_simpler():
    """Hundreds of pipelines promise some hundredths less than the best has, and none keeps it."""
    model, job = make_model({"preset": "gpt2-xl"}, Path())[0], Job(64, 1024)
    found = search(model, clusters.preset("dgx-h100", 1), job, [8])
    kinds = branch_and_bound.family(strategy_columns.columns_of([c.as_requested for c in found.candidates]))
    assert {*kinds} == {*branch_and_bound.family(space.all_strategies(model, job, 8, OPTIONS))}  # each says why not
    for s in (Strategy(dp=8, zero=1, micro_batch=8), Strategy(dp=4, zero=1, cp=2, micro_batch=8)):
        assert found.best.seconds <= price(model, clusters.preset("dgx-h100", 1), job, s).seconds


def test_where_memory_is_short_what_fits_is_found():
    """Two dozen strategies of one rank, of which the smallest alone fits; the fastest are priced first."""
    model, job = make_model({"preset": "gpt2", "layers": 2}, Path())[0], Job(32, 64)
    every = [
        price(model, _cluster(True, 1e12), job, s) for s in space.all_strategies(model, job, 1, OPTIONS).strategies()
    ]
    least = min(every, key=lambda c: int(c.prediction.memory_bytes))
    found = search(model, _cluster(True, int(least.prediction.memory_bytes)), job, [1])
    assert len(every) > searching.SHOWN
    assert found.best.strategy == least.strategy
    assert found.exhaustive


def test_what_does_not_fit_or_split_is_one_line():
    model = make_model({"preset": "gpt2", "layers": 2}, Path())[0]
    with pytest.raises(InputError, match=r"nothing fits: .* needs 1\.0 of 0\.0 GiB"):
        search(model, _cluster(True, 1e7), Job(4, 64), [1])
    with pytest.raises(InputError, match=r"no split of 7 ranks .* use 6 ranks"):
        search(model, _cluster(True, 1e12), Job(1, 64), [7])


@pytest.fixture
def here(tmp_path: Path, measured: None) -> Path:
    (tmp_path / "job.toml").write_text(_JOB)
    return tmp_path


def test_a_plan_of_a_job_is_the_job_with_its_strategy(here):
    found = json_of(here, "plan job.toml --json")
    assert found["strategies_evaluated"] > found["strategies_priced_one_by_one"] >= 1  # as this machine was measured
    file = plans.job_of(here / "plan.json", ["train.steps=3"])
    assert str(replace(file.strategy, bucket="auto", layers="auto")) == found["best"]["strategy"]
    assert (file.train.name, file.train.steps, file.job.global_batch) == ("job", 3, 4)
    assert plans.job_of(here) == plans.job_of(here / "plan.json")


def test_a_plan_of_a_job_is_explained_by_its_exact_price(here):
    assert phalanx(here, "plan job.toml --strategy dp=2,micro_batch=1")[0] == 0
    found = json.loads(phalanx(here, "explain plan.json --json")[1])
    predicted = found["prediction"]
    assert sum(predicted["terms_s"].values()) == pytest.approx(predicted["step_time_s"])
    assert sum(predicted["memory_terms"].values()) == predicted["memory_bytes"]
    assert {"pp 1 -> 2", "micro_batch 1 -> 2", "zero 0 -> 1"} <= {n["change"] for n in found["neighbours"]}
    times = [n["step_time_s"] for n in found["neighbours"]]
    assert times == sorted(times)
    text = phalanx(here, "explain plan.json")[1]
    assert "its neighbours" in text
    code, out, _ = phalanx(here, "lint plan.json")
    assert code == 1
    assert "small-micro-batch: a rank multiplies 16 tokens at a time" in out


@pytest.mark.parametrize(
    ("line", "mended", "name"),
    [
        ("pp=2,micro_batch=8", "pp=2,micro_batch=1", "few-micro-batches"),
        ("dp=2,micro_batch=1", "dp=2,micro_batch=4", "needless-accumulation"),
        ("dp=2,zero=3,micro_batch=4", "dp=2,micro_batch=4", "needless-zero3"),
        ("dp=2,micro_batch=4,bucket=0.001", "dp=2,micro_batch=4", "small-buckets"),
        ("tp=4,micro_batch=8", "tp=2,dp=2,micro_batch=4", "wide-tp"),
    ],
)
def test_lint_examines_our_own_runtime_by_exact_prices(line, mended, name):
    model, job = make_model({"preset": "gpt2", "layers": 4}, Path())[0], Job(8, 64)
    found = clusters.preset("dgx-h100", 2)
    fast, slow = found.tiers
    cluster = replace(found, ranks_per_node=2, tiers=(replace(fast, ranks=2), replace(slow, ranks=4)))
    for strategy, speaks in ((line, True), (mended, False)):
        chosen = make_strategy(strategy)
        x = ExactSubject(model, cluster, job, chosen, chosen.world)
        assert (name in {f.name for f in lint(x)}) == speaks
    assert 0 < ExactSubject(model, cluster, job, make_strategy("tp=4,micro_batch=8"), 4).tensor_parallel < 1


def test_a_plan_of_names_needs_data_and_steps(here):
    words = ("--model", "gpt2", "--cluster", "dgx-a100", "--gpus", "8", "--batch", "8", "--seq", "64")
    assert phalanx(here, "plan", *words, "--out", "g.json")[0] == 0
    assert "set train.data=..." in error_of(here, "train g.json --set train.steps=2")
    file = plans.job_of(here / "g.json", ["train.steps=2", "train.data=austen"])
    assert (file.train.name, file.cluster.preset, file.strategy.world) == ("g", "dgx-a100", 8)
    code, _, err = phalanx(here, "train absent.json")
    assert (code, err) == (2, "error: plan = 'absent.json': no such file\n")
