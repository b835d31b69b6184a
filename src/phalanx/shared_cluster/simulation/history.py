"""The history of a simulation: where each job ran and when, and what was lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from phalanx.shared_cluster.simulation.nodes import HeldGpus, Nodes
from phalanx.shared_cluster.simulation.policy import SchedulingPolicy
from phalanx.shared_cluster.simulation.trace import TraceJob


@dataclass(frozen=True, slots=True)
class JobRun:
    """A job on its GPUs from `start` to `end`."""

    job: int
    start: float
    end: float
    gpus: HeldGpus


@dataclass
class JobHistory:
    """The history of a simulation. Lists have an element for each job, in the order of the trace."""

    jobs: Sequence[TraceJob]
    nodes: Nodes
    policy: SchedulingPolicy
    finish: list[float]
    waited: list[float]
    """Seconds that each job waited, whether before or between its runs."""
    preempted: list[int]
    """How often each job was preempted."""
    resized: list[int]
    """How often each running job changed its width."""
    runs: list[JobRun] = field(default_factory=list)
    fragmented: float = 0.0
    """GPU-seconds for which the first waiting job's GPUs were free, but not in the shape that it needs."""
    placement: float = 0.0
    """GPU-seconds that jobs took longer than on their best placement."""
    promised: dict[int, float] = field(default_factory=dict)
    """The latest start that a reservation has promised, by job."""

    @property
    def makespan(self) -> float:
        """Seconds from the first submission to the last end."""
        return max(self.finish, default=0.0)
