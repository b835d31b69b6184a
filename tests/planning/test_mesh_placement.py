"""`phalanx tables mesh`: drawn meshes in every order, their groups and tiers, and the command."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.in_process_cli import error_of, phalanx

from phalanx.planning.placement import axis_groups, axis_names, default_placement, groups_of
from phalanx.report.gallery.mesh import cube, nodes, slices
from phalanx.report.pictures.files import svg, text
from phalanx.spec.cluster.part import ranges
from phalanx.spec.cluster.presets import preset
from phalanx.spec.strategy.spec import AXES, Strategy

_ORDERS = ["/".join(order) for order in permutations(AXES)]


@st.composite
def strategies(draw):
    dp, cp = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 4]))
    zero = draw(st.sampled_from([0, 1, 3]))
    return Strategy(
        dp=dp,
        zero=zero,
        shard=draw(st.sampled_from([None, *(n for n in (1, 2) if dp % n == 0)])) if zero else None,
        tp=draw(st.sampled_from([1, 2, 3])),
        cp=cp,
        ulysses=draw(st.sampled_from([n for n in (1, 2) if cp % n == 0])),
        pp=draw(st.sampled_from([1, 2, 3])),
        ep=draw(st.sampled_from([n for n in (1, 2) if dp % n == 0])),
        order=draw(st.sampled_from(_ORDERS)),
    )


@given(strategies(), st.sampled_from(["dgx-h100", "pcie-a100", "gb200-nvl72"]))
@settings(max_examples=60, deadline=None)
def test_groups_of_every_axis_partition_the_ranks_and_talk_over_the_innermost_common_tier(strategy, name):
    node = preset(name, 1).ranks_per_node
    p = default_placement(strategy, preset(name, -(-strategy.world // node)))
    for row in axis_groups(p):
        groups, tiers = groups_of(p, row.axis)
        assert sum(row.tiers.values()) == row.groups == len(groups)
        members = np.sort(groups.reshape(-1))
        if row.axis != "embed":
            assert np.array_equal(members, np.arange(p.world))
        for ranks, tier in zip(groups, tiers, strict=True):
            i = [t.name for t in p.cluster.tiers].index(tier)
            assert len({int(r) // p.cluster.tiers[i].ranks for r in ranks}) == 1 or i == len(p.cluster.tiers) - 1
            if i:
                assert len({int(r) // p.cluster.tiers[i - 1].ranks for r in ranks}) > 1
    (_, _, _), ranks = cube(p)
    assert ranks.ndim == 3
    assert ranks[0, 0, 0] == 0
    assert len(set(ranks.reshape(-1).tolist())) == ranks.size


def test_the_svg_has_every_rank_and_is_well_formed():
    p = default_placement(Strategy(tp=4, pp=3, dp=4), preset("dgx-h100", 6))
    for picture in (nodes(p, "tp", 37), slices(p, "pp")):
        drawn = {t.text for t in ElementTree.fromstring(svg(picture)).iter("{http://www.w3.org/2000/svg}text")}
        assert {str(rank) for rank in range(48)} <= drawn
        words = {word.strip("|") for line in text(picture) for word in line.replace("|", " ").split()}
        assert {str(rank) for rank in range(48)} <= words


def test_a_rank_and_its_peers_are_outlined():
    p = default_placement(Strategy(tp=4, pp=3, dp=4), preset("dgx-h100", 6))
    cells = [cell for grid in nodes(p, "tp", 37).panels[0].grids for row in grid.rows for cell in row]
    assert [cell.text for cell in cells if cell.bold] == ["37"]
    peers = {int(r) for axis in ("pp", "dp_replicate", "tp") for r in p.mesh.group_of(37, axis)}
    assert {int(cell.text) for cell in cells if cell.outlined} == peers


def test_ranges_join_runs():
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"
    assert ranges([0, 2, 4, 6, 8]) == "0,2..8"


def test_the_command_answers_for_a_rank_and_for_an_axis(tmp_path):
    line = ("--strategy", "tp=8,pp=2,dp=4,zero=1", "--json")
    code, out, _ = phalanx(tmp_path, "tables mesh", *line, "--rank", "37")
    answer = json.loads(out)
    assert code == 0
    assert (answer["node"], answer["gpu"]) == ("node4", 5)
    assert answer["coordinates"] == {"pp": 1, "dp_shard": 0, "tp": 5}
    assert answer["groups"]["tp"] == {"ranks": list(range(32, 40)), "links": "nvlink"}
    assert answer["groups"]["pp"] == {"ranks": [5, 37], "links": "infiniband"}
    rows = json.loads(phalanx(tmp_path, "tables mesh groups", *line, "--axis", "dp")[1])
    assert rows["axis"] == "dp"
    assert rows["groups"][0]["ranks"] == [0, 8, 16, 24]
    assert len(json.loads(phalanx(tmp_path, "tables mesh", *line)[1])["nodes"]) == 8


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("--strategy", "tp=2", "--rank", "2"), "--rank = 2: tp=2 has ranks 0 to 1"),
        (("groups", "--strategy", "tp=2", "--axis", "ttp"), "did you mean tp"),
        ((), "--strategy: is missing"),
        (("--strategy", "tp=2", "--cluster", "dgx-h10"), "did you mean dgx-h100"),
        (("--strategy", "tp=2,order=tp/pp"), "must name each of"),
        (("cube", "--strategy", "dp=256,tp=128"), "makes a cube of 32,768 ranks; draw at most 16,384"),
    ],
)
def test_wrong_input_is_one_line(tmp_path, words, what):
    err = error_of(tmp_path, "tables mesh", *words)
    assert what in err
    assert err.count("\n") == 1


def test_axis_names_leave_out_axes_of_one_rank():
    p = default_placement(Strategy(dp=8, zero=3, ep=4), preset("dgx-h100", 1))
    assert axis_names(p) == ["dp_shard", "ep", "edp"]


def test_a_model_gives_stages_their_layers_and_ties_their_ends(tmp_path):
    """embed groups only of a tied embedding; every block on one stage, in the order of the model."""
    words = "tables mesh --strategy tp=2,pp=4,virtual=2,schedule=interleaved,dp=2 --json --model"
    found = json.loads(phalanx(tmp_path, f"{words} llama-65b")[1])
    assert "embed" not in {row["axis"] for row in found["axes"]}
    assert [stage["pp"] for stage in found["stages"]] == [0, 1, 2, 3]
    held = [found["stages"][chunk % 4]["units"][chunk // 4] for chunk in range(8)]
    assert (held[0].split(", ")[0], held[-1].split(", ")[-1]) == ("embed", "head")
    spans = [[int(word) for word in part.split() if word.isdigit()] for unit in held for part in unit.split(", ")]
    blocks = [i for span in spans if span for i in range(span[0], span[-1] + 1)]
    assert blocks == list(range(80))
    tied = json.loads(phalanx(tmp_path, f"{words} gpt2")[1])
    assert "embed" in {row["axis"] for row in tied["axes"]}


@pytest.mark.parametrize(
    ("cluster", "links"), [("", "host"), ('[cluster]\npreset = "dgx-h100"\nnodes = 1\n', "nvlink")]
)
def test_a_job_file_has_the_groups_of_its_strategy_on_its_cluster(tmp_path, cluster, links):
    """Of this machine too, of which nothing is measured: one node."""
    sizes = "vocab = 512\nhidden = 64\nlayers = 2\nheads = 2\nffn = 128\nmax_seq = 64\n"
    job = "[job]\nglobal_batch = 8\nseq = 64\n[strategy]\ndp = 4\ntp = 2\n"
    (tmp_path / "job.toml").write_text(f'[model]\nfamily = "llama"\n{sizes}{job}{cluster}')
    stated = json.loads(phalanx(tmp_path, "tables mesh job.toml --json")[1])
    named = json.loads(phalanx(tmp_path, "tables mesh --strategy dp=4,tp=2 --json")[1])
    assert [node["ranks"] for node in stated["nodes"]] == [node["ranks"] for node in named["nodes"]]
    assert {name for row in stated["axes"] for name in row["tiers"]} == {links}
