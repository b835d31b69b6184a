"""The effect of a fabric's wiring on the price of a placement: rails, and direct links between groups.

Rails: GPU i of every host under a leaf is at switch i. Two ranks of different index meet over NVLink in a host that
has a GPU of the job at both indices (NCCL's PXN: the message changes its rail before it leaves). Hosts on which the
job has no index in common, {0-3} here and {4-7} there, cannot: what they send each other goes one tier further out.

Dragonfly (Kim, Dally, Scott, Abts, ISCA 2008): every two of G groups are joined by global links; a group's uplink U
is all of its own. A job in s groups has U (s-1) / (G-1) on minimal routes. Valiant's routes lead over a third group,
which costs two global hops: half of U. Adaptive routing takes whichever is better.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from phalanx.spec.cluster.topology import Ints, Topology

Floats = npt.NDArray[np.float64]


def between_groups(reached: Ints, groups: int) -> Floats:
    """Return the share of a group's global links that a job in `used` of `groups` groups has, (placements,)."""
    direct = (reached - 1) / max(groups - 1, 1)
    return np.asarray(np.where(reached > 1, np.maximum(direct, 0.5), 1.0))


def on_rails(topology: Topology, leaves: Ints, gpus: Ints) -> Ints:
    """Return the block of every rank under leaves of rails, (placements, world): ranks under a leaf are in one block
    if rails, or NVLink in hosts of the job, lead from one to the other. `leaves`: of each GPU; `gpus`: those of each
    placement, (placements, world)."""
    rails = int(topology.index.max()) + 1
    result = np.empty_like(gpus)
    for row, own in enumerate(gpus):
        leaf, host, rail = leaves[own], topology.host[own], topology.index[own]
        hosts, at = np.unique(host, return_inverse=True)
        used = np.zeros((len(hosts), rails + 1), dtype=np.int64)
        used[at, rail] = 1
        used[at, rails] = leaf
        block = np.arange((int(leaf.max()) + 1) * rails).reshape(-1, rails)  # (leaf, rail), joined below
        for *present, of in np.unique(used, axis=0).tolist():
            together = np.flatnonzero(present)
            labels = block[of]
            labels[np.isin(labels, labels[together])] = labels[together].min()
        result[row] = block[leaf, rail]
    return result
