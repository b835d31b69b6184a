"""Several jobs at once: who goes where is the best of all ways to deal whole nodes, and shared uplinks are named."""

from __future__ import annotations

import json
import re
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from support.in_process_cli import error_of, json_of, phalanx

from phalanx.shared_cluster.placement import free_gpus
from phalanx.shared_cluster.placement.answer import job_of_plan
from phalanx.shared_cluster.placement.together import placed_together

_PLAN = ("--model", "llama3-8b", "--cluster", "dgx-h100", "--seq", "8192", "--strategy", "tp=8,zero=1")
_LEAVES = "SwitchName=s1 Nodes=n[1-4]\nSwitchName=s2 Nodes=n[5-8]\nSwitchName=top Switches=s[1-2]\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Plans of two and three nodes, a topology of two leaves of four, and seven nodes that are free."""
    root = tmp_path_factory.mktemp("together")
    for nodes in (2, 3):
        words = ("plan", *_PLAN, "--gpus", str(8 * nodes), "--batch", str(48 * nodes), "--out", f"{nodes}.json")
        assert phalanx(root, *words)[0] == 0
    (root / "topology.conf").write_text(_LEAVES)
    (root / "free.json").write_text(json.dumps({"free": {"n[1-7]": "0-7"}, "nodes": "n[1-8]"}))
    return root


def _on(job: dict[str, list[dict[str, str]]]) -> set[str]:
    return {rank["node"] for rank in job["ranks"]}


def test_two_jobs_each_get_a_leaf(folder: Path) -> None:
    """The first alone takes three of the four nodes under the first leaf, and the second crosses to the other."""
    words = ("cluster", "place", "3.json", "3.json", "--free", "free.json", "--topology", "topology.conf")
    answer = json_of(folder, *words, "--json")
    assert sorted(map(sorted, map(_on, answer["jobs"])))[1] == ["n5", "n6", "n7"]
    assert answer["shared_uplinks"] == []
    said = phalanx(folder, *words)[1]
    assert "n[5-7]" in said
    for job in answer["jobs"]:
        row = f"24 .* {job['step_time_s'] / job['empty_cluster_s']:.3f} times"
        assert re.search(row, said), "each job's nodes, and how much longer than alone"
    assert "no two jobs share an uplink" in said


def test_what_several_jobs_cross_is_named(folder: Path) -> None:
    """Two jobs of three nodes over leaves of two: both take the way out of one leaf, however they are dealt."""
    leaves = {"s1": "n[1-2]", "s2": "n[3-4]", "s3": "n[5-6]"}
    table = {"free": {"n[1-6]": "0-7"}, "nodes": "n[1-6]", "leaves": leaves}
    (folder / "pairs.json").write_text(json.dumps(table))
    words = ("cluster", "place", "3.json", "3.json", "--free", "pairs.json")
    (shared,) = json_of(folder, *words, "--json")["shared_uplinks"]
    assert shared["jobs"] == [0, 1]
    assert len(shared["hosts"]) == 2
    said = phalanx(folder, *words)[1]
    assert "3.json (job 1) and 3.json (job 2) share the way out of n[" in said


@pytest.mark.parametrize("oversubscription", [1, 4])
def test_no_way_to_deal_whole_nodes_is_better(folder: Path, oversubscription: int) -> None:
    """All ways to give a job of two nodes and one of three their nodes of six, priced with the other's in use."""
    leaves = {"s1": "n[1,4]", "s2": "n[2-3]", "s3": "n[5-6]"}
    table = {"free": {"n[1-6]": "0-7"}, "nodes": "n[1-6]", "leaves": leaves, "oversubscription": oversubscription}
    (folder / "six.json").write_text(json.dumps(table))
    jobs = [job_of_plan(folder / name, None, None) for name in ("2.json", "3.json")]
    ours = placed_together(jobs, free_gpus.read(folder / "six.json", jobs[0].cluster))
    t = ours.answers[0].free.topology
    gpus = [np.flatnonzero(t.host == host) for host in range(6)]
    best = np.inf
    for two in combinations(range(6), 2):
        for three in combinations(sorted({*range(6)} - {*two}), 3):
            own = [np.concatenate([gpus[host] for host in hosts]) for hosts in (two, three)]
            steps = [a.job.seconds(t, own[i][None], own[1 - i])[0] for i, a in enumerate(ours.answers)]
            best = min(best, sum(s / a.empty.seconds for s, a in zip(steps, ours.answers, strict=True)))
    assert sum(a.placed.seconds / a.empty.seconds for a in ours.answers) <= best * (1 + 1e-4)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("3.json", "3.json", "3.json"), "56 GPUs are free, but 3 jobs have 72 ranks; place fewer of them\n"),
        (("2.json",) * 17, "17: plans are more than are placed at once, 16; place some of them"),
    ],
)
def test_jobs_that_do_not_go_together_are_refused(folder: Path, words: tuple[str, ...], reason: str) -> None:
    assert reason in error_of(folder, "cluster", "place", *words, "--free", "free.json")


def test_each_job_has_its_files(folder: Path) -> None:
    words = ("2.json", "3.json", "--free", "free.json", "--topology", "topology.conf", "--for", "slurm")
    assert phalanx(folder, "cluster", "place", *words, "--out", "out")[0] == 0
    for name, ranks in (("1-2", 16), ("2-3", 24)):
        assert len((folder / "out" / name / "hostfile").read_text().split()) == ranks


def test_files_that_name_gpus_need_to_know_which_are_free(folder: Path) -> None:
    """Where a scheduler says how many GPUs are free and not which, the answer is given, and its files are not."""
    node = "NodeName={} Gres=gpu:8 State=MIXED CfgTRES=gres/gpu=8 AllocTRES=gres/gpu={}\n"
    (folder / "counted.txt").write_text("".join(node.format(f"n{i}", used) for i, used in ((1, 0), (2, 4), (3, 4))))
    words = ("cluster", "place", "2.json", "--free", "counted.txt", "--no-search")
    assumed = "assumed: n[2-3]: the last GPUs are free; how many is said, and not which"
    code, _, err = phalanx(folder, *words)
    assert code == 0
    assert assumed in err
    code, _, err = phalanx(folder, *words, "--for", "slurm", "--out", "named")
    assert code == 2
    assert assumed in err
    assert "it is not said which GPUs of n[2-3] are free" in err
    assert "scontrol -d show nodes" in err


def test_notes_on_nodes_come_before_a_refusal_and_not_in_its_remedy(folder: Path) -> None:
    node = "NodeName={} Gres=gpu:8 State={} CfgTRES=gres/gpu=8\n"
    (folder / "down.txt").write_text(node.format("n1", "IDLE") + node.format("n2", "DOWN"))
    for plans in (("2.json",), ("2.json", "3.json")):
        code, _, err = phalanx(folder, "cluster", "place", *plans, "--free", "down.txt")
        *notes, error = err.splitlines()
        assert code == 2
        assert any("n2" in note for note in notes)
        assert error.startswith("error: --free: 8 GPUs are free, but ")
        assert "n2" not in error
