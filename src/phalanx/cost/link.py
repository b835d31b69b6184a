"""What a group's links can do: α (seconds per message) and β (seconds per byte, one direction, one rank)."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.spec.cluster import ClusterSpec
from phalanx.spec.mesh import Mesh


@dataclass(frozen=True)
class Link:
    alpha_s: float
    beta_s_per_byte: float


def link(cluster: ClusterSpec, mesh: Mesh, axis: str) -> Link:
    """The link of the innermost tier that spans the axis's groups."""
    tier = mesh.tier(axis, cluster)
    return Link(tier.latency_s, 1 / tier.bandwidth_bytes_per_s_per_gpu_per_direction)
