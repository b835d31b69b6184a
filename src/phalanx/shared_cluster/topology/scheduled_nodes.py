"""The nodes of a cluster as its scheduler lists them: their GPUs, the GPUs in use, and whether they take jobs.

Read from `scontrol show nodes`, `sinfo` in any of its formats, and `kubectl describe nodes`.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from phalanx.shared_cluster.topology.hostlist import compress
from phalanx.spec.errors import InputError


@dataclass(frozen=True)
class ScheduledNode:
    """A node in a scheduler's list."""

    name: str
    closed: str
    """Why it takes no jobs, in the scheduler's words; empty: it takes jobs."""
    gpus: int | None
    """None: not in the list."""
    used: int | None
    """GPUs in use by jobs, or UNKNOWN_COUNT; None: not in the list."""
    which: frozenset[int] | None = None
    """Numbers of the GPUs in use; None: not in the list."""
    kind: str = ""
    """Kind of its GPUs, in the scheduler's words; empty: not in the list."""
    partitions: frozenset[str] = frozenset()
    by_name: bool = False
    """Whether only its name, or its partitions', says that it has no GPUs."""
    remedy: str = "scontrol -d show nodes says it"
    """How to list the GPUs in use."""

    @property
    def open(self) -> int | None:
        """GPUs that a job could get; None: the list does not say."""
        if self.closed or self.used == UNKNOWN_COUNT:
            return 0
        return None if self.gpus is None or self.used is None else max(self.gpus - self.used, 0)


@dataclass(frozen=True)
class FreeList:
    """The free GPUs of a scheduler's nodes."""

    free: dict[str, list[int]]
    """Node -> numbers of its free GPUs."""
    nodes: tuple[str, ...]
    """All nodes with GPUs, in the order of the list."""
    notes: tuple[str, ...]
    """Omissions and assumptions."""
    unnumbered: tuple[str, ...]
    """Nodes of which the list says how many GPUs are free, and not which."""


@dataclass(frozen=True)
class FreeCount:
    """GPUs of the open nodes with one kind of GPU, counted where the list says how many are free."""

    kind: str
    nodes: int
    gpus: int
    free: int
    unsaid: tuple[str, ...]
    """The other such nodes: the list does not say how many of their GPUs are free."""


UNKNOWN_COUNT = -1
"""`used` of a full node whose number of GPUs is not in the list."""
REMEDY = "sinfo -N -O NodeList:30,Gres:40,GresUsed:60,StateLong has them"
_GPU_PARTITION = re.compile(r"gpu|[dh]gx|(?:^|[^a-z])g?[abhlv]\d00?s?(?![a-z\d])", re.I)
"""The name of a partition with GPUs."""
_UNSAID = "how many GPUs jobs have is not said"


def usage_lines(nodes: Sequence[ScheduledNode]) -> Iterator[str]:
    """Yield lines on the nodes that take no jobs, and on the nodes with GPUs in use."""
    groups: dict[str, list[str]] = {}
    for node in nodes:
        if node.closed:
            groups.setdefault(f"takes no jobs ({node.closed})", []).append(node.name)
        elif node.used is None:
            groups.setdefault(_UNSAID, []).append(node.name)
        elif node.used:
            count = "all" if node.used == UNKNOWN_COUNT else node.used
            total = "" if node.gpus is None else f" of {node.gpus}"
            groups.setdefault(f"jobs have {count}{total} GPUs", []).append(node.name)
    for what, names in groups.items():
        yield f"{compress(names)}: {what}"


def without_gpus(nodes: Sequence[ScheduledNode]) -> Iterator[str]:
    """Yield lines on the nodes without GPUs, which a topology of GPUs leaves out."""
    for by_name, why in (
        (False, "have no GPUs: left out"),
        (True, "have no GPUs by their names: left out (assumed)"),
    ):
        if names := [node.name for node in nodes if node.gpus == 0 and node.by_name == by_name]:
            yield f"{compress(names)} {why if len(names) > 1 else why.replace('have', 'has').replace('their', 'its')}"


def _without(node: ScheduledNode) -> ScheduledNode:
    return replace(node, gpus=0, by_name=True)


def of_partition(nodes: Sequence[ScheduledNode], partition: str | None, file: str) -> list[ScheduledNode]:
    """Return the nodes of a partition; None: all, of which nodes of partitions named for GPUs alone have some, where
    the list does not say. Raises InputError for a partition without nodes, and for None where the list has several
    partitions and nothing says which nodes have GPUs."""
    named = sorted({name for node in nodes for name in node.partitions})
    if partition is None:
        unsaid = [node.partitions for node in nodes if node.gpus is None]
        if named and unsaid and not frozenset.intersection(*unsaid):
            if of_gpus := frozenset(name for name in named if _GPU_PARTITION.search(name)):
                return [n if n.gpus is not None or n.partitions & of_gpus else _without(n) for n in nodes]
            reason = "lists nodes of several partitions, and not which of them have GPUs"
            remedy = f"name one with --partition: {', '.join(named)[:200]}; or give GRES, as {REMEDY}"
            raise InputError(file, None, reason, remedy)
        return list(nodes)
    if partition not in named:
        remedy = f"it has {', '.join(named)[:200]}" if named else f"it names none: {REMEDY}"
        raise InputError("partition", partition, f"is not a partition of {file}", remedy)
    return [node for node in nodes if partition in node.partitions]


def counts(nodes: Sequence[ScheduledNode], size: int | None = None) -> list[FreeCount]:
    """Count the GPUs of open nodes, by kind. `size`: GPUs of a node where the list does not say; None: such nodes are
    not counted."""
    sized = [replace(node, gpus=size if node.gpus is None else node.gpus) for node in nodes if not node.closed]
    kinds: dict[str, list[ScheduledNode]] = {}
    for node in sized:
        if node.gpus:
            kinds.setdefault(node.kind, []).append(node)
    return [
        FreeCount(
            kind,
            sum(node.open is not None for node in group),
            sum(node.gpus or 0 for node in group if node.open is not None),
            sum(node.open or 0 for node in group),
            tuple(node.name for node in group if node.open is None),
        )
        for kind, group in kinds.items()
    ]


def sums(nodes: Sequence[ScheduledNode], size: int | None = None) -> Iterator[str]:
    """Yield lines on how many GPUs of open nodes are free, and on the nodes whose free GPUs are unknown. `size`: as
    in `counts`."""
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
    """Return the free GPUs of open nodes. `size`: GPUs of a node where the list does not say; `alike`: whether all
    pairs of GPUs of a node have equal links, so that any free ones will do. Raises InputError if none is known to be
    free."""
    sized = [node if node.gpus is not None else replace(node, gpus=size) for node in nodes]
    assumed = [n.name for n, with_size in zip(nodes, sized, strict=True) if n.gpus is None and with_size.open]
    free: dict[str, list[int]] = {}
    counted: list[str] = []
    for node in sized:
        if node.open and node.gpus and (node.which is not None or not node.used):
            free[node.name] = [i for i in range(node.gpus) if i not in (node.which or ())]
        elif node.open and node.gpus and alike:
            free[node.name] = list(range(node.gpus - node.open, node.gpus))
            counted.append(node.name)
    unsaid = [node.name for node in sized if node.name not in free and node.gpus and node.open != 0]
    notes = [f"left out: {line}" for line in usage_lines([n for n in sized if n.name not in (*free, *unsaid)])]
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
