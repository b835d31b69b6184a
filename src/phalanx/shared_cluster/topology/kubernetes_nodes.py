"""The nodes of `kubectl describe nodes`: the GPUs that the device plugin offers, the GPUs that pods request, and
whether the scheduler places pods there.

    Name:               gpu-1
    Taints:             node.kubernetes.io/unschedulable:NoSchedule
    Unschedulable:      true
    Conditions:         ... Ready  True ...
    Allocatable:        ... nvidia.com/gpu:  8
    Allocated resources:
      nvidia.com/gpu     4            4

A node's own taints (node.kubernetes.io/) close it; others, such as nvidia.com/gpu, are tolerated by the pods of GPUs.
The output does not say which GPUs of a node are in use: only the device plugin knows.
"""

import re

from phalanx.shared_cluster.topology.hostlist import require_host_name
from phalanx.shared_cluster.topology.scheduled_nodes import ScheduledNode

_RECORD = re.compile(r"^(?=Name:\s+\S)", re.M)
_SECTION = r"^{}:\s*\n((?:[ \t]+.*\n?)*)"
_GPUS = re.compile(r"^\s+[\w.-]+/gpu:\s+(\d{1,4})\s*$", re.M)
_GPU_REQUEST = re.compile(r"^\s+[\w.-]+/gpu\s+(\d{1,4})\b", re.M)
_NOT_READY = re.compile(r"^\s+Ready\s+(False|Unknown)\b", re.M)
_PRODUCT = re.compile(r"^\s+nvidia\.com/gpu\.product=(\S+)", re.M)
_REMEDY = "give all that kubectl describe nodes prints: Allocated resources says it"
_TAINT = re.compile(r"\bnode\.kubernetes\.io/([\w-]+)\S*:No(?:Schedule|Execute)")


def is_kubectl(text: str) -> bool:
    """Whether a text is the output of `kubectl describe nodes`."""
    return bool(re.search(r"^Allocatable:", text, re.M) and _RECORD.search(text))


def kubectl_nodes(text: str, file: str) -> list[ScheduledNode]:
    """Read the nodes of `kubectl describe nodes`, each once. Raises InputError for a name that no host can have."""
    nodes: dict[str, ScheduledNode] = {}
    for record in _RECORD.split(text):
        name = re.match(r"Name:\s+(\S+)", record)
        if name and "Allocatable:" in record:
            nodes.setdefault(require_host_name(name[1], file), _node(name[1], record))
    return list(nodes.values())


def _node(name: str, record: str) -> ScheduledNode:
    gpus, asked = _GPUS.findall(_section("Allocatable", record)), _section("Allocated resources", record)
    used = sum(map(int, _GPU_REQUEST.findall(asked))) if _GPU_REQUEST.search(asked) else None if gpus else 0
    product = _PRODUCT.search(_section("Labels", record.replace("Labels: ", "Labels:\n ", 1)))
    kind = product[1] if product else ""
    return ScheduledNode(name, _closed_reason(record), sum(map(int, gpus)), used, kind=kind, remedy=_REMEDY)


def _section(title: str, record: str) -> str:
    section = re.search(_SECTION.format(title), record, re.M)
    return section[1] if section else ""


def _closed_reason(record: str) -> str:
    if re.search(r"^Unschedulable:\s+true", record, re.M):
        return "Unschedulable"
    if _NOT_READY.search(_section("Conditions", record)):
        return "not Ready"
    taint = _TAINT.search(record)
    return f"taint {taint[1]}" if taint else ""
