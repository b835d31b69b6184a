"""Other strategies for the same job on the same free GPUs: the search, asked again for their shape.

The search knows clusters of equal nodes. So it is asked for nodes with as many GPUs as enough of the free blocks
have, and each of its best strategies is then placed and priced on the free GPUs themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from phalanx.plan.placement.price import PlacedJob
from phalanx.plan.placement.search import Placed, place
from phalanx.plan.search.column_pricing import Pricing
from phalanx.plan.search.planner import answer
from phalanx.spec.cluster.spec import ClusterSpec, Tier
from phalanx.spec.cluster.topology import Ints, Topology

KEPT = 12
"""Strategies of the search that are placed."""


@dataclass(frozen=True, eq=False)
class Alternative:
    """Another strategy, placed on the same free GPUs."""

    job: PlacedJob
    placed: Placed


def shape(cluster: ClusterSpec, topology: Topology, free: Ints, world: int) -> ClusterSpec:
    """Return a cluster of equal nodes with as many GPUs as each of the hosts that hold `world` has free."""
    counts = np.bincount(topology.host[free])
    size = int(max(n for n in set(counts.tolist()) if counts[counts >= n].sum() >= world))
    nodes, node = -(-world // size), cluster.ranks_per_node
    tiers: list[Tier] = []
    for tier in cluster.tiers:
        ranks = min(tier.ranks, size) if tier.ranks <= node else -(-tier.ranks // node) * size
        if not tiers or ranks > tiers[-1].ranks:
            tiers.append(replace(tier, ranks=ranks))
    tiers[-1] = replace(tiers[-1], ranks=max(tiers[-1].ranks, nodes * size))
    return replace(cluster, ranks_per_node=size, nodes=nodes, tiers=tuple(tiers))


def alternatives(job: PlacedJob, topology: Topology, free: Ints) -> list[Alternative]:
    """Return the best strategies for a job's model and batch on so many of these GPUs, the fastest as placed first.

    Raises InputError if no strategy is legal or fits.
    """
    world = job.strategy.world
    even = shape(job.cluster, topology, free, world)
    searched = answer(lambda _: Pricing(job.model, even, job.job, job.stack), world, keep=KEPT)
    others = [replace(job, strategy=ranked.strategy) for ranked in searched.ranked]
    placed = [Alternative(other, place(other, topology, free)) for other in _distinct(others)]
    return sorted(placed, key=lambda a: a.placed.seconds)


def _distinct(jobs: Sequence[PlacedJob]) -> list[PlacedJob]:
    """Strategies that differ in more than the order of their axes: the placement chooses that."""
    by_name = {str(replace(job.strategy, order="pp/dp/cp/tp")): job for job in reversed(jobs)}
    return list(by_name.values())
