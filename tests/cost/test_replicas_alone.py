"""Prices of replicas that step alone: what a replica costs by itself, and their synchronisation."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.in_process_cli import phalanx
from support.sizes import examples

from phalanx.cost.analytic.estimate import estimate
from phalanx.planning.lookup import cluster_named, pricing_by_gpus
from phalanx.planning.search.replicas_alone import steps_alone_around
from phalanx.report.pictures.figure import Lines
from phalanx.spec.cluster.presets import preset as cluster
from phalanx.spec.errors import InputError
from phalanx.spec.files.job_file import build
from phalanx.spec.job import Job, Precision
from phalanx.spec.model.families import complete
from phalanx.spec.model.presets import preset
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.optimizers import OuterOptimizer
from phalanx.spec.strategy.spec import Strategy, parse
from phalanx.textbook.answers import picture
from phalanx.textbook.gallery.replicas_alone import slowest_link

LLAMA, MOE = (build(ModelSpec, complete(preset(name)), "model") for name in ("llama3-8b", "mixtral-8x7b"))
SITES, ONE = "sites-h100", "dgx-h100"
JOB = Job(256, 4096)
REPLICAS = ("", "zero=1", "zero=3", "tp=4,sp=1", "zero=2,tp=2", "cp=2,zero=3", "zero=3,recompute=full", "tp=8,zero=1")


def priced(line: str, job: Job, gpus: int, links=SITES, model=LLAMA, local: int = 0, shard: int = 0):
    given_ = parse(line)
    dp = gpus // (int(given_.get("tp", 1)) * int(given_.get("cp", 1)))
    s = Strategy(**given_, dp=dp, local=local, shard=shard if shard and shard < dp and "zero" in given_ else None)
    return estimate(model, cluster(links, max(gpus // 8, 1)), job, s, "phalanx")


@examples(40, 1000)
def test_a_replica_costs_what_it_costs_by_itself(examples: int) -> None:
    """Without the synchronisation, every term is that of one replica on its own GPUs with its part of the batch."""

    @settings(max_examples=examples)
    @given(
        line=st.sampled_from(REPLICAS),
        shard=st.sampled_from([2, 4, 8]),
        replicas=st.sampled_from([2, 4, 8]),
        local=st.integers(1, 500),
        links=st.sampled_from([SITES, ONE]),
        outer=st.sampled_from([OuterOptimizer(), OuterOptimizer(1.0, 0.0)]),
    )
    def holds(line: str, shard: int, replicas: int, local: int, links, outer) -> None:
        job, given_ = replace(JOB, outer=outer), parse(line)
        shard = shard if "zero" in given_ else 1
        gpus = shard * int(given_.get("tp", 1)) * int(given_.get("cp", 1))
        several = priced(line, job, gpus * replicas, links, local=local, shard=shard)
        single = priced(line, replace(job, global_batch=job.global_batch // replicas), gpus, links)
        terms = {name: float(t) for name, t in several.step.terms.items()}
        assert terms.pop("outer") > 0
        mine, its = (
            {**terms, "other": 0.0},
            {**{name: float(t) for name, t in single.step.terms.items()}, "other": 0.0},
        )  # jitter grows with all ranks
        assert mine == pytest.approx(its, rel=1e-12)
        bytes_ = several.memory.terms["state"] - single.memory.terms["state"]
        shards = several.layout.shards if given_.get("zero") else 1
        parameters = LLAMA.parameter_count / int(given_.get("tp", 1))
        norms = 0.01 * parameters  # which tp ranks hold whole
        kept = (2 if outer.momentum else 1) * 4
        assert bytes_ == pytest.approx(kept * parameters / shards, abs=kept * norms / shards)
        assert several.model_flops == pytest.approx(replicas * single.model_flops, rel=1e-12)

    holds()


def test_steps_between_synchronisations_share_their_cost() -> None:
    once = priced("zero=3", JOB, 256, local=1, shard=8).step.terms["outer"]
    assert priced("zero=3", JOB, 256, local=50, shard=8).step.terms["outer"] == pytest.approx(once / 50, rel=1e-12)
    # In two sites the slow link sets the pace of the all-reduce; in one it is the nodes' network.
    assert once > 5 * priced("zero=3", JOB, 128, local=1, shard=8).step.terms["outer"]


def test_experts_are_brought_together_too() -> None:
    dense, all_ = LLAMA.parameter_count, MOE.parameter_count
    both = [
        priced("ep=8,zero=1", JOB, 64, ONE, model=MOE, local=1, shard=8),
        priced("zero=1", JOB, 64, ONE, local=1, shard=8),
    ]
    sent = [float(e.step.of["outer"]["update_s"]) for e in both]
    assert sent[0] / sent[1] == pytest.approx(all_ / dense, rel=0.01)


def test_as_many_gpus_as_are_said_to_do_for_replicas_that_step_alone_do(tmp_path: Path) -> None:
    words = "--model llama3-70b --cluster dgx-h100 --batch 384 --seq 2048 --stack phalanx --strategy local=2 --gpus"
    code, _, error = phalanx(tmp_path, "plan", *words.split(), "8")
    assert code == 2
    enough = re.search(r"(\d+) of them would do", error)
    assert enough
    assert phalanx(tmp_path, "plan", *words.split(), enough[1])[0] == 0


def test_compressed_changes_take_less_of_the_link_and_more_memory() -> None:
    whole, eight, four = (
        priced(f"zero=3{c}", JOB, 64, local=10, shard=8) for c in ("", ",compression=int8", ",compression=int4")
    )
    sent = [float(e.step.of["outer"]["sent_s"]) for e in (whole, eight, four)]
    assert sent[1] / 2 < sent[2] < 0.6 * sent[1]  # half the bytes, the same latency
    assert sent[2] < sent[0]
    n = LLAMA.parameter_count / 8
    residual = float(four.memory.terms["compression"]) - float(whole.memory.terms["compression"])
    assert residual == pytest.approx(n * 4 * (1 + 1 / 8), rel=0.1)


def test_the_picture_marks_where_the_price_of_a_step_is_that_of_plain() -> None:
    """Below a mark a way is faster than the hierarchical step, above it slower, by `phalanx predict`'s own prices."""
    drawn = picture("local-steps")
    (panel,) = drawn.panels
    assert isinstance(panel, Lines)
    lines = ("", ",compression=int4", ",local=4", ",local=16", ",local=16,compression=int4", ",local=64")
    base, *ways = (Strategy(**parse(f"dp=256,zero=3,shard=128{how}")) for how in lines)
    job, sites = Job(512, 8192, Precision("bfloat16")), cluster(SITES, 32)

    def step(s: Strategy, gbit: float) -> float:
        return float(estimate(LLAMA, slowest_link(sites, gbit), job, s, "phalanx").seconds)

    for s, mark in zip(ways, panel.marks, strict=True):
        assert step(s, 0.98 * mark.x) < step(base, 0.98 * mark.x)
        assert step(s, 1.02 * mark.x) > step(base, 1.02 * mark.x)
        assert f"{float(f'{mark.x:.2g}'):,.0f}" in drawn.note
    # 400 Gbit/s are the rate of the preset.
    assert step(base, 400) == pytest.approx(float(estimate(LLAMA, sites, job, base, "phalanx").seconds), rel=1e-12)


