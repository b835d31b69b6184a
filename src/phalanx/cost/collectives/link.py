"""The α (seconds per message) and β (seconds per byte, one direction, one rank) of a group's links."""

from __future__ import annotations

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
    """Return the link of the innermost tier that spans the axis's groups. Where ranks share an uplink, each gets a
    part of it: a ring leaves each host once, and all groups of the axis communicate at once."""
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


def _leaving(groups: Ranks, host: int) -> int:
    """Return the most groups that leave one host of `host` neighbouring ranks. `groups`: rank numbers, (groups,
    ranks)."""
    hosts = np.sort(groups // host, axis=1)
    first = np.diff(hosts, axis=1, prepend=-1) > 0  # of each host that a group is in
    crossing = hosts[:, :1] != hosts[:, -1:]
    return int(np.bincount(hosts[first & crossing], minlength=1).max())
