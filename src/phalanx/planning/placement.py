"""A placement: the GPU of every rank of a mesh, and the tier of links over which each of its groups communicates. A
group communicates over the innermost tier that has all its GPUs in one block: eight ranks on one host over NVLink,
the same eight on two hosts over the network.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from phalanx.spec.cluster.spec import ClusterSpec
from phalanx.spec.cluster.topology import Ints, Topology, of_cluster
from phalanx.spec.errors import InputError, nearest
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.mesh import Mesh, mesh
from phalanx.spec.strategy.spec import Strategy


@dataclass(frozen=True, eq=False)
class Placement:
    """A strategy's ranks on the GPUs of a cluster."""

    strategy: Strategy
    cluster: ClusterSpec
    topology: Topology
    gpu: Ints
    """GPU of each rank, (world,)."""
    model: ModelSpec | None = None
    """The trained model, if known: it determines the layers of stages, and whether `embed` groups exist."""

    @property
    def mesh(self) -> Mesh:
        """The mesh of the strategy."""
        return mesh(self.strategy)

    @property
    def world(self) -> int:
        """World size."""
        return len(self.gpu)

    @property
    def coloured_axis(self) -> str:
        """The axis whose groups a drawing colours by default: the innermost one larger than 1."""
        return next((name for name, size in reversed(self.mesh.axes) if size > 1), "world")

    def ranks_by_host(self) -> Iterator[tuple[int, Ints]]:
        """Yield each host that has ranks, with its ranks in the order of its GPUs."""
        order = np.argsort(self.gpu, kind="stable")
        hosts = self.topology.host[self.gpu[order]]
        starts = np.flatnonzero(np.diff(hosts, prepend=-1))
        for start, part in zip(starts, np.split(order, starts[1:]), strict=True):
            yield int(hosts[start]), part

    def where(self, rank: int) -> str:
        """Name a rank's host and its GPU there."""
        gpu = self.gpu[rank]
        return f"{self.topology.hosts[self.topology.host[gpu]]}, GPU {self.topology.index[gpu]}"

    def tiers(self, groups: Ints) -> Ints:
        """Return the index of the tier used by each group, (groups,), for groups of ranks (groups, size)."""
        blocks = self.topology.blocks[:, self.gpu[groups]]
        inside = np.all(blocks == blocks[:, :, :1], axis=2)
        inside[-1] = True  # groups that no tier joins use the outermost one
        innermost: Ints = np.argmax(inside, axis=0)
        return innermost


@dataclass(frozen=True)
class AxisGroups:
    """The groups of one axis of a mesh."""

    axis: str
    """Name of the axis, as in `Mesh.groups`."""
    size: int
    """Ranks per group."""
    groups: int
    """Number of groups."""
    tiers: dict[str, int]
    """Number of groups that communicate over each tier of links; unused tiers are left out."""
    first: tuple[int, ...]
    """The ranks of the first group."""

    @property
    def tier(self) -> str:
        """The outermost tier that any group needs: it sets the pace of the axis."""
        return next(reversed(self.tiers))


def default_placement(strategy: Strategy, cluster: ClusterSpec, model: ModelSpec | None = None) -> Placement:
    """Return the placement of ranks in their order: rank 0 on the first GPU of the first host. Raises InputError if
    the cluster has fewer GPUs than the strategy has ranks."""
    if strategy.world > cluster.ranks:
        raise InputError(
            "strategy", str(strategy), f"has {strategy.world} ranks, but {cluster.name} has {cluster.ranks} GPUs"
        )
    return Placement(strategy, cluster, of_cluster(cluster), np.arange(strategy.world, dtype=np.int64), model)


def axis_names(p: Placement) -> list[str]:
    """Name the axes of a mesh larger than 1, then the groups that follow from them: fused and expert axes, and
    `embed`, the ends of a pipeline that share a tied embedding (an unknown model is taken to have one)."""
    m = p.mesh
    sizes = dict(m.axes)
    names = [name for name, size in m.axes if size > 1]
    names += [axis for axis in dict.fromkeys((m.gradient_axis, m.shard_axis)) if "+" in axis]
    names += ["ring", "ulysses"] if sizes["cp"] > m.ulysses > 1 else []
    names += [name for name in ("ep", "etp") if getattr(m, name) > 1]
    names += ["edp"] if m.ep * m.etp > 1 and m.size("edp") > 1 else []
    return names + (["embed"] if sizes["pp"] > 2 and (p.model is None or p.model.tied) else [])


def axis_groups(p: Placement) -> list[AxisGroups]:
    """Return the groups of every axis of a placement's mesh larger than 1, with the tiers that they use."""
    rows = []
    for axis in axis_names(p):
        groups = p.mesh.groups(axis)
        counts = np.bincount(p.tiers(groups), minlength=len(p.cluster.tiers))
        tiers = {tier.name: int(n) for tier, n in zip(p.cluster.tiers, counts, strict=True) if n}
        rows.append(AxisGroups(axis, groups.shape[1], len(groups), tiers, tuple(groups[0].tolist())))
    return rows


def groups_of(p: Placement, axis: str) -> tuple[Ints, list[str]]:
    """Return all groups of an axis, (groups, size), and the tier that each uses. Raises InputError."""
    names = [*axis_names(p), "world"]
    aliases = {"dp": p.mesh.name("dp_replicate", "dp_shard")}
    if axis not in names and not aliases.get(axis):
        raise InputError("axis", axis, f"is not an axis of {p.strategy}", nearest(axis, names))
    groups = p.mesh.groups(aliases.get(axis) or axis)
    return groups, [p.cluster.tiers[int(tier)].name for tier in p.tiers(groups)]
