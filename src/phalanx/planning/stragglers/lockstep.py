"""The ranks that advance at one pace: they wait for each other inside layers, or after every micro-batch."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from phalanx.schedule.gradients.sharding import Sharding
from phalanx.spec.strategy.mesh import Mesh, mesh
from phalanx.spec.strategy.spec import Strategy

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Lockstep:
    """The pipeline, stage and replica of each rank, (world,); ranks of one pipeline and stage advance at one pace."""

    pipeline: Ints
    stage: Ints
    replica: Ints

    @property
    def pipelines(self) -> int:
        """Number of pipelines, which wait for each other only once a step."""
        return int(self.pipeline.max()) + 1


def lockstep(s: Strategy, sharding: Sharding) -> Lockstep:
    """Return the pipelines of a strategy: replicas that wait for each other inside layers or after every micro-batch
    count as one pipeline."""
    m = mesh(s)
    place = dict(
        zip((n for n, _ in m.axes), np.unravel_index(np.arange(m.world), [k for _, k in m.axes]), strict=True)
    )
    sizes = dict(m.axes)
    replica = place["dp_replicate"] * sizes["dp_shard"] + place["dp_shard"]
    label = np.arange(sizes["dp_replicate"] * sizes["dp_shard"])
    for axis in _meeting_axes(m, sharding):
        rows = np.unique(replica[m.groups(axis)], axis=0)
        while True:  # until every group has one label
            least = label[rows].min(axis=1)
            before = label.copy()
            np.minimum.at(label, rows, least[:, None])
            if (before == label).all():
                break
    pipeline, stage = np.unique(label, return_inverse=True)[1][replica], place["pp"]
    return Lockstep(pipeline.astype(np.int64), stage.astype(np.int64), replica.astype(np.int64))


def _meeting_axes(m: Mesh, sharding: Sharding) -> list[str]:
    """Return the axes over which replicas wait for each other before the end of a step; tp and cp stay inside one."""
    axes = ["ep+etp"] if m.ep * m.etp > 1 else []
    axes += ["dp_shard"] if np.any(sharding.gathers_each) or np.any(sharding.reduces_each) else []
    return axes + (["dp_shard+dp_replicate"] if np.any(sharding.replicates_each) else [])
