"""The axes over which compressed buckets are reduced."""

from dataclasses import dataclass

from phalanx.schedule.event import Phase
from phalanx.spec.strategy.mesh import Mesh
from phalanx.spec.strategy.spec import Strategy


@dataclass(frozen=True)
class ReductionAxes:
    """The mesh axes over which compressed buckets are reduced. `axis`: of all ranks that sum a bucket; `shards`: of
    the ranks that each keep a part of the sum, "" if all keep everything; `replicas`: the number of ranks with the
    same part (HSDP). `phase`: of the step, in which they are reduced."""

    axis: str
    shards: str = ""
    replicas: int = 1
    phase: Phase = "B"


def reduction_axes(strategy: Strategy, grid: Mesh) -> ReductionAxes:
    """Return the axes of a strategy's gradients."""
    if strategy.shards == 1:
        return ReductionAxes(grid.gradient_axis)
    return ReductionAxes(grid.gradient_axis, grid.shard_axis, strategy.dp_replicate)
