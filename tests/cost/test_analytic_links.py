"""All-reduces between nodes, by a ring, a tree or switches; and pipelines of ranks that NVLink does not join."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from phalanx.cost.analytic.chips import generation, system
from phalanx.cost.analytic.profile import Profile, profile
from phalanx.cost.analytic.step import step
from phalanx.cost.collectives.nccl_model import collective_s
from phalanx.cost.ledger.model_shape import shape
from phalanx.cost.ledger.rank_layout import layout
from phalanx.planning.explain.analytic import AnalyticSubject
from phalanx.planning.lookup import model_named, pricing_by_gpus
from phalanx.spec.cluster.chips import CHIPS
from phalanx.spec.cluster.presets import LikePreset
from phalanx.spec.files.job_file import make_model
from phalanx.spec.job import Job, Precision
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy, parse
from phalanx.validate.systems import Benched, corrected_system

N = 4e9


def reduce_s(ranks: int, nic: float, chip: str = "A100") -> tuple[float, float, float]:
    """Of an all-reduce, and of the two halves of a ring; bytes/s that a node's ports reach."""
    on = system(chip, 8, nic)
    ring = 2 * float(collective_s("reduce_scatter", N, ranks, 1, on))
    return float(collective_s("all_reduce", N, ranks, 1, on)), ring, 8 * on.tiers[1].bytes_per_s_per_gpu_per_direction


def test_two_nodes_with_slow_ports_reduce_by_a_tree() -> None:
    """One way is the other's other: n bytes through a node's ports, where a ring has 2 (p-1)/p of them."""
    found, ring, ports = reduce_s(16, 50e9 / 8)
    assert found == pytest.approx(N / ports, rel=0.01)
    assert ring == pytest.approx(2 * N * 15 / 16 / ports, rel=0.01)


@pytest.mark.parametrize(("ranks", "nic"), [(16, 25e9), (32, 50e9 / 8), (32, 25e9)])
def test_fast_ports_and_more_nodes_reduce_by_a_ring(ranks: int, nic: float) -> None:
    found, ring, _ = reduce_s(ranks, nic)
    assert found == pytest.approx(ring, rel=1e-6)


def test_switches_that_reduce_send_less_than_a_ring() -> None:
    found, ring, ports = reduce_s(32, 25e9, "H100")
    assert found == pytest.approx(2 * N * 3 / 4 / ports, rel=0.01)
    assert found < ring


def test_what_has_no_switches_that_reduce_has_a_tree() -> None:
    for name in {chip.generation for chip in CHIPS.values()}:
        built = generation(name)
        assert (built.tree > 0) == (built.reduce_gain == 1), name


def test_small_all_reduces_of_many_nodes_take_the_trees_hops() -> None:
    on = system("A100", 8, 25e9)
    few, many = (float(collective_s("all_reduce", 1e3, 8 * nodes, 1, on)) for nodes in (8, 64))
    assert many < 2.5 * few  # a ring's would be eight times as many


def test_ranks_that_nvlink_does_not_join_hold_their_pipeline_up() -> None:
    """What a job measured inside of a node says so: 42 GB/s where NVLink carries 325."""
    spec = make_model({"preset": "llama2-7b"}, Path())[0]
    job, stack = Job(64, 4096, Precision("bfloat16")), profile("nanotron")
    known = system("H100", 8, 50e9)
    apart = corrected_system(known, Benched(32, 44e9, 40e9, 45e9, 42e9))
    assert (float(apart.cut_off), float(corrected_system(known, Benched(32, 154e9, 97e9, 425e9, 242e9)).cut_off)) == (
        1,
        0,
    )
    for line, messages in (("dp=4,pp=8", 2 * (16 + 7)), ("dp=32", 0)):
        laid = layout(Strategy(**parse(line)), job, spec.layers)
        whole, free = (step(shape(spec), laid, on, stack).seconds for on in (apart, replace(apart, cut_off=0.0)))
        assert float(whole - free) == pytest.approx(messages * float(np.asarray(stack.stalled_s)))


