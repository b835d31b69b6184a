"""Clusters known by name: honest figures, plans priced on each, and links that a host's ranks share."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from phalanx.answers.question.query import Query
from phalanx.answers.question.resolution import read
from phalanx.cli.app import app
from phalanx.cost.collectives.link import link
from phalanx.planning.lookup import cluster_named, gpus_in
from phalanx.planning.search.best_first import price
from phalanx.spec.cluster.presets import PRESETS, chip_of, named, preset
from phalanx.spec.cluster.spec import ClusterSpec
from phalanx.spec.errors import InputError
from phalanx.spec.files.cluster_toml import cluster_from_toml
from phalanx.spec.job import Job, Precision
from phalanx.spec.model.families import complete
from phalanx.spec.model.presets import preset as model_preset
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy, divisors

# What the vendor prints in large: TFLOP/s with sparsity, NVLink in both directions at once in GB/s. Half is ours.
HEADLINES = {
    "dgx-a100-40gb": (624, 600),
    "dgx-a100": (624, 600),
    "dgx-h100": (1979, 900),
    "dgx-h800": (1979, 400),
    "dgx-h200": (1979, 900),
    "dgx-b200": (4500, 1800),
    "gb200-nvl72": (5000, 1800),
    "pcie-l4": (242, None),
    "pcie-a10": (250, None),
}


def test_a_cluster_is_named_by_its_chip() -> None:
    """The vendor's own node comes first, and what is no chip names nothing."""
    words = {"h100": "dgx-h100", "NVIDIA H200": "dgx-h200", "a100": "dgx-a100", "A100-40GB": "dgx-a100-40gb"}
    words |= {"a100-80gb": "dgx-a100", "NVIDIA-H100-80GB-HBM3": "dgx-h100", "H200-141GB": "dgx-h200"}
    words |= {"dgx-a100-40g": "dgx-a100-40gb", "A100-80GiB": "dgx-a100", "NVIDIA A40": "pcie-a40"}
    words |= {"4090": "pcie-rtx4090", "rtx-a6000": "pcie-a6000", "DGX_H100": "dgx-h100", "v5p": "tpu-v5p"}
    words |= {"Tesla-T4": "cloud-t4", "NVIDIA GeForce RTX 4090": "pcie-rtx4090", "NVIDIA A10G": "pcie-a10g"}
    words |= {"NVIDIA-A100-80GB-PCIe": "pcie-a100", "NVIDIA A100-PCIE-80GB": "pcie-a100", "a100-pcie": "pcie-a100"}
    words |= {"NVIDIA H100 PCIe": "pcie-h100", "h100-nvl": "pcie-h100-nvl", "H100 NVL 94GB": "pcie-h100-nvl"}
    words |= {"NVIDIA Thor": "jetson-thor", "Jetson AGX Thor": "jetson-thor", "H20 141GB": "dgx-h20-3e"}
    words |= {"h100-80gb": "dgx-h100", "h200-141gb": "dgx-h200", "H200 NVL": "pcie-h200-nvl"}
    assert {word: named(word) for word in words} == words
    assert named("NVIDIA A100-PCIE-40GB") is None
    assert [named(word) for word in ("h100-nvlx", "pcie", "dgx", "rtx", "")] == [None] * 5
    assert preset("h100", 3) == preset("dgx-h100", 3)
    with pytest.raises(InputError, match="counts 8 GPUs, and the number of nodes does too; use pcie-l40s"):
        preset("8xL40S", 1)
    assert chip_of("NVIDIA RTX 6000 Ada Generation") == chip_of("6000-ada") == "RTX-6000-Ada"
    assert [chip_of(word) for word in ("a6000", "NVIDIA A100-SXM4-80GB", "dgx-h100")] == ["RTX-A6000", "A100", None]


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_what_its_hardware_can_do(name: str) -> None:
    for nodes in (1, 3, 40):
        c = preset(name, nodes)
        assert (c.name, c.nodes, c.tiers[-1].ranks) == (name, nodes, c.ranks)
        device, flops = c.device, c.device.dense_flops_per_s
        gigabytes = int(device.name.removesuffix("GB").rpartition("-")[2])
        assert 0.999 * gigabytes * 1e9 < device.memory_bytes <= gigabytes * 2**30
        assert 0.8 * device.memory_bytes < device.usable_bytes < device.memory_bytes
        half = flops.get("float16", flops.get("bfloat16", 0))
        assert flops.get("float64", 0) <= flops.get("float32", np.inf) or "float32" not in flops
        assert flops.get("float32", 0) < half <= flops.get("bfloat16", np.inf)
        if name in HEADLINES:
            sparse, both_ways = HEADLINES[name]
            assert flops["bfloat16"] == pytest.approx(sparse / 2 * 1e12, rel=1e-3)
            nvlink = c.tiers[0].bandwidth_bytes_per_s_per_gpu_per_direction
            assert both_ways is None or nvlink == both_ways / 2 * 1e9
        ranks = [t.ranks for t in c.tiers]
        rates = [t.bandwidth_bytes_per_s_per_gpu_per_direction for t in c.tiers]
        latencies = [t.latency_s for t in c.tiers]
        inside = 2 if name.startswith("dgx-1v") else 0  # a ring of more GPUs uses more of a cube mesh's links
        assert (ranks, latencies) == (sorted(ranks), sorted(latencies))
        assert rates[inside:] == sorted(rates[inside:], reverse=True)
        for below, t in zip((1, *ranks), c.tiers, strict=False):
            uplink, port = (
                t.uplink_bandwidth_bytes_per_s_per_direction,
                t.bandwidth_bytes_per_s_per_gpu_per_direction,
            )
            assert uplink is None or port <= uplink <= port * below  # one port fits, all together fill it
            assert t.source
        assert device.source
        assert {k.dtype for k in c.kernels} == set(flops)
        assert {k.origin for k in c.kernels} == {"estimated"}


