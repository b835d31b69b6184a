"""The topology of a cluster from the output of any tool that is read, and the cluster that it describes."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from phalanx.shared_cluster.topology import gpus, ibnetdiscover, link_matrix, nccl_xml, scheduled_nodes, slurm
from phalanx.shared_cluster.topology.gpus import GpuTopology
from phalanx.shared_cluster.topology.hostlist import compress
from phalanx.shared_cluster.topology.kubernetes_nodes import is_kubectl, kubectl_nodes
from phalanx.shared_cluster.topology.scheduled_nodes import ScheduledNode
from phalanx.shared_cluster.topology.slurm_nodes import is_sinfo, scontrol_nodes, sinfo_nodes
from phalanx.spec.cluster.presets import preset
from phalanx.spec.cluster.spec import ClusterSpec
from phalanx.spec.cluster.topology import SwitchTree, of_leaves
from phalanx.spec.documents import read_text
from phalanx.spec.errors import InputError

_LARGEST = 2**24
"""Bytes of the largest file that is read."""
_DOCUMENT = re.compile(r"\s*(<\?xml[^>]*>\s*)?<!DOCTYPE", re.I)
_DUMP = re.compile(r"<system(?=[ >])")
"""The beginning of NCCL's dump."""
_TAG = re.compile(r"^[^<]*(?=<)")
_BEFORE = re.compile(
    r"\[[^][]*\]<\w+>: ?|(>|\d{1,9}:|\[[^][]*\]:?|(\d{4}-\d\d-\d\d )?\S{0,99}\d\d:\d\d:\d\d\S*)([ \t]|$)"
)
"""The beginning of a line in a log or a quotation: a rank of mpirun, `>`, a rank, a word in brackets or a time."""
_DEEPEST = 8
"""Of these, before one line."""
_TYPED = re.compile(r".{0,80}[$#%] ((sudo )?(scontrol|sinfo|nvidia-smi|rocm-smi|ibnetdiscover|cat)\b.*)?$")
"""A shell's prompt, alone or with one of these commands."""
_CUT = re.compile(r"\s*([\[(<]\s*)?(\.\.\.+|…|snip(ped)?|truncated)(\s*[\])>])?\s*", re.I)
"""A line in place of lines that were left out."""


def read_topology(path: Path, field: str = "FILE", partition: str | None = None) -> SwitchTree | GpuTopology:
    """Read a topology from the output of a scheduler, a fabric's tools or a host's; of a list of nodes, only a
    `partition`'s. `field` names the file in messages. Raises InputError."""
    text = read_text(path, field, _LARGEST)
    if dumps := _dumps(text, field, str(path)):
        if len(set(dumps)) > 1:
            raise InputError(field, str(path), f"holds {len(set(dumps))} dumps of NCCL's topology", "keep one host's")
        return nccl_xml.read_dump(dumps[0], path.name)
    text = _alone(text)
    if re.search(r"^\s*(SwitchName|BlockName)\s*=", text, re.MULTILINE | re.IGNORECASE):
        return slurm.read_topology(text, path.name)
    if re.search(r"^Switch: 0x", text, re.MULTILINE):
        return ibnetdiscover.read_links(text, path.name)[0]
    if re.search(r'^Switch\s+\d+\s+"S-', text, re.MULTILINE):
        return ibnetdiscover.read_topology(text, path.name)[0]
    if re.search(r"Link Type between two GPUs", text, re.IGNORECASE):
        return link_matrix.read_tables(text, path.name)
    if re.search(r"^\s*GPU0\b", text, re.MULTILINE):
        return link_matrix.read_matrix(text, path.name)
    if re.search(r"^\s*-\s+topology\s*:", text, re.MULTILINE):
        return slurm.read_yaml(text, path.name)
    if nodes := nodes_of(text, path.name, partition):
        with_gpus = [node for node in nodes if node.gpus != 0] or nodes
        return slurm.of_nodes([node.name for node in with_gpus], path.name)
    if listed := re.findall(r"^\s*GPU \d+: (.+?) \(UUID: ", text, re.MULTILINE):
        reason = f"lists {len(listed)} GPUs ({', '.join(sorted(set(listed)))}) and no links between them"
        remedy = f"nvidia-smi topo -m has them; a preset of that chip takes --gpus {len(listed)}"
        raise InputError(field, str(path), reason, remedy)
    kinds = (
        "Slurm's topology.conf, topology.yaml, scontrol show topology or nodes, sinfo; kubectl describe nodes; "
        "ibnetdiscover, iblinkinfo; nvidia-smi topo -m; rocm-smi --showtopo; NCCL_TOPO_DUMP_FILE"
    )
    raise InputError(field, str(path), "is not a topology that Phalanx reads", f"it reads {kinds}")


