"""Links that are slower than their tier: the rate that each group of ranks keeps.

The groups of an axis communicate at once, each at one rate through all of its ports: a group of r ranks in a block
leaves it through their r ports, each with its part of the data, and shares the block's uplink, where there is one,
with the others. Rates are max-min fair: all grow alike until a link is full; its groups stop there, the others go on.
A group's share is its rate over its rate with healthy links, at most 1: what others leave unused makes none faster.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from phalanx.spec.cluster.spec import ClusterSpec
from phalanx.spec.strategy.mesh import Mesh, Ranks, mesh
from phalanx.spec.strategy.spec import Strategy

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class SlowLink:
    """A link at a `share` of its rate: of a rank's port out of its node, of all links of a node, or of a tier."""

    of: Literal["nic", "node", "tier"]
    number: int
    """Of the rank, the node, or the tier in ClusterSpec.tiers."""
    share: float


@dataclass(frozen=True)
class KeptRates:
    """Shares of their rate that messages keep, by tier."""

    layers: Floats
    """Of each rank's groups inside layers (tp, cp, ep), (world, tiers)."""
    messages: Floats
    """Of each rank's messages between pipeline stages, (world, tiers)."""
    gradients: Floats
    """Of the slowest group that reduces gradients or gathers parameters, (tiers,)."""


def kept_rates(cluster: ClusterSpec, s: Strategy, slow: tuple[SlowLink, ...]) -> KeptRates:
    """Return what groups keep of their rates where links are slow."""
    m = mesh(s)
    inside = [axis for axis in ("tp", "cp", "ep", "etp") if m.size(axis) > 1]
    reducing = [axis for axis in dict.fromkeys((m.gradient_axis, "edp" * (s.ep > 1))) if axis and m.size(axis) > 1]
    shape = (m.world, len(cluster.tiers))
    layers, messages, gradients = np.ones(shape), np.ones(shape), np.ones(len(cluster.tiers))
    for i in range(len(cluster.tiers)):
        links = _Links(cluster, i, m.world, slow)
        for axis in inside:
            layers[:, i] = np.minimum(layers[:, i], links.shares(m.groups(axis)))
        for axis in reducing:
            gradients[i] = min(gradients[i], float(links.shares(m.groups(axis)).min()))
        if s.pp > 1:
            messages[:, i] = links.shares(_hops(m, s))
    return KeptRates(layers, messages, gradients)


def _hops(m: Mesh, s: Strategy) -> Ranks:
    """Pairs of ranks that send messages to each other, (pairs, 2)."""
    stages = m.groups("pp")
    pairs = [stages[:, [i, i + 1]] for i in range(s.pp - 1)]
    if s.virtual > 1 and s.pp > 2:  # from a rank's last chunk to the first rank's next one
        pairs.append(stages[:, [0, s.pp - 1]])
    return np.concatenate(pairs)


class _Links:
    """The links into one tier: a port of each rank, and an uplink of each block, in bytes/s."""

    def __init__(self, cluster: ClusterSpec, tier: int, world: int, slow: tuple[SlowLink, ...]) -> None:
        t, node = cluster.tiers[tier], cluster.ranks_per_node
        self.block = cluster.tiers[tier - 1].ranks if tier else 1
        blocks = -(-world // self.block)
        uplink = t.uplink_bandwidth_bytes_per_s_per_direction
        self.healthy = np.concatenate(
            [
                np.full(world, t.bandwidth_bytes_per_s_per_gpu_per_direction),
                np.full(blocks, np.inf if uplink is None else uplink),
            ]
        )
        share = np.ones_like(self.healthy)
        leaves_node = t.ranks > node and (tier > 0 or node == 1)
        for link in slow:
            if link.of == "tier" and link.number == tier:
                share *= link.share
            elif leaves_node and link.of == "nic":
                share[link.number] *= link.share
            elif leaves_node and link.of == "node":
                share[link.number * node : min((link.number + 1) * node, world)] *= link.share
                if self.block == node:
                    share[world + link.number] *= link.share
        self.left = self.healthy * share
        self.world = world

    def shares(self, groups: Ranks) -> Floats:
        """Return the share of its rate that each rank's group keeps, (world,): 1 for ranks in no group that leaves a
        block. `groups`: (groups, ranks); a rank in several has the least."""
        result = np.ones(self.world)
        groups = groups[(groups // self.block != groups[:, :1] // self.block).any(axis=1)]
        if not len(groups) or (self.left == self.healthy).all():
            return result
        kept = self._rates(groups, self.left) / self._rates(groups, self.healthy)
        np.minimum.at(result, groups, kept[:, None])
        return result

    def _rates(self, groups: Ranks, capacity: Floats) -> Floats:
        """Return the max-min fair rate of each group out of its blocks, bytes/s."""
        block = groups // self.block
        members = np.stack([np.bincount(row - row.min())[row - row.min()] for row in block])  # in each rank's block
        first = np.diff(np.sort(block, axis=1), axis=1, prepend=-1) > 0
        own = np.arange(len(groups))
        group = np.concatenate([np.repeat(own, groups.shape[1]), np.repeat(own, first.sum(axis=1))])
        link = np.concatenate([groups.reshape(-1), self.world + np.sort(block, axis=1)[first]])
        load = np.concatenate([1 / members.reshape(-1), np.ones(int(first.sum()))])
        left, rates, active = capacity.copy(), np.zeros(len(groups)), np.ones(len(groups), dtype=bool)
        while active.any():
            asked = np.bincount(link, load * active[group], minlength=len(left))
            level = np.divide(left, asked, out=np.full_like(left, np.inf), where=asked > 0)
            full = level <= level.min() * (1 + 1e-12)
            stopped = np.zeros_like(active)
            stopped[group[full[link]]] = True
            stopped &= active
            rates[stopped] = level.min()
            left = left - np.bincount(link, load * (rates * stopped)[group], minlength=len(left))
            left, active = np.maximum(left, 0.0), active & ~stopped
        return rates
