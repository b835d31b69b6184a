"""Files of schedulers and fabrics, held against their published grammars and schemas, and the commands around
them."""

from __future__ import annotations

import json
import re
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from support.in_process_cli import error_of, phalanx, text_of
from support.openapi import violations

from phalanx.frameworks.launchers.export import documents
from phalanx.planning.lookup import require_plausible
from phalanx.shared_cluster.placement import free_gpus, launch
from phalanx.shared_cluster.topology import gpus, ibnetdiscover, link_matrix, nccl_xml, reading, slurm
from phalanx.shared_cluster.topology.reading import read_topology
from phalanx.spec.cluster.presets import preset
from phalanx.spec.cluster.topology import SwitchTree, of_leaves
from phalanx.spec.errors import InputError
from phalanx.spec.files.cluster_toml import cluster_from_toml

_SCHEMAS = json.loads((Path(__file__).parent / "kueue_schemas.json").read_text())
# topology.conf(5), "EXAMPLE".
_MANUAL = """
##################################################################
# Slurm's network topology configuration file for use with the
# topology/tree plugin
##################################################################
SwitchName=s0 Nodes=dev[0-5]
SwitchName=s1 Nodes=dev[6-11]
switchname=s2 nodes=dev[12-17] LinkSpeed=1000
SwitchName=s3 Switches=s[0-2]
"""
# ibnetdiscover(8), the example of its topology file, with the hosts' names of today and a rail each.
_FABRIC = """
# Topology file: generated on Tue Jun  5 14:15:10 2007
vendid=0x8f1
switchguid=0x5442ba00003080(5442ba00003080)
Switch  24 "S-005442ba00003080"         # "ISR9024 Voltaire" base port 0 lid 6 lmc 0
[22]    "H-0008f10403961354"[1](8f10403961355)         # "node01 mlx5_0" lid 4 4xNDR
[10]    "S-0008f10400410015"[1]         # "SW-6IB4 Voltaire" lid 3 4xNDR
[8]     "H-0008f10403960558"[2](8f1040396055a)         # "node02 mlx5_0" lid 14 4xNDR

switchguid=0x8f10400410015(8f10400410015)
Switch  8 "S-0008f10400410015"          # "SW-6IB4 Voltaire" base port 0 lid 3 lmc 0
[6]     "S-0008f10400410016"[1]         # "SW" lid 3 4xNDR
[1]     "S-005442ba00003080"[10]         # "ISR9024 Voltaire" lid 6 4xNDR

Switch  24 "S-0008f10400410016"         # "leaf" base port 0 lid 6 lmc 0
[2]    "H-0008f10403961358"[1](8f10403961355)         # "node03 mlx5_0" lid 4 4xNDR
[6]     "S-0008f10400410015"[6]         # "SW-6IB4 Voltaire" lid 3 4xNDR

Ca      2 "H-0008f10403960984"          # "node01 mlx5_0"
[1](8f10403960985)      "S-0008f10400410015"[6]         # lid 16 lmc 1 "SW-6IB4 Voltaire" lid 3 4xNDR
"""


def _matrix(rows):
    head = "\t".join(["", *(f"GPU{i}" for i in range(len(rows))), "NIC0", "NIC1", "CPU Affinity", "NUMA Affinity"])
    lines = [f"GPU{i}\t" + "\t".join(row) + "\tPIX\tSYS\t0-47\t0" for i, row in enumerate(rows)]
    return "\n".join([head, *lines, "NIC0\tPIX\tX", "", "Legend:", "  X    = Self"]) + "\n"


def _pcie(count=8, half=4):
    return [
        ["X" if i == j else "PHB" if i // half == j // half else "SYS" for j in range(count)] for i in range(count)
    ]


def test_the_manual_s_topology_is_read_and_written():
    tree = slurm.read_topology(_MANUAL, "topology.conf")
    assert tree.leaves["s2"] == tuple(f"dev{i}" for i in range(12, 18))
    assert tree.above == {"s3": ("s0", "s1", "s2")}
    assert slurm.read_topology(slurm.write_topology(tree), "again") == tree
    block = slurm.read_topology("BlockName=b1 Nodes=n[01-18]\nBlockName=b2 Nodes=n[19-36]\nBlockSizes=18,36", "t")
    assert [len(hosts) for hosts in block.leaves.values()] == [18, 18]


@given(st.lists(st.integers(1, 12), min_size=1, max_size=15))
def test_uneven_leaves_survive_writing_and_reading(sizes):
    hosts = iter(range(1000))
    tree = SwitchTree({f"leaf{i}": tuple(f"n{next(hosts):03}" for _ in range(n)) for i, n in enumerate(sizes)}, {})
    again = slurm.read_topology(slurm.write_topology(tree), "t")
    assert again.leaves == tree.leaves
    for line in slurm.write_topology(tree).splitlines():  # the grammar of the tree plugin
        assert re.fullmatch(r"SwitchName=[\w.-]+ (Nodes|Switches)=[\w.,\[\]-]+", line)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("SwitchName=s0 Nodes=n[0-1]\nSwitchName=s1 Nodes=n1", "n1': is under s0 and s1"),
        ("SwitchName=s0 Nodes=n0\nSwitchName=s1 Switches=s7", "s7': is below s1, but is not a switch"),
        ("SwitchName=s0", "t line 1 = 's0': needs Nodes or Switches"),
        ("SwitchName=s0 Node=n0", "t line 1 = 'Node=n0': is not a field"),
        ("SwitchName=s0 Nodes=n0\nSwitchName=s0 Nodes=n1", "t line 2 = 's0': is named twice"),
        ("# empty", "has no switch with nodes"),
    ],
)
def test_wrong_topologies_are_named(text, what):
    with pytest.raises(InputError) as error:
        slurm.read_topology(text, "t")
    assert what in str(error.value)


def test_a_fabric_is_read_from_its_switches():
    tree, rate = ibnetdiscover.read_topology(_FABRIC, "ib.txt")
    assert sorted(tree.leaves.values()) == [("node01", "node02"), ("node03",)]
    assert tree.oversubscription == 2.0  # two hosts and one uplink
    assert rate == 50e9
    assert slurm.read_topology(slurm.write_topology(tree), "t").leaves == tree.leaves
    with pytest.raises(InputError, match="is not a speed"):
        ibnetdiscover.read_topology(_FABRIC.replace("4xNDR", "4xFOO", 1), "ib.txt")


_LIST = """
CA: node03 mlx5_0:
      0x0008f10403961358      9    1[  ] ==( 4X   106.25 Gbps Active/  LinkUp)==>       7    2[  ] "leaf" ( )
Switch: 0x005442ba00003080 ISR9024 Voltaire:
           6   22[  ] ==( 4X   106.25 Gbps Active/  LinkUp)==>       4    1[  ] "node01 mlx5_0" ( )
           6   10[  ] ==( 4X   106.25 Gbps Active/  LinkUp)==>       3    1[  ] "SW-6IB4 Voltaire" ( )
           6    8[  ] ==( 4X   106.25 Gbps Active/  LinkUp)==>      14    2[  ] "node02 mlx5_0" ( )
           6    9[  ] ==(                Down/ Polling)==>             [  ] "" ( )
           6   41[  ] ==( 4X   106.25 Gbps Active/  LinkUp)==>   5    1[  ] "Mellanox Technologies Aggregation" ( )
Switch: 0x0008f10400410015 SW-6IB4 Voltaire:
           3    6[  ] ==( 4X   106.25 Gbps Active/  LinkUp)==>       7    6[  ] "leaf" ( )
           3    1[  ] ==( 4X   106.25 Gbps Active/  LinkUp)==>       6   10[  ] "ISR9024 Voltaire" ( )
Switch: 0x0008f10400410016 leaf:
           7    2[  ] ==( 4X   106.25 Gbps Active/  LinkUp)==>       9    1[  ] "node03 mlx5_0" ( )
           7    6[  ] ==( 4X   106.25 Gbps Active/  LinkUp)==>       3    6[  ] "SW-6IB4 Voltaire" ( )
"""


