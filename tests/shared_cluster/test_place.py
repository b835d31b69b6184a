"""Placement of one job: the price is the engine's, the answer the best of all permutations, the bound below it."""

from __future__ import annotations

import json
import math
from functools import cache
from itertools import combinations, pairwise, permutations, product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.in_process_cli import error_of, phalanx
from support.sizes import drawn

from phalanx.cost.analytic.estimate import estimate
from phalanx.planning.explain.analytic import AnalyticSubject
from phalanx.planning.explain.lint import lint
from phalanx.planning.lookup import model_named
from phalanx.planning.search.column_pricing import Pricing
from phalanx.planning.search.priced import price
from phalanx.planning.search.refine import refine
from phalanx.schedule.pipeline.stages import check
from phalanx.shared_cluster.placement import descent, search
from phalanx.shared_cluster.placement.alternatives import PlacedAlternative, shape
from phalanx.shared_cluster.placement.carve import FreeBlock, carve
from phalanx.shared_cluster.placement.price import PlacedJob, between_groups, on_rails
from phalanx.shared_cluster.placement.report import better
from phalanx.shared_cluster.placement.search import place
from phalanx.shared_cluster.topology.hostlist import compress, expand
from phalanx.spec.cluster.presets import preset
from phalanx.spec.cluster.topology import Topology, of_cluster, of_leaves
from phalanx.spec.errors import InputError
from phalanx.spec.job import Job, Precision
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import AXES, Strategy

_NOBODY = np.array([], dtype=np.int64)
_SMALL = [
    Strategy(tp=2, dp=2, zero=1),
    Strategy(tp=2, pp=2),
    Strategy(pp=2, dp=2),
    Strategy(tp=3, dp=2, zero=2),
    Strategy(cp=2, dp=2, zero=3),
    Strategy(tp=2, dp=3),
    Strategy(tp=6),
    Strategy(pp=3, tp=2),
]


@cache
def _model(name="llama3-8b"):
    return model_named(name)[0]


def _job(strategy, cluster, batch=192):
    stack = "phalanx" if strategy.schedule == "zb-h1" else "megatron-core"
    return PlacedJob(_model(), cluster, Job(batch, 4096, Precision("bfloat16")), strategy, stack)


def _leaves(wiring="tree") -> tuple:
    node = preset("dgx-h100", 1)
    return of_leaves(node, [f"n{i}" for i in range(6)], [0, 0, 0, 1, 1, 2], oversubscription=4, wiring=wiring)


@st.composite
def cases(draw):
    name = draw(st.sampled_from(["dgx-h100", "ethernet-a100", "pcie-a100", "tree", "rails", "pairs"]))
    tiers = _leaves(name) if name in ("tree", "rails", "pairs") else None
    cluster, topology = tiers or ((c := preset(name, 3)), of_cluster(c))
    strategy = draw(st.sampled_from(_SMALL))
    free = draw(st.sets(st.integers(0, topology.gpus - 1), min_size=strategy.world, max_size=7))
    return _job(strategy, cluster), topology, np.array(sorted(free))


@drawn(8, 25, cases())
def test_small_cases_are_the_best_of_all_permutations_and_the_bound_is_below(case):
    job, topology, free = case
    busy = np.setdiff1d(np.arange(topology.gpus), free)
    answer = place(job, topology, free)
    every = np.array(list(permutations(free.tolist(), job.strategy.world)))
    best = job.seconds(topology, every, busy).min()
    assert answer.exact
    assert answer.seconds == pytest.approx(best, rel=1e-12)
    assert len(set(answer.placement.gpu.tolist()) & set(free.tolist())) == job.strategy.world
    assert search.bound_s(job, topology, free, busy) <= best * (1 + 1e-9)


def test_the_fewest_free_gpus_of_a_switch_serve_two_pairs():
    """Two hosts with two free GPUs each, not the one with three that carving fills first: found by drawing."""
    cluster, topology = _leaves("tree")
    free = np.array([0, 1, 2, 24, 25, 40, 41])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "EXACT", 0)
        patch.setattr(descent, "descend", lambda start, unused, price: start)
        placed = place(_job(Strategy(tp=2, dp=2, zero=1), cluster), topology, free)
    assert placed.placement.gpu.tolist() == [24, 25, 40, 41]