def test_a_picture_of_one_group_is_refused() -> None:
    with pytest.raises(InputError, match="several groups of the 8 that dgx-h100 joins last"):
        picture("local-steps", {"cluster": "dgx-h100", "gpus": 8})


def test_a_plan_says_what_other_numbers_of_steps_and_bits_are_worth() -> None:
    """Each priced as itself; rarer ones are shorter, and worth the tokens that fill the time which they save."""
    pricing = pricing_by_gpus(LLAMA, cluster_named(SITES), 256, 4096, "phalanx")(256)
    s = Strategy(dp=256, zero=3, shard=16, local=32)
    ways = steps_alone_around(pricing, s, 2.0)
    by = {(w.strategy.local, w.strategy.compression): w for w in ways}
    assert {local for local, _ in by} == {4, 16, 32, 64, 256}
    assert {c for _, c in by} == {"none", "int8", "int4"}
    assert by[4, "none"].step_time_s > by[16, "none"].step_time_s > by[256, "none"].step_time_s
    assert by[4, "int4"].step_time_s < by[4, "int8"].step_time_s
    for w in ways:
        step = float(estimate(LLAMA, pricing.cluster, pricing.job, w.strategy, "phalanx").seconds)
        assert (w.step_time_s, w.more_tokens) == pytest.approx((step, 2.0 / step - 1))
    cut = steps_alone_around(pricing, Strategy(dp=64, zero=1, shard=32, tp=4, local=32), None)
    assert {(w.strategy.compression, w.more_tokens) for w in cut} == {("none", None)}  # tp takes no compression
