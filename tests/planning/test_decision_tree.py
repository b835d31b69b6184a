"""The tree of decisions: every leaf is reached by a job, and a job's path is marked and said."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.in_process_cli import json_of, phalanx, text_of

from phalanx.answers.question.query import Query
from phalanx.planning.explain.decision_tree import Facts, facts, leaves, sentence, walk
from phalanx.planning.lookup import model_named
from phalanx.report.pictures.files import text
from phalanx.spec.cluster.presets import preset
from phalanx.spec.errors import InputError
from phalanx.textbook.answers import decision_path
from phalanx.textbook.gallery.choosing import decisions

_SMALL = Facts(1e9, 0, 2048, 8.0, 64, 8, 80 * 2**30, 50e9, sites=False)
JOBS = {
    "replicas": replace(_SMALL, serving=True),
    "tp=T": replace(_SMALL, parameters=70e9, serving=True),
    "tp=T,pp=P": replace(_SMALL, parameters=700e9, serving=True),
    "dp=1": replace(_SMALL, gpus=1),
    "pp=P": replace(_SMALL, sites=True),
    "dp,zero=1,ep=E,pp=P": replace(_SMALL, parameters=671e9, experts=256),
    "dp,zero=1,ep=E": replace(_SMALL, parameters=47e9, experts=8),
    "dp,zero=1,tp=T,cp=C": replace(_SMALL, seq=131072),
    "dp": _SMALL,
    "dp,zero=3": replace(_SMALL, parameters=13e9, gpus=8),
    "dp,zero=1,tp=T,sp=1,pp=P": replace(_SMALL, parameters=175e9),
    "dp,zero=3 ": replace(_SMALL, parameters=13e9),
    "dp,zero=1,tp=T,sp=1": replace(_SMALL, parameters=13e9, sequences=0.5),
    "tp=T,pp=P or zero=3,shard=T": replace(_SMALL, parameters=13e9, network_bytes_per_s=3e9),
}


def test_every_leaf_can_be_reached() -> None:
    reached = [walk(job)[1] for job in JOBS.values()]
    assert [leaf.line for leaf in reached] == [line.strip() for line in JOBS]
    assert {id(leaf) for leaf in reached} == {id(leaf) for leaf in leaves()}


def test_the_facts_of_presets() -> None:
    mixtral = facts(model_named("mixtral-8x7b")[0], preset("dgx-h100", 8), 64, 256, 4096)
    assert (mixtral.experts, mixtral.node, mixtral.network_bytes_per_s, mixtral.sites) == (8, 8, 50e9, False)
    assert facts(model_named("llama3-8b")[0], preset("sites-h100", 32), 256, 256, 4096).sites
    sockets = facts(model_named("llama3-8b")[0], preset("pcie-rtx4090", 2), 16, 64, 4096)  # a tier inside the node
    assert (sockets.sites, sockets.node, sockets.network_bytes_per_s) == (False, 8, 1.25e9 / 8)
    assert facts(model_named("llama3-8b")[0], preset("ethernet-a100", 8), 64, 256, 4096).network_bytes_per_s < 20e9


@pytest.mark.parametrize("line", JOBS)
def test_a_path_is_marked_from_the_root_to_its_leaf(line: str) -> None:
    path, leaf = walk(JOBS[line])
    lines = text(decisions(path))
    assert sum("-> " in words or "=> " in words for words in lines) == len(path) + 1
    assert f"=> {leaf.rule} [{leaf.line}]" in " ".join(" ".join(lines).split())
    assert sentence(JOBS[line]).endswith(leaf.rule)
    assert not any("->" in words or "=>" in words for words in text(decisions()))


def test_the_command_draws_it(tmp_path: Path) -> None:
    job = ("--model", "llama3-70b", "--cluster", "dgx-h100", "--gpus", "64", "--batch", "512", "--seq", "8192")
    out = text_of(tmp_path, "learn tree", *job)
    assert "=> ZeRO-3 (FSDP) or ZeRO-1 with what fits" in out
    assert "--batch: is missing" in phalanx(tmp_path, "learn tree", *job[:6])[2]
    for name in ("gpus", "batch", "seq"):
        given = {"gpus": 64, "batch": 512, "seq": 8192, name: 0}
        with pytest.raises(InputError, match=f"{name} = 0"):
            decision_path(Query(model="llama3-70b", cluster="dgx-h100", **given))  # type: ignore[arg-type]
    assert max(map(len, phalanx(tmp_path, "learn tree")[1].splitlines())) <= 80


def test_the_tree_as_json_has_the_leaves_and_the_path_of_a_job(tmp_path: Path) -> None:
    bare = json_of(tmp_path, "learn tree --json")
    assert bare["path"] is None
    assert _lines(bare["tree"]) == [leaf.line for leaf in leaves()]
    job = ("--model", "llama3-8b", "--cluster", "dgx-h100", "--gpus", "64", "--batch", "64", "--seq", "8192")
    marked = json.loads(phalanx(tmp_path, "learn tree", *job, "--json")[1])
    node = marked["tree"]
    for step in marked["path"]:
        assert node["question"] == step["question"]
        node = node[step["answer"]]
    assert (node["rule"], node["strategy"]) == (marked["rule"], marked["strategy"])
    assert phalanx(tmp_path, "learn tree --save csv")[0] == 2


def _lines(node: dict[str, Any]) -> list[str]:
    return [node["strategy"]] if "strategy" in node else [*_lines(node["yes"]), *_lines(node["no"])]
