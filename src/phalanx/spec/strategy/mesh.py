"""The mesh: ranks arranged along named axes; their coordinates, their groups, the tier of links that a group spans.

Default order, outermost first: pp, dp_local, dp_replicate, dp_shard, cp, tp; the innermost axes get neighbouring
ranks. Only strategies whose replicas take steps alone have dp_local.
Everything is one `arange(world)` reshaped and read along different axes:

    pp=2, tp=2    ranks [[0, 1], [2, 3]]   groups of tp: the rows (0 1) (2 3)   groups of pp: the columns (0 2) (1 3)
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from phalanx.spec.cluster.spec import ClusterSpec, Tier
from phalanx.spec.strategy.spec import Strategy

Ranks = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Mesh:
    """The axes of `world` ranks. Ranks are global, from 0."""

    axes: tuple[tuple[str, int], ...]
    """(name, size) of every axis, outermost first."""
    ulysses: int = 1
    """The innermost part of cp that exchanges tokens for heads; the rest is the ring."""
    ep: int = 1
    """Ranks among which experts are divided; folds into dp x cp x tp."""
    etp: int = 1
    """Ranks that split each expert's width, the innermost of dp x cp x tp."""

    @property
    def world(self) -> int:
        """World size: the product of the axes."""
        return math.prod(size for _, size in self.axes)

    @cached_property
    def _ranks(self) -> Ranks:
        return np.arange(self.world, dtype=np.int64).reshape([size for _, size in self.axes])

    @cached_property
    def _experts(self) -> Ranks:
        """(pp x dp_local, edp, ep, etp): the innermost ranks of each dp x cp x tp block first (DESIGN.md, Mesh)."""
        names = [name for name, _ in self.axes]
        outer = [names.index(name) for name in ("pp", "dp_local") if name in names]
        block = np.moveaxis(self._ranks, outer, range(len(outer)))
        return block.reshape(math.prod(block.shape[: len(outer)]), -1, self.ep, self.etp)

    @cached_property
    def _context(self) -> Ranks:
        """(rest, ring, ulysses): the two parts of cp, Ulysses on neighbouring ranks."""
        names = [name for name, _ in self.axes]
        last = np.moveaxis(self._ranks, names.index("cp"), -1)
        return last.reshape(-1, last.shape[-1] // self.ulysses, self.ulysses)

    def size(self, axis: str) -> int:
        """Return the number of ranks per group of an axis, named as for `groups`."""
        return int(self.groups(axis).shape[1])

    def groups(self, axis: str) -> Ranks:
        """Return all groups of an axis: an array of ranks, (groups, ranks per group), each group in ascending order,
        as torch.distributed numbers the ranks of a group regardless of the given order.

        `axis` is a mesh axis, several joined by `+` (`dp_shard+cp`), `ring`, `ulysses`, `ep`, `etp`, `edp` (replicas
        of the same experts), `ep+etp`, `edp+etp`, `tokens` (ranks that share sequences: cp and tp), `embed` (the
        first and the last pipeline rank) or `world`.
        """
        if axis not in self._groups:
            self._groups[axis] = self._groups_of(axis)
        return self._groups[axis]

    @cached_property
    def _groups(self) -> dict[str, Ranks]:
        """Cache of groups by axis."""
        return {}

    def _groups_of(self, axis: str) -> Ranks:
        if axis == "tokens":
            axis = "cp+tp"
        if axis == "world":
            return self._ranks.reshape(1, -1)
        if axis in ("edp", "ep", "etp"):
            return _lines(self._experts, (("edp", "ep", "etp").index(axis) + 1,))
        if axis in ("ep+etp", "edp+etp"):
            return _lines(self._experts, (2 if axis == "ep+etp" else 1, 3))
        if axis in ("ring", "ulysses"):
            return _lines(self._context, (("ring", "ulysses").index(axis) + 1,))
        names = [name for name, _ in self.axes]
        if axis == "embed":
            lines = _lines(self._ranks, (names.index("pp"),))
            return lines[:, [0, -1]] if lines.shape[1] > 1 else lines
        # In the order of the mesh, regardless of the name's: then ranks ascend.
        return _lines(self._ranks, tuple(sorted(names.index(part) for part in axis.split("+"))))

    def group_of(self, rank: int, axis: str) -> tuple[int, ...]:
        """Return the ranks of a rank's group along an axis; the rank alone if it is in none (`embed`)."""
        groups = self.groups(axis)
        row = np.nonzero((groups == rank).any(axis=1))[0]
        return tuple(int(r) for r in groups[row[0]]) if len(row) else (rank,)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return a rank's coordinate along every axis larger than 1."""
        sizes = dict(self.axes)
        return {name: i for name, i in self.place(rank).items() if sizes[name] > 1}

    def place(self, rank: int) -> dict[str, int]:
        """Return a rank's coordinate along every axis."""
        place = np.unravel_index(rank, self._ranks.shape)
        return {name: int(i) for (name, _), i in zip(self.axes, place, strict=True)}

    def replica(self, rank: int) -> int:
        """Return the index, in dp, of a rank's data-parallel replica."""
        place, sizes = self.place(rank), dict(self.axes)
        copy = place.get("dp_local", 0) * sizes["dp_replicate"] + place["dp_replicate"]
        return copy * sizes["dp_shard"] + place["dp_shard"]

    def name(self, *parts: str) -> str:
        """Name the fused axis of these axes; axes of size 1 are dropped ("" if all are)."""
        sizes = dict(self.axes)
        return "+".join(part for part in parts if sizes[part] > 1)

    @cached_property
    def gradient_axis(self) -> str:
        """The axis that dense gradients reduce over: dp_replicate, dp_shard and cp, fused."""
        return self.name("dp_replicate", "dp_shard", "cp")

    @cached_property
    def step_axis(self) -> str:
        """The axis of the ranks that take a step together: the world, but for replicas that take steps alone."""
        names = [name for name, _ in self.axes]
        return self.name(*(name for name in names if name != "dp_local")) if "dp_local" in names else "world"

    @cached_property
    def step_ranks(self) -> int:
        """The number of ranks that take a step together."""
        return self.world // dict(self.axes).get("dp_local", 1)

    @cached_property
    def shard_axis(self) -> str:
        """The axis that the model state is sharded over: dp_shard and cp, fused."""
        return self.name("dp_shard", "cp")

    def along(self, axis: str) -> Ranks:
        """Return every rank's index in its group of an axis, (world,); all 0 for "", the name of dropped axes."""
        places = np.zeros(self.world, dtype=np.int64)
        if axis:
            groups = self.groups(axis)
            places[groups] = np.arange(groups.shape[1])
        return places

    def shard(self, rank: int) -> int:
        """Return the index, in its group of `shard_axis`, of a rank's shard of the model state."""
        return int(self.along(self.shard_axis)[rank])

    def within(self, axis: str, ranks: int) -> bool:
        """Whether every group of the axis lies within one block of `ranks` neighbouring ranks (a node)."""
        groups = self.groups(axis) // ranks
        return bool(np.all(groups == groups[:, :1]))

    def hosts(self, axis: str, ranks: int) -> int:
        """Return the number of blocks of `ranks` neighbouring ranks (nodes) that each group of the axis spans evenly;
        0 if groups differ or are spread unevenly."""
        if self.within(axis, ranks):
            return 1
        groups = self.groups(axis) // ranks
        counts = {tuple(sorted(np.unique(row, return_counts=True)[1].tolist())) for row in groups}
        parts = next(iter(counts))
        return len(parts) if len(counts) == 1 and len(set(parts)) == 1 else 0

    def tier(self, axis: str, cluster: ClusterSpec) -> Tier:
        """Return the innermost tier of links that contains every group of the axis; the outermost if none does."""
        groups = self.groups(axis)
        low, high = groups.min(axis=1), groups.max(axis=1)
        for tier in cluster.tiers:
            if np.all(low // tier.ranks == high // tier.ranks):
                return tier
        return cluster.tiers[-1]


def mesh(strategy: Strategy) -> Mesh:
    """Return the mesh of a strategy, in its `order`, where `dp` means dp_local (if replicas take steps alone), then
    dp_replicate, then dp_shard."""
    alone = (("dp_local", strategy.dp_local),) if strategy.local else ()
    sizes = {
        "pp": (("pp", strategy.pp),),
        "dp": (*alone, ("dp_replicate", strategy.dp_replicate), ("dp_shard", strategy.dp_shard)),
        "cp": (("cp", strategy.cp),),
        "tp": (("tp", strategy.tp),),
    }
    axes = tuple(axis for part in strategy.order.split("/") for axis in sizes[part])
    return Mesh(axes, strategy.ulysses, strategy.ep, strategy.etp)


def _lines(ranks: Ranks, axes: tuple[int, ...]) -> Ranks:
    """Return all lines of an array along these axes, (lines, ranks per line)."""
    moved = np.moveaxis(ranks, axes, range(-len(axes), 0))
    return moved.reshape(-1, math.prod(ranks.shape[i] for i in axes))
