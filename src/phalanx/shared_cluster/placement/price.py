"""The price of a placement: the analytic engine's step, with every axis at the distance that its groups then have.

A group of p ranks has parts in several blocks of a tier (hosts, leaf switches). Its smallest part sets the pace:
with m ranks in a block, m links leave it in parallel (cost/collectives/nccl_model.py), so a group split 6 + 2 has two
links across, and one split 4 + 4 has four. All groups of an axis wait for the slowest. So for the engine a placement
is the least m of every axis at every tier, and an axis has the distance R/m at which an even mesh on blocks of
R ranks would have m of them together. A pipeline and a ring send to neighbours: their slowest hop counts.

Uplinks that a block shares are divided among its GPUs in use, by this job or by others. A fabric's
wiring adds rails and direct links between groups.

Rails: GPU i of every host under a leaf is at switch i. Two ranks of different index meet over NVLink in a host that
has a GPU of the job at both indices (NCCL's PXN: the message changes its rail before it leaves). Hosts on which the
job has no index in common, {0-3} here and {4-7} there, cannot: what they send each other goes one tier further out.

Dragonfly (Kim, Dally, Scott, Abts, ISCA 2008): every two of G groups are joined by global links; a group's uplink U
is all of its own. A job in s groups has U (s-1) / (G-1) on minimal routes. Valiant's routes lead over a third group,
which costs two global hops: half of U. Adaptive routing takes whichever is better.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from phalanx.cost.analytic.chips import system_of
from phalanx.cost.analytic.estimate import estimate_placed
from phalanx.cost.collectives.nccl_model import collective_s
from phalanx.cost.hardware.system import System
from phalanx.planning.search.column_pricing import Pricing
from phalanx.planning.search.refine import run_placed, with_listed_blocks
from phalanx.spec.cluster.spec import ClusterSpec
from phalanx.spec.cluster.topology import Ints, Topology
from phalanx.spec.job import Job
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.mesh import Mesh, mesh
from phalanx.spec.strategy.spec import Strategy
from phalanx.spec.strategy.stack_options import AS_RELEASED, StackOptions


def between_groups(reached: Ints, groups: int) -> Floats:
    """Return the share of a group's global links that a job in `reached` of `groups` groups has, (placements,)."""
    direct = (reached - 1) / max(groups - 1, 1)
    return np.asarray(np.where(reached > 1, np.maximum(direct, 0.5), 1.0))


def on_rails(topology: Topology, leaves: Ints, gpus: Ints) -> Ints:
    """Return the block of every rank under leaves of rails, (placements, world): ranks under a leaf are in one block
    if rails, or NVLink in hosts of the job, connect them. `leaves`: leaf of each GPU, (gpus,); `gpus`: GPU of each
    rank, (placements, world)."""
    rails = int(topology.index.max()) + 1
    result = np.empty_like(gpus)
    for row, placed in enumerate(gpus):
        leaf, host, rail = leaves[placed], topology.host[placed], topology.index[placed]
        hosts, at = np.unique(host, return_inverse=True)
        used = np.zeros((len(hosts), rails + 1), dtype=np.int64)
        used[at, rail] = 1
        used[at, rails] = leaf
        block = np.arange((int(leaf.max()) + 1) * rails).reshape(-1, rails)  # (leaf, rail), joined below
        for *present, under in np.unique(used, axis=0).tolist():
            together = np.flatnonzero(present)
            labels = block[under]
            labels[np.isin(labels, labels[together])] = labels[together].min()
        result[row] = block[leaf, rail]
    return result


Floats = npt.NDArray[np.float64]
Parts = dict[str, Ints]
"""Axis -> ranks in the smallest part of its worst group, (tiers, placements)."""
_MESSAGE = 64 * 2**20
"""Bytes of the all-gather by which distances over three and more tiers are compared."""


