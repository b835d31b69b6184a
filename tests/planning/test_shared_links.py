"""Several jobs on one network: closed forms of two cycles, a link that another always uses, parts of clusters."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.in_process_cli import error_of, json_of, phalanx

from phalanx.answers.simulation import simulate
from phalanx.cost.hardware.bent import cluster_at_shares
from phalanx.cost.step.predict import predict
from phalanx.planning.lookup import cluster_named, model_named, pricing_by_gpus
from phalanx.planning.stragglers.links import SlowLink, sending_groups
from phalanx.planning.stragglers.own import own_pipelines
from phalanx.planning.stragglers.priced import priced_pipelines
from phalanx.planning.stragglers.shared_links import (
    Phase,
    SecondsOfStep,
    SharedNetwork,
    SharedStep,
    shared_step,
    shared_tiers,
)
from phalanx.spec.cluster.part import subcluster
from phalanx.spec.cluster.presets import preset
from phalanx.spec.cluster.spec import ClusterSpec, CollectiveFit
from phalanx.spec.errors import InputError
from phalanx.spec.job import Job
from phalanx.spec.strategy.spec import Strategy

CLUSTER = preset("ethernet-h100", 2)  # 2 x 8; the uplink of a node is no wider than a port
HALVES = np.array([0, 1, 8, 9]), np.array([4, 5, 12, 13])


def _job(passes_s: float, gradients_s: float, gpus: np.ndarray, update_s: float = 0.0) -> SharedStep:
    """A job that sends in its gradients alone, all the time."""

    def price(share: float) -> SecondsOfStep:
        return SecondsOfStep(passes_s, gradients_s / share, update_s)

    return shared_step(price, sending_groups(Strategy(dp=len(gpus))), gpus)


@settings(max_examples=10)
@given(st.floats(0.1, 5), st.floats(0.1, 5), st.floats(0, 1))
def test_two_equal_jobs_meet_in_full_or_not_at_all(passes: float, gradients: float, update: float) -> None:
    """In step with each other both send at half of the rate; where passes are longer they can miss each other."""
    jobs = [_job(passes, gradients, gpus, update) for gpus in HALVES]
    network = SharedNetwork(CLUSTER, jobs)
    alone = passes + gradients + update
    together = network.run(np.array([[0.0, 0.0]]), 3)
    assert together.mean_s == pytest.approx(np.full((1, 2), alone + gradients), rel=1e-9)
    assert together.kept == pytest.approx([0.5, 0.5])
    assert together.by_phase_s[0] == pytest.approx([passes, 2 * gradients, update], rel=1e-9)
    if gradients < 0.49 * alone:
        apart = network.run(np.array([[0.0, 0.5]]), 3)
        assert apart.mean_s == pytest.approx(np.full((1, 2), alone), rel=1e-9)
        assert apart.kept == pytest.approx([1, 1])


@settings(max_examples=12)
@given(st.lists(st.tuples(st.floats(0.1, 3), st.floats(0.1, 3)), min_size=2, max_size=3), st.integers(0, 99))
def test_others_never_help_and_never_take_more_than_their_part(cycles: list[tuple[float, float]], seed: int) -> None:
    gpus = [np.array([i, i + 8]) for i in range(len(cycles))]
    jobs = [_job(*cycle, row) for cycle, row in zip(cycles, gpus, strict=True)]
    starts = np.random.default_rng(seed).random((3, len(jobs)))
    mean = SharedNetwork(CLUSTER, jobs).run(starts, 4).mean_s
    for i, (passes, gradients) in enumerate(cycles):
        assert (mean[:, i] >= passes + gradients - 1e-9).all()
        assert (mean[:, i] <= passes + len(jobs) * gradients + 1e-9).all()


def test_many_flows_leave_one_its_part_and_no_more() -> None:
    """A flow among 128 of a job that always sends has a 129th of the link, and its step is as long as that takes."""
    cluster = preset("sites-h100", 32)
    many = np.stack([np.arange(0, 127), np.arange(128, 255)], axis=1).reshape(-1)
    jobs = [_job(0.0, 1.0, np.array([127, 255])), _job(0.0, 1.0, many)]
    groups = many.reshape(-1, 2)
    jobs[1] = SharedStep((Phase("all", jobs[1].phases[1].seconds, 1.0, (groups,)),))
    mean = SharedNetwork(cluster, jobs).run(np.array([[0.0, 0.0]]), 2).mean_s
    assert mean[0, 0] == pytest.approx(128, rel=1e-3)
    assert 1 / mean[0, 0] + 1 / mean[0, 1] <= 1 + 1e-9  # of one link


@settings(max_examples=12)
@given(
    st.sampled_from(
        [
            Strategy(dp=8, zero=1),
            Strategy(dp=8, zero=3),
            Strategy(dp=2, tp=4, sp=True, zero=1),
            Strategy(tp=8, sp=True),
            Strategy(dp=2, cp=4, zero=1),
            Strategy(dp=4, pp=2, zero=1),
        ]
    )
)
def test_a_neighbour_that_always_sends_is_a_link_at_half_of_its_rate(s: Strategy) -> None:
    """The answer of `--neighbour` to a job that never rests is that of `--slow-link tier=ethernet:0.5`."""
    first, second = np.array([0, 1, 2, 3, 8, 9, 10, 11]), np.array([4, 5, 6, 7, 12, 13, 14, 15])
    part = subcluster(CLUSTER, first.tolist())
    pricing = replace(
        pricing_by_gpus(model_named("llama3-8b")[0], lambda _: part, 64, 2048, "megatron-core")(8), cluster=part
    )

    def price(share: float) -> SecondsOfStep:
        slow = (SlowLink("tier", 1, share),) if share < 1 else ()
        x = priced_pipelines(pricing, s, slow)
        step = x.delayed(np.ones(8))
        passes = float(step.ends_s.max())
        return SecondsOfStep(passes, step.step_s - passes - x.update_s, x.update_s)

    of = sending_groups(s)
    every = tuple(second[g] for g in of.layers + of.messages + of.gradients)
    restless = SharedStep((Phase("always", np.array([1.0, 1.25, 1.5, 2, 3, 4, 6, 8, 16, 32]), 1.0, every),))
    together = SharedNetwork(CLUSTER, [shared_step(price, of, first), restless]).run(np.array([[0.0, 0.3]]), 2)
    half = priced_pipelines(pricing, s, (SlowLink("tier", 1, 0.5),)).delayed(np.ones(8))
    assert together.mean_s[0, 0] == pytest.approx(half.step_s, rel=1e-6)
    assert half.step_s > half.undisturbed_s


def test_passes_meet_by_chance() -> None:
    """Two jobs of which each sends in half of its passes: p = (1/2k) / (1/2 + 1/2k) of the time of each, and it keeps
    k = 1 - p / 2."""
    inside = [(row[None, :],) for row in HALVES]
    times = np.array([1, 1.25, 1.5, 2, 3, 4, 6, 8, 16, 32])
    jobs = [SharedStep((Phase("passes", 0.5 + 0.5 * times, 0.5, groups),)) for groups in inside]
    (kept, same) = SharedNetwork(CLUSTER, jobs).kept((0, 0))
    assert kept == pytest.approx(same)
    seconds = float(np.interp(1 / kept, times, 0.5 + 0.5 * times))
    assert kept == pytest.approx(1 - 0.5 / kept / seconds / 2, rel=1e-6)


def test_hidden_gradients_are_one_phase_with_passes_and_cost_nothing_until_they_fit_no_longer() -> None:
    def price(share: float) -> SecondsOfStep:
        return SecondsOfStep(2.0, max(1.0 / share - 2.0, 0.0), 0.1)

    job = shared_step(price, sending_groups(Strategy(dp=4)), HALVES[0])
    assert [p.name for p in job.phases] == ["passes and gradients", "update"]
    assert job.phases[0].sending_s == pytest.approx(1.0, rel=1e-6)
    other = _job(1.0, 1.0, HALVES[1])
    mean = SharedNetwork(CLUSTER, [job, other]).run(np.array([[0.0, 0.0]]), 3).mean_s
    assert mean[0, 0] == pytest.approx(job.alone_s)  # half of the link is enough
    assert mean[0, 1] > other.alone_s


def test_a_part_of_a_cluster_is_what_its_ranks_see() -> None:
    whole = preset("ethernet-a100", 4)
    assert subcluster(whole, range(32)) == whole
    half = subcluster(whole, [0, 1, 2, 3, 8, 9, 10, 11])
    assert (half.nodes, half.ranks_per_node, [t.ranks for t in half.tiers]) == (2, 4, [4, 8])
    uplink = whole.tiers[1].uplink_bandwidth_bytes_per_s_per_direction
    assert half.tiers[1].uplink_bandwidth_bytes_per_s_per_direction == uplink
    fits = tuple(CollectiveFit("all_reduce", 2, 1e-4, 2e-10, 0.0, "native", hosts=hosts) for hosts in (1, 2))
    measured = replace(whole, collectives=fits)
    assert subcluster(measured, range(16)).collectives == fits
    assert subcluster(measured, [0, 8]).collectives == fits[:1]  # measured with eight pairs at once
    inside = subcluster(whole, range(8, 12))
    assert (inside.nodes, [t.name for t in inside.tiers]) == (1, [whole.tiers[0].name])
    sites = preset("sites-h100", 32)  # 8 in a node, 128 in a site
    spread = subcluster(sites, [*range(8), *range(128, 136)])  # a node of each site sees nodes and what joins sites
    assert [(t.name, t.ranks) for t in spread.tiers] == [("nvlink", 8), ("wan", 16)]
    for gpus, reason in (([0, 1, 8], "take 2, 1 neighbours"), ([0, 8, 1], "take 1, 1, 1"), ([0, 40], "are not")):
        with pytest.raises(InputError, match=reason):
            subcluster(whole, gpus)


def test_jobs_share_what_both_leave_their_blocks_by() -> None:
    def tiers(cluster: ClusterSpec, *gpus: list[int]) -> tuple[int, ...]:
        rows = [np.array(row) for row in gpus]
        return shared_tiers(
            cluster, [[row[g] for g in sending_groups(Strategy(dp=len(row))).gradients] for row in rows]
        )

    assert tiers(CLUSTER, [0, 8], [1, 9]) == (1,)  # nodes' uplinks
    assert tiers(CLUSTER, [0, 1], [2, 3]) == ()  # inside a node
    assert tiers(CLUSTER, [0, 8], [1, 2]) == ()  # one of them
    assert tiers(preset("dgx-h100", 2), [0, 8], [1, 9]) == ()  # a port each


WORDS = "--model llama3-8b --cluster ethernet-h100 --batch 64 --seq 4096 --strategy dp=2,tp=4,zero=1 --gpus 8"
PLACES = "--on 0-3,8-11 --neighbour plan.json@4-7,12-15"


PLANS = {"plan.json": WORDS, "ampere.json": WORDS.replace("ethernet-h100", "dgx-a100")}


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shared")
    for name, words in PLANS.items():
        code, _, error = phalanx(folder, f"plan {words} --out {name}")
        assert code == 0, error
    return folder


def test_a_job_beside_another_costs_at_most_half_of_its_links(plan: Path) -> None:
    """Each of two equal jobs says the same of the other, and of free links that they take nothing."""
    answer = json_of(plan, f"simulate plan.json {PLACES} --json")
    mine, other = answer["links"]["jobs"]
    assert answer["links"]["tiers"] == ["ethernet"]
    assert mine["alone_s"] == other["alone_s"] == answer["undisturbed_s"]
    assert mine["alone_s"] < mine["step_s"] == answer["step_time_s"]
    assert mine["step_s"] == pytest.approx(other["step_s"], rel=0.02)  # the same starts, the other way round
    assert 0.5 <= mine["kept_share"] < 1
    assert sum(w["gpu_s"] for w in answer["waits"]) == pytest.approx(answer["lost_gpu_s"])
    free = json_of(plan, "simulate plan.json --neighbour plan.json --json")
    assert [j["gpus"] for j in free["links"]["jobs"]] == ["0-7", "8-15"]
    assert free["slowdown"] == pytest.approx(1, rel=1e-12)
    assert free["links"]["tiers"] == []


def test_neighbours_of_python_are_one_or_several(plan: Path) -> None:
    file, places = plan / "plan.json", "4-7,12-15"
    several = simulate(file, on="0-3,8-11", neighbours=[f"{file}@{places}"])
    assert simulate(file, on="0-3,8-11", neighbours=f"{file}@{places}") == several
    assert simulate(file, on="0-3,8-11", neighbours=[file]) == several  # the next GPUs in order
    with pytest.raises(InputError, match="are 1 GPUs"):
        simulate(file, on=3, neighbours=[file])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--on 0-7", "--on = '0-7': says where a job is among others; name another"),
        ("--neighbour plan.json@0-7 --on 0-7", "are GPUs of two jobs"),
        ("--neighbour plan.json@8-11", "are 4 GPUs; "),
        ("--neighbour plan.json@3-1", "goes backwards; use 1-3"),
        ("--neighbour plan.json --slow rank=1:2", "is simulated alone"),
        ("--neighbour plan.json --lengths lognormal:900,1", "is simulated alone"),
        ("--neighbour none.json", "no such file"),
        ("--neighbour ampere.json", "was planned for A100-SXM4-80GB, and ethernet-h100 has H100-SXM5-80GB"),
        ("--on 0-5,8-9 --neighbour plan.json", "take 6, 2 neighbours of blocks"),
        ("--neighbour plan.json --trace t.json", "is of slow ranks and links alone"),
    ],
)
def test_what_cannot_be_shared_has_one_line(plan: Path, words: str, says: str) -> None:
    assert says in error_of(plan, f"simulate plan.json {words}")


@pytest.mark.parametrize("s", [Strategy(dp=16, zero=2), Strategy(dp=2, tp=8), Strategy(dp=2, pp=8)])
def test_our_own_step_over_slow_links_is_that_of_a_slower_cluster(s: Strategy) -> None:
    model, job = model_named("llama3-8b")[0], Job(global_batch=64, seq=2048)
    cluster = replace(cluster_named("dgx-h100")(16), nodes=2)
    fits = [CollectiveFit("all_reduce", 2, 1e-4, 2e-10, 0.0, "native", hosts=2, points=((1024, 2e-4),))]
    cluster = replace(cluster, collectives=tuple(fits))
    slow = own_pipelines(model, cluster, job, s, (SlowLink("node", 1, 0.25),)).delayed(np.ones(16))
    expected = predict(model, cluster_at_shares(cluster, [1.0, 0.25]), job, s).step_time_s
    assert slow.step_s == pytest.approx(expected, rel=1e-9)
    assert slow.undisturbed_s == pytest.approx(predict(model, cluster, job, s).step_time_s, rel=1e-9)
    parts = slow.own_s + slow.inside_s + slow.stages_s + slow.replicas_s + slow.update_s + sum(slow.links_s.values())
    assert parts == pytest.approx(16 * (slow.step_s - slow.undisturbed_s), rel=1e-9)


def test_a_measured_collective_keeps_its_latency_over_a_slower_link() -> None:
    fit = CollectiveFit("all_reduce", 2, 1e-4, 2e-10, 0.0, "native", hosts=2, points=((1000, 3e-4), (10**6, 5e-4)))
    inner = replace(fit, hosts=1)
    cluster = replace(preset("dgx-h100", 2), collectives=(fit, inner))
    slower, same = cluster_at_shares(cluster, [1.0, 0.5]).collectives
    assert same == inner
    assert slower.seconds(10**6) - fit.seconds(10**6) == pytest.approx(2e-10 * 10**6)
    assert slower.alpha_s == fit.alpha_s
    assert json.dumps(slower.points)
