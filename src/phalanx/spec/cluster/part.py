"""The part of a cluster that a job has: the cluster that its ranks see when they take these GPUs in order.

A job with 4 of the 8 GPUs of each node sees nodes of 4 that share the node's uplink; one with a node of each rack
sees no rack, and leaves its nodes through the uplink of node or rack, whichever is narrower. What was measured
between nodes with all ranks of a node at work is not kept for a job that has fewer: its links have less to carry.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from phalanx.spec.cluster.spec import ClusterSpec, Tier
from phalanx.spec.errors import InputError


def subcluster(cluster: ClusterSpec, gpus: Sequence[int]) -> ClusterSpec:
    """Return the cluster of some GPUs, in the order of ranks. Raises InputError unless they fill the blocks of each
    tier that they are in equally, block by block."""
    numbers = np.array(gpus, dtype=np.int64)
    if not len(numbers) or numbers.min() < 0 or numbers.max() >= cluster.ranks or len(set(gpus)) < len(gpus):
        raise InputError("gpus", ranges(gpus), f"are not different GPUs of the {cluster.ranks} of {cluster.name}")
    tiers: list[Tier] = []
    narrowest, below, size = np.inf, 1, 1
    for tier in cluster.tiers:
        size = _in_a_block(numbers, tier)
        uplink = tier.uplink_bandwidth_bytes_per_s_per_direction
        narrowest = min(narrowest, np.inf if uplink is None else uplink)
        if size > below or tier is cluster.tiers[-1]:
            shared = None if np.isinf(narrowest) else float(narrowest)
            tiers.append(replace(tier, ranks=size, uplink_bandwidth_bytes_per_s_per_direction=shared))
            narrowest, below = np.inf, size
        if size == len(numbers):
            break
    node = len(numbers) // len(set((numbers // cluster.ranks_per_node).tolist()))
    fits = tuple(fit for fit in cluster.collectives if fit.hosts == 1 or node == cluster.ranks_per_node)
    nodes = len(numbers) // node
    return replace(cluster, ranks_per_node=node, nodes=nodes, tiers=tuple(tiers), collectives=fits)


def _in_a_block(gpus: np.ndarray, tier: Tier) -> int:
    """Return the ranks that each block of a tier holds; they are neighbours."""
    block = gpus // tier.ranks
    starts = np.flatnonzero(np.diff(block, prepend=-1) != 0)
    sizes = np.diff(np.append(starts, len(gpus)))
    if len(set(sizes.tolist())) > 1 or len(starts) > len(set(block.tolist())):
        reason = (
            f"take {', '.join(map(str, sizes[:4]))}{', ...' * (len(sizes) > 4)} neighbours of blocks of {tier.name}"
        )
        raise InputError("gpus", ranges(gpus.tolist()), reason, "take as many of each block, one after the other")
    return int(sizes[0])


def ranges(numbers: Sequence[int]) -> str:
    """Write ascending numbers with runs joined: 0-3,6; more than four runs as the first and last number."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and runs[-1][-1] == n - 1:
            runs[-1][-1:] = [n] if len(runs[-1]) > 1 else [runs[-1][0], n]
        else:
            runs.append([n])
    if len(runs) > 4:
        return f"{numbers[0]},{numbers[1]}..{numbers[-1]}"
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