def test_no_exchange_that_is_not_faster_is_made():
    """Of equal placements the first is kept; the ranks of a sum of squares end in order."""
    start = np.array([3, 1, 2])
    assert descent.descend(start, np.array([0]), lambda gpus: np.ones(len(gpus))) is start
    wanted = np.array([2, 0, 1])
    best = descent.descend(start, np.array([0]), lambda gpus: ((gpus - wanted) ** 2).sum(axis=1))
    assert best.tolist() == wanted.tolist()


@pytest.mark.parametrize("seed", range(12))
def test_no_exchange_is_left_that_saves(seed):
    """Of two ranks, or for a free GPU; each rank adds what its GPU costs it."""
    draw = np.random.default_rng(seed)
    gpus = draw.permutation(12)[: int(draw.integers(3, 9))]
    world = int(draw.integers(2, min(len(gpus), 5) + 1))
    cost = draw.random((12, world))

    def price(placements):
        return cost[placements, np.arange(world)].sum(axis=1)

    best = descent.descend(gpus[:world], gpus[world:], price)
    assert len(set(best.tolist()) & set(gpus.tolist())) == world
    unused = set(gpus.tolist()) - set(best.tolist())
    others = [[*best[:i], gpu, *best[i + 1 :]] for i in range(world) for gpu in unused]
    for i, j in combinations(range(world), 2):
        others.append(best.tolist())
        others[-1][i], others[-1][j] = best[j], best[i]
    assert price(np.array(others)).min() >= price(best[None])[0]


