"""The free GPUs of a cluster, read from a JSON file or a scheduler's list of nodes.

    {"free": {"node0": "0-7", "node[1-3]": "0,2-3", "node4": [5, 6]},
     "nodes": "node[0-31]",                                 all nodes in physical order; else node0, node1, ...
     "leaves": {"leaf0": "node[0-15]", "leaf1": "node[16-31]"}, "oversubscription": 2,
     "wiring": "rails"}

`leaves`, `oversubscription` and `wiring` (tree, rails, pairs: Tier.wiring) may be left out. GPUs are numbered on
their node from 0. The output of `scontrol show nodes`, `sinfo` and `kubectl describe nodes` has them too, or their
number.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np

from phalanx.shared_cluster.topology.hostlist import compress, expand
from phalanx.shared_cluster.topology.reading import nodes_of, omissions
from phalanx.shared_cluster.topology.scheduled_nodes import free_of
from phalanx.spec.cluster.presets import resized
from phalanx.spec.cluster.spec import ClusterSpec, Wiring
from phalanx.spec.cluster.topology import Ints, Topology, of_cluster, of_leaves
from phalanx.spec.documents import read_json, read_text
from phalanx.spec.errors import InputError, nearest

_KEYS = ("free", "nodes", "leaves", "oversubscription", "wiring")


@dataclass(frozen=True, eq=False)
class FreeGpus:
    """A cluster with its topology and its free GPUs."""

    cluster: ClusterSpec
    topology: Topology
    free: Ints
    notes: tuple[str, ...] = ()
    """Lines on nodes that are left out, and why, and on assumptions about others."""
    unnumbered: tuple[str, ...] = ()
    """Nodes whose free GPUs are only counted, not numbered."""

    def require(self, ranks: int, wanted: str, remedy: str) -> None:
        """Require that there are as many free GPUs as `ranks`. `wanted`: who needs how many. Raises InputError."""
        if ranks > len(self.free):
            raise InputError("free", None, f"{len(self.free)} GPUs are free, but {wanted}", remedy)


def read(
    path: Path, cluster: ClusterSpec, leaves: Mapping[str, Sequence[str]] | None = None, partition: str | None = None
) -> FreeGpus:
    """Read a file of free GPUs of a cluster with the nodes of `cluster`.

    `leaves`: the nodes of each leaf switch, in place of the file's; `partition`: the only one whose nodes are used,
    in a scheduler's list. Raises InputError.
    """
    content, notes, unnumbered = _content(path, cluster, leaves, partition)
    if not isinstance(content, dict) or not isinstance(content.get("free"), dict):
        raise InputError("free", str(path), "has no table `free`", 'write {"free": {"node0": "0-7"}}')
    for key in content:
        if key not in _KEYS:
            raise InputError(f"free {key}", None, "no such field", nearest(key, _KEYS))
    if leaves is None and "leaves" in content:
        leaves = _leaves(content["leaves"])
    names = _names(content, cluster, leaves)
    if not names:
        raise InputError("free nodes", content.get("nodes"), "names no node", 'write "node[0-31]"')
    if len(set(names)) < len(names):
        twice = next(name for name, n in Counter(names).items() if n > 1)
        raise InputError("free nodes", twice, "is named twice")
    if leaves is not None:
        under = {name: i for i, hosts in enumerate(leaves.values()) for name in hosts}
        missing = next((name for name in names if name not in under), None)
        if missing is not None:
            raise InputError("free leaves", missing, "is under no leaf")
        over = content.get("oversubscription", 1.0)
        if not isinstance(over, int | float) or not 1 <= over <= 1e6:
            raise InputError("free oversubscription", over, "must be a number from 1 to 1,000,000")
        wiring = content.get("wiring", "tree")
        if wiring not in get_args(Wiring):
            raise InputError("free wiring", wiring, "is not a wiring", nearest(str(wiring), get_args(Wiring)))
        cluster, topology = of_leaves(cluster, names, [under[name] for name in names], float(over), wiring)
    elif wired := next((key for key in ("oversubscription", "wiring") if key in content), None):
        raise InputError(f"free {wired}", content[wired], "needs leaves", 'add "leaves": {"leaf0": "node[0-15]"}')
    else:
        cluster = resized(cluster, len(names))
        topology = of_cluster(cluster, names)
    index = {name: i for i, name in enumerate(topology.hosts)}
    free: set[int] = set()
    for hosts, gpus in content["free"].items():
        for host in expand(hosts, "free free"):
            if host not in index:
                reason = f"is not a node of the cluster, which has {len(index):,}"
                raise InputError("free free", host, reason, _remedy(host, index))
            free |= {index[host] * cluster.ranks_per_node + i for i in _indices(gpus, host, cluster.ranks_per_node)}
    return FreeGpus(cluster, topology, np.array(sorted(free), dtype=np.int64), notes, unnumbered)


def _content(
    path: Path, cluster: ClusterSpec, leaves: Mapping[str, Sequence[str]] | None, partition: str | None
) -> tuple[Any, tuple[str, ...], tuple[str, ...]]:
    """Return (table of a JSON file, or made of a scheduler's list of nodes, without nodes that are under none of the
    `leaves`; notes; nodes whose free GPUs are only counted). Raises InputError."""
    text = read_text(path, "free")
    nodes = nodes_of(text, path.name, partition)
    if not nodes and not text.lstrip().startswith(("{", "[")):
        reason = "is neither a table `free` in JSON nor a list of nodes with its header"
        remedy = "give what scontrol -d show nodes, sinfo or kubectl describe nodes prints"
        raise InputError("free", str(path), reason, f'write {{"free": {{"node0": "0-7"}}}}, or {remedy}')
    if not nodes:
        return read_json(path, "free"), (), ()
    notes = tuple(omissions(text))
    if leaves is not None:
        under = {name for hosts in leaves.values() for name in hosts}
        others = [node.name for node in nodes if node.name not in under]
        nodes = [node for node in nodes if node.name in under]
        if not nodes:
            reason = "lists no node that is under the topology's switches"
            raise InputError("free", path.name, reason, f"it lists {compress(others)[:200]}")
        if others:
            notes = (*notes, f"left out: {compress(others)}: under none of the topology's switches")
    size = cluster.ranks_per_node
    listed = free_of(nodes, path.name, size, alike=cluster.tiers[0].ranks >= size)
    names = {"nodes": ",".join(listed.nodes)} if leaves is None else {}
    return {"free": listed.free} | names, (*notes, *listed.notes), listed.unnumbered


def _remedy(host: str, known: Mapping[str, int]) -> str:
    hint = nearest(host, known) if len(known) < 10_000 else ""
    listing = 'list the nodes, as "nodes": "node[0-31]"'
    return f"{hint} Else {listing}" if hint.startswith("did") else listing


def _names(content: dict[str, Any], cluster: ClusterSpec, leaves: Mapping[str, Sequence[str]] | None) -> list[str]:
    if "nodes" in content:
        return expand(str(content["nodes"]), "free nodes")
    if leaves is not None:
        return [name for hosts in leaves.values() for name in hosts]
    return [f"node{i}" for i in range(cluster.nodes)]


def _leaves(table: Any) -> dict[str, list[str]]:
    if not isinstance(table, dict) or not table or not all(isinstance(hosts, str) for hosts in table.values()):
        raise InputError("free leaves", None, "is not a table of host lists", 'write {"leaf0": "node[0-15]"}')
    return {leaf: expand(hosts, "free leaves") for leaf, hosts in table.items()}


def _indices(gpus: Any, host: str, node: int) -> list[int]:
    """Parse GPU indices, given as a list or as text such as 0,2-3. Raises InputError."""
    if isinstance(gpus, str) and re.fullmatch(r"\s*[0-9]+(-[0-9]+)?\s*(,\s*[0-9]+(-[0-9]+)?\s*)*", gpus):
        # Numbers beyond any node are all the same: too large.
        bounds = [tuple(int(n.strip()[:9]) for n in part.split("-")) for part in gpus.split(",")]
        past = next((n for part in bounds for n in part if n >= node), None)
        indices = [past] if past is not None else sorted({i for a, *b in bounds for i in range(a, max([a, *b]) + 1)})
    elif isinstance(gpus, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in gpus):
        indices = gpus
    else:
        raise InputError(f"free free.{host}", gpus, "does not list GPUs", 'write "0-3" or [0, 1, 2, 3]')
    twice = next((i for i, n in Counter(indices).items() if n > 1), None)
    if twice is not None:
        raise InputError(f"free free.{host}", twice, "is listed twice")
    wrong = next((i for i in indices if not 0 <= i < node), None)
    if wrong is not None:
        raise InputError(f"free free.{host}", wrong, f"is not a GPU of a node, which has 0 to {node - 1}")
    return indices
