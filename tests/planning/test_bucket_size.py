"""`bucket = auto` is the size at which the priced collectives of a step cost least beside the backward pass."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fitted_cluster import cluster, fit

from phalanx.cost.collectives import measured as collective
from phalanx.cost.compute.unit_work import Column
from phalanx.cost.step.predict import predict
from phalanx.planning.auto.bucket_size import best_bytes, has_buckets, resolve
from phalanx.planning.search.best_first import price, search
from phalanx.runs.resume import _as_before
from phalanx.schedule.gradients.buckets import buckets
from phalanx.spec.cluster import presets as clusters
from phalanx.spec.cluster.spec import ClusterSpec
from phalanx.spec.files.job_file import build
from phalanx.spec.job import Job, Precision
from phalanx.spec.model.families import complete
from phalanx.spec.model.presets import preset
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy

MODEL = build(ModelSpec, complete(preset("gpt2")), "model")
G = 4 * MODEL.parameter_count
JOB = Job(64, 128)
ALPHAS, BETAS = st.floats(1e-7, 1e-2), st.floats(1e-12, 1e-8)


def visible(here: ClusterSpec, strategy: Strategy, size: Column) -> Column:
    """Seconds of G bytes in buckets of `size`, less what hides: their travel, but for the last one's."""
    grid = mesh(strategy)
    op, axis = ("reduce_scatter", "dp_shard") if strategy.shards > 1 else ("all_reduce", "dp_replicate")
    latency, once = (collective.seconds(here, grid, op, axis, n, 0) for n in (G / size, 1))
    return latency + collective.seconds(here, grid, op, axis, 1, size) - once


@given(ALPHAS, BETAS, st.sampled_from([2, 3, 8, 64]), st.sampled_from([0, 1, 2]), st.booleans())
def test_no_other_size_is_cheaper(alpha: float, beta: float, ranks: int, zero: int, measured: bool) -> None:
    strategy = Strategy(dp=ranks, zero=zero)  # type: ignore[arg-type]
    op = "reduce_scatter" if zero else "all_reduce"
    here = clusters.preset("dgx-h100", nodes=8)
    tier = replace(here.tiers[0], ranks=64, latency_s=alpha, bandwidth_bytes_per_s_per_gpu_per_direction=1 / beta)
    here = replace(here, ranks_per_node=64, nodes=1, tiers=(tier,))
    if measured:
        here = replace(here, collectives=(replace(fit("shm", alpha, beta, ranks, op), points=()),))
    found, reason = resolve(MODEL, here, JOB, strategy)
    chosen = visible(here, strategy, min(found.bucket_bytes, G))
    scan = np.geomspace(2**16, G, 400)
    assert chosen <= 1.01 * np.min(visible(here, strategy, scan)), reason


@given(st.floats(1, 1e12), st.floats(1, 1e12))
def test_between_the_crossover_and_all_there_is(total: float, crossover: float) -> None:
    size = best_bytes(total, crossover)
    assert size <= total
    assert size >= min(total, crossover)


def test_why_and_over_what() -> None:
    late, early, slow = fit("p2p", 1e-3, 1e-10), fit("shm", 1e-4, 1e-10), fit("native", 1e-4, 1e-9)
    found, reason = resolve(MODEL, cluster(late, early, slow), JOB, Strategy(dp=2))
    assert reason == "G = 475 MiB of gradients by all_reduce over shm, n* = 977 KiB; sqrt(G n*)"
    assert found == Strategy(dp=2, bucket=22.0)
    found, reason = resolve(MODEL, clusters.preset("dgx-h100", 1), JOB, Strategy(dp=8, zero=1))
    # n* of a ring of 8: eight times that of its link, 2.25 MB
    assert reason == (
        "G = 475 MiB of gradients by reduce_scatter over a ring of 8 on nvlink, n* = 17.2 MiB; sqrt(G n*)"
    )
    assert found.bucket == 91.0
    across = resolve(MODEL, clusters.preset("dgx-h100", 2), JOB, Strategy(dp=16))[1]
    assert "a ring of 16 on infiniband" in across
    half = replace(JOB, precision=Precision("bfloat16", reduce="bfloat16"))
    assert resolve(MODEL, cluster(early), half, Strategy(dp=2))[1].startswith("G = 237 MiB")


def test_where_nothing_hides_buckets_are_few() -> None:
    here = cluster(fit("native", 1e-3, 1e-9))
    here = replace(here, device=replace(here.device, kind="cpu", own_communication_engine=False))
    found, reason = resolve(MODEL, here, JOB, Strategy(dp=2))
    assert (found.bucket, reason.split("; ")[1]) == (25.0, "no smaller: this device hides none of them")
    found, reason = resolve(MODEL, replace(here, collectives=(fit("native", 1e-1, 1e-9),)), JOB, Strategy(dp=2))
    assert found.bucket == pytest.approx(1e8 / 2**20, rel=0.1)  # n*
    small = build(
        ModelSpec, complete({**preset("gpt2"), "vocab": 100, "layers": 1, "hidden": 48, "heads": 4}), "model"
    )
    found, reason = resolve(small, here, JOB, Strategy(dp=2))
    assert reason.endswith("all at once")
    assert len(buckets(small, JOB, found)) == 1


def test_few_gradients_travel_at_once() -> None:
    found, reason = resolve(MODEL, cluster(fit("native", 1.0, 1e-9)), JOB, Strategy(dp=2))
    assert reason.endswith("all at once")
    assert len(buckets(MODEL, JOB, found)) == 1
    found, reason = resolve(MODEL, cluster(fit("native", 1e-3, 0.0)), JOB, Strategy(dp=2))
    assert "n* = without bound; all at once" in reason
    found, reason = resolve(MODEL, cluster(fit("native", 0.0, 1e-9)), JOB, Strategy(dp=2))
    assert reason.endswith("no less than 64 KiB")


@pytest.mark.parametrize("strategy", [Strategy(), Strategy(dp=2, zero=3), Strategy(dp=2, bucket=3.0)], ids=str)
def test_what_is_given_or_has_no_buckets_stays(strategy: Strategy) -> None:
    assert resolve(MODEL, clusters.preset("dgx-h100", 1), JOB, strategy) == (strategy, "")
    assert has_buckets(strategy) == (strategy.bucket == 3.0)


def test_candidates_are_priced_with_their_bucket_and_shown_without() -> None:
    here = clusters.preset("dgx-h100", 1)
    found = search(MODEL, here, JOB, [8]).candidates
    for c in found[:40]:
        assert (c.strategy.bucket == "auto") != has_buckets(c.strategy)
        assert c.as_requested == replace(c.strategy, bucket="auto", layers="auto")
        assert float(c.prediction.step_time_s) == float(predict(MODEL, here, JOB, c.strategy).step_time_s)
        assert c == price(MODEL, here, JOB, c.as_requested)
    assert price(MODEL, here, JOB, Strategy(dp=2, bucket=3.0)).as_requested == Strategy(dp=2, bucket=3.0)


def test_on_the_old_layout_the_old_bucket() -> None:
    old = Strategy(dp=2, micro_batch=2, bucket=2.8)
    assert _as_before(None, old) == old
    assert _as_before(replace(old, bucket="auto"), old) == old
    assert _as_before(replace(old, bucket=3.0), old) == replace(old, bucket=3.0)
    assert _as_before(Strategy(dp=4), old) == Strategy(dp=4)
    assert _as_before(None, replace(old, bucket="auto")) == replace(old, bucket=25.0)
    assert _as_before(None, Strategy(dp=2, zero=3)) == Strategy(dp=2, zero=3)
