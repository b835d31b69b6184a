"""Hosts that their tools describe, several of which make a cluster: racks, and NICs that no tool lists."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.in_process_cli import text_of

from phalanx.shared_cluster.topology import gpus, link_matrix
from phalanx.spec.errors import InputError
from phalanx.spec.files.cluster_toml import cluster_from_toml


def _all_by(size: int, link: str) -> str:
    """What nvidia-smi prints of a host whose GPUs all reach each other by one kind of link."""
    heads = "".join(f"\tGPU{i}" for i in range(size))
    rows = ("".join(f"\t{' X ' if i == j else link}" for j in range(size)) for i in range(size))
    return "\n".join([heads, *(f"GPU{i}{row}" for i, row in enumerate(rows))]) + "\n"


@pytest.mark.parametrize(
    ("hosts", "link", "per_node", "nodes", "tiers"),
    [
        (18, "NV18", 72, 1, [("nvlink", 72)]),
        (6, "NV18", 24, 1, [("nvlink", 24)]),
        (36, "NV18", 72, 2, [("nvlink", 72), ("network", 144)]),
        (1, "NV18", 4, 1, [("nvlink", 4)]),
        (2, "NV6", 4, 2, [("nvlink", 4), ("network", 8)]),  # an NVL4 board, whose links end on it
    ],
)
def test_trays_of_a_rack_are_one_node(
    hosts: int, link: str, per_node: int, nodes: int, tiers: list[tuple[str, int]], tmp_path: Path
) -> None:
    topology = link_matrix.read_matrix(_all_by(4, link), "topo.txt")
    port = None if nodes == 1 else 400.0
    spec = gpus.cluster(topology, "GB200", hosts, port, "c")
    assert (spec.ranks_per_node, spec.nodes) == (per_node, nodes)
    assert [(tier.name, tier.ranks) for tier in spec.tiers] == tiers
    assert any("a rack" in line for line in gpus.assumptions(topology, "GB200", hosts)) == (per_node > 4)


def test_a_part_of_a_rack_beyond_whole_ones_is_refused() -> None:
    topology = link_matrix.read_matrix(_all_by(4, "NV18"), "topo.txt")
    with pytest.raises(InputError, match="is no number of whole racks of 18 such hosts"):
        gpus.cluster(topology, "GB200", 20, 400.0, "c")
    assert gpus.cluster(topology, "H100", 20, 400.0, "c").ranks_per_node == 4


@pytest.mark.parametrize(("by", "network"), [("rocm", 50e9), ("nvidia", 50e9 / 8)])
def test_nics_that_no_tool_lists_are_said_to_be_taken(by: str, network: float, tmp_path: Path) -> None:
    """rocm-smi lists none of any host: one for each of 8 GPUs; nvidia-smi none of this one, whose GPUs share one."""
    head, row = "".join(f"  GPU{i}" for i in range(8)), "".join("  XGMI" for _ in range(8))
    table = "\n".join(f"GPU{i} {row}" for i in range(8))
    text = f"== Link Type between two GPUs ==\n{head}\n{table}\n" if by == "rocm" else _all_by(8, "NV18")
    (tmp_path / "t.txt").write_text(text)
    chip = "MI300X" if by == "rocm" else "H100"
    asked = ("--device", chip, "--nodes", "2", "--port-gbit", "400", "--out", "c.toml")
    said = text_of(tmp_path, "cluster", "read", "t.txt", *asked)
    assert ("reach each other by XGMI" in said) == (by == "rocm")
    assert f"no NIC is listed: one is taken for {'each GPU' if by == 'rocm' else 'the host'}" in said
    tier = cluster_from_toml(tmp_path / "c.toml").tiers[-1]
    shared = tier.uplink_bandwidth_bytes_per_s_per_direction
    assert min(tier.bandwidth_bytes_per_s_per_gpu_per_direction, (shared or 400e9) / 8) == network