@pytest.mark.parametrize("name", PRESETS)
def test_a_plan_is_priced_on_every_preset(name: str) -> None:
    model = ModelSpec(**complete(model_preset("gpt2")))
    times = []
    for nodes in (1, 2, 4):
        cluster = preset(name, nodes)
        half = "float16" if "float16" in cluster.device.dense_flops_per_s else "bfloat16"
        job = Job(global_batch=288, seq=1024, precision=Precision(half))
        dp = max(d for d in divisors(job.global_batch) if d <= cluster.ranks)
        found = price(model, cluster, job, Strategy(dp=dp, zero=2))
        assert not found.reason
        assert (found.prediction.communication_s > 0) == (dp > 1)  # a node of one GPU has none
        times.append(float(found.prediction.forward_s + found.prediction.backward_s))
    assert times == sorted(times, reverse=True)


@pytest.mark.parametrize(
    ("text", "gpus", "node", "kind"),
    [
        ("8xH100", 8, 8, "dgx-h100"),
        ("8 x NVIDIA H100", 8, 8, "dgx-h100"),
        ("2x8xH100", 16, 8, "dgx-h100"),
        ("2x4xH100", 8, 4, "dgx-h100"),
        ("4 A100", 4, 8, "dgx-a100"),
        ("4*l20", 4, 8, "pcie-l20"),
        ("H100:8", 8, 8, "dgx-h100"),
        ("rtx4090x2", 2, 8, "pcie-rtx4090"),
        ("v5p-128", 64, 8960, "tpu-v5p"),
        ("tpu v5e-16", 16, 256, "tpu-v5e"),
    ],
)
def test_a_name_may_count_its_gpus(text: str, gpus: int, node: int, kind: str) -> None:
    """As people and clouds write them; of TPUs before v5e the TensorCores, two a chip."""
    assert gpus_in(text) == gpus
    there = cluster_named(text)(gpus)
    assert (there.ranks_per_node, there.device) == (node, cluster_named(kind)(gpus).device)
    question = read(Query(model="llama3-8b", cluster=text, batch=64, seq=1024, strategy="tp=2"))
    assert question.gpus == gpus
    fewer = read(Query(model="llama3-8b", cluster=text, gpus=2, batch=64, seq=1024, strategy="tp=2"))
    assert fewer.gpus == 2


@pytest.mark.parametrize("name", [*PRESETS, "h100", "a100-80gb", "rtx-pro-6000", "gb200-nvl72.toml", "8xfoo", "x"])
def test_a_name_that_counts_no_gpus_counts_none(name: str) -> None:
    assert gpus_in(name) is None


def test_more_gpus_than_the_name_counts_are_refused_but_for_whole_nodes() -> None:
    assert cluster_named("8xH100")(64).ranks == 64
    for text in ("4xH100", "2x4xH100"):
        with pytest.raises(InputError, match=r"gpus = 64: is more than .* has; name the kind of cluster: dgx-h100"):
            cluster_named(text)(64)
    with pytest.raises(InputError, match="has no GPU"):
        cluster_named("0xH100")


