"""Slow links: the share of its rate that each group of ranks keeps.

The groups of an axis communicate at once, each at one rate through all of its ports: a group of r ranks in a block
leaves it through their r ports, each with its part of the data, and shares the block's uplink, where there is one,
with the others. Rates are max-min fair: all grow equally until a link is full; its groups stop there, the others go
on. A group's share is its rate over its rate with healthy links, at most 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from phalanx.spec.cluster.spec import ClusterSpec
from phalanx.spec.strategy.mesh import Mesh, Ranks, mesh
from phalanx.spec.strategy.spec import Strategy

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SlowLink:
    """Links at a `share` of their rate: a rank's port out of its node, all links of a node, or a whole tier."""

    of: Literal["nic", "node", "tier"]
    number: int
    """Index of the rank, the node, or the tier in ClusterSpec.tiers."""
    share: float


@dataclass(frozen=True)
class KeptRates:
    """Shares of the full rate that groups keep, by tier."""

    layers: Floats
    """The least share of each rank's groups inside layers (tp, cp, ep), (world, tiers)."""
    messages: Floats
    """The share of each rank's messages between pipeline stages, (world, tiers)."""
    gradients: Floats
    """The share of the slowest group that reduces gradients or gathers parameters, (tiers,)."""


def kept_rates(cluster: ClusterSpec, s: Strategy, slow: tuple[SlowLink, ...]) -> KeptRates:
    """Return the shares of their rates that a strategy's groups keep with these slow links."""
    of = sending_groups(s)
    shape = (s.world, len(cluster.tiers))
    layers, messages, gradients = np.ones(shape), np.ones(shape), np.ones(len(cluster.tiers))
    for i in range(len(cluster.tiers)):
        links = Links(cluster, i, s.world, slow)
        for groups in of.layers:
            layers[:, i] = np.minimum(layers[:, i], links.shares(groups))
        for groups in of.gradients:
            gradients[i] = min(gradients[i], float(links.shares(groups).min()))
        for groups in of.messages:
            messages[:, i] = links.shares(groups)
    return KeptRates(layers, messages, gradients)


@dataclass(frozen=True)
class SendingGroups:
    """Groups of ranks that communicate, each (groups, ranks): inside layers, between stages, for gradients."""

    layers: tuple[Ranks, ...]
    messages: tuple[Ranks, ...]
    gradients: tuple[Ranks, ...]


def sending_groups(s: Strategy) -> SendingGroups:
    """Return the groups of a strategy's axes that have more than 1 rank."""
    m = mesh(s)
    reducing = [axis for axis in dict.fromkeys((m.gradient_axis, "edp" * (s.ep > 1))) if axis and m.size(axis) > 1]
    return SendingGroups(
        layers=tuple(m.groups(axis) for axis in ("tp", "cp", "ep", "etp") if m.size(axis) > 1),
        messages=(_hops(m, s),) if s.pp > 1 else (),
        gradients=tuple(m.groups(axis) for axis in reducing),
    )


def _hops(m: Mesh, s: Strategy) -> Ranks:
    """Return the pairs of ranks that send messages between stages, (pairs, 2)."""
    stages = m.groups("pp")
    pairs = [stages[:, [i, i + 1]] for i in range(s.pp - 1)]
    if s.virtual > 1 and s.pp > 2:  # from a rank's last chunk to the first rank's next one
        pairs.append(stages[:, [0, s.pp - 1]])
    return np.concatenate(pairs)


class Links:
    """The links into one tier: a port of each rank, and an uplink of each block, in bytes/s."""

    def __init__(self, cluster: ClusterSpec, tier: int, world: int, slow: tuple[SlowLink, ...] = ()) -> None:
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
        """Return the share of its rate that each rank's group keeps, (world,): the least if a rank is in several, 1
        if in none that leaves a block. `groups`: (groups, ranks)."""
        result = np.ones(self.world)
        groups = self._leaving(groups)
        if not len(groups) or (self.left == self.healthy).all():
            return result
        kept = self._rates([groups], self.left) / self._rates([groups], self.healthy)
        np.minimum.at(result, groups, kept[:, None])
        return result

    def among(self, jobs: Sequence[Sequence[Ranks]]) -> Floats:
        """Return for each job the least share of its rate alone that one of its groups keeps while the groups of all
        jobs send, (jobs,). `jobs`: the groups of each job, (groups, ranks)."""
        leaving = [[g for g in map(self._leaving, groups) if len(g)] for groups in jobs]
        sharing = [i for i, groups in enumerate(leaving) if groups]
        result = np.ones(len(jobs))
        if len(sharing) < 2:
            return result
        together = self._rates([g for i in sharing for g in leaving[i]], self.left)
        ends = np.cumsum([sum(map(len, leaving[i])) for i in sharing])
        for i, rates in zip(sharing, np.split(together, ends[:-1]), strict=True):
            result[i] = (rates / self._rates(leaving[i], self.left)).min()
        return np.minimum(result, 1.0)

    def _leaving(self, groups: Ranks) -> Ranks:
        """Return the groups that have ranks in several blocks."""
        leave = (groups // self.block != groups[:, :1] // self.block).any(axis=1)
        return np.asarray(groups[leave])

    def _rates(self, several: Sequence[Ranks], capacity: Floats) -> Floats:
        """Return the max-min fair rate of each group out of its blocks, in bytes/s, (all groups,). `several`: groups
        by size, each (groups, ranks); `capacity`: bytes/s of each link."""
        of_group, of_link, loads, count = list[Ints](), list[Ints](), list[Floats](), 0
        for groups in several:
            block = groups // self.block
            members = np.stack([np.bincount(row - row.min())[row - row.min()] for row in block])  # in a rank's block
            first = np.diff(np.sort(block, axis=1), axis=1, prepend=-1) > 0
            own = np.arange(count, count + len(groups))
            count += len(groups)
            of_group += [np.repeat(own, groups.shape[1]), np.repeat(own, first.sum(axis=1))]
            of_link += [groups.reshape(-1), self.world + np.sort(block, axis=1)[first]]
            loads += [1 / members.reshape(-1), np.ones(int(first.sum()))]
        group, link, load = np.concatenate(of_group), np.concatenate(of_link), np.concatenate(loads)
        left, rates, active = capacity.copy(), np.zeros(count), np.ones(count, dtype=bool)
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
