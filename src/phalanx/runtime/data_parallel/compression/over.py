"""The axes over which compressed buckets are reduced."""

from dataclasses import dataclass

from phalanx.schedule.event import Phase
from phalanx.spec.strategy.mesh import Mesh
from phalanx.spec.strategy.spec import Strategy


@dataclass(frozen=True)
class Over:
    """`axis`: of all ranks that sum a bucket; `shards`: of those that each keep a part of the sum, "" where all keep
    everything, and `replicas` of each part (HSDP). `phase`: of the step in which they are reduced."""

    axis: str
    shards: str = ""
    replicas: int = 1
    phase: Phase = "B"


def over(strategy: Strategy, grid: Mesh) -> Over:
    """Return the axes of a strategy's gradients."""
    if strategy.shards == 1:
        return Over(grid.gradient_axis)
    return Over(grid.gradient_axis, grid.shard_axis, strategy.dp_replicate)
