"""The nodes of a cluster as its scheduler lists them: their GPUs, how many jobs have, whether they take any.

Read from `scontrol show nodes`, `sinfo` in any of its formats, and `kubectl describe nodes`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from phalanx.shared_cluster.topology.hostlist import compress
from phalanx.spec.errors import InputError


@dataclass(frozen=True)
class ScheduledNode:
    """A node as its scheduler has it."""

    name: str
    closed: str
    """Why it takes no jobs, in the scheduler's words; empty if it takes some."""
    gpus: int | None
    """None: not said."""
    used: int | None
    """GPUs that jobs have; None: not said."""
    which: frozenset[int] | None = None
    """Their numbers; None: not said."""

    @property
    def open(self) -> int | None:
        """GPUs that a job could have; None: not said."""
        if self.closed or self.used == ALL:
            return 0
        return None if self.gpus is None or self.used is None else max(self.gpus - self.used, 0)


@dataclass(frozen=True)
class FreeList:
    """The free GPUs of a scheduler's nodes."""

    free: dict[str, list[int]]
    """By node, their numbers."""
    nodes: tuple[str, ...]
    """All nodes that have GPUs, in the order of the list."""
    notes: tuple[str, ...]
    """What is left out or assumed."""
    unnumbered: tuple[str, ...]
    """Nodes of which the number of free GPUs is known, and not which."""


ALL = -1
"""GPUs that jobs have of a node that is full, where their number is not said."""


def engaged(nodes: Sequence[ScheduledNode]) -> Iterator[str]:
    """Yield in words which nodes take no jobs, and which have GPUs that jobs have."""
    groups: dict[str, list[str]] = {}
    for node in nodes:
        if node.closed:
            groups.setdefault(f"takes no jobs ({node.closed})", []).append(node.name)
        elif node.used is None:
            groups.setdefault("jobs have some GPUs, and how many is not said", []).append(node.name)
        elif node.used:
            count = "all" if node.used == ALL else node.used
            of = "" if node.gpus is None else f" of {node.gpus}"
            groups.setdefault(f"jobs have {count}{of} GPUs", []).append(node.name)
    for what, names in groups.items():
        yield f"{compress(names)}: {what}"


def free_of(nodes: Sequence[ScheduledNode], file: str, size: int, alike: bool) -> FreeList:
    """Return the free GPUs of the nodes that take jobs. `size`: GPUs of a node where the list does not say; `alike`:
    whether all GPUs of a node reach each other alike, so that their number is enough. Raises InputError where none is
    free."""
    sized = [node if node.gpus is not None else replace(node, gpus=size) for node in nodes]
    assumed = [node.name for node, own in zip(nodes, sized, strict=True) if node.gpus is None and own.open]
    free: dict[str, list[int]] = {}
    counted: list[str] = []
    for node in sized:
        if node.open and node.gpus and (node.which is not None or not node.used):
            free[node.name] = [i for i in range(node.gpus) if i not in (node.which or ())]
        elif node.open and node.gpus and alike:
            free[node.name] = list(range(node.gpus - node.open, node.gpus))
            counted.append(node.name)
    unsaid = [node.name for node in sized if node.name not in free and node.gpus and node.open != 0]
    notes = [f"left out: {line}" for line in engaged([n for n in sized if n.name not in (*free, *unsaid)])]
    if unsaid:
        remedy = "scontrol -d show nodes says it"
        notes.append(f"left out: {compress(unsaid)}: which of their GPUs are free is not said: {remedy}")
    if counted:
        notes.append(f"assumed: {compress(counted)}: the last GPUs are free; how many is said, and not which")
    if assumed:
        other = 'a list with GRES does, or a table {"free": {"NODES": "0-3"}}'
        what = f"{_have(len(assumed))} {size} GPUs: the list does not say, the plan's nodes have as many; {other}"
        notes.append(f"assumed: {compress(assumed)} {what}")
    if not free:
        raise InputError("free", file, "has no node with GPUs that are known to be free", "; ".join(notes)[:400])
    return FreeList(free, tuple(n.name for n in sized if n.gpus), tuple(notes), tuple(counted))


def _have(nodes: int) -> str:
    return "has" if nodes == 1 else "have"