def test_a_list_of_links_is_the_fabric_that_is_discovered(tmp_path):
    assert ibnetdiscover.read_links(_LIST, "links") == ibnetdiscover.read_topology(_FABRIC, "ib.txt")
    alike = re.sub(r"ISR9024 Voltaire|SW-6IB4 Voltaire|leaf", "Quantum Mellanox Technologies", _LIST)
    assert ibnetdiscover.read_links(alike, "links") == ibnetdiscover.read_topology(_FABRIC, "ib.txt")
    (tmp_path / "links.txt").write_text(_LIST)
    assert read_topology(tmp_path / "links.txt") == ibnetdiscover.read_topology(_FABRIC, "ib.txt")[0]
    with pytest.raises(InputError, match=r"106\.2': is not a rate of an InfiniBand lane"):
        ibnetdiscover.read_links(_LIST.replace("106.25", "106.2"), "links")


def test_adapters_without_a_name_are_no_host(tmp_path):
    """NVIDIA/topograph tests/output/ibnetdiscover/example.out: 69 adapters of the same description."""
    (tmp_path / "ib.txt").write_text(_FABRIC.replace("node03 mlx5_0", "MT4129 ConnectX7   Mellanox Technologies"))
    assert sorted(read_topology(tmp_path / "ib.txt").hosts) == ["node01", "node02"]
    assert "note: 1 adapter named for the model" in phalanx(tmp_path, "cluster", "read", "ib.txt")[2]


@pytest.mark.parametrize(("racks", "hosts", "each"), [(12, 8, 8), (4, 18, 18), (2, 36, 18), (3, 1, 1)])
def test_a_host_of_a_rack_is_its_tray(racks, hosts, each, tmp_path):
    """Slurm's nodes of a GB200 NVL72 are trays of 4 GPUs; the hosts of a rack are one node of the planner's."""
    lines = [f"BlockName=b{i} Nodes=n{i}-[1-{hosts}]" for i in range(racks)]
    (tmp_path / "topology.conf").write_text("\n".join(lines))
    text_of(tmp_path, "cluster read topology.conf --like gb200-nvl72 --out c.toml")
    spec = cluster_from_toml(tmp_path / "c.toml")
    assert spec.nodes * spec.ranks_per_node == 4 * racks * hosts
    assert (spec.tiers[0].name, spec.tiers[0].ranks, spec.ranks_per_node) == ("nvlink", 4 * each, 4 * each)


def test_racks_of_other_sizes_are_refused_and_a_list_counts_trays(tmp_path):
    (tmp_path / "topology.conf").write_text("BlockName=a Nodes=a[1-17]\nBlockName=b Nodes=b[1-16,18-19]")
    said = error_of(tmp_path, "cluster read topology.conf --like gb200-nvl72 --out c.toml")
    assert "has racks of 18 hosts with 4 GPUs, and the leaves have 17 to 18 hosts" in said
    (tmp_path / "sinfo.txt").write_text(
        "PARTITION AVAIL TIMELIMIT NODES STATE NODELIST\ngpu up 1:00 18 idle t[1-18]\n"
    )
    assert "free: 72 of 72 GPUs (4 each assumed)" in text_of(tmp_path, "cluster read sinfo.txt --like gb200-nvl72")


def test_nodes_to_which_slurm_gives_no_gpus_are_said(tmp_path):
    """SlinkyProject/slurm-operator issue 101: gres.conf is not read, and Gres=(null)."""
    (tmp_path / "n.txt").write_text("NodeName=s-0 Gres=(null) State=IDLE Partitions=all\n")
    code, out, err = phalanx(tmp_path, "cluster", "read", "n.txt", "--like", "dgx-h100")
    assert (code, "1 host: s-0" in out) == (0, True)
    assert "note: s-0: the scheduler knows no GPUs there, and gives none to jobs" in err


@pytest.mark.parametrize(("alone", "fault"), [((2,), True), ((0, 1), True), ((2, 3, 4, 5, 6, 7), False)])
def test_nvlinks_that_no_tier_has_are_said(alone, fault, tmp_path):
    """vllm-project/vllm issue 16336: a B200 that its fabric does not reach; NVIDIA/nccl-tests issue 320: a pair and a
    third GPU."""
    rows = _pcie()
    others = [i for i in range(8) if i not in alone]
    for i in others:
        rows[i] = [cell if j == i or j in alone else "NV18" for j, cell in enumerate(rows[i])]
    (tmp_path / "topo.txt").write_text(_matrix(rows))
    said = text_of(tmp_path, "cluster read topo.txt --device B200")
    assert f"left out: NVLink of GPUs {', '.join(map(str, others))}: only equal" in said
    assert ("its fabric is down" in said) == fault


@pytest.mark.parametrize(
    ("chip", "cell", "count", "gb"),
    [("A100", "NV4", 2, 100), ("A100", "NV12", 4, 300), ("H100", "NV18", 2, 450), ("H100", "NV6", 4, 450),
     ("V100", "NV2", 2, 50)],
)  # fmt: skip
def test_a_gpu_has_the_rate_of_the_links_that_it_has(chip, cell, count, gb):
    """A virtual machine with two of the four A100 of a board, which NV4 joins, has a third of the rate."""
    links = tuple(tuple("X" if i == j else cell for j in range(count)) for i in range(count))
    spec = gpus.cluster(gpus.GpuTopology(links), chip, 1, None, "c")
    assert spec.tiers[0].bandwidth_bytes_per_s_per_gpu_per_direction == pytest.approx(gb * 1e9)


@pytest.mark.parametrize(("count", "gb"), [(8, 448), (4, 192), (2, 64)])
def test_xgmi_is_one_link_to_each_other_gpu(count, gb):
    """An MI300X has seven, of 64 GB/s in one direction (AMD Instinct MI300X data sheet; ROCm/rccl issue 1210)."""
    links = tuple(tuple("X" if i == j else "NV1" for j in range(count)) for i in range(count))
    spec = gpus.cluster(gpus.GpuTopology(links, link="xgmi"), "MI300X", 1, None, "c")
    assert spec.tiers[0].bandwidth_bytes_per_s_per_gpu_per_direction == pytest.approx(gb * 1e9)


def test_a_nic_is_near_by_its_own_row_where_the_gpus_lost_it(tmp_path):
    """A terminal's paste that ran the last NIC's column into the CPU's."""
    text = (
        _matrix(_pcie())
        .replace("\tSYS\t0-47\t0", "\tSY0-47\t0")
        .replace("NIC0\tPIX\tX", "NIC1" + "\tPHB" * 8 + "\tX")
    )
    assert link_matrix.read_matrix(text, "t").near == (("PIX",) * 8, ("PHB",) * 8)


def test_a_file_for_nccl_without_gpus_is_said_to_be_one(tmp_path):
    """aws/aws-ofi-nccl topology/p4d-24xl-topo.xml: what NCCL cannot see of a virtual machine's buses."""
    (tmp_path / "p4d.xml").write_text('<system version="1"><cpu numaid="0"><pci busid="a"/></cpu></system>')
    assert "names no GPU: it is for NCCL_TOPO_FILE" in error_of(tmp_path, "cluster read p4d.xml --device A100")


@pytest.mark.parametrize(("leaves", "hosts", "links", "up"), [(1, 4, 1, 2), (2, 4, 1, 4), (3, 6, 2, 4), (2, 2, 1, 8)])
def test_a_fabric_has_the_rate_of_a_hosts_links_and_as_many_tiers_as_switches_need(leaves, hosts, links, up):
    """`hosts` under each leaf with `links` links, which add up, and `up` links to two spines: what they may send is
    shared by the uplinks where these are fewer. One leaf needs no tier above it, whatever it is linked to."""
    text = ""
    for leaf in range(leaves):
        text += f'Switch  40 "S-{leaf + 1:016x}"  # "leaf" base port 0 lid 1 lmc 0\n'
        for n in range(hosts * links):
            name = f"n{leaf}-{n // links}"
            text += f'[{n}]  "H-{100 * leaf + n + 1:016x}"[1](1)   # "{name} mlx5_{n % links}" lid 2 4xNDR\n'
        for n in range(up):
            text += f'[{50 + n}]  "S-{200 + n % 2:016x}"[{leaf}]   # "spine" lid 3 4xNDR\n'
        text += "\n"
    tree, rate = ibnetdiscover.read_topology(text, "ib.txt")
    assert rate == links * 50e9
    assert sorted(map(len, tree.leaves.values())) == [hosts] * leaves
    assert tree.oversubscription == max(1.0, hosts * links / up)
    assert [sorted(under) for under in tree.above.values()] == [sorted(tree.leaves)] * (leaves > 1)