def nodes_of(text: str, file: str, partition: str | None = None) -> list[ScheduledNode]:
    """Return the nodes of a partition, or all, in the text of a scheduler's list; none if it is no such list. Raises
    InputError."""
    text = _alone(text)
    if re.search(r"^NodeName=", text, re.M):
        nodes = scontrol_nodes(text, file)
    elif is_kubectl(text):
        nodes = kubectl_nodes(text, file)
    else:
        nodes = sinfo_nodes(text, file) if is_sinfo(text) else []
    return scheduled_nodes.of_partition(nodes, partition, file) if nodes or partition else []


def nodes_and_notes(path: Path, partition: str | None) -> tuple[list[ScheduledNode], list[str]]:
    """Return the nodes of a partition, or all, in the file of a scheduler's list; and notes on lines that were left
    out of it, nodes without GPUs, nodes that take no jobs, and nodes with GPUs in use. Raises InputError."""
    text = read_text(path, "FILE", _LARGEST)
    nodes = nodes_of(text, path.name, partition)
    some = [node for node in nodes if node.gpus != 0] or nodes
    states = [f"{line}; the topology has it all the same" for line in scheduled_nodes.usage_lines(some)]
    left = list(scheduled_nodes.without_gpus(nodes)) if len(some) < len(nodes) else []
    if nodes and all(node.gpus == 0 and not node.by_name for node in nodes):
        why = "the scheduler knows no GPUs there, and gives none to jobs: Gres in slurm.conf and gres.conf, or the"
        left = [f"{compress([n.name for n in nodes])}: {why} device plugin of Kubernetes, name them; it is kept"]
    return nodes, [*omissions(text), *ibnetdiscover.notes(text), *left, *states]


def omissions(text: str) -> list[str]:
    """Return a note on each line of a text that marks lines left out there."""
    lines = enumerate(text.split("\n"), 1)
    return [
        f"line {number} is {line.strip()}: what it left out is not read" for number, line in lines if _is_cut(line)
    ]


def _is_cut(line: str) -> bool:
    return bool(_CUT.fullmatch(_BEFORE.sub("", line, count=1)) or _CUT.fullmatch(line))


def _dumps(text: str, field: str, path: str) -> list[str]:
    """Return NCCL's dumps in a text, with a line for each element, without a log's prefixes and without other lines
    between them. A text with a document type is returned whole, for `read_dump` to refuse. Raises InputError for a
    dump that is cut short."""
    if _DOCUMENT.match(text):
        return [text]
    parts = [part for part in _DUMP.split(text)[1:] if "<cpu" in part]
    if any("</system>" not in part for part in parts):
        raise InputError(field, path, "holds a dump of NCCL's topology without its end", "give all up to </system>")
    dumps = [f"<system{part.partition('</system>')[0]}</system>" for part in parts]
    return ["\n".join(_TAG.sub("", line) for line in dump.split("\n") if "<" in line) for dump in dumps]


def _alone(text: str) -> str:
    """Return a text without the command that printed it, and without the prefix that a log, a quotation or `srun -l`
    writes before each line."""
    lines = [line for line in text.split("\n") if not _TYPED.match(line) and not _is_cut(line)]
    for _ in range(_DEEPEST):
        filled = [line for line in lines if line.strip()]
        if not filled or not all(map(_BEFORE.match, filled)):
            break
        lines = [_BEFORE.sub("", line, count=1) for line in lines]
    return "\n".join(lines)


