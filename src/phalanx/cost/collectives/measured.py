"""The time of a collective on a measured machine: the fastest fit for such a group, else the ring's formula.

A ring all-reduce of n bytes over p ranks takes 2(p-1) α + 2n(p-1)/p β; all-gather, reduce-scatter (Thakur et al.
2005) and a pairwise all-to-all take half of that. n counts the buffer, as Event.bytes does.
"""

import numpy as np

from phalanx.cost.collectives.link import Link, link, ring_link
from phalanx.cost.compute.unit_work import Column
from phalanx.spec.cluster.spec import ClusterSpec, CollectiveFit
from phalanx.spec.strategy.mesh import Mesh

_PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}


def ring_seconds(op: str, p: int, count: Column, total_bytes: Column, over: Link) -> Column:
    """Return seconds of `count` ring collectives with `total_bytes` in total over p ranks; 0 for one rank."""
    hops = _PASSES[op] * (p - 1)
    return hops * over.alpha_s * count + hops / p * over.beta_s_per_byte * total_bytes


def measured_fits(cluster: ClusterSpec, mesh: Mesh, op: str, axis: str) -> list[CollectiveFit]:
    """Return the fits measured for an operation over groups like an axis's; empty if none was measured."""
    if not any(fit.op == op for fit in cluster.collectives):
        return []
    hosts = mesh.hosts(axis, cluster.ranks_per_node)
    return cluster.fits(op, mesh.size(axis), hosts) if hosts else []


def seconds(cluster: ClusterSpec, mesh: Mesh, op: str, axis: str, count: Column, total_bytes: Column) -> Column:
    """Return seconds of `count` collectives along a mesh axis with `total_bytes` in total."""
    p = mesh.size(axis)
    fits = measured_fits(cluster, mesh, op, axis)
    if fits:
        size = total_bytes / np.maximum(count, 1)
        return count * np.minimum.reduce([fit.seconds(size) for fit in fits])
    over = link if op == "all_to_all" else ring_link  # pairs send through their own ports
    return ring_seconds(op, p, count, total_bytes, over(cluster, mesh, axis))
