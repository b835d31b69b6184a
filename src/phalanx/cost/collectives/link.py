"""The α (seconds per message) and β (seconds per byte, one direction, one rank) of a group's links.

A message crosses one link, so `link` has the rate of one port. NCCL's ring consists of several parallel rings: the r
ranks of a group in a node leave it through r ports, each with its part of the buffer. So `ring_link` has r times the
port's rate, at most the rate inside the node; and of the p - 1 hops of a chunk only one out of each node takes the
network's latency.
"""

from dataclasses import dataclass

import numpy as np

from phalanx.spec.cluster.spec import ClusterSpec
from phalanx.spec.strategy.mesh import Mesh, Ranks


@dataclass(frozen=True)
class Link:
    """Latency and inverse bandwidth of a link."""

    alpha_s: float
    beta_s_per_byte: float


def link(cluster: ClusterSpec, mesh: Mesh, axis: str) -> Link:
    """Return the link of the innermost tier that spans the axis's groups. If ranks share an uplink, each gets a part
    of it: a ring leaves each host once, and all groups of the axis communicate at once."""
    tier = mesh.tier(axis, cluster)
    beta = 1 / tier.bandwidth_bytes_per_s_per_gpu_per_direction
    below = 1  # ranks that share an uplink to a tier
    for t in cluster.tiers:
        uplink = t.uplink_bandwidth_bytes_per_s_per_direction
        if uplink is not None:
            beta = max(beta, _leaving(mesh.groups(axis), below) / uplink)
        if t is tier:
            break
        below = t.ranks
    return Link(tier.latency_s, beta)


def ring_link(cluster: ClusterSpec, mesh: Mesh, axis: str) -> Link:
    """Return the mean link of a hop in ring collectives over the axis's groups: on GPUs over the ports of all ranks
    that a group has in a node, as NCCL builds rings between nodes; elsewhere as `link`."""
    over = link(cluster, mesh, axis)
    outermost = mesh.tier(axis, cluster)
    if cluster.device.kind != "cuda" or outermost.ranks <= cluster.ranks_per_node:
        return over
    p, groups = mesh.size(axis), np.sort(mesh.groups(axis), axis=1)
    inside = [tier for tier in cluster.tiers if tier.ranks <= cluster.ranks_per_node]
    node = inside[-1].ranks if inside else 1
    blocks, members = _blocks(groups, node)
    beta = 1 / inside[-1].bandwidth_bytes_per_s_per_gpu_per_direction if inside and members > 1 else 0.0
    hops = min(blocks, p - 1)  # between nodes, of the slowest chunk
    alpha = (p - 1 - hops) * inside[-1].latency_s if inside else 0.0
    outer = cluster.tiers[len(inside) :]
    for below, tier in zip((node, *(t.ranks for t in outer)), outer, strict=False):
        beta = max(beta, 1 / (members * tier.bandwidth_bytes_per_s_per_gpu_per_direction))
        uplink = tier.uplink_bandwidth_bytes_per_s_per_direction
        if uplink is not None:
            beta = max(beta, _leaving(groups, below) / uplink)
        blocks, members = _blocks(groups, tier.ranks)
        further = 0 if tier is outermost else min(blocks, p - 1)
        alpha += (hops - further) * tier.latency_s
        hops = further
        if tier is outermost:
            break
    return Link(alpha / (p - 1), beta)


def _blocks(groups: Ranks, size: int) -> tuple[int, int]:
    """Return the most blocks of `size` neighbouring ranks that a group spans, and the fewest ranks that a group has
    in a block. `groups`: rank numbers, ascending, (groups, ranks)."""
    first = np.diff(groups // size, axis=1, prepend=-1) > 0  # of each block that a group is in
    starts = np.append(np.flatnonzero(first), groups.size)
    return int(first.sum(axis=1).max()), int(np.diff(starts).min())


def _leaving(groups: Ranks, host: int) -> int:
    """Return the most groups that leave one host of `host` neighbouring ranks. `groups`: rank numbers, (groups,
    ranks)."""
    hosts = np.sort(groups // host, axis=1)
    first = np.diff(hosts, axis=1, prepend=-1) > 0  # of each host that a group is in
    crossing = hosts[:, :1] != hosts[:, -1:]
    return int(np.bincount(hosts[first & crossing], minlength=1).max())