def leaves_of(path: Path) -> dict[str, tuple[str, ...]]:
    """Return leaf switch -> its hosts, from a file of a topology. Raises InputError."""
    tree = read_topology(path, "topology")
    if not isinstance(tree, SwitchTree):
        raise InputError("topology", str(path), "nvidia-smi knows one host, and no switches")
    return tree.leaves


def cluster_of(
    content: SwitchTree | GpuTopology,
    like: str | None,
    device: str | None,
    nodes: int,
    port_gbit: float | None,
    name: str,
) -> ClusterSpec:
    """Return the cluster of a topology. Of a tree of switches: with nodes of the preset `like`. Of a host: `nodes`
    such hosts, with GPUs of `device` and NICs of `port_gbit` Gb/s. Raises InputError."""
    if isinstance(content, GpuTopology):
        return gpus.cluster(content, device, nodes, port_gbit, name)
    if like is None:
        raise InputError("like", None, "is missing: switches do not say which nodes", "e.g. --like dgx-h100")
    hosts, sizes = content.hosts, [len(names) for names in content.leaves.values()]
    node = preset(like, len(hosts))
    trays = node.ranks_per_node // (tray := gpus.gpus_of_host(node))
    node_hosts = min(trays, *sizes)  # hosts of a node: of a rack, whose hosts are under one leaf
    if any(size % node_hosts for size in sizes):
        reason = (
            f"has racks of {trays} hosts with {tray} GPUs, and the leaves have {min(sizes)} to {max(sizes)} hosts"
        )
        remedy = (
            "give the leaves that have whole racks, or as many hosts of one: --partition, or a topology.conf of them"
        )
        raise InputError("like", like, reason, remedy)
    if node_hosts < trays:  # the links inside the part of a rack
        inside = replace(node.tiers[0], ranks=node_hosts * tray)
        node = replace(node, ranks_per_node=node_hosts * tray, tiers=(inside, *node.tiers[1:]))
    leaf = [i for i, size in enumerate(sizes) for _ in range(size // node_hosts)]
    return of_leaves(node, [f"node{i}" for i in range(len(leaf))], leaf, content.oversubscription)[0]


def summary(content: SwitchTree | GpuTopology, device: str | None = None, nodes: int = 1) -> Iterator[str]:
    """Yield the lines of a topology's summary, with what a cluster of `nodes` such hosts assumes."""
    if isinstance(content, GpuTopology):
        kinds = sorted({link for row in content.links for link in row} - {"X"})
        kinds = ["XGMI" if content.link == "xgmi" and kind.startswith("NV") else kind for kind in kinds]
        yield f"a host of {len(content.links)} GPUs, which reach each other by {', '.join(kinds) or 'nothing'}"
        yield from gpus.tier_lines(content, device)
        yield from gpus.apart_lines(content)
        yield from gpus.nic_lines(content)
        yield from gpus.assumptions(content, device, nodes)
        return
    if not content.stated:
        yield f"{len(content.hosts)} host{'s' if len(content.hosts) > 1 else ''}: {compress(content.hosts)}"
        yield "missing: the switches that they are under, which this list does not say; assumed: one leaf over all"
        return
    sizes = sorted(len(hosts) for hosts in content.leaves.values())
    each = f"{sizes[0]} to {sizes[-1]} hosts" if sizes[0] < sizes[-1] else f"{sizes[0]} hosts each"
    yield f"{sum(sizes)} hosts under {len(sizes)} leaf switch{'es' if len(sizes) > 1 else ''} of {each}"
    if content.oversubscription > 1:
        yield f"{content.oversubscription:.2f} times as much to hosts as to other switches, at the fullest leaf"
    for leaf, hosts in content.leaves.items():
        yield f"{leaf}: {compress(hosts)}"
