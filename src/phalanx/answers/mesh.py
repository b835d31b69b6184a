"""A strategy's ranks in order on a cluster that a plan, a job or options name: their places and groups."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.answers.answer import DRAWN, Answer, plain
from phalanx.planning.lookup import cluster_named, model_named
from phalanx.planning.placement import Placement, axis_groups, axis_names, default_placement, groups_of
from phalanx.schedule.pipeline.stages import chunks, rank_of, require_chunks
from phalanx.spec.cluster.presets import preset
from phalanx.spec.cluster.spec import ClusterSpec, Device, Tier
from phalanx.spec.errors import InputError
from phalanx.spec.files import job_file
from phalanx.spec.files import plan as plans
from phalanx.spec.files.cluster_toml import cluster_from_toml
from phalanx.spec.files.job_file import make_strategy
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.spec import Strategy

DEFAULT_CLUSTER = "dgx-h100"


@dataclass(frozen=True)
class LinkedGroup:
    """A communication group."""

    ranks: tuple[int, ...]
    links: str
    """Name of the outermost tier of links between its ranks."""


@dataclass(frozen=True)
class StageUnits:
    """The units of the model on a pipeline rank, and the nodes that it is on."""

    pp: int
    units: tuple[str, ...]
    """Text for each chunk, such as `embed, blocks 0 to 9`."""
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class RankMap(Answer):
    """Every rank on its GPU, and the groups of every axis."""

    placement: Placement
    axis: str
    """The axis whose groups have colours."""
    stages: tuple[StageUnits, ...] = ()
    """Units of each pipeline rank; () where the model is not known."""


@dataclass(frozen=True)
class MeshGroups(Answer):
    """All groups of an axis."""

    axis: str
    groups: tuple[LinkedGroup, ...]
    placement: Placement = field(repr=False, metadata=DRAWN)


@dataclass(frozen=True)
class RankPlace(Answer):
    """Where a rank is, and the groups that it is in."""

    rank: int
    node: str
    gpu: int
    coordinates: dict[str, int]
    groups: dict[str, LinkedGroup]
    placement: Placement = field(repr=False, metadata=DRAWN)
    axis: str = field(metadata=DRAWN)
    """The axis whose groups have colours."""


@plain.register
def _(value: RankMap) -> dict[str, Any]:
    p = value.placement
    hosts = p.topology.hosts
    return {
        "strategy": str(p.strategy),
        "world": p.world,
        "cluster": p.cluster.name,
        "nodes": [{"name": hosts[host], "ranks": ranks.tolist()} for host, ranks in p.ranks_by_host()],
        "axes": [plain(row) for row in axis_groups(p)],
        "axis": value.axis,
        **({"stages": [plain(stage) for stage in value.stages]} if value.stages else {}),
    }


def rank_map(p: Placement, axis: str | None) -> RankMap:
    """Return the places of all ranks; `axis`: the one whose groups have colours. Raises InputError."""
    return RankMap(p, _colour_axis(p, axis), tuple(_stages(p)))


def _stages(p: Placement) -> Iterator[StageUnits]:
    """Yield the units and nodes of each pipeline rank; nothing without a model or a pipeline. Raises InputError."""
    if p.model is None or p.strategy.pp == 1:
        return
    require_chunks(p.strategy)
    units_of = chunks(p.model, p.strategy)
    coordinate = np.array([p.mesh.coordinates(rank)["pp"] for rank in range(p.world)])
    for pp in range(p.strategy.pp):
        texts = (_units(units) for units, rank in zip(units_of, rank_of(p.strategy), strict=True) if rank == pp)
        hosts = np.unique(p.topology.host[p.gpu[coordinate == pp]])
        yield StageUnits(pp, tuple(texts), tuple(p.topology.hosts[host] for host in hosts))


def _units(units: Sequence[str]) -> str:
    """Write the units of a chunk: `embed, blocks 0 to 9`."""
    blocks = [unit.removeprefix("blocks.") for unit in units if unit.startswith("blocks.")]
    span = f"block {blocks[0]}" if len(blocks) == 1 else f"blocks {blocks[0]} to {blocks[-1]}" if blocks else ""
    parts = ("embed" if "embed" in units else "", span, "head" if "head" in units else "")
    return ", ".join(part for part in parts if part)


def mesh_groups(p: Placement, axis: str) -> MeshGroups:
    """Return all groups of an axis. Raises InputError."""
    members, links = groups_of(p, axis)
    rows = (LinkedGroup(tuple(ranks.tolist()), tier) for ranks, tier in zip(members, links, strict=True))
    return MeshGroups(axis, tuple(rows), p)


def rank_place(p: Placement, rank: int, axis: str | None) -> RankPlace:
    """Return where a rank is; `axis`: the one whose groups have colours. Raises InputError."""
    if not 0 <= rank < p.world:
        raise InputError("rank", rank, f"{p.strategy} has ranks 0 to {p.world - 1}")
    groups = {}
    for name in axis_names(p):
        ranks = p.mesh.group_of(rank, name)
        if len(ranks) > 1:
            groups[name] = LinkedGroup(tuple(ranks), p.cluster.tiers[int(p.tiers(np.array([ranks]))[0])].name)
    gpu = p.gpu[rank]
    node = p.topology.hosts[int(p.topology.host[gpu])]
    return RankPlace(
        rank, node, int(p.topology.index[gpu]), p.mesh.coordinates(rank), groups, p, _colour_axis(p, axis)
    )


def _colour_axis(p: Placement, axis: str | None) -> str:
    """Return the axis that has colours: one that the mesh has, by default the innermost. Raises InputError."""
    if axis is not None:
        groups_of(p, axis)
    return axis or p.coloured_axis


def placement(source: Path | None, line: str | None, cluster: str | None, model: str | None = None) -> Placement:
    """Return the ranks of a strategy on a cluster, in order.

    `source`: a plan.json, a run's folder or a job file; `line`, `cluster` and `model` replace its strategy, cluster
    and model. Without it, `line` is needed, and the cluster is DGX H100 by default. Raises InputError.
    """
    strategy = make_strategy(line) if line else None
    trained: ModelSpec | None = None
    described: ClusterSpec | None = None
    if source is not None and source.suffix == ".toml":
        file = job_file.load(source)
        strategy = strategy or file.strategy
        if strategy is None:
            raise InputError("strategy", None, f'{source} has strategy = "auto"', "name one, such as dp=2,tp=4")
        described, trained = _cluster_of(file.cluster, strategy), file.model
    elif source is not None:
        plan = plans.read(source / "plan.json" if source.is_dir() else source)
        strategy, described, trained = strategy or plan.strategy, plan.cluster, plan.model
    if strategy is None:
        raise InputError("strategy", None, "is missing", "name one, such as dp=2,tp=4, or a plan.json")
    if cluster or described is None:
        described = cluster_named(cluster or DEFAULT_CLUSTER)(strategy.world)
    if model is not None:
        trained = model_named(model)[0]
    return default_placement(strategy, described, trained)


def _cluster_of(choice: job_file.ClusterChoice, strategy: Strategy) -> ClusterSpec:
    """Return a job file's cluster; for this machine one node, whose links are not measured. Raises InputError."""
    if choice.file:
        return cluster_from_toml(Path(choice.file))
    if choice.preset == "local":
        return _one_node(strategy.world)
    return preset(str(choice.preset), choice.nodes)


def _one_node(ranks: int) -> ClusterSpec:
    unknown = "not measured: only drawn"
    device = Device("CPU", "cpu", 1, 1, 1.0, {}, False, "estimated", unknown)
    return ClusterSpec("local", device, ranks, 1, (Tier("host", ranks, 0.0, 1.0, "estimated", unknown),), ())
