"""All-reduce over tiers of links: most bytes stay where links are fast.

Builders take groups of ranks that work side by side, so an algorithm over all ranks and one over every host at once
are the same code.
"""

from __future__ import annotations

import numpy as np

from phalanx.schedule.reductions import ring_all_reduce, ring_reduce_scatter
from phalanx.schedule.transfers import Ints, Round, cut, reverse


def hierarchical_all_reduce(groups: Ints, low: Ints, high: Ints, tiers: tuple[int, ...]) -> list[Round]:
    """Reduce-scatter inside the innermost tier, all-reduce of every chunk across, all-gather inside.

    `tiers`: sizes, innermost first, with product p; each level works on 1/size of what the level below had.
    """
    p, q = groups.shape[1], tiers[0]
    if len(tiers) == 1:
        return ring_all_reduce(groups, low, high)
    hosts = p // q
    inside = groups.reshape(-1, q)  # (groups x hosts, q)
    scatter = ring_reduce_scatter(inside, np.repeat(low, hosts), np.repeat(high, hosts))
    across = groups.reshape(len(groups), hosts, q).transpose(0, 2, 1).reshape(-1, hosts)  # (groups x q, hosts)
    bounds = cut(low, high, q)
    up = hierarchical_all_reduce(across, bounds[:, :-1].ravel(), bounds[:, 1:].ravel(), tiers[1:])
    return scatter + up + reverse(scatter, reduces=False)