def test_hosts_with_a_rail_at_every_switch_are_one_leaf():
    switches = [f'Switch  40 "S-{rail:016x}"  # "rail" base port 0 lid 1 lmc 0' for rail in range(1, 5)]
    ports = [
        "\n".join(f'[{n}]  "H-{16 * n + rail:016x}"[1](1)   # "n{n} mlx5_{rail}" lid 2 4xNDR' for n in range(6))
        for rail in range(4)
    ]
    text = "\n\n".join(f"{switch}\n{own}" for switch, own in zip(switches, ports, strict=True))
    assert list(ibnetdiscover.read_topology(text, "t")[0].leaves.values()) == [tuple(f"n{n}" for n in range(6))]


def test_matrices_of_gpus_become_tiers():
    nvlink = [["X" if i == j else "NV18" for j in range(8)] for i in range(8)]
    full = link_matrix.read_matrix(_matrix(nvlink), "t")
    assert full.nvlink
    assert full.nics == 2
    cluster = gpus.cluster(full, "H100", 4, 400, "mine")
    assert [(t.name, t.ranks) for t in cluster.tiers] == [("nvlink", 8), ("network", 32)]
    assert cluster.tiers[1].uplink_bandwidth_bytes_per_s_per_direction == 50e9  # NIC1 is near no GPU
    pcie = gpus.cluster(link_matrix.read_matrix(_matrix(_pcie()), "t"), "A10", 1, None, "mine")
    assert [(t.name, t.ranks) for t in pcie.tiers] == [("pcie", 4), ("sockets", 8)]
    pairs = [["X" if i == j else "NV4" if i // 2 == j // 2 else "SYS" for j in range(4)] for i in range(4)]
    bridged = gpus.cluster(link_matrix.read_matrix(_matrix(pairs), "t"), "a6000", 1, None, "mine")
    assert [(t.name, t.ranks) for t in bridged.tiers] == [("nvlink", 2), ("sockets", 4)]
    require_plausible(bridged)  # a card's bridge is faster than its PCIe
    both = replace(bridged.tiers[0], bandwidth_bytes_per_s_per_gpu_per_direction=112.5e9)
    with pytest.raises(InputError, match=r"NVLink of RTX-A6000 carries 56\.25 GB/s"):
        require_plausible(replace(bridged, tiers=(both, bridged.tiers[1])))
    with pytest.raises(InputError, match="GPU7"):
        link_matrix.read_matrix(_matrix(nvlink).replace("\nGPU7\t", "\nCPU7\t"), "t")
    with pytest.raises(InputError, match="not a kind of link"):
        link_matrix.read_matrix(_matrix(nvlink).replace("NV18", "MX", 1), "t")


def _violations(schema, value, where=""):
    """What a value lacks of an OpenAPI schema; fields that the schema does not have count too: Kubernetes drops
    them. Its rules in CEL are those of _RULES, by their message."""
    kinds = {"object": dict, "array": list, "string": str, "integer": int}
    if not isinstance(value, kinds[schema["type"]]):
        return [f"{where}: is no {schema['type']}"]
    broken = [
        f"{where}: {rule['message']}"
        for rule in schema.get("x-kubernetes-validations", ())
        if "oldSelf" not in rule["rule"] and not _RULES[rule["message"]](value)
    ]
    if schema["type"] == "string":
        fits = re.search(schema.get("pattern", ""), value) and len(value) <= schema.get("maxLength", 10**9)
        return [] if fits and len(value) >= schema.get("minLength", 0) else [f"{where}: {value}"]
    if schema["type"] == "array":
        inner = [v for i, x in enumerate(value) for v in _violations(schema["items"], x, f"{where}[{i}]")]
        sized = schema.get("minItems", 0) <= len(value) <= schema["maxItems"]
        return [*broken, *inner, *([] if sized else [f"{where}: length"])]
    broken += [f"{where}.{name}: missing" for name in schema.get("required", ()) if name not in value]
    if "properties" not in schema and "additionalProperties" not in schema:
        return broken  # of metadata Kubernetes has its own schema
    for name, part in value.items():
        known = schema.get("properties", {}).get(name, schema.get("additionalProperties"))
        broken += [f"{where}.{name}: unknown"] if known is None else _violations(known, part, f"{where}.{name}")
    return broken


_HOST = "kubernetes.io/hostname"
_RULES = {
    "must be unique": lambda levels: len({str(level) for level in levels}) == len(levels),
    "the kubernetes.io/hostname label can only be used at the lowest level of topology": lambda levels: (
        _HOST not in [level.get("nodeLabel") for level in levels[:-1]]
    ),
    "at least one nodeLabel is required when topology is set": lambda spec: (
        "topologyName" not in spec or spec.get("nodeLabels")
    ),
}


def test_kueue_documents_follow_their_published_schemas():
    text = documents(
        launch.topology("gang"), launch.resource_flavor("gang", "NVIDIA-H100-80GB-HBM3"), launch.job("gang", 4, 8, 1)
    )
    topology, flavor, job = yaml.safe_load_all(text)
    for document in (topology, flavor):
        assert _violations(_SCHEMAS[f"{document['apiVersion']} {document['kind']}"], document) == []
    hosts = [level["nodeLabel"] for level in topology["spec"]["levels"]]
    annotations = job["spec"]["template"]["metadata"]["annotations"]
    assert annotations == {"kueue.x-k8s.io/podset-required-topology": hosts[0]}
    assert "preferred" in json.dumps(launch.job("gang", 4, 8, 2))
    schema = _SCHEMAS["kueue.x-k8s.io/v1beta2 Topology"]
    wrong = [{"label": "x"}], [{"nodeLabel": _HOST}, {"nodeLabel": "x"}], [{"nodeLabel": "x"}] * 2, []
    assert [len(_violations(schema, topology | {"spec": {"levels": levels}})) for levels in wrong] == [2, 1, 1, 1]
    assert len(_violations(_SCHEMAS["kueue.x-k8s.io/v1beta2 ResourceFlavor"], {"spec": {"topologyName": "A"}})) == 2


@pytest.mark.parametrize("leaves", [1, 2])
def test_a_job_for_kueue_is_one_that_kubernetes_and_kueue_accept(leaves):
    """The Job's schema is that of Kubernetes; its label and annotation are Kueue's at ff69552e79ad: QueueLabel in
    pkg/controller/constants/constants.go, annotations in apis/kueue/v1beta2/topology_types.go; its webhook wants one
    of them at most, with a label's name (pkg/controller/jobframework/tas_validation.go)."""
    job = json.loads(documents(launch.job("gang", 4, 8, leaves)))
    schema = _SCHEMAS["batch/v1 Job"]
    assert violations(schema, job) == []
    assert list(job["metadata"]["labels"]) == ["kueue.x-k8s.io/queue-name"]
    annotations = job["spec"]["template"]["metadata"]["annotations"]
    relation = "required" if leaves == 1 else "preferred"
    assert list(annotations) == [f"kueue.x-k8s.io/podset-{relation}-topology"]
    levels = launch.topology("gang")["spec"]["levels"]
    assert [level["nodeLabel"] for level in levels].index(*annotations.values()) == 0
    # The two policies that Kubernetes allows in a Job; and Kueue starts what is suspended.
    assert job["spec"]["template"]["spec"]["restartPolicy"] in ("Never", "OnFailure")
    assert job["spec"]["suspend"]
    pods = job["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    assert job["spec"]["parallelism"] * pods == 32
    job["spec"]["gang"] = True
    job["spec"]["template"]["spec"]["containers"][0].pop("name")
    job["spec"]["completions"] = "4"
    assert len(violations(schema, job)) == 3


def test_what_real_machines_printed_is_read():
    """Outputs of tools that people published: two leaves of an EDR fabric (24 hosts and 12 uplinks each; GUIDs and
    LIDs of hosts replaced), a DGX A100 (NVIDIA/nccl issue 1505), V100s in a cube mesh."""
    data = Path(__file__).parent / "data"
    tree, rate = ibnetdiscover.read_topology((data / "ibnetdiscover_edr.txt").read_text(), "ib")
    assert [len(hosts) for hosts in tree.leaves.values()] == [24, 24]
    assert (tree.oversubscription, rate) == (2.0, 12.5e9)
    assert slurm.read_topology(slurm.write_topology(tree), "t").leaves == tree.leaves
    dgx = link_matrix.read_matrix((data / "topo_dgx_a100.txt").read_text(), "t")
    assert (len(dgx.links), dgx.nics, dgx.nvlink) == (8, 12, True)
    cube = link_matrix.read_matrix((data / "topo_v100_cube_mesh.txt").read_text(), "t")
    assert not cube.nvlink
    own = gpus.cluster(cube, "V100", 1, None, "mine")
    ours = preset("dgx-1v", 1)
    assert [(t.ranks, t.bandwidth_bytes_per_s_per_gpu_per_direction) for t in own.tiers] == [
        (t.ranks, t.bandwidth_bytes_per_s_per_gpu_per_direction)
        for t in ours.tiers
        if t.ranks in (4, 8) and "nvl" in t.name
    ]
    assert own.tiers[1].uplink_bandwidth_bytes_per_s_per_direction == 150e9


def test_torchrun_refuses_what_it_cannot_number():
    assert "--nproc-per-node=2" in launch.torchrun(["a", "a", "b", "b"], [0, 1, 4, 5])
    with pytest.raises(InputError, match="not in a row"):
        launch.torchrun(["a", "b", "a", "b"], [0, 1, 2, 3])
    with pytest.raises(InputError, match="1 to 3 ranks"):
        launch.torchrun(["a", "a", "a", "b"], [0, 1, 2, 3])


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    folder = tmp_path_factory.mktemp("schedulers")
    plan = "plan --model llama3-8b --cluster dgx-h100 --gpus 16 --batch 64 --seq 4096 --out p.json"
    assert phalanx(folder, *plan.split())[0] == 0
    (folder / "topology.conf").write_text("SwitchName=l0 Nodes=n[0-1]\nSwitchName=l1 Nodes=n[2-4]\n")
    (folder / "free.json").write_text('{"free": {"n[0-4]": "0-3", "n4": "0-7"}}')
    (folder / "ib.txt").write_text(_FABRIC)
    (folder / "topo.txt").write_text(_matrix(_pcie()))
    return folder


@pytest.mark.parametrize("line", ["tp=4,dp=4,zero=1", "tp=2,pp=2,dp=4"])
def test_ranks_land_where_the_files_say(here, line):
    words = ("cluster", "place", "p.json", "--free", "free.json", "--topology", "topology.conf", "--strategy", line)
    code, out, _ = phalanx(here, *words, "--no-search", "--json", "--for", "slurm", "--out", "s")
    ranks = json.loads(out)["ranks"]
    assert code == 0
    assert (here / "s/hostfile").read_text().split() == [r["node"] for r in ranks]
    script = (here / "s/launch.sbatch").read_text()
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    assert f"GPUS=({' '.join(str(r['gpu']) for r in ranks)})" in script
    leaves = {"n0": 0, "n1": 0}
    assert f"--switches={len({leaves.get(r['node'], 1) for r in ranks})}" in script
    code, _, err = phalanx(here, *words, "--no-search", "--for", "torchrun", "--out", "t")
    assert code == 0 or "use --for slurm" in err
    if code == 0:
        assert subprocess.run(["bash", "-n", str(here / "t/launch.sh")]).returncode == 0


def test_without_leaf_switches_there_is_one(here):
    (here / "whole.json").write_text('{"free": {"node[0-1]": "0-7"}}')
    words = "cluster place p.json --free whole.json --strategy tp=8,dp=2 --no-search --json --for slurm --out u"
    assert len({r["node"] for r in json.loads(text_of(here, words))["ranks"]}) == 2
    assert "--switches=1" in (here / "u/launch.sbatch").read_text()


def test_a_cluster_is_read_from_its_tools(here):
    out = text_of(here, "cluster read topology.conf --like dgx-h100 --out c.toml")
    assert "5 hosts under 2 leaf switches of 2 to 3 hosts" in out
    spec = cluster_from_toml(here / "c.toml")
    assert [tier.name for tier in spec.tiers] == ["nvlink", "infiniband", "spine"]
    assert spec.nodes == 5
    assert phalanx(here, "cluster read ib.txt --slurm t.conf")[0] == 0
    assert "SwitchName=leaf0 Nodes=node[01-02]" in (here / "t.conf").read_text()
    text_of(here, "cluster read topo.txt --device A10 --out host.toml")
    words = "--model llama3-8b --cluster host.toml --gpus 8 --batch 8 --seq 2048 --strategy tp=8"
    assert phalanx(here, "predict", *words.split())[0] == 0
    assert "is not a topology that Phalanx reads" in error_of(here, "cluster read free.json")


# Hosts as their tools print them.


@st.composite
def hosts(draw):
    """A host of sockets with GPUs in cliques of NVLinks, and NICs below PCIe switches, sockets or none."""
    sockets, each = draw(st.sampled_from([1, 2])), draw(st.sampled_from([2, 4]))
    count = sockets * each
    clique = draw(st.sampled_from([n for n in (1, 2, 4, 8) if count % n == 0]))
    number, near = draw(st.integers(1, 18)), draw(st.sampled_from(["PXB", "PHB"]))

    def link(i, j):
        if i == j:
            return "X"
        if clique > 1 and i // clique == j // clique:
            return f"NV{number}"
        return near if i // each == j // each else "SYS"

    links = tuple(tuple(link(i, j) for j in range(count)) for i in range(count))
    nics = draw(st.lists(st.integers(-1, count - 1), max_size=4))
    rows = tuple(
        tuple("PIX" if i == gpu else near if gpu >= 0 and i // each == gpu // each else "SYS" for i in range(count))
        for gpu in nics
    )
    names = tuple(f"NIC{n}" for n in range(len(nics)))
    return gpus.GpuTopology(links, rows, names), sockets, nics


def as_matrix(t):
    head = "\t".join(["", *(f"GPU{i}" for i in range(len(t.links))), *t.nic_names, "CPU Affinity"])
    lines = [f"GPU{i}\t" + "\t".join([*row, *(near[i] for near in t.near), "0-47"]) for i, row in enumerate(t.links)]
    return "\n".join([head, *lines, "", "Legend:", "  X    = Self"]) + "\n"


@given(hosts())
def test_a_matrix_is_read_as_the_host_that_it_is_of(host):
    t, _, nics = host
    assert link_matrix.read_matrix(as_matrix(t), "t") == t
    below = {n for n, gpu in enumerate(nics) if gpu >= 0}
    assert set(t.fabric) == (below or set(range(len(nics))))
    spec = gpus.cluster(t, "A100", 2, 400, "mine")
    sizes = [tier.ranks for tier in spec.tiers]
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == 2 * len(t.links)
    rates = [tier.bandwidth_bytes_per_s_per_gpu_per_direction for tier in spec.tiers[:-1]]
    assert rates == sorted(rates, reverse=True)  # nothing is faster further away


def test_pairs_of_cards_and_nics_of_a_host_are_placed():
    rows = [
        ["X" if i == j else "NV4" if i // 2 == j // 2 else "NODE" if i // 4 == j // 4 else "SYS" for j in range(8)]
        for i in range(8)
    ]
    near = (("PIX", *["SYS"] * 7), (*["SYS"] * 4, "PIX", *["SYS"] * 3), ("SYS",) * 8)
    t = gpus.GpuTopology(tuple(map(tuple, rows)), near, ("mlx5_0", "mlx5_1", "mlx5_2"))
    spec = gpus.cluster(t, "A10", 2, 100, "mine")
    assert [(x.name, x.ranks) for x in spec.tiers] == [("nvlink", 2), ("pcie", 4), ("sockets", 8), ("network", 16)]
    assert spec.tiers[-1].uplink_bandwidth_bytes_per_s_per_direction == 25e9
    assert list(gpus.tier_lines(t, "A10")) == [
        "nvlink: GPUs 0-1, 2-3, 4-5, 6-7: 56.25 GB/s a GPU, assumed: rate of A10's datasheet, one direction",
        "pcie: GPUs 0-3, 4-7: 25 GB/s a GPU, assumed: rate of PCIe 4.0 x16, one direction",
        "sockets: GPUs 0-7: 25 GB/s a GPU, assumed: rate between the host bridges of two sockets",
    ]
    unknown = list(gpus.tier_lines(t, None))
    assert unknown[0] == "nvlink: GPUs 0-1, 2-3, 4-5, 6-7: --device says at which rate"
    assert "25 GB/s a GPU, assumed" in unknown[1]
    assert "100 GB/s a GPU, published: rate of A100's datasheet, 4 of 12 links" in next(gpus.tier_lines(t, "A100"))
    with pytest.raises(InputError, match="is not a chip that Phalanx knows"):
        list(gpus.tier_lines(t, "A101"))
    said = list(gpus.nic_lines(t))
    assert said[0] == "2 of 3 NICs are the fabric's: mlx5_2 is near no GPU, and not counted"
    assert "GPUs 1, 2, 3, 5, 6, 7 have no NIC" in said[1]


_DUMP = """<system version="1">
  <cpu numaid="0" affinity="ffff" arch="x86_64">
    <pci busid="0000:16:00.0" class="0x060400">
      <pci busid="0000:18:00.0" class="0x030200"><gpu dev="0" sm="90" rank="0" gdr="1">
        <nvlink target="ffffff" count="18" tclass="0x068000"/></gpu></pci>
      <pci busid="0000:17:00.0" class="0x020700"><nic><net name="mlx5_0" dev="0" speed="400000" port="1"/></nic></pci>
    </pci>
  </cpu>
  <cpu numaid="1" affinity="ffff0000" arch="x86_64">
    <pci busid="0000:9a:00.0" class="0x030200"><gpu dev="1" sm="90" rank="1" gdr="1">
      <nvlink target="ffffff" count="18" tclass="0x068000"/></gpu></pci>
  </cpu>
</system>
"""
_ROCM = """
GPU[0]\t\t: (Topology) Numa Node: 0
GPU[1]\t\t: (Topology) Numa Node: 0
GPU[2]\t\t: (Topology) Numa Node: 1
=============================== Link Type between two GPUs ===============================
       GPU0         GPU1         GPU2
GPU0   0            XGMI         PCIE
GPU1   XGMI         0            PCIE
GPU2   PCIE         PCIE         0
======================================= Numa Nodes =======================================
"""


@pytest.mark.parametrize("text", ["\t", " \n\t\n", "> " * 10_000, "[a] " * 10_000])
def test_a_file_of_prefixes_alone_is_refused(tmp_path, text):
    (tmp_path / "topology.conf").write_text(text)
    with pytest.raises(InputError):
        read_topology(tmp_path / "topology.conf")


def test_a_host_of_one_gpu_has_a_tier_of_it_alone():
    found = gpus.cluster(link_matrix.read_matrix(_matrix([["X"]]), "t"), "A10", 4, 100, "mine")
    assert [(t.name, t.ranks) for t in found.tiers] == [("pcie", 1), ("network", 4)]


def test_what_nccl_and_rocm_write_is_read():
    t = nccl_xml.read_dump(_DUMP, "t")
    assert (t.links, t.near) == ((("X", "NV18"), ("NV18", "X")), (("PIX", "SYS"),))
    assert (t.nic_names, t.port_gbit) == (("mlx5_0",), 400)
    assert gpus.cluster(t, "H100", 2, None, "mine").tiers[-1].uplink_bandwidth_bytes_per_s_per_direction == 50e9
    assert link_matrix.read_tables(_ROCM, "t").links == (
        ("X", "NV1", "SYS"),
        ("NV1", "X", "SYS"),
        ("SYS", "SYS", "X"),
    )


def _in_a_log(dump: str) -> str:
    lines = [f"node0:{17 + i}:99 [0] {line}" for i, line in enumerate(dump.splitlines())]
    return "\n".join(["node0:1:1 [0] NCCL INFO Bootstrap", *lines[:4], "a line of another rank", *lines[4:], "done"])


@pytest.mark.parametrize(
    "text",
    [
        _DUMP,
        f'<?xml version="1.0"?>\n{_DUMP}',
        f"$ cat topo.xml\n{_DUMP}$ exit\n",
        "> " + _DUMP.replace("\n", "\n> "),
        _in_a_log(_DUMP),
        f"{_in_a_log(_DUMP)}\n{_DUMP}",
    ],
)
def test_a_dump_of_nccl_is_read_where_it_was_pasted(tmp_path: Path, text: str) -> None:
    (tmp_path / "log.txt").write_text(text)
    t = read_topology(tmp_path / "log.txt")
    assert t == nccl_xml.read_dump(_DUMP, "t")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (_DUMP + _DUMP.replace("400000", "200000"), "holds 2 dumps of NCCL's topology; keep one host's"),
        (f"a\n{_DUMP[:300]}", "without its end; give all up to </system>"),
        (f'<!DOCTYPE a [<!ENTITY b "c">]>{_DUMP}', "declares a document type"),
        ("a\n<system> of ours\n", "is not a topology that Phalanx reads"),
        ("GPU 0: NVIDIA L4 (UUID: GPU-1)\nGPU 1: NVIDIA L4 (UUID: GPU-2)\n", "lists 2 GPUs"),
    ],
)
def test_a_dump_that_cannot_be_taken_gets_one_line(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "log.txt").write_text(text)
    with pytest.raises(InputError, match=said):
        read_topology(tmp_path / "log.txt")


@pytest.mark.parametrize(
    ("read", "text", "said"),
    [
        (nccl_xml.read_dump, '<!DOCTYPE a [<!ENTITY b "c">]><system/>', "declares a document type"),
        (nccl_xml.read_dump, "<system><cpu>", "is not XML"),
        (nccl_xml.read_dump, "<system/>", "names no GPU"),
        (
            nccl_xml.read_dump,
            "<system>" + '<cpu numaid="0">' * 99 + "</cpu>" * 99 + "</system>",
            "nested more than 64",
        ),
        (nccl_xml.read_dump, _DUMP.replace('count="18"', 'count="x"'), "is not a count"),
        (link_matrix.read_tables, "Link Type between two GPUs\nGPU0 GPU1\n", "has no table of link types"),
        (link_matrix.read_tables, _ROCM.replace("XGMI         0", "XGMI"), "has 2 links, and there are 3 GPUs"),
        (link_matrix.read_tables, _ROCM.replace("XGMI", "TCP"), "is not a kind of link"),
        (slurm.read_yaml, "- topology: a\n  flat: true\n", "has no topology of switches or blocks"),
        (slurm.read_yaml, "- topology: a\n  tree: {switches: [{switch: s}]}\n", "needs nodes or children"),
        (lambda text, file: slurm.of_nodes(text.split(), file), "", "has no switch with nodes"),
        (reading.nodes_of, "NodeName=g1 A=b\nNodeName=$(id) A=b\n", "is not the name of a host"),
    ],
)
def test_a_topology_with_a_mistake_gets_one_line(read, text, said):
    with pytest.raises(InputError, match=said):
        read(text, "t")


def test_a_topology_is_the_same_in_every_form_of_slurms():
    tree = SwitchTree({"r1": ("g1", "g2"), "r2": ("g3", "g4")}, {"spine": ("r1", "r2")})
    shown = (
        "SwitchName=spine Level=1 LinkSpeed=1 Nodes=g[1-4] Switches=r[1-2]\n"
        "SwitchName=r1 Level=0 LinkSpeed=1 Nodes=g[1-2]\nSwitchName=r2 Level=0 LinkSpeed=1 Nodes=g[3-4]\n"
    )
    switches = "[{switch: spine, children: 'r[1-2]'}, {switch: r1, nodes: 'g[1-2]'}, {switch: r2, nodes: 'g[3-4]'}]"
    assert slurm.read_topology(slurm.write_topology(tree), "t") == tree
    assert slurm.read_topology(shown, "t") == tree
    assert slurm.read_yaml(f"- topology: a\n  cluster_default: true\n  tree: {{switches: {switches}}}\n", "t") == tree
    blocks = "- topology: b\n  block: {blocks: [{block: r1, nodes: 'g[1-2]'}, {block: r2, nodes: 'g[3-4]'}]}\n"
    assert slurm.read_yaml(blocks, "t").leaves == tree.leaves
    listed = reading.nodes_of("NodeName=g1 Arch=x86_64\n   Gres=gpu:8\n\nNodeName=g2 Arch=x\n", "t")
    assert [node.name for node in listed] == ["g1", "g2"]


_NODES = """NodeName=g1 Arch=x86_64
   Gres=gpu:h100:8(S:0-1)
   State=IDLE ThreadsPerCore=2
   CfgTRES=cpu=224,gres/gpu=8,gres/gpu:h100=8
   AllocTRES=

NodeName=g2 Gres=gpu:8 State=MIXED+PLANNED CfgTRES=cpu=2,gres/gpu=8 AllocTRES=cpu=1,gres/gpu=4,gres/gpu:h100=4{used}
NodeName=g3 Gres=gpu:8 State=IDLE+DRAIN CfgTRES=gres/gpu=8 AllocTRES=
NodeName=g4 Gres=gpu:8 State=DOWN* CfgTRES=gres/gpu=8 AllocTRES=
NodeName=g5 Gres=gpu:8 State=ALLOCATED CfgTRES=gres/gpu=8 AllocTRES=gres/gpu=8
NodeName=login Gres=(null) State=IDLE CfgTRES=cpu=8 AllocTRES=
"""


def test_nodes_that_jobs_have_or_that_take_none_are_not_free(tmp_path: Path) -> None:
    file = tmp_path / "nodes.txt"
    file.write_text(_NODES.format(used=""))
    out, err = phalanx(tmp_path, "cluster", "read", "nodes.txt")[1:]
    assert "5 hosts: g[1-5]\n" in out
    assert "login has no GPUs: left out" in err
    for line in ("g2: jobs have 4 of 8", "g3: takes no jobs (State=IDLE+DRAIN)", "g4: takes no jobs (State=DOWN*)"):
        assert line in err
    found = free_gpus.read(file, preset("dgx-h100", 5))
    assert found.free.tolist() == [*range(8), 12, 13, 14, 15]
    assert "assumed: g2: the last GPUs are free; how many is said, and not which" in found.notes
    assert found.unnumbered == ("g2",)
    quads = replace(preset("dgx-h100", 5), tiers=preset("pcie-a100", 5).tiers)  # where it matters which
    found = free_gpus.read(file, quads)
    assert found.free.tolist() == [*range(8)]
    assert any(note.startswith("left out: g2: which of their GPUs are free is not said") for note in found.notes)
    file.write_text(_NODES.format(used=" GresUsed=gpu:h100:4(IDX:0,5-7)"))
    found = free_gpus.read(file, preset("dgx-h100", 5))
    assert found.free.tolist() == [*range(8), 9, 10, 11, 12]
    assert [note.partition(": ")[2][:2] for note in found.notes[:-1]] == ["g3", "g4", "g5"]
    file.write_text(_NODES.format(used="").replace("State=IDLE ", "State=MAINT ").replace("MIXED", "RESERVED"))
    with pytest.raises(InputError, match="has no node with GPUs that are known to be free"):
        free_gpus.read(file, preset("dgx-h100", 5))
    file.write_text("gpu* up 7-00:00:00 1 drain* g7\n")
    with pytest.raises(InputError, match="neither a table `free` in JSON nor a list of nodes"):
        free_gpus.read(file, preset("dgx-h100", 5))


_UNTRACKED = "CfgTRES=cpu=192,mem=800G,billing=192"
_TRACKED = f"{_UNTRACKED},gres/gpu=8"


@pytest.mark.parametrize(
    ("state", "cpus", "configured", "allocated", "free"),
    [
        ("ALLOCATED", 192, _UNTRACKED, "cpu=192,mem=800G,billing=192", 0),
        ("ALLOCATED", 192, _TRACKED, "", 0),
        ("ALLOCATED", 192, _TRACKED, "cpu=192,mem=800G,gres/gpu=4", 0),  # no CPU is left for the other four
        ("ALLOCATED+DRAIN", 192, _UNTRACKED, "cpu=192", 0),
        ("ALLOCATED+CLOUD", 192, _UNTRACKED, "cpu=192", 0),
        ("MIXED", 192, _UNTRACKED, "", 0),
        ("MIXED", 96, _UNTRACKED, "cpu=96", None),
        ("MIXED", 96, _TRACKED, "", None),
        ("MIXED", 96, _TRACKED, "cpu=96", 8),  # GPUs are counted, and jobs have none
        ("MIXED+CLOUD", 96, _UNTRACKED, "cpu=96 GresUsed=gpu:h100:2(IDX:0-1)", 6),
        ("MIXED+DRAIN", 96, _UNTRACKED, "cpu=96", 0),
        ("IDLE", 96, _UNTRACKED, "cpu=96", None),
        ("IDLE", 0, _UNTRACKED, "", 8),
        ("IDLE+COMPLETING", 0, _UNTRACKED, "", None),
        ("IDLE+RESERVED", 0, _TRACKED, "", 0),
        ("IDLE+CLOUD+POWERED_DOWN", 0, _TRACKED, "", 8),
        ("IDLE+CLOUD+POWERING_DOWN", 0, _TRACKED, "", 0),
    ],
)
def test_a_state_says_what_is_free_where_slurm_does_not_count_gpus(
    state: str, cpus: int, configured: str, allocated: str, free: int | None
) -> None:
    """Slurm counts GPUs of jobs only under AccountingStorageTRES=gres/gpu; sinfo's short states say the same."""
    record = f"NodeName=g1 CPUAlloc={cpus} CPUTot=192\n   Gres=gpu:h100:8\n   State={state} ThreadsPerCore=1\n"
    (node,) = reading.nodes_of(f"{record}   {configured}\n   AllocTRES={allocated}\n", "t")
    assert node.open == free


def test_an_allocated_node_has_no_gpu_to_give_in_sinfo_either() -> None:
    rows = "NODELIST GRES GRES_USED STATE\ng1 gpu:8 gpu:4(IDX:0-3) alloc\ng2 gpu:8 gpu:4(IDX:0-3) mix\n"
    assert [node.open for node in reading.nodes_of(rows, "t")] == [0, 4]


_SINFO = {
    "default": "PARTITION AVAIL TIMELIMIT NODES STATE NODELIST\n"
    "h100* up 1-00:00:00 2 drng@ n[1,6]\nh100* up 1-00:00:00 1 mix n2\nh100* up 1-00:00:00 2 idle n[3-4]\n"
    "h100* up 1-00:00:00 1 alloc n5\n",
    "-N -l": "Mon Nov 30 09:12:44 2026\n"
    "NODELIST NODES PARTITION STATE CPUS S:C:T MEMORY TMP_DISK WEIGHT AVAIL_FE REASON\n"
    "n1 1 h100 draining 192 2:96:1 206250 0 1 (null) ECC errors on GPU 3\n"
    "n2 1 h100 mixed 192 2:96:1 2 0 1 (null) none\n"
    "n3 1 h100 idle~ 192 2:96:1 2 0 1 (null) none\nn4 1 h100 idle 192 2:96:1 2 0 1 (null) none\n"
    "n5 1 h100 allocated 192 2:96:1 2 0 1 (null) none\nn6 1 h100 idle* 192 2:96:1 2 0 1 (null) Not responding\n",
    "-o %N|%G|%t": "NODELIST|GRES|STATE\nn1,n6|gpu:h100:8(S:0-1),nic:4|drain\nn2|gpu:h100:8|mix\n"
    "n[3-4]|gpu:h100:8|idle\n"
    "n5|gpu:h100:8|alloc\n",
}


@pytest.mark.parametrize("form", _SINFO)
def test_a_table_of_sinfo_says_which_nodes_are_free(tmp_path: Path, form: str) -> None:
    """Idle nodes are; nodes that are mixed have GPUs that no table without GRES_USED counts."""
    file = tmp_path / "sinfo.txt"
    file.write_text(f"me@login:~$ sinfo {form}\n{_SINFO[form]}")
    found = free_gpus.read(file, preset("dgx-h100", 8))
    assert {found.topology.hosts[int(gpu) // 8] for gpu in found.free} == {"n3", "n4"}
    assert len(found.free) == 16
    said = "\n".join(found.notes)
    assert "left out: n2: which of their GPUs are free is not said" in said
    assert ("assumed: n[3-4] have 8 GPUs each, 16 in all: the list does not say" in said) == ("|" not in form)
    assert "n5: jobs have" in said
    assert "takes no jobs (State=dr" in said


def test_nodes_under_no_switch_of_the_topology_are_left_out_of_a_list(tmp_path: Path) -> None:
    """A partition of nodes without GPUs is in the list, and not in the fabric of the others."""
    file = tmp_path / "sinfo.txt"
    file.write_text("PARTITION AVAIL TIMELIMIT NODES STATE NODELIST\nall up infinite 4 idle n[3-4],cpu[1-2]\n")
    found = free_gpus.read(file, preset("dgx-h100", 8), {"leaf0": ("n3", "n5"), "leaf1": ("n4",)})
    assert {found.topology.hosts[int(gpu) // 8] for gpu in found.free} == {"n3", "n4"}
    assert found.notes[0] == "left out: cpu[1-2]: under none of the topology's switches"
    assert "the plan's nodes have as many; a list with GRES does, or a table" in found.notes[1]
    with pytest.raises(InputError, match=r"lists no node that is under the topology's switches; it lists n\[3-4\],c"):
        free_gpus.read(file, preset("dgx-h100", 8), {"leaf0": ("m1",)})


def test_a_list_of_nodes_knows_no_switches(tmp_path: Path) -> None:
    (tmp_path / "sinfo.txt").write_text("NODELIST STATE\nn[1-4] idle\n")
    out = text_of(tmp_path, "cluster read sinfo.txt")
    assert "4 hosts: n[1-4]" in out
    assert "missing: the switches that they are under" in out
    assert "under 1 leaf" not in out


def test_a_table_of_sinfo_with_the_gpus_in_use(tmp_path: Path) -> None:
    rows = (
        "NODELIST  GRES               GRES_USED                STATE\n"
        "n1        gpu:h100:8(S:0-1)  gpu:h100:4(IDX:0,2,5-6)  mixed\n"
        "n2        gpu:h100:8(S:0-1)  gpu:h100:0(IDX:N/A)      idle\n"
        "cpu1      (null)             gpu:0                    idle\n"
    )
    file = tmp_path / "sinfo.txt"
    file.write_text(rows)
    found = free_gpus.read(file, preset("dgx-h100", 8))
    assert found.free.tolist() == [1, 3, 4, 7, *range(8, 16)]
    assert found.unnumbered == ()
    file.write_text(rows.replace("gpu:h100:4(IDX:0,2,5-6)  mixed", "mixed"))
    with pytest.raises(InputError, match=r"line 2 has not the columns of the header"):
        free_gpus.read(file, preset("dgx-h100", 8))


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ("PARTITION AVAIL TIMELIMIT NODES STATE NODELIST\nbig up 1 1 idle c1\nlong up 1 1 idle g1\n",
         "several partitions, and not which of them have GPUs; name one with --partition: big, long"),
        ("PARTITION AVAIL TIMELIMIT NODES(A/I/O/T) NODELIST\ngpu up 1 1/1/0/2 g[1-2]\n",
         "counts the nodes of each state"),
        ("PARTITION AVAIL TIMELIMIT NODES STATE NODELIST\ngpu up 1 1 mix g1\n",
         "no node with GPUs that are known to be"),
        ("NODELIST STATE\ng[1- idle\n", "a bracket without its partner"),
    ],
)  # fmt: skip
def test_a_table_of_sinfo_that_does_not_name_free_gpus_is_refused(tmp_path: Path, table: str, reason: str) -> None:
    file = tmp_path / "sinfo.txt"
    file.write_text(table)
    with pytest.raises(InputError, match=re.escape(reason)):
        free_gpus.read(file, preset("dgx-h100", 8))


def _described(name: str, asked: int, more: str = "") -> str:
    return (
        f"Name:               {name}\nTaints:             nvidia.com/gpu=present:NoSchedule\n{more}"
        "Capacity:\n  nvidia.com/gpu:     8\nAllocatable:\n  cpu:                190\n  nvidia.com/gpu:     8\n"
        "Allocated resources:\n  (Total limits may be over 100 percent)\n  Resource           Requests     Limits\n"
        f"  cpu                30770m (16%) 54040m (28%)\n  nvidia.com/gpu     {asked}            {asked}\n"
        "Events:              <none>\n\n"
    )


def test_pods_take_gpus_of_nodes_that_kubectl_describes(tmp_path: Path) -> None:
    """A cordoned node and one that is not ready have none to give; which GPUs pods have is not said."""
    closed = "Unschedulable:      true\n"
    broken = "Conditions:\n  Type   Status  Reason\n  Ready  Unknown KubeletStopped\n"
    text = _described("n1", 4) + _described("n2", 0, closed) + _described("n3", 0) + _described("n4", 0, broken)
    (tmp_path / "nodes.txt").write_text(text)
    found = free_gpus.read(tmp_path / "nodes.txt", preset("dgx-h100", 8))
    assert found.free.tolist() == [4, 5, 6, 7, *range(16, 24)]
    assert found.unnumbered == ("n1",)
    assert found.notes[:2] == (
        "left out: n2: takes no jobs (Unschedulable)",
        "left out: n4: takes no jobs (not Ready)",
    )
    out, err = phalanx(tmp_path, "cluster", "read", "nodes.txt")[1:]
    assert "4 hosts: n[1-4]" in out
    assert "n1: jobs have 4 of 8 GPUs" in err


_PARTITIONS = """login$ sinfo
PARTITION AVAIL TIMELIMIT NODES STATE NODELIST
all*      up    infinite      1 drain n1
all*      up    infinite      4  idle n[2-3],m[1-2]
...
gpu       up    infinite      1 drain n1
gpu       up    infinite      2  idle n[2-3]
[...]
"""


def test_free_gpus_are_summed_over_nodes_that_take_jobs_by_kind(tmp_path: Path) -> None:
    rows = (
        "NODELIST GRES GRES_USED STATE\nn1 gpu:h100:8 gpu:h100:2(IDX:0-1) mix\nn2 gpu:a100:4 gpu:a100:0 idle\n"
        "n3 gpu:h100:8 gpu:h100:0 drain\nn4 gpu:h100:8 gpu:h100:8(IDX:0-7) alloc\ncpu1 (null) gpu:0 idle\n"
    )
    (tmp_path / "rows").write_text(rows)
    assert "free: 10 of 20 GPUs on 3 nodes that take jobs (h100 6 of 16, a100 4 of 4)" in text_of(
        tmp_path, "cluster read rows"
    )
    counted = json.loads(text_of(tmp_path, "cluster read rows --json"))["free_gpus"]
    assert [(each["kind"], each["free"]) for each in counted] == [("h100", 6), ("a100", 4)]
    (tmp_path / "rows").write_text("NODELIST GRES STATE\nn1 gpu:h100:8 mix\nn2 gpu:h100:8 idle\n")
    said = text_of(tmp_path, "cluster read rows")
    assert "free: 8 of 8 GPUs on 1 node that takes jobs" in said
    assert "not in that sum: n1: how many GPUs jobs have is not said: scontrol -d show nodes says it" in said


def test_the_nodes_of_a_partition_alone_are_taken(tmp_path: Path) -> None:
    """Where a table shows no GPUs, how many nodes are taken to have some is said, with the partitions that could."""
    (tmp_path / "sinfo.txt").write_text(_PARTITIONS)
    out, err = phalanx(tmp_path, "cluster", "read", "sinfo.txt")[1:]
    assert "4 of 4 nodes that take jobs are idle; how many GPUs they have is not said" in out
    assert "line 5 is ...: what it left out is not read" in err
    assert "line 8 is [...]" in err
    said = text_of(tmp_path, "cluster read sinfo.txt --partition gpu --like dgx-h100")
    assert "free: 16 of 16 GPUs (8 each assumed) on 2 nodes that take jobs" in said
    assert "3 hosts: n[1-3]" in said
    found = free_gpus.read(tmp_path / "sinfo.txt", preset("dgx-h100", 4))
    assert any(
        "8 GPUs each, 32 in all" in n and "--partition takes the nodes of one: all, gpu" in n for n in found.notes
    )
    found = free_gpus.read(tmp_path / "sinfo.txt", preset("dgx-h100", 4), partition="gpu")
    assert found.topology.hosts == ("n1", "n2", "n3")
    assert found.notes[-1].startswith("free: 16 of 16 GPUs")
    record = "NodeName=a Gres=gpu:8 State=IDLE Partitions=gpu,long\nNodeName=b Gres=gpu:8 State=IDLE Partitions=dev\n"
    assert [node.name for node in reading.nodes_of(record, "t", "long")] == ["a"]
    for text in (record, "NODELIST STATE\nn1 idle\n"):
        with pytest.raises(InputError, match=r"is not a partition of t; it (has dev, gpu, long|names none)"):
            reading.nodes_of(text, "t", "gpus")


@pytest.mark.parametrize(
    "rows",
    [
        "cpu* up 1-00 12 idle c[01-12]\ngpu up 1-00 2 idle g[1-2]\ngpu up 1-00 1 mix g3",
        "debug* up 1-00 4 idle e[1-4]\na100-long up 1-00 2 idle g[1-2]\nh100 up 1-00 1 mix g3",
        "all* up 1-00 4 idle cpu-[1-2],login1,bigmem4\nall* up 1-00 2 idle g[1-2]\nall* up 1-00 1 mix g3",
    ],
)
def test_nodes_that_have_no_gpus_by_their_names_are_no_hosts_of_gpus(tmp_path: Path, rows: str) -> None:
    """What plain `sinfo` prints says no GPUs of any node; a node of a partition named cpu was taken to have eight."""
    (tmp_path / "sinfo.txt").write_text(f"PARTITION AVAIL TIMELIMIT NODES STATE NODELIST\n{rows}\n")
    out, err = phalanx(tmp_path, "cluster", "read", "sinfo.txt", "--like", "dgx-h100")[1:]
    assert "free: 16 of 16 GPUs (8 each assumed) on 2 nodes that take jobs" in out
    assert "3 hosts: g[1-3]\n" in out
    assert "have no GPUs by their names: left out (assumed)" in err
    found = free_gpus.read(tmp_path / "sinfo.txt", preset("dgx-h100", 4))
    assert {found.topology.hosts[int(gpu) // 8] for gpu in found.free} == {"g1", "g2"}


def test_a_node_named_cpu_has_the_gpus_that_its_list_says(tmp_path: Path) -> None:
    (tmp_path / "rows").write_text("NODELIST GRES GRES_USED STATE\ncpu1 gpu:h100:8 gpu:h100:0 idle\n")
    assert "free: 8 of 8 GPUs" in text_of(tmp_path, "cluster read rows")
    (tmp_path / "rows").write_text("PARTITION NODELIST STATE\ncpu_gpu n[1-2] idle\n")
    assert "2 hosts: n[1-2]" in text_of(tmp_path, "cluster read rows")


def test_nodes_that_kubectl_describes_in_part_have_no_known_gpus(tmp_path: Path) -> None:
    text = (
        _described("n1", 4)
        .partition("Allocated")[0]
        .replace("Taints:", "Labels: a=b\n  nvidia.com/gpu.product=H20\nTaints:")
    )
    (tmp_path / "nodes.txt").write_text(text)
    out, err = phalanx(tmp_path, "cluster", "read", "nodes.txt")[1:]
    assert "n1: how many GPUs jobs have is not said" in err
    assert "give all that kubectl describe nodes prints: Allocated resources says it" in out
    assert "scontrol" not in out + err
    assert reading.nodes_of(text, "t")[0].kind == "H20"


@pytest.mark.parametrize(
    ("hosts", "asked"),
    [
        ("aabb", "#SBATCH --gpus-per-node=2\n#SBATCH --exclusive\n"),
        ("ab", "#SBATCH --gpus-per-node=1\n# Slurm chooses which"),
        ("aab", "#SBATCH --gpus=3\n# Slurm chooses which"),
    ],
)
def test_a_batch_script_asks_for_the_gpus_of_its_ranks(hosts: str, asked: str) -> None:
    script = slurm.launch(list(hosts), [0] * len(hosts), 2, 1, "hostfile")
    assert asked in script
    assert ("--exclusive" in script) == ("--exclusive" in asked)


def test_leaves_that_a_cluster_has_already_are_counted_once() -> None:
    """A topology given again, for a cluster that was written from it, describes the same leaves under one spine."""
    names, leaf = [f"n{i}" for i in range(8)], [i // 4 for i in range(8)]
    once, _ = of_leaves(preset("dgx-h100", 8), names, leaf, 2.0)
    again, _ = of_leaves(once, names, leaf)
    assert [tier.name for tier in again.tiers] == ["nvlink", "infiniband", "spine"]
    assert [tier.ranks for tier in again.tiers] == [8, 32, 64]
    uplinks = {c.tiers[-1].uplink_bandwidth_bytes_per_s_per_direction for c in (once, again)}
    assert len(uplinks - {None}) == 1


@pytest.mark.parametrize(
    "before",
    [
        "> ",
        "0: ",
        "[1,0]<stdout>:",
        "2024-05-01T12:00:00.000Z ",
        "> 2024-05-01 12:00:00,123 ",
        "[2024-05-01 12:00:00] ",
    ],
)
def test_a_topology_is_read_as_people_paste_it(tmp_path, before):
    text = (
        "SwitchName=spine Level=1 LinkSpeed=1 Nodes=g[1-4] Switches=r[1-2]\n\n"
        "SwitchName=r1 Level=0 LinkSpeed=1 Nodes=g[1-2]\nSwitchName=r2 Level=0 LinkSpeed=1 Nodes=g[3-4]\n"
    )
    pasted = "".join(f"{before}{line}".rstrip() + "\n" for line in text.splitlines())
    typed = f"me@login:~$ scontrol show topology\n{text}me@login:~$ \n"
    leaves = {"r1": ("g1", "g2"), "r2": ("g3", "g4")}
    for form in (pasted, typed, pasted.replace("\n", "\r\n"), "\ufeff" + text):
        (tmp_path / "t").write_text(form, encoding="utf-8", newline="")
        assert read_topology(tmp_path / "t").leaves == leaves


@pytest.mark.parametrize("repeated", ["[", "[a", "1", "<", "a=", "("])
def test_a_hostile_line_is_refused_in_linear_time(tmp_path: Path, repeated: str) -> None:
    (tmp_path / "t.conf").write_text(repeated * 40_000)
    began = time.process_time()
    assert error_of(tmp_path, "cluster read t.conf --nodes 2").startswith("error: FILE = 't.conf'")
    assert time.process_time() - began < 5  # once 30 s for brackets