@dataclass(frozen=True)
class PlacedJob:
    """A model, job and strategy under a stack's constants, to be placed on a cluster."""

    model: ModelSpec
    cluster: ClusterSpec
    job: Job
    strategy: Strategy
    stack: str
    number_format: str = "bfloat16"
    """Name of the format of matrix products."""
    options: StackOptions = AS_RELEASED
    """Options of the stack beyond the strategy."""

    @cached_property
    def mesh(self) -> Mesh:
        """The strategy's mesh."""
        return mesh(self.strategy)

    @cached_property
    def system(self) -> System:
        """Rates of the cluster. Raises InputError for a device without published rates."""
        return system_of(self.cluster)

    @cached_property
    def _cut(self) -> Strategy:
        """The strategy with the blocks of its pipeline chunks listed, as for ranks in order."""
        s = self.strategy
        return s if s.compression != "none" else with_listed_blocks(self.question(self.cluster), s)

    @cached_property
    def groups(self) -> dict[str, Ints]:
        """Axis -> its groups of ranks, (groups, size); for pipelines and rings, pairs of neighbours."""
        s, m = self.strategy, self.mesh
        by_axis: dict[str, Ints] = {}
        if s.tp > 1:
            by_axis["tp"] = m.groups("tp")
        if s.ulysses > 1:
            by_axis["ulysses"] = m.groups("ulysses")
        if s.ring > 1:
            by_axis["ring"] = _neighbours(m.groups("ring"), closed=True)
        if s.pp > 1:
            by_axis["pp"] = _neighbours(m.groups("pp"), closed=False)
        data = m.shard_axis if s.shards > 1 else m.gradient_axis
        if data:
            by_axis["data"] = m.groups(data)
        if s.shards > 1 and s.dp_replicate > 1:
            by_axis["replicate"] = m.groups("dp_replicate")
        if s.ep > 1:
            by_axis["ep"] = m.groups("ep")
        if s.etp > 1:
            by_axis["etp"] = m.groups("etp")
        if s.ep * s.etp > 1 and m.size("edp") > 1:
            by_axis["edp"] = m.groups("edp")
        return by_axis

    def parts(self, topology: Topology, gpus: Ints) -> Parts:
        """Return the smallest part of each axis for placements `gpus`, (placements, world)."""
        tiers = zip(self.cluster.tiers, topology.blocks, strict=True)
        blocks = [on_rails(topology, block, gpus) if t.wiring == "rails" else block[gpus] for t, block in tiers]
        return {axis: np.stack([_smallest_part(block, g) for block in blocks]) for axis, g in self.groups.items()}

    def distances(self, parts: Mapping[str, Ints]) -> dict[str, Floats | float]:
        """Return the distance of each axis, by its field of PlacedLayout, from the smallest parts."""
        s = self.strategy
        at = {axis: self._distance(axis, part) for axis, part in parts.items()}
        one = 1.0
        return {
            "tp_stride": at.get("tp", one),
            "cp_stride": at.get("ulysses", at.get("ring", one)),
            "ring": at.get("ring", one),
            "dp_stride": at.get("replicate", one) * s.cp / max(s.shards, 1),
            "pp_stride": at.get("pp", one),
            "data": at.get("data", one),
            "expert": at.get("ep", one),
            "same_expert": at.get("edp", one),
            "expert_part": at.get("etp", one),
        }

    def _distance(self, axis: str, parts: Ints) -> Floats:
        """Return the distance of an even mesh that takes as long as an axis with these smallest parts, (placements,):
        exact if some distance has that many ranks in a block of every tier, otherwise the least that is not
        faster."""
        tiers, size = self.cluster.tiers, self.groups[axis].shape[1]
        unique, back = np.unique(parts, axis=1, return_inverse=True)
        ranks = np.array([tier.ranks for tier in tiers])[:, None]
        # A block of R ranks holds m of them at distances above R / (m + 1) and up to R / m.
        least = np.where(unique < size, ranks / (unique + 1), 0.0).max(axis=0)
        most = _group_span(ranks, unique)
        result = np.where(unique < size, most, 1.0).max(axis=0)
        if axis in _HOPS:
            return np.asarray(result[back.reshape(-1)])
        exact = most.min(axis=0)
        result = np.where((least < exact) & (result > 1.0), exact, result)
        several = np.flatnonzero((least >= exact) & (np.sum(unique < size, axis=0) > 1))
        if len(several):
            grid = np.unique(np.maximum(_group_span(ranks, np.arange(1, size + 1)[None, :]), 1.0))
            even = collective_s("all_gather", _MESSAGE, size, grid, self.system)
        for i in several:
            sizes = zip(self.system.tiers, unique[:, i].tolist(), strict=True)
            system = replace(self.system, tiers=tuple(replace(t, ranks=float(m)) for t, m in sizes))
            slowest = collective_s("all_gather", _MESSAGE, size, 1.0, system)
            slow = np.flatnonzero(even >= slowest * (1 - 1e-9))
            result[i] = grid[slow[0] if len(slow) else -1]
        return np.asarray(result[back.reshape(-1)])

    def shares(self, topology: Topology, gpus: Ints, busy: Ints) -> Floats:
        """Return each tier's rate under each placement as a share of its rate with every GPU in use, (tiers,
        placements). `busy`: GPUs that other jobs use."""
        tiers, factors = self.cluster.tiers, np.ones((len(self.cluster.tiers), len(gpus)))
        for i, tier in enumerate(tiers):
            tier_uplink = tier.uplink_bandwidth_bytes_per_s_per_direction
            if tier_uplink is None or i == 0:
                continue
            uplink: Floats | float = tier_uplink
            below, rate = tiers[i - 1].ranks, tier.bandwidth_bytes_per_s_per_gpu_per_direction
            blocks = topology.blocks[i - 1]
            others = np.bincount(blocks[busy], minlength=int(blocks.max()) + 1)
            own = blocks[gpus]
            users = np.array([int((np.bincount(row, minlength=len(others)) + others)[row].max()) for row in own])
            if tier.wiring == "pairs":
                groups = len(others)
                reached = np.array([len(set(row.tolist())) for row in own])
                uplink = uplink * between_groups(reached, groups)
            factors[i] = np.minimum(rate, uplink / users) / min(rate, tier_uplink / below)
        return factors

    def priced(self, parts: Mapping[str, Ints], shares: Floats) -> Floats:
        """Return the step times of placements, (placements,), from their smallest parts and shares of the tiers'
        rates. Raises InputError for a strategy, chip or stack that is not modelled."""
        tiers = tuple(
            replace(t, bytes_per_s_per_gpu_per_direction=t.bytes_per_s_per_gpu_per_direction * share)
            for t, share in zip(self.system.tiers, shares, strict=True)
        )
        by = (self.stack, self.distances(parts), self.number_format, self.options)
        placed = estimate_placed(self.model, replace(self.system, tiers=tiers), self.job, self._cut, *by)
        return np.array(run_placed(self.question(self.cluster), self._cut, placed.step, shares.shape[1]))

    def question(self, cluster: ClusterSpec) -> Pricing:
        """Return the pricing question of the job's strategy on a cluster, with its number format and options."""
        return Pricing(self.model, cluster, self.job, self.stack, self.number_format, extra=self.options)

    def seconds(self, topology: Topology, gpus: Ints, busy: Ints) -> Floats:
        """Return the step time of each of the placements, (placements,)."""
        parts, shares = self.parts(topology, gpus), self.shares(topology, gpus, busy)
        _, first, back = np.unique(
            np.concatenate([*parts.values(), shares]), axis=1, return_index=True, return_inverse=True
        )
        distinct = {axis: part[:, first] for axis, part in parts.items()}
        return self.priced(distinct, shares[:, first])[back.reshape(-1)]


