"""The topology of a cluster: the host, and the block of each tier of links, of every GPU.

A ClusterSpec has the speed of each tier, and equal blocks. A Topology has the blocks of a real cluster: hosts with
names, hosts of unequal size, leaf switches with unequal numbers of hosts. GPUs are numbered from 0, host by host.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from phalanx.spec.cluster.spec import ClusterSpec, Wiring

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SwitchTree:
    """Leaf switches with their hosts, and the switches above them, as schedulers and fabrics list them."""

    leaves: dict[str, tuple[str, ...]]
    """Hosts of each leaf switch."""
    above: dict[str, tuple[str, ...]]
    """Switches below each other switch."""
    oversubscription: float = 1.0
    """A leaf's links to hosts over its links to other switches."""
    stated: bool = True
    """Whether the switches were listed; else one is assumed over all hosts."""

    @property
    def hosts(self) -> list[str]:
        """All hosts, leaf by leaf."""
        return [host for hosts in self.leaves.values() for host in hosts]


@dataclass(frozen=True, eq=False)
class Topology:
    """GPUs by host and by block of each tier of `ClusterSpec.tiers`, the innermost first."""

    hosts: tuple[str, ...]
    """Names of the hosts."""
    host: Ints
    """Host of each GPU, (gpus,)."""
    index: Ints
    """Index of each GPU on its host, (gpus,)."""
    blocks: Ints
    """Block of each GPU at each tier, (tiers, gpus); the block of a tier contains the blocks of the tier below."""

    @property
    def gpus(self) -> int:
        """GPUs of all hosts."""
        return len(self.host)

    @cached_property
    def first(self) -> Ints:
        """The first GPU of each host, (hosts,)."""
        return np.searchsorted(self.host, np.arange(len(self.hosts)))


def of_cluster(cluster: ClusterSpec, names: Sequence[str] = ()) -> Topology:
    """Return the topology of a cluster of equal hosts, named `names`, by default node0, node1, ..."""
    gpus = np.arange(cluster.ranks, dtype=np.int64)
    return Topology(
        tuple(names) or tuple(f"node{i}" for i in range(cluster.nodes)),
        gpus // cluster.ranks_per_node,
        gpus % cluster.ranks_per_node,
        np.stack([gpus // tier.ranks for tier in cluster.tiers]),
    )


def of_leaves(
    cluster: ClusterSpec,
    names: Sequence[str],
    leaf: Sequence[int],
    oversubscription: float = 1.0,
    wiring: Wiring = "tree",
) -> tuple[ClusterSpec, Topology]:
    """Return a cluster of equal hosts under leaf switches, host i under leaf[i], and its topology.

    The tier of `cluster` that holds a leaf's hosts becomes that of a leaf; above it comes a tier `spine` of the
    outermost links, which a leaf's GPUs share: one link for `oversubscription` of them. The ClusterSpec has one host
    for each name. `wiring`: "rails" of the leaves, which are then a switch for each GPU index; "pairs" of the spine,
    whose leaves are then the groups of a dragonfly.
    """
    node = cluster.ranks_per_node
    leaves = np.asarray(leaf, dtype=np.int64)
    largest = int(np.bincount(leaves).max()) * node
    network = next((t for t in cluster.tiers if t.ranks >= largest), cluster.tiers[-1])
    rate = network.bandwidth_bytes_per_s_per_gpu_per_direction
    inner = [t for t in cluster.tiers[: cluster.tiers.index(network)] if t.ranks < largest]
    above = cluster.tiers[-1]  # of a cluster that `cluster read` wrote, the spine already
    spine = replace(
        above,
        name="spine",
        ranks=max(len(names) * node, largest),
        uplink_bandwidth_bytes_per_s_per_direction=rate * largest / oversubscription
        if oversubscription > 1 or wiring == "pairs"
        else None
        if above is network
        else above.uplink_bandwidth_bytes_per_s_per_direction,
        wiring="pairs" if wiring == "pairs" else "tree",
    )
    tiers = (*inner, replace(network, ranks=largest, wiring="rails" if wiring == "rails" else "tree"), spine)
    described = replace(cluster, nodes=len(names), tiers=tiers)
    gpus = np.arange(len(names) * node, dtype=np.int64)
    blocks = [gpus // tier.ranks for tier in inner] + [leaves[gpus // node], np.zeros_like(gpus)]
    return described, Topology(tuple(names), gpus // node, gpus % node, np.stack(blocks))
