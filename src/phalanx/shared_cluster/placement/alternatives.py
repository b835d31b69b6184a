"""Other strategies for the same job on the same free GPUs, from a search for nodes of that shape.

The search only knows clusters of equal nodes. It is given the largest node size that enough free hosts have, and each
of its best strategies is then placed and priced on the free GPUs themselves.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from phalanx.planning.placement import axis_groups
from phalanx.planning.search import HEADROOM
from phalanx.planning.search.planner import answer
from phalanx.shared_cluster.placement.price import PlacedJob
from phalanx.shared_cluster.placement.search import Carvings, Placed, place
from phalanx.spec.cluster.spec import ClusterSpec, Tier
from phalanx.spec.cluster.topology import Ints, Topology
from phalanx.spec.strategy.spec import Strategy

MOST_PLACED = 12
"""Number of the search's strategies that are placed."""


@dataclass(frozen=True, eq=False)
class PlacedAlternative:
    """Another strategy, placed on the same free GPUs."""

    job: PlacedJob
    placed: Placed


def shape(cluster: ClusterSpec, topology: Topology, free: Ints, world: int) -> ClusterSpec:
    """Return a cluster of equal nodes for `world` ranks; a node has the largest number of GPUs that enough hosts have
    free."""
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


def alternatives(
    job: PlacedJob, topology: Topology, free: Ints, carvings: Carvings | None = None
) -> list[PlacedAlternative]:
    """Return other strategies for a job's model and batch on as many of these GPUs as it has ranks, the fastest as
    placed first: the best of the search, and the best of each family. `carvings`: as for `place`.

    Raises InputError if no strategy is legal or fits.
    """
    world = job.strategy.world
    even = replace(job.question(shape(job.cluster, topology, free, world)), headroom=HEADROOM)
    searched = answer(lambda _: even, world, keep=MOST_PLACED)
    others = [
        replace(job, strategy=ranked.strategy, options=searched.pricing.extra)
        for ranked in (*searched.ranked, *searched.families)
    ]
    unordered = _without_order(job.strategy)
    carvings = {} if carvings is None else carvings
    placed = [
        PlacedAlternative(other, place(other, topology, free, carvings=carvings))
        for name, other in _distinct(others).items()
        if name != unordered
    ]
    return sorted(placed, key=lambda a: a.placed.seconds)


def gains(own: Placed, other: Placed) -> list[str]:
    """Name the axes of another strategy that use faster links than the same axes of the plan."""
    tiers = [tier.name for tier in own.placement.cluster.tiers]
    here = {row.axis: row.tier for row in axis_groups(own.placement)}
    return [
        f"{row.axis} stays on {row.tier}"
        for row in axis_groups(other.placement)
        if row.axis in here and tiers.index(row.tier) < tiers.index(here[row.axis])
    ]


def _distinct(jobs: Sequence[PlacedJob]) -> dict[str, PlacedJob]:
    """Return name -> job, without jobs that differ only in the order of axes, which the placement chooses, or in the
    blocks of chunks: a strategy without that list is priced with an even division, which is no real gain."""
    return {_without_order(job.strategy): job for job in reversed(jobs)}


def _without_order(s: Strategy) -> str:
    return str(replace(s, order="pp/dp/cp/tp", layers="auto"))