def _neighbours(groups: Ints, closed: bool) -> Ints:
    """Return the pairs of neighbours along each group, (pairs, 2); `closed`: the last one sends to the first."""
    after = np.roll(groups, -1, axis=1)
    pairs = np.stack([groups, after], axis=2)
    return (pairs if closed else pairs[:, :-1]).reshape(-1, 2)


def _smallest_part(blocks: Ints, groups: Ints) -> Ints:
    """Return the ranks in the smallest part of the worst group, (placements,). `blocks`: of each rank, (placements,
    world); `groups`: (groups, size)."""
    (g, size), count = groups.shape, int(blocks.max()) + 1
    if count == 1:
        return np.full(len(blocks), size)
    if size == 2:
        return np.where((blocks[:, groups[:, 0]] == blocks[:, groups[:, 1]]).all(axis=1), 2, 1)
    offsets = np.repeat(np.arange(g, dtype=np.int32) * count, size)
    step = max(1, _ELEMENTS // offsets.size)
    pieces = np.split(blocks.astype(np.int32), range(step, len(blocks), step))
    return np.concatenate([_shortest_run(piece[:, groups.reshape(-1)] + offsets) for piece in pieces])


def _shortest_run(keys: npt.NDArray[np.int32]) -> Ints:
    """Return how often the rarest key of each row occurs; for keys of (group, block), the ranks of the smallest
    part."""
    keys.sort(axis=1)
    begins = np.ones(keys.shape, dtype=bool)
    np.not_equal(keys[:, 1:], keys[:, :-1], out=begins[:, 1:])
    starts = np.flatnonzero(begins.reshape(-1))
    lengths = np.diff(starts, append=keys.size)
    return np.minimum.reduceat(lengths, np.searchsorted(starts, np.arange(len(keys)) * keys.shape[1]))


_ELEMENTS = 2**18
"""Keys to sort at once: few enough to stay in a core's cache."""
_HOPS = ("pp", "ring")
"""Axes that send to neighbours."""


def _group_span(ranks: Ints, part: Ints) -> Floats:
    """Return the greatest distance at which blocks of `ranks` hold `part` ranks of a group, minus a margin for
    rounding."""
    return np.asarray(ranks / part * (1 - 1e-12 * (part > 1)))