@pytest.mark.parametrize("seed", range(30))
def test_a_group_in_blocks_with_few_free_gpus_is_whole_or_has_at_most_half_in_its_smallest_part(seed):
    draw = np.random.default_rng(seed)
    size, groups = int(draw.integers(2, 7)), int(draw.integers(1, 3))
    counts = draw.integers(0, size + 1, int(draw.integers(2, 5)))
    counts[0] += max(0, size * groups - counts.sum())
    strategy = SimpleNamespace(world=size * groups, pp=1, ring=1)
    job = SimpleNamespace(strategy=strategy, groups={"tp": np.zeros((groups, size))})
    together = search._most_together(job, "tp", counts)
    assert together in {*range(1, size // 2 + 1), size}
    assert together <= search._most_together(job, "tp", counts + 1)
    splits = [parts for parts in product(*(range(n + 1) for n in counts)) if sum(parts) == size]
    smallest = max(min(part for part in parts if part) for parts in splits)
    assert groups > 1 or together >= smallest  # of one group: none is placed better


@drawn(12, 60, cases(), st.sampled_from([Strategy(pp=2, dp=2), Strategy(tp=2, pp=3, dp=2), Strategy(dp=4)]))
def test_parts_of_groups_have_room_together(case, strategy):
    """Stages in pairs take as many times the room; axes of one rank have no groups."""
    counts = np.bincount(case[1].blocks[0][case[2]])
    job = _job(strategy, preset("dgx-h100", 3))
    assert all(len(groups) and groups.shape[1] > 1 for groups in job.groups.values())
    parts = list(search._joint_parts(job, counts))
    for part in parts:
        stages = strategy.pp if part["pp"] > 1 else 1
        assert part["tp"] * part["data"] * stages <= search._capacity(counts, strategy.tp, part["tp"], strategy.world)
    assert not parts or any(part["pp"] == 1 for part in parts)


@drawn(12, 25, cases())
def test_carved_placements_of_small_cases_reach_the_best(case):
    job, topology, free = case
    exact = place(job, topology, free)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "EXACT", 0)
        carved = place(job, topology, free)
    assert not carved.exact
    assert exact.seconds == pytest.approx(carved.seconds, rel=1e-9)
    assert carved.bound_s <= exact.seconds * (1 + 1e-9)


@pytest.mark.parametrize("name", ["dgx-h100", "ethernet-a100", "pcie-a100", "gb200-nvl72"])
@pytest.mark.parametrize(
    "strategy",
    [
        Strategy(tp=4, pp=2, dp=4, zero=1),
        Strategy(tp=2, cp=2, dp=8, zero=3, sp=True),
        Strategy(dp=32, zero=1, shard=8),
        Strategy(cp=8, ulysses=4, dp=2, tp=2),
        Strategy(tp=4, pp=2, dp=4, zero=1, order="dp/pp/cp/tp"),
        Strategy(tp=2, pp=4, dp=4, schedule="zb-h1"),
    ],
    ids=str,
)
def test_ranks_in_order_cost_what_predict_says(name, strategy):
    node = preset(name, 1).ranks_per_node
    cluster = preset(name, -(-strategy.world // node))
    job, topology = _job(strategy, cluster), of_cluster(cluster)
    in_order = np.arange(strategy.world)[None]
    # With every GPU in use, as the engine assumes of shared links; the pipeline timed with its real chunks.
    others = np.arange(strategy.world, topology.gpus)
    priced = job.seconds(topology, in_order, others)[0]
    assert priced == pytest.approx(refine(job.question(cluster), [strategy])[0][0].seconds, rel=1e-12)


@st.composite
def even_meshes(draw):
    """Powers of two on nodes of 8 or 16: every axis fits blocks of every tier, or is made of whole ones."""
    sizes = {axis: 2 ** draw(st.integers(0, 4)) for axis in ("tp", "pp", "cp", "dp")}
    assume(2 <= math.prod(sizes.values()) <= 512)
    pick = lambda n: draw(st.sampled_from([k for k in (1, 2, 4, 8, 16) if n % k == 0]))  # noqa: E731
    more = {"ulysses": pick(min(sizes["cp"], 8)), "zero": draw(st.sampled_from([0, 1, 3]))}
    if more["zero"] and sizes["dp"] > 1:
        more["shard"] = pick(sizes["dp"])
    experts = draw(st.booleans())
    if experts:
        more["ep"] = pick(8)
        more["etp"] = draw(st.sampled_from([1, sizes["tp"]]))
    return draw(st.sampled_from(["dgx-h100", "ethernet-a100", "pcie-a100", "dgx-2", "dgx-1v"])), sizes | more, experts


@drawn(25, 60, even_meshes())
def test_any_even_mesh_in_order_costs_what_predict_says(case):
    name, fields, experts = case
    model, compute = _model("mixtral-8x7b" if experts else "llama3-8b"), "float16" if "dgx-" in name else "bfloat16"
    try:
        strategy = Strategy(**fields)
        check(strategy, model, job := Job(256, 4096, Precision(compute)), None)
        cluster = preset(name, -(-strategy.world // preset(name, 1).ranks_per_node))
        placed = PlacedJob(model, cluster, job, strategy, "megatron-core")
        topology = of_cluster(cluster)
        others = np.arange(strategy.world, topology.gpus)
        priced = placed.seconds(topology, np.arange(strategy.world)[None], others)[0]
        expected = refine(placed.question(cluster), [strategy])[0][0].seconds
    except InputError:  # no such layout of this model, or not under this stack
        assume(False)
    assert priced == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("order", list(map("/".join, permutations(AXES))))
def test_every_order_of_the_mesh_is_priced_and_linted(order):
    s = Strategy(tp=4, pp=2, cp=2, dp=4, zero=1, order=order)
    cluster = preset("dgx-h100", 8)
    job = Job(192, 4096, Precision("bfloat16"))
    pricing = Pricing(_model(), cluster, job, "megatron-core")
    by_columns = price(pricing, [s])[0].seconds
    assert by_columns == pytest.approx(float(estimate(_model(), cluster, job, s, "megatron-core").seconds), rel=1e-12)
    findings = {f.name: f for f in lint(AnalyticSubject(lambda _: pricing, s, s.world))}
    together = bool(mesh(s).within("tp", 8))
    assert ("wide-tp" in findings) != together
    if not together:
        assert findings["wide-tp"].remedy.startswith("order=")


def test_a_tensor_parallel_group_over_two_nodes_is_slower_and_chosen_only_if_nothing_else_is_free():
    cluster = preset("dgx-h100", 4)
    # Micro-batches of 8 keep the GPUs, not the launches, busy: else the step hides what tensor parallelism waits.
    job, topology = _job(Strategy(tp=8, dp=2, micro_batch=8), cluster), of_cluster(cluster)
    good = place(job, topology, np.arange(4, 32))
    halves = np.concatenate([np.arange(8 * n, 8 * n + 4) for n in range(4)])
    bad = place(job, topology, halves)
    assert set(good.placement.tiers(good.placement.mesh.groups("tp")).tolist()) == {0}
    assert bad.seconds > 1.2 * good.seconds
    assert bad.bound_s == pytest.approx(bad.seconds)


def test_the_faster_strategy_is_named_with_the_axes_that_then_stay_in_nodes():
    cluster = preset("dgx-h100", 4)
    halves, topology = np.concatenate([np.arange(8 * n, 8 * n + 4) for n in range(4)]), of_cluster(cluster)
    wide, narrow = (_job(s, cluster) for s in (Strategy(tp=8, dp=2, zero=1), Strategy(tp=4, dp=4, zero=1)))
    slow, fast = (place(job, topology, halves) for job in (wide, narrow))
    sentence = better(wide, slow, [PlacedAlternative(narrow, fast)])
    assert sentence.startswith("better on these GPUs: dp=4,zero=1,tp=4: ")
    assert sentence.endswith("(tp stays on nvlink)")
    assert f"{slow.seconds / fast.seconds - 1:+.1%}" in sentence
    assert "none is faster" in better(narrow, fast, [PlacedAlternative(wide, slow)])


def test_a_plan_is_placed_with_its_number_format_and_the_options_of_its_stack(tmp_path):
    words = "plan --model llama3-8b --cluster dgx-h100 --gpus 16 --batch 64 --seq 4096 --precision fp8 --strategy"
    assert phalanx(tmp_path, *words.split(), "tp=2,dp=8,zero=1,sp=1", "--out", "p.json")[0] == 0
    (tmp_path / "free.json").write_text('{"free": {"node[0-1]": "0-7"}}')
    line = ("cluster", "place", "p.json", "--free", "free.json", "--no-search", "--json")
    placed = json.loads(phalanx(tmp_path, *line)[1])["step_time_s"]
    assert placed == pytest.approx(
        json.loads((tmp_path / "p.json").read_text())["prediction"]["step_time_s"], rel=1e-9
    )


def test_jobs_placed_one_after_the_other_on_rails_are_placed_as_alone():
    """What was carved for one job serves the next, by all GPUs of a selection: indices 0, 1, 3 are not 0, 2, 3."""
    cluster, topology = _leaves("rails")
    free = np.array([8 * host + index for host in range(6) for index in ((0, 1, 3, 5), (0, 2, 3, 5))[host % 2]])
    known = {}
    for line in ("tp=4,dp=4", "tp=2,pp=2,dp=4", "pp=4,dp=4"):
        job = _job(Strategy(**{k: int(v) for k, v in (part.split("=") for part in line.split(","))}), cluster)
        alone, after = place(job, topology, free), place(job, topology, free, carvings=known)
        assert after.seconds == alone.seconds
        assert np.array_equal(after.placement.gpu, alone.placement.gpu)
    for (selected, _), gpus in known.items():
        assert gpus is not None
        assert set(gpus.tolist()) <= set(np.frombuffer(selected, dtype=np.int64).tolist())


def test_16384_ranks_on_uneven_nodes_keep_tensor_groups_in_nodes():
    cluster = preset("dgx-h100", 2300)
    free = np.sort(np.random.default_rng(0).permutation(cluster.ranks)[:18_000])
    answer = place(_job(Strategy(tp=2, pp=16, dp=512, zero=1), cluster, 8192), of_cluster(cluster), free)
    p = answer.placement
    assert len(set(p.gpu.tolist()) & set(free.tolist())) == 16_384
    assert p.tiers(p.mesh.groups("tp")).max() == 0
    assert 0 <= answer.gap < 0.1


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.permutations([2, 3, 2]))
def test_carved_gpus_are_distinct_and_blocks_stay_in_one_piece_where_a_host_has_room(counts, factors):
    start = np.cumsum([0, *counts])
    hosts = [FreeBlock((), np.arange(a, b)) for a, b in pairwise(start) if b > a]
    sizes = np.cumprod(factors).tolist()
    assume(hosts)
    gpus = carve(hosts, sizes)
    if sum(counts) < 12:
        assert gpus is None
        return
    assert len(set(gpus.tolist())) == 12
    host = np.repeat(np.arange(len(counts)), counts)[gpus]
    for size in sizes:
        intact = sum(len(set(block)) == 1 for block in host.reshape(-1, size).tolist())
        if sum(c // size for c in counts) >= 12 // size:
            assert intact == 12 // size


@pytest.mark.parametrize("seed", range(20))
def test_pairs_are_carved_under_a_switch_where_all_can_be(seed):
    """Of hosts with one free GPU each, of which one leaf has an odd number: in whatever order they come."""
    draw = np.random.default_rng(seed)
    hosts = 2 * draw.integers(1, 4, int(draw.integers(2, 5)))
    pairs = int(hosts.sum()) // 2
    hosts[draw.integers(len(hosts))] += 1
    leaf = np.repeat(np.arange(len(hosts)), hosts)
    free = [FreeBlock((int(of),), np.array([gpu])) for gpu, of in enumerate(leaf)]
    gpus = carve([free[i] for i in draw.permutation(len(free))], [2, 2 * pairs])
    assert len(set(gpus.tolist())) == 2 * pairs
    assert all(len(set(pair)) == 1 for pair in leaf[gpus].reshape(-1, 2).tolist())


def test_host_lists():
    assert expand("node[01-03,7],login") == ["node01", "node02", "node03", "node7", "login"]
    assert expand("r[1-2]n[0-1]") == ["r1n0", "r1n1", "r2n0", "r2n1"]
    assert compress(["node08", "node09", "node10", "node12", "x"]) == "node[08-10,12],x"
    with pytest.raises(InputError, match="partner"):
        expand("node[1-2")


@given(st.lists(st.tuples(st.sampled_from(["a", "gpu-", "n0x"]), st.integers(0, 120)), min_size=1, unique=True))
def test_a_compressed_host_list_expands_to_the_same(parts):
    names = [f"{head}{n}" for head, n in parts]
    assert expand(compress(names)) == names


@pytest.fixture(scope="module")
def plan(tmp_path_factory) -> Path:
    here = tmp_path_factory.mktemp("place")
    words = "plan --model llama3-8b --cluster dgx-h100 --gpus 16 --batch 64 --seq 4096 --out p.json"
    assert phalanx(here, *words.split())[0] == 0
    (here / "free.json").write_text('{"free": {"node[0-2]": "0-3", "node3": [0, 1, 2, 3]}, "nodes": "node[0-3]"}')
    return here


def test_the_command_places_and_compares(plan):
    line = ("cluster", "place", "p.json", "--free", "free.json", "--strategy", "tp=8,dp=2,zero=1")
    code, out, _ = phalanx(plan, *line, "--json", "--save", "p.svg")
    answer = json.loads(out)
    assert code == 0
    assert {(r["node"], r["gpu"]) for r in answer["ranks"]} == {(f"node{n}", g) for n in range(4) for g in range(4)}
    assert answer["step_time_s"] > answer["empty_cluster_s"]
    assert answer["others"][0]["step_time_s"] < answer["step_time_s"]
    assert "node3" in (plan / "p.svg").read_text()
    assert "costs" in phalanx(plan, *line, "--no-search")[1]
    assert "against the plan" in phalanx(plan, *line)[1]
    assert "does not divide" in error_of(plan, *line[:-1], "tp=3,dp=4")
    code, _, err = phalanx(plan, *line, "--no-search", "--for", "slurm", "--out", "p.json")
    assert (code, err) == (2, "error: --out = 'p.json': is a file; name a folder\n")


@pytest.mark.parametrize(
    ("free", "what"),
    [
        ('{"free": {"node0": "0-7"}}', "8 GPUs are free, but dp=16,zero=1 has 16 ranks"),
        ('{"free": {"nodd1": "0-7"}}', "did you mean node1"),
        ('{"free": {"node0": "0-8"}}', "is not a GPU of a node, which has 0 to 7"),
        ('{"free": {"node0": "a"}}', "does not list GPUs"),
        ('{"fre": {}}', "has no table `free`"),
        ('{"free": {}, "leafs": {}}', "did you mean leaves"),
        ('{"free": {"n0": "0"}, "nodes": "n0,n0"}', "is named twice"),
        ('{"free": {"n0": "0"}, "nodes": "\\n", "leaves": {"a": "n0"}}', "names no node"),
        ('{"free": {}, "nodes": ""}', "names no node"),
        ('{"free": {"node0": [1, 3, 1]}}', "--free free.node0 = 1: is listed twice"),
        ('{"free": {"n0": "0"}, "nodes": "n[0-1]", "leaves": {"l": "n0"}}', "is under no leaf"),
        ('{"free": {}, "leaves": {"l": "node0"}, "nodes": "node0", "wiring": "rail"}', "did you mean rails"),
        ('{"free": {}, "wiring": "rails"}', "--free wiring = 'rails': needs leaves"),
        ("{", "is not JSON"),
    ],
)
def test_wrong_free_files_are_one_line(plan, free, what):
    (plan / "wrong.json").write_text(free)
    err = error_of(plan, "cluster place p.json --free wrong.json")
    assert what in err
    assert err.count("\n") == 1


def test_hosts_without_a_rail_in_common_meet_one_tier_further_out():
    cluster, topology = _leaves("rails")
    job = _job(Strategy(dp=8, zero=1), cluster)
    apart = np.concatenate([np.arange(0, 4), np.arange(12, 16), np.arange(20, 24)])  # n0: 0-3, n1 and n2: 4-7
    chosen = place(job, topology, apart)
    assert set(chosen.placement.gpu.tolist()) == set(apart[4:].tolist())
    crossing = job.seconds(topology, apart[None, :8], _NOBODY)[0]
    plain, same = _leaves()
    assert crossing > chosen.seconds
    assert _job(Strategy(dp=8, zero=1), plain).seconds(same, apart[None, :8], _NOBODY)[0] == chosen.seconds
    # Tensor parallelism in hosts: NVLink leads from rail to rail where a host has a GPU of each.
    blocks = on_rails(topology, topology.blocks[1], np.array([[0, 4, 12, 13], [0, 1, 12, 13]]))
    assert [len(set(row)) for row in blocks.tolist()] == [1, 2]


def test_a_job_in_two_groups_of_a_dragonfly_has_their_links_or_half_of_all():
    assert between_groups(np.array([1, 2, 5, 9]), 9).tolist() == [1.0, 0.5, 0.5, 1.0]
    assert between_groups(np.array([2]), 3).tolist() == [0.5]
    node, names = preset("dgx-h100", 1), [f"n{i}" for i in range(18)]
    job, seconds = Strategy(dp=32, zero=3), []
    for wiring in ("tree", "pairs"):
        cluster, topology = of_leaves(node, names, [i // 2 for i in range(18)], 2, wiring)
        two = np.arange(32)  # two groups of nine, entire
        seconds.append(_job(job, cluster).seconds(topology, two[None], _NOBODY)[0])
    assert seconds[1] > 1.1 * seconds[0]


def test_three_tiers_are_placed_close_to_their_bound():
    cluster, topology = of_leaves(preset("dgx-h100", 1), [f"n{i}" for i in range(64)], [i // 8 for i in range(64)], 4)
    free = np.sort(np.random.default_rng(0).permutation(topology.gpus)[:400])
    answer = place(_job(Strategy(tp=8, dp=32, zero=1), cluster), topology, free)
    assert set(answer.placement.gpu.tolist()) <= set(free.tolist())
    assert answer.gap < 0.12  # 0.34 where no GPUs are left over under a switch


def test_leaf_switches_make_a_tier_of_their_own():
    cluster, topology = _leaves()
    assert [tier.name for tier in cluster.tiers] == ["nvlink", "infiniband", "spine"]
    assert isinstance(topology, Topology)
    assert shape(cluster, topology, np.arange(topology.gpus), topology.gpus).tiers == cluster.tiers
    job = _job(Strategy(dp=16, zero=1), cluster)
    leaf1 = np.arange(3 * 8, 5 * 8)
    across = np.concatenate([np.arange(16, 24), np.arange(40, 48)])
    near, far = (job.seconds(topology, gpus[None], _NOBODY)[0] for gpus in (leaf1, across))
    assert near < far
    everything = np.arange(topology.gpus)
    chosen = place(job, topology, everything).placement
    assert len({int(topology.blocks[1][gpu]) for gpu in chosen.gpu}) == 1


def test_gradients_meet_over_all_ranks_that_hold_the_same_parameters():
    """Sharded or not: each group has its dp ranks; replicas of shards meet apart."""
    cluster = preset("dgx-h100", 2)
    for s, data, replicas in (
        (Strategy(dp=4, tp=2), 4, None),
        (Strategy(dp=4, tp=2, zero=1), 4, None),
        (Strategy(dp=4, tp=2, zero=3, shard=2), 2, 2),
    ):
        groups = _job(s, cluster).groups
        assert groups["data"].shape == (8 // data, data), s
        assert sorted(groups["data"].ravel().tolist()) == list(range(8))
        assert ("replicate" in groups) == (replicas is not None)
        if replicas:
            assert groups["replicate"].shape == (8 // replicas, replicas)
