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
    kind: str = ""
    """Which GPUs, in the scheduler's words; empty: not said."""
    partitions: frozenset[str] = frozenset()
    by_name: bool = False
    """Whether only its name, or its partitions', says that it has no GPUs."""
    remedy: str = "scontrol -d show nodes says it"
    """What says which GPUs jobs have."""

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


@dataclass(frozen=True)
class FreeCount:
    """GPUs of the nodes of one kind that take jobs and of which it is said how many are free."""

    kind: str
    nodes: int
    gpus: int
    free: int
    unsaid: tuple[str, ...]
    """More such nodes, of which that is not said."""


ALL = -1
"""GPUs that jobs have of a node that is full, where their number is not said."""
REMEDY = "sinfo -N -O NodeList:30,Gres:40,GresUsed:60,StateLong has them"
_UNSAID = "how many GPUs jobs have is not said"


def engaged(nodes: Sequence[ScheduledNode]) -> Iterator[str]:
    """Yield in words which nodes take no jobs, and which have GPUs that jobs have."""
    groups: dict[str, list[str]] = {}
    for node in nodes:
        if node.closed:
            groups.setdefault(f"takes no jobs ({node.closed})", []).append(node.name)
        elif node.used is None:
            groups.setdefault(_UNSAID, []).append(node.name)
        elif node.used:
            count = "all" if node.used == ALL else node.used
            of = "" if node.gpus is None else f" of {node.gpus}"
            groups.setdefault(f"jobs have {count}{of} GPUs", []).append(node.name)
    for what, names in groups.items():
        yield f"{compress(names)}: {what}"


def without_gpus(nodes: Sequence[ScheduledNode]) -> Iterator[str]:
    """Yield in words which nodes have no GPUs, so that no topology of GPUs has them."""
    for by_name, why in (
        (False, "have no GPUs: left out"),
        (True, "have no GPUs by their names: left out (assumed)"),
    ):
        if names := [node.name for node in nodes if node.gpus == 0 and node.by_name == by_name]:
            yield f"{compress(names)} {why if len(names) > 1 else why.replace('have', 'has').replace('their', 'its')}"


def of_partition(nodes: Sequence[ScheduledNode], partition: str | None, file: str) -> list[ScheduledNode]:
    """Return the nodes of a partition; None: all. Raises InputError for a partition that no node is of, and for all
    nodes of several partitions where it is not said which have GPUs."""
    named = sorted({name for node in nodes for name in node.partitions})
    if partition is None:
        unsaid = [node.partitions for node in nodes if node.gpus is None]
        if named and unsaid and not frozenset.intersection(*unsaid):
            reason = "lists nodes of several partitions, and not which of them have GPUs"
            remedy = f"name one with --partition: {', '.join(named)[:200]}; or give GRES, as {REMEDY}"
            raise InputError(file, None, reason, remedy)
        return list(nodes)
    if partition not in named:
        of = f"it has {', '.join(named)[:200]}" if named else f"it names none: {REMEDY}"
        raise InputError("partition", partition, f"is not a partition of {file}", of)
    return [node for node in nodes if partition in node.partitions]


def counts(nodes: Sequence[ScheduledNode], size: int | None = None) -> list[FreeCount]:
    """Count the GPUs of the nodes that take jobs, by kind. `size`: GPUs of a node where the list does not say; None:
    such nodes are not counted."""
    sized = [replace(node, gpus=size if node.gpus is None else node.gpus) for node in nodes if not node.closed]
    kinds: dict[str, list[ScheduledNode]] = {}
    for node in sized:
        if node.gpus:
            kinds.setdefault(node.kind, []).append(node)
    return [
        FreeCount(
            kind,
            sum(node.open is not None for node in own),
            sum(node.gpus or 0 for node in own if node.open is not None),
            sum(node.open or 0 for node in own),
            tuple(node.name for node in own if node.open is None),
        )
        for kind, own in kinds.items()
    ]


def sums(nodes: Sequence[ScheduledNode], size: int | None = None) -> Iterator[str]:
    """Yield in words how many GPUs are free of all that take jobs, and of which that is not said; as `counts`."""
    counted = counts(nodes, size)
    unsized = [node for node in nodes if node.gpus is None and not node.closed]
    free, gpus, hosts = (sum(getattr(c, name) for c in counted) for name in ("free", "gpus", "nodes"))
    if hosts:
        each = f" ({size} each assumed)" if unsized else ""
        kinds = ", ".join(f"{c.kind or 'others'} {c.free:,} of {c.gpus:,}" for c in counted)
        kinds = f" ({kinds})" if any(c.kind for c in counted) else ""
        where = f"{hosts:,} nodes that take jobs" if hosts > 1 else "1 node that takes jobs"
        yield f"free: {free:,} of {gpus:,} GPUs{each} on {where}{kinds}"
    if unsaid := [name for c in counted for name in c.unsaid]:
        remedy = next(node.remedy for node in nodes if node.name in unsaid)
        yield f"not in that sum: {compress(unsaid)}: {_UNSAID}: {remedy}"
    if unsized and size is None:
        idle = sum(node.used == 0 for node in unsized)
        yield (
            f"{idle:,} of {len(unsized):,} nodes that take jobs are idle; how many GPUs they have is not said: "
            f"--like names a preset with such nodes, or {REMEDY}"
        )


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
        remedy = next(node.remedy for node in nodes if node.name in unsaid)
        notes.append(f"left out: {compress(unsaid)}: which of their GPUs are free is not said: {remedy}")
    if counted:
        notes.append(f"assumed: {compress(counted)}: the last GPUs are free; how many is said, and not which")
    if assumed:
        other = 'a list with GRES does, or a table {"free": {"NODES": "0-3"}}'
        each = f"{size} GPUs each, {size * len(assumed):,} in all" if len(assumed) > 1 else f"{size} GPUs"
        have = "have" if len(assumed) > 1 else "has"
        what = f"{have} {each}: the list does not say, the plan's nodes have as many; {other}"
        if len({node.partitions for node in nodes}) > 1:
            named = ", ".join(sorted({name for node in nodes for name in node.partitions}))
            what += f"; --partition takes the nodes of one: {named}"
        notes.append(f"assumed: {compress(assumed)} {what}")
    notes += sums(nodes, size)
    if not free:
        raise InputError("free", file, "has no node with GPUs that are known to be free", "; ".join(notes)[:400])
    return FreeList(free, tuple(n.name for n in sized if n.gpus), tuple(notes), tuple(counted))