def test_a_type_that_a_device_lacks_is_refused() -> None:
    with pytest.raises(InputError, match="'bfloat16': cluster dgx-2 has no rates for it; it has float16"):
        preset("dgx-2", 1).rates("bfloat16", 1)
    with pytest.raises(InputError, match=r"'dgx-h10': is not a cluster .*did you mean dgx-h\d00"):
        preset("dgx-h10", 1)


def test_groups_that_leave_a_host_together_share_its_uplink() -> None:
    c = preset("ethernet-h100", 2)
    port = 12.5e9
    two = mesh(Strategy(dp=16, zero=3, shard=8))
    assert link(c, two, "dp_shard").beta_s_per_byte == 1 / 450e9
    # 8 rings, each between two ranks of equal number, leave a host at once; one ring over all 16 leaves it once.
    assert link(c, two, "dp_replicate").beta_s_per_byte == pytest.approx(8 / port)
    assert link(c, two, "dp_replicate+dp_shard").beta_s_per_byte == pytest.approx(1 / port)
    inner = mesh(Strategy(dp=16, zero=3, shard=2))  # of the 2 groups of 8 neither is inside of a host
    assert link(c, inner, "dp_replicate").beta_s_per_byte == pytest.approx(2 / port)
    some = mesh(Strategy(dp=12, zero=3, shard=6))  # of the groups 0 to 5 and 6 to 11 only the second leaves a host
    assert link(c, some, "dp_shard").beta_s_per_byte == pytest.approx(1 / port)
    own = replace(c, tiers=(c.tiers[0], replace(c.tiers[1], uplink_bandwidth_bytes_per_s_per_direction=None)))
    assert link(own, two, "dp_replicate").beta_s_per_byte == pytest.approx(1 / port)
    sites = preset("sites-h100", 32)  # 8 DGX ports fill the way out of a site, which 16 nodes share
    assert link(sites, mesh(Strategy(dp=256, zero=1, shard=128)), "dp_replicate").beta_s_per_byte == 128 / 50e9


def test_a_group_in_a_cube_mesh_has_the_links_that_join_it() -> None:
    c = preset("dgx-1v", 1)
    nvlinks = {2: 1, 4: 4, 8: 6}  # of neighbouring GPUs
    for shard, links in nvlinks.items():
        of = mesh(Strategy(dp=8, zero=3, shard=shard))
        assert link(c, of, "dp_shard").beta_s_per_byte == pytest.approx(1 / (links * 25e9))
    across = mesh(Strategy(dp=8, zero=3, shard=4))  # four pairs, and six links between the quads
    assert link(c, across, "dp_replicate").beta_s_per_byte == pytest.approx(4 / (6 * 25e9))


def test_the_table_of_clusters() -> None:
    shown = CliRunner().invoke(app, ["tables", "clusters"])
    assert shown.exit_code == 0
    assert [name for name in PRESETS if f" {name} " not in shown.output] == []
    one = CliRunner().invoke(app, ["tables", "clusters", "gb200-nvl72"]).output
    assert "half of the headline figure" in one
    found = json.loads(
        CliRunner().invoke(app, ["tables", "clusters", "sites-h100", "--nodes", "20", "--json"]).stdout
    )
    assert [t["ranks"] for t in found[0]["tiers"]] == [8, 128, 160]
    for words, arguments in (
        ("cluster.preset = 'dgx-h10': is not a cluster", ["dgx-h10"]),
        ("cluster.nodes = 0: must be at least 1", ["dgx-h100", "--nodes", "0"]),
        ("cluster.nodes = -1: must be at least 1", ["--nodes", "-1"]),
    ):
        found = CliRunner().invoke(app, ["tables", "clusters", *arguments])
        assert (found.exit_code, words in found.output) == (2, True), found.output


@pytest.mark.parametrize(("nodes", "ranks"), [(1, [8, 8]), (16, [8, 128]), (17, [8, 128, 136]), (40, [8, 128, 320])])
def test_a_site_is_joined_to_others_where_there_are_others(nodes: int, ranks: list[int]) -> None:
    assert [tier.ranks for tier in preset("sites-h100", nodes).tiers] == ranks


def test_pairs_of_groups_say_what_their_links_carry() -> None:
    """A rank's own link says nothing of the links between two groups, which all of a group share."""
    tier = preset("dgx-h100", 4).tiers[-1]
    with pytest.raises(InputError, match=rf"tiers\.{tier.name}\.uplink.* is needed for wiring"):
        replace(tier, wiring="pairs", uplink_bandwidth_bytes_per_s_per_direction=None)
    assert replace(tier, wiring="pairs", uplink_bandwidth_bytes_per_s_per_direction=1e9).wiring == "pairs"


