"""Steps over slow links: a whole tier equals the step priced on such a cluster, parts add up, shares are fair; kills,
traces and plans of our own runtime."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.in_process_cli import json_of, phalanx

from phalanx.cost.step.predict import predict
from phalanx.planning.lookup import cluster_named, model_named, pricing_by_gpus
from phalanx.planning.search.column_pricing import Pricing
from phalanx.planning.search.refine import refine
from phalanx.planning.stragglers.links import Links, SlowLink, kept_rates
from phalanx.planning.stragglers.own import own_pipelines
from phalanx.planning.stragglers.priced import priced_pipelines
from phalanx.spec.cluster.spec import ClusterSpec
from phalanx.spec.job import Job
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy

LINES = (
    Strategy(dp=16, zero=1),
    Strategy(dp=2, tp=16, zero=1),
    Strategy(dp=2, tp=4, pp=4, zero=1),
    Strategy(dp=2, pp=8, virtual=2, schedule="interleaved"),
    Strategy(dp=2, cp=16),
    Strategy(dp=16, zero=3),
)
WORDS = "--model llama3-8b --cluster dgx-h100 --gpus 32 --batch 64 --seq 2048 --strategy dp=4,tp=2,pp=4,zero=1"


def _pricing(s: Strategy, cluster: ClusterSpec | None = None) -> Pricing:
    on = (lambda gpus: replace(cluster, nodes=gpus // 8)) if cluster else cluster_named("dgx-h100")
    return pricing_by_gpus(model_named("llama3-8b")[0], on, 64, 2048, "megatron-core")(s.world)


def _cluster(gpus: int, **of_outer: float) -> ClusterSpec:
    found = cluster_named("dgx-h100")(gpus)
    *inner, outer = found.tiers
    return replace(found, tiers=(*inner, replace(outer, **of_outer)))  # type: ignore[arg-type]


@given(st.sampled_from(LINES), st.sampled_from(["every node", "every port", "tier"]), st.floats(0.05, 0.95))
@settings(max_examples=10)
def test_if_all_links_are_slow_the_step_is_that_of_a_slower_cluster(s: Strategy, how: str, share: float) -> None:
    links = {
        "every node": [SlowLink("node", n, share) for n in range(s.world // 8)],
        "every port": [SlowLink("nic", n, share) for n in range(s.world)],
        "tier": [SlowLink("tier", 1, share)],
    }[how]
    pricing = _pricing(s)
    outer = pricing.cluster.tiers[-1].bandwidth_bytes_per_s_per_gpu_per_direction
    slower = _cluster(s.world, bandwidth_bytes_per_s_per_gpu_per_direction=share * outer)
    found = priced_pipelines(pricing, s, tuple(links)).delayed(np.ones(s.world))
    s = replace(s, layers="auto")
    expected = refine(_pricing(s, slower), [s])[0][0].seconds
    assert found.step_s == pytest.approx(expected, rel=1e-9)
    assert found.undisturbed_s == pytest.approx(refine(pricing, [s])[0][0].seconds, rel=1e-12)


@given(st.sampled_from(LINES), st.data())
@settings(max_examples=12)
def test_lost_time_is_the_sum_of_its_parts(s: Strategy, data: st.DataObject) -> None:
    links = tuple(
        SlowLink(of, data.draw(st.integers(0, (s.world if of == "nic" else s.world // 8) - 1)), share)
        for of, share in data.draw(
            st.lists(st.tuples(st.sampled_from(["nic", "node"]), st.floats(0.02, 0.9)), max_size=3)
        )
    )
    x = priced_pipelines(_pricing(s), s, links)
    factor = np.ones(s.world)
    for rank in data.draw(st.lists(st.integers(0, s.world - 1), max_size=2)):
        factor[rank] = data.draw(st.floats(1.01, 2))
    d = x.delayed(factor)
    parts = d.own_s + d.inside_s + d.stages_s + d.replicas_s + d.update_s + sum(d.links_s.values())
    assert parts == pytest.approx(s.world * (d.step_s - d.undisturbed_s), rel=1e-9, abs=1e-9)
    assert min(d.inside_s, d.replicas_s, *d.links_s.values()) >= -1e-9
    worse = priced_pipelines(_pricing(s), s, tuple(replace(link, share=link.share / 2) for link in links))
    assert worse.delayed(factor).step_s >= d.step_s - 1e-12


def test_a_port_slows_the_groups_that_use_it() -> None:
    """tp stays in its node; of 8 groups over replicas one leaves through the port of rank 5."""
    s = Strategy(dp=4, tp=8, zero=1)
    cluster = _cluster(s.world)
    kept = kept_rates(cluster, s, (SlowLink("nic", 5, 0.25),))
    assert (kept.layers == 1).all()
    assert kept.gradients.tolist() == [1, 0.25]
    wide = kept_rates(cluster, Strategy(dp=2, tp=16), (SlowLink("nic", 5, 0.25),))
    assert np.flatnonzero(wide.layers[:, 1] < 1).tolist() == list(range(16))
    pipeline = Strategy(dp=8, pp=4, zero=1)
    sent = kept_rates(cluster, pipeline, (SlowLink("nic", 5, 0.25),)).messages
    assert np.flatnonzero(sent[:, 1] < 1).tolist() == [5, 13]  # and the rank of the next stage, which waits for it
    chunks = replace(pipeline, schedule="interleaved", virtual=2)
    sent = kept_rates(cluster, chunks, (SlowLink("nic", 5, 0.25),)).messages
    assert np.flatnonzero(sent[:, 1] < 1).tolist() == [
        5,
        13,
        29,
    ]  # and the last, which sends to the first


def test_an_uplink_is_shared_max_min_fairly() -> None:
    """Eight groups share a node's uplink, each an eighth. A port that is slower than its share slows its group; one
    that is still faster slows nobody; a slow uplink all of its groups."""
    s = Strategy(dp=4, tp=8, zero=1)
    rate = 50e9
    cluster = _cluster(
        s.world,
        bandwidth_bytes_per_s_per_gpu_per_direction=rate,
        uplink_bandwidth_bytes_per_s_per_direction=2 * rate,
    )

    def share(*links: SlowLink) -> float:
        return float(kept_rates(cluster, s, links).gradients[1])

    assert share(SlowLink("nic", 5, 0.5)) == 1  # half of a port is still twice an eighth of the uplink
    assert share(SlowLink("nic", 5, 0.125)) == pytest.approx(0.5)
    assert share(SlowLink("node", 1, 0.5)) == pytest.approx(0.5)
    # The group of port 5 takes a twentieth; the others share what it leaves of a halved uplink.
    both = SlowLink("node", 0, 0.5), SlowLink("nic", 5, 0.1)
    assert share(*both) == pytest.approx(0.05 / 0.25)
    of_rank = Links(cluster, 1, s.world, both).shares(mesh(s).groups("dp_shard+dp_replicate"))
    assert of_rank[[4, 5, 12, 13]] == pytest.approx([0.95 / 7 / 0.25, 0.2] * 2)
    # What a slow port leaves of an uplink that is healthy makes no other group faster.
    alone = Links(cluster, 1, s.world, both[1:]).shares(mesh(s).groups("dp_shard+dp_replicate"))
    assert alone[[4, 5]] == pytest.approx([1.0, 0.1 / 0.25])


@pytest.mark.parametrize("line", ["dp=4", "pp=4", "dp=2,pp=2", "dp=4,zero=3", "dp=2,tp=2"])
def test_our_own_runtimes_step_is_simulated(line: str) -> None:
    s = Strategy(**{k: int(v) for k, v in (word.split("=") for word in line.split(","))})  # type: ignore[arg-type]
    model, job = model_named("llama3-8b")[0], Job(global_batch=16, seq=2048)
    cluster = replace(cluster_named("dgx-h100")(8), nodes=1)
    x = own_pipelines(model, cluster, job, s)
    same, slow = x.delayed(np.ones(4)), x.delayed(np.array([1, 1, 1, 1.5]))
    assert same.step_s == pytest.approx(predict(model, cluster, job, s).step_time_s, rel=1e-9)
    assert same.step_s * 1.2 < slow.step_s <= same.step_s * 1.5
    parts = slow.own_s + slow.inside_s + slow.stages_s + slow.replicas_s + slow.update_s
    assert parts == pytest.approx(4 * (slow.step_s - slow.undisturbed_s), rel=1e-9)
    assert x.schedule(0, np.ones(s.pp)).makespan <= x.alone_s * (1 + 1e-9)


def test_a_trace_has_each_class_of_ranks_once(tmp_path: Path) -> None:
    file = tmp_path / "step.json"
    found = json_of(tmp_path, f"simulate {WORDS} --slow rank=9:1.5 --trace {file} --json")
    events = json.loads(file.read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    alike = [int(name.split(", ")[-1].split()[0]) if "alike" in name else 1 for name in names.values()]
    assert sum(alike) == 32
    assert len(names) == 9  # four stages of the slow and of the other pipelines, and the slow rank itself
    assert 9 in names
    spans = [e for e in events if e["ph"] == "X"]
    for rank in names:
        own = sorted((e for e in spans if e["pid"] == rank), key=lambda e: e["ts"])
        assert sum(e["dur"] for e in own) == pytest.approx(1e6 * found["step_time_s"], rel=1e-9)  # no gap
        assert all(a["ts"] + a["dur"] == pytest.approx(b["ts"]) for a, b in itertools.pairwise(own))
    waits = {e["name"] for e in spans if e["tid"] == 1 and e["pid"] != 9}
    assert "other pipelines" in waits


def test_a_large_trace_stays_loadable(tmp_path: Path) -> None:
    words = "--model llama3.1-405b --cluster dgx-h100 --gpus 16384 --batch 2048 --seq 8192"
    words += " --strategy dp=128,tp=8,pp=16,sp=1,zero=1"
    file = tmp_path / "step.json"
    json_of(tmp_path, f"simulate {words} --slow-link nic=16000:0.3 --slow rank=77:1.2 --trace {file} --json")
    assert file.stat().st_size < 10e6
    code, _, said = phalanx(tmp_path, *f"simulate {words} --trace {file} --ranks 0-16383".split())
    assert code == 2
    assert "no browser draws them; name fewer" in said


def test_a_kill_costs_detection_restart_and_work(tmp_path: Path) -> None:
    killed = json_of(tmp_path, f"simulate {WORDS} --kill rank=5@50% --json")["killed"]
    kinds = {r["kind"]: r for r in killed["restarts"]}
    assert list(kinds) == ["manual", "job", "in-job", "in-process"]
    costs = [r["gpu_hours"] for r in kinds.values()]
    assert costs == sorted(costs, reverse=True)
    for r in kinds.values():
        assert r["gpu_hours"] == pytest.approx(32 * (r["detect_s"] + r["restart_s"] + r["again_s"]) / 3600)
    assert killed["stopped_ranks"] == 2  # tp=2
    node = json_of(tmp_path, f"simulate {WORDS} --kill node=1@50% --json")["killed"]
    assert node["restarts"][2]["restart_s"] > kinds["in-job"]["restart_s"]
    assert node["stopped_ranks"] == 8
    later = json_of(tmp_path, f"simulate {WORDS} --kill rank=5@100% --json")["killed"]
    assert later["restarts"][0]["again_s"] - killed["restarts"][0]["again_s"] == pytest.approx(killed["at_s"])


def test_replicas_that_step_alone_are_refused(tmp_path: Path) -> None:
    words = WORDS.replace("dp=4,tp=2,pp=4,zero=1", "dp=16,tp=2,local=8").split()
    code, _, err = phalanx(tmp_path, "simulate", *words, "--stack", "phalanx", "--slow", "rank=3:1.5")
    assert code == 2
    assert "strategy.local = 8: has replicas that step alone, which are not simulated yet" in err
    code, _, err = phalanx(tmp_path, "predict", *words, "--stack", "phalanx", "--lengths", "lognormal:3000,1")
    assert code == 2
    assert "strategy.local = 8: has replicas that step alone, whose waiting" in err
