"""How long a collective takes: measured α + β n where there is a fit, else the ring's formula.

Ring all-reduce of n bytes over p ranks: 2(p-1) α + 2n(p-1)/p β; all-gather and reduce-scatter half of that
(Thakur et al. 2005). n counts the buffer, as Event.bytes does.
"""

from __future__ import annotations

from phalanx.cost.kernel import Column
from phalanx.cost.link import Link, link
from phalanx.spec.cluster import ClusterSpec
from phalanx.spec.mesh import Mesh

_RING_PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}


def ring_seconds(op: str, p: int, count: Column, total_bytes: Column, over: Link) -> Column:
    """`count` collectives of `total_bytes` together, by ring over p ranks; 0 for a group of one."""
    passes = _RING_PASSES[op]
    steps = passes * (p - 1)
    return steps * over.alpha_s * count + passes * (p - 1) / p * over.beta_s_per_byte * total_bytes


def seconds(cluster: ClusterSpec, mesh: Mesh, op: str, axis: str, count: Column, total_bytes: Column) -> Column:
    """`count` collectives along a mesh axis with `total_bytes` together."""
    p = mesh.size(axis)
    fit = cluster.collective(op, p)
    if fit is not None:
        return count * fit.alpha_s + total_bytes * fit.beta_s_per_byte
    return ring_seconds(op, p, count, total_bytes, link(cluster, mesh, axis))