def _in_file(folder: Path, text: str) -> ClusterSpec:
    (folder / "mine.toml").write_text(text)
    return cluster_from_toml(folder / "mine.toml")


def test_a_file_says_in_what_a_cluster_differs_from_a_preset(tmp_path: Path) -> None:
    assert _in_file(tmp_path, 'preset = "dgx-h100"\nnodes = 4\n') == preset("dgx-h100", 4)
    line = 'preset = "h100"\nnodes = 3\nranks_per_node = 7\ngb_per_s = { infiniband = 12.5 }\nname = "ours"\n'
    ours = _in_file(tmp_path, line)
    assert (ours.name, ours.ranks, [tier.ranks for tier in ours.tiers]) == ("ours", 21, [7, 21])
    assert [t.bandwidth_bytes_per_s_per_gpu_per_direction for t in ours.tiers] == [450e9, 12.5e9]
    # Two GPUs share the one Ethernet card of a host: it carries what the file says, not what the preset's does.
    shared = _in_file(
        tmp_path, 'preset = "pcie-a10"\nranks_per_node = 2\nnodes = 2\ngb_per_s = { ethernet = 1.25 }\n'
    )
    assert shared.tiers[-1].uplink_bandwidth_bytes_per_s_per_direction == pytest.approx(1.25e9)
    quads = _in_file(tmp_path, 'preset = "dgx-1v"\nnodes = 2\nranks_per_node = 3\n')  # pairs, of a mesh of three
    assert [tier.ranks for tier in quads.tiers] == [2, 3, 6]
    assert [tier.name for tier in quads.tiers] == ["nvlink pair", "nvlink quad", "infiniband"]
    for line, said in (
        ("ranks_per_node = 9", "ranks_per_node = 9: a node of dgx-h100 has 8"),
        ("gb_per_s = { infinband = 2 }", "gb_per_s.infinband = 2.*did you mean infiniband"),
        ("gb_per_s = { infiniband = -2 }", "must be GB/s"),
        ("gpus = 8", "cluster.gpus: no such field"),
    ):
        with pytest.raises(InputError, match=said):
            _in_file(tmp_path, f'preset = "dgx-h100"\n{line}\n')


@pytest.mark.parametrize(
    ("name", "gpus", "nodes", "each"),
    [
        ("gb200-nvl72", 256, 4, 64),
        ("gb200-nvl72", 144, 2, 72),
        ("gb200-nvl72", 73, 2, 72),
        ("gb300-nvl72", 64, 1, 72),
        ("vera-rubin-nvl72", 144, 2, 72),
        ("tpu-v4", 6144, 2, 3072),
        ("dgx-h100", 12, 2, 8),
    ],
)
def test_racks_and_pods_are_taken_in_equal_parts(name: str, gpus: int, nodes: int, each: int) -> None:
    cluster = cluster_named(name)(gpus)
    assert (cluster.nodes, cluster.ranks_per_node, cluster.tiers[0].ranks) == (nodes, each, each)


def test_no_pod_has_one_host_for_all_its_traffic() -> None:
    """Chips of a pod reach the next pod by their own hosts: what they share is a host's."""
    for name in ("tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e", "tpu-v7"):
        assert preset(name, 2).tiers[-1].uplink_bandwidth_bytes_per_s_per_direction is None


@pytest.mark.parametrize(
    ("name", "chip", "kind", "gib"),
    [
        ("NVIDIA H100 96GB", "H100-SXM5-80GB", "dgx-h100", 96),
        ("gh200-144g", "GH200-96GB", "gh200", 144),
        ("h800-pcie", "H800-SXM5-80GB", "dgx-h800", "its GiB"),
        ("h800-nvl", "H800-SXM5-80GB", "dgx-h800", "its GiB"),
    ],
)
def test_another_card_is_told_from_the_one_that_is_known(name: str, chip: str, kind: str, gib: int | str) -> None:
    """GH200 is sold with two sizes of memory, and the H800 as other cards: a name of these is not taken for the known
    one."""
    with pytest.raises(
        InputError, match=f'is the {chip}; a cluster.s file with preset = "{kind}", gpu_memory_gib = {gib}'
    ):
        preset(name, 1)


def test_a_superchip_is_a_node() -> None:
    cluster = preset("GH200", 4)
    assert (cluster.ranks_per_node, [t.name for t in cluster.tiers]) == (1, ["infiniband"])
    assert cluster.device.name == preset("gh200-96gb", 1).device.name == "GH200-96GB"
