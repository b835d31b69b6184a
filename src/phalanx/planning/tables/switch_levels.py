"""Capacity of each level of a cluster's switches: the bisection, and the demand of the level below. The bisection of
a level that joins n ranks is the rate at which one half of them can send to the other, in one direction: n/2 times
the rate of a rank, or half of the uplinks where blocks of the level below share them. A fat tree without
oversubscription, a node's NVSwitch and rails (a plane of switches for each GPU of a node) have the first; a tree with
fewer uplinks, and groups of a dragonfly with fewer global links, the second.
"""

from phalanx.planning.tables.table import Sheet, columns
from phalanx.spec.cluster.spec import ClusterSpec


def sheet(cluster: ClusterSpec) -> Sheet:
    """Tabulate the levels of a cluster, innermost first."""
    rows, below = [], 1
    for tier in cluster.tiers:
        rate = tier.bandwidth_bytes_per_s_per_gpu_per_direction
        shared = tier.uplink_bandwidth_bytes_per_s_per_direction
        blocks = tier.ranks // below
        asked = tier.ranks * rate
        carried = asked if shared is None else min(asked, blocks * shared)
        rows.append((tier.name, blocks, tier.ranks, rate, carried, carried / 2, asked / carried))
        below = tier.ranks
    return Sheet(
        f"levels of {cluster.name}, in one direction",
        columns(
            "level | blocks [count] | ranks [count] | a rank [rate] | all uplinks [rate] | bisection [rate] "
            "| oversubscribed [count]"
        ),
        rows,
        "blocks: of the level below that this one joins; all uplinks: what their ranks can send into it together; "
        "oversubscribed: what they could ask for, over that",
    )
