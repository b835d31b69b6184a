"""What `phalanx mesh` draws: a strategy's ranks in order on a cluster that a plan, a job or options name."""

from __future__ import annotations

from pathlib import Path

from phalanx.planning.lookup import cluster_named
from phalanx.planning.placement import Placement, in_order
from phalanx.spec.cluster.presets import preset
from phalanx.spec.cluster.spec import ClusterSpec, Device, Tier
from phalanx.spec.errors import InputError
from phalanx.spec.files import job_file
from phalanx.spec.files import plan as plans
from phalanx.spec.files.cluster_toml import cluster_from_toml
from phalanx.spec.files.job_file import make_strategy
from phalanx.spec.strategy.spec import Strategy

DEFAULT_CLUSTER = "dgx-h100"


def placement(source: Path | None, line: str | None, cluster: str | None) -> Placement:
    """Return the ranks of a strategy on a cluster, in order.

    `source`: a plan.json, a run's folder or a job file, of which `line` replaces the strategy and `cluster` the
    cluster. Without one, `line` is needed, and the cluster is DGX H100 by default. Raises InputError.
    """
    strategy = make_strategy(line) if line else None
    described: ClusterSpec | None = None
    if source is not None and source.suffix == ".toml":
        file = job_file.load(source)
        strategy = strategy or file.strategy
        if strategy is None:
            raise InputError("strategy", None, f'{source} has strategy = "auto"', "name one, such as dp=2,tp=4")
        described = _cluster_of(file.cluster, strategy)
    elif source is not None:
        plan = plans.read(source / "plan.json" if source.is_dir() else source)
        strategy, described = strategy or plan.strategy, plan.cluster
    if strategy is None:
        raise InputError("strategy", None, "is missing", "name one, such as dp=2,tp=4, or a plan.json")
    if cluster or described is None:
        described = cluster_named(cluster or DEFAULT_CLUSTER)(strategy.world)
    return in_order(strategy, described)


def _cluster_of(choice: job_file.ClusterChoice, strategy: Strategy) -> ClusterSpec:
    """The cluster of a job file; this machine is one node whose links are not measured here."""
    if choice.file:
        return cluster_from_toml(Path(choice.file))
    if choice.preset == "local":
        return _one_node(strategy.world)
    return preset(str(choice.preset), choice.nodes)


def _one_node(ranks: int) -> ClusterSpec:
    unknown = "not measured: only drawn"
    device = Device("CPU", "cpu", 0, 0, 1.0, {}, False, "estimated", unknown)
    return ClusterSpec("local", device, ranks, 1, (Tier("host", ranks, 0.0, 1.0, "estimated", unknown),), ())