def test_a_job_that_nobody_observed_may_be_held_up() -> None:
    """Over several nodes: between one that is held up and one that is not, by nanotron's share."""
    spec = make_model({"preset": "llama2-7b"}, Path())[0]
    job, stack, known = Job(64, 4096, Precision("bfloat16")), profile("nanotron"), system("H100", 8, 50e9)

    def seconds(line: str, held_up: float | None, by: Profile = stack) -> float:
        laid = layout(Strategy(**parse(line)), job, spec.layers)
        on = known if held_up is None else replace(known, observed=1.0, held_up=held_up)
        return float(step(shape(spec), laid, on, by).seconds)

    line = "dp=4,tp=8,sp=1"
    assert seconds(line, 0) < seconds(line, None) < seconds(line, 1)
    assert seconds(line, None) == pytest.approx(seconds(line, float(np.asarray(stack.held_up))))
    assert seconds("tp=8,sp=1", None) == seconds("tp=8,sp=1", 0)
    assert seconds(line, None, profile("llm-foundry")) == seconds(line, 1, profile("llm-foundry"))


def _tp_seconds(line: str) -> float:
    s, model = Strategy(**parse(line)), make_model({"preset": "llama2-7b"}, Path())[0]
    job = Job(96, 4096, Precision("bfloat16"))
    on = system("H100", 8, 50e9)
    return float(step(shape(model), layout(s, job, 32), on, profile("megatron-core")).terms["tp"])


def test_tensor_parallel_groups_that_straddle_nodes_are_priced_by_the_worst_of_them() -> None:
    """With 3 ranks a group on nodes of 8, ranks 6, 7, 8 are on two nodes, and one of them sends for all."""
    job = Job(96, 4096, Precision("bfloat16"))
    strides = {}
    for line in ("dp=8,tp=3", "dp=8,tp=6", "dp=4,tp=12", "dp=2,tp=3", "dp=8,tp=4", "dp=4,tp=16"):
        strides[line] = float(layout(Strategy(**parse(line)), job, 32).on_nodes(8).tp_stride)
    # 1 of 3 in a node, 2 of 6, 4 of 12; 6 ranks are in one node; 4 and 16 fill theirs.
    assert strides == {
        "dp=8,tp=3": 8,
        "dp=8,tp=6": 4,
        "dp=4,tp=12": 2,
        "dp=2,tp=3": 1,
        "dp=8,tp=4": 1,
        "dp=4,tp=16": 1,
    }
    groups = mesh(Strategy(**parse("dp=8,tp=6"))).groups("tp")
    assert min(int(n) for row in groups for n in np.unique(row // 8, return_counts=True)[1]) == 2
    inside, across = (_tp_seconds(line) for line in ("dp=2,tp=3", "dp=8,tp=3"))
    assert across > 5 * inside / 4  # of a quarter of the micro-batches


@pytest.mark.parametrize(
    ("model", "line", "term"),
    [
        ("llama3-8b", "dp=28,zero=1,cp=2", "cp"),
        ("llama3-8b", "dp=28,zero=1,cp=2,ulysses=2", "cp"),
        ("mixtral-8x7b", "dp=56,zero=1,ep=2,recompute=full", "ep"),
        ("llama3-8b", "dp=28,zero=1,pp=2,order=dp/pp/cp/tp,schedule=1f1b", "transfers"),
    ],
)
def test_every_group_that_straddles_nodes_is_priced_by_the_worst_of_them(model: str, line: str, term: str) -> None:
    """Pairs of neighbours fill nodes of 8; of nodes of 7, ranks 6 and 7 are on two, and the slowest sets the pace."""

    def seconds(size: int, gbytes: float) -> float:
        like = LikePreset("dgx-h100", 8, size, {"infiniband": gbytes}).cluster()
        pricing = pricing_by_gpus(model_named(model)[0], lambda _: like, 56, 4096, "megatron-core")(56)
        return AnalyticSubject(lambda _: pricing, Strategy(**parse(line)), 56).priced.terms[term]

    assert seconds(8, 5) == pytest.approx(seconds(8, 50))
    assert seconds(7, 5) > 1.5 * seconds(7, 50) > seconds(8, 50)


@pytest.mark.parametrize(
    ("ranks", "megabytes", "microseconds"),
    [(2, 1, 44), (2, 8, 87), (2, 32, 230), (4, 8, 117), (4, 32, 284), (8, 32, 358)],
)
def test_all_reduces_of_few_ranks_start_late(ranks: int, megabytes: int, microseconds: float) -> None:
    """As vTrain publishes them of its A100s (collectives.csv). By hops alone two ranks' 8 MB would take half."""
    on = system("A100", 8, 25e9)
    found = float(collective_s("all_reduce", megabytes * 2.0**20, ranks, 1, on))
    assert found == pytest.approx(microseconds * 1e-6, rel=0.25)
    without = float(collective_s("all_reduce", megabytes * 2.0**20, ranks, 1, replace(on, start_s=0.0)))
    assert without < 0.92 * microseconds * 1e-6
