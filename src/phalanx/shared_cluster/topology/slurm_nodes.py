"""What `scontrol show nodes` says of each node: its GPUs, those that jobs have, and whether it takes jobs.

    NodeName=g1 ... Gres=gpu:h100:8(S:0-1) ... State=MIXED+PLANNED ...
    CfgTRES=cpu=224,gres/gpu=8   AllocTRES=cpu=56,gres/gpu=4
    GresUsed=gpu:h100:4(IDX:0-3)                                 with `scontrol -d`: which of them

States are named in scontrol(1) and joined by `+`; a `*` behind one is a node that does not respond.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from phalanx.shared_cluster.topology.hostlist import compress, require_host_name
from phalanx.spec.errors import InputError

_TAKES_JOBS = frozenset(("IDLE", "MIXED", "ALLOCATED", "COMPLETING", "PLANNED", "CLOUD", "DYNAMIC_NORM"))
_COUNT = re.compile(r"gpu(?::[\w.-]+)?:(\d{1,4})(?![\w.-])")
_USED = re.compile(r"gpu[^,(]*\(IDX:([\d,-]+)\)")
_MOST = 1024
"""GPUs of a node."""


@dataclass(frozen=True)
class SlurmNode:
    """A node as Slurm has it."""

    name: str
    state: str
    gpus: int
    used: int
    """GPUs that jobs have."""
    which: frozenset[int] | None
    """Their numbers; None: not said."""

    @property
    def takes_jobs(self) -> bool:
        """Whether it is neither drained, down, reserved nor silent."""
        return "*" not in self.state and {re.sub(r"\W", "", s) for s in self.state.split("+")} <= _TAKES_JOBS


def nodes_of(text: str, file: str) -> list[SlurmNode]:
    """Read the nodes that `scontrol show nodes` prints, each once. Raises InputError for a name that no host has."""
    nodes: dict[str, SlurmNode] = {}
    for record in re.split(r"^(?=NodeName=)", text, flags=re.M):
        if (name := re.match(r"NodeName=(\S+)", record)) and name[1] not in nodes:
            nodes[require_host_name(name[1], file)] = _node(name[1], record)
    return list(nodes.values())


def _node(name: str, record: str) -> SlurmNode:
    fields = {key: value for key, value in re.findall(r"(?:^|\s)([A-Za-z]+)=(\S*)", record)}
    gpus = sum(map(int, _COUNT.findall(fields.get("Gres", "")))) or _tres(fields.get("CfgTRES", ""))
    used, listed = _tres(fields.get("AllocTRES", "")), _USED.findall(fields.get("GresUsed", ""))
    which = frozenset(i for part in ",".join(listed).split(",") if part for i in _range(part))
    return SlurmNode(name, fields.get("State", "UNKNOWN"), gpus, used, which if len(which) == used else None)


def _tres(text: str) -> int:
    """Return the GPUs of a list of trackable resources: gres/gpu=8, or by type where there is no sum."""
    whole = re.search(r"(?:^|,)gres/gpu=(\d{1,4})", text)
    return int(whole[1]) if whole else sum(map(int, re.findall(r"(?:^|,)gres/gpu:[^=,]*=(\d{1,4})", text)))


def _range(part: str) -> range:
    first, _, last = part.partition("-")
    return range(int(first or 0), min(int(last or first or 0), _MOST) + 1)


def engaged(nodes: Sequence[SlurmNode]) -> Iterator[str]:
    """Yield in words which nodes take no jobs, and which have GPUs that jobs have."""
    groups: dict[str, list[str]] = {}
    for node in nodes:
        if not node.takes_jobs:
            groups.setdefault(f"takes no jobs (State={node.state})", []).append(node.name)
        elif node.used:
            groups.setdefault(f"jobs have {node.used} of {node.gpus} GPUs", []).append(node.name)
    for what, names in groups.items():
        yield f"{compress(names)}: {what}"


def free_of(nodes: Sequence[SlurmNode], file: str) -> tuple[dict[str, list[int]], list[str]]:
    """Return the free GPUs of each node that takes jobs, and what is left out in words. A node of which it is not
    said which GPUs jobs have is left out. Raises InputError where none is free."""
    free: dict[str, list[int]] = {}
    unsaid: list[str] = []
    for node in nodes:
        if not node.takes_jobs or node.used >= node.gpus:
            continue
        if node.which is None:
            unsaid.append(node.name)
        else:
            free[node.name] = [i for i in range(node.gpus) if i not in node.which]
    remedy = "print it with scontrol -d show nodes, whose GresUsed says it"
    said = [f"left out: {line}" for line in engaged([n for n in nodes if n.name not in (*free, *unsaid)])]
    if unsaid:
        said.append(f"left out: {compress(unsaid)}: which of their GPUs are free is not said: {remedy}")
    if not free:
        raise InputError("free", file, "has no node with GPUs that are free", "; ".join(said)[:300])
    return free, said
