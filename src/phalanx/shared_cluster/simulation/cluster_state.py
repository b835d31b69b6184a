"""The state of a simulation (waiting and running jobs, their GPUs, pending events) and its history (where each job
ran and when, and the losses).

A job runs at a speed: 1 on the GPUs that it asks for, placed well; less where its placement or its width is worse.
A job that is stopped keeps the work that it has done.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from phalanx.shared_cluster.simulation import policy as policies
from phalanx.shared_cluster.simulation.nodes import HeldGpus, Nodes
from phalanx.shared_cluster.simulation.policy import THRESHOLD, Key, SchedulingPolicy
from phalanx.shared_cluster.simulation.reservations import Reservation, Timelines
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
    """Number of times that each job was preempted."""
    resized: list[int]
    """Number of times that each job changed its width while it ran."""
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


SpeedOf = Callable[[TraceJob, HeldGpus], float]
"""Speed of a job on the GPUs that it has, over that of its best placement: above 0, at most 1."""
Chosen = list[tuple[int, int]]
"""GPUs for a gang: (node, number of GPUs) of each node."""
END, DEMOTE, RESERVED = 0, 2, 3
"""Kinds of events, in the order in which events of one time are handled; arrivals follow ends."""


@dataclass(slots=True)
class ActiveJob:
    """A job that has arrived and has not ended."""

    left: float
    """Seconds of work left at speed 1."""
    since: float
    """Time at which it began to wait, or to run."""
    attained: float = 0.0
    """GPU-seconds of service so far."""
    version: int = 0
    """A number that changes whenever the job's pending events become invalid."""
    speed: float = 1.0
    end: float = 0.0
    """Time at which it ends unless it is stopped."""
    planned_end: float = 0.0
    """Time at which its limit ends it."""
    gpus: HeldGpus = ()
    width: int = 0
    """GPUs that it runs on."""


class ClusterState:
    """A shared cluster at one time of a simulation, under a policy."""

    def __init__(
        self, jobs: Sequence[TraceJob], nodes: Nodes, policy: SchedulingPolicy, speed_of: SpeedOf | None
    ) -> None:
        n = len(jobs)
        self.jobs, self.nodes, self.policy, self.speed_of = jobs, nodes, policy, speed_of
        self.history = JobHistory(jobs, nodes, policy, [0.0] * n, [0.0] * n, [0] * n, [0] * n)
        self.active: dict[int, ActiveJob] = {}
        self.running: dict[int, ActiveJob] = {}
        self.waiting: dict[int, list[tuple[Key, int]]] = {}
        """Width -> waiting jobs, (key, number), in the order of the policy."""
        self.events: list[tuple[float, int, int, int]] = []
        self.now = 0.0
        self.stuck = 0
        """GPUs of the first waiting job, while enough are free but not in its shape; else 0."""
        self.reserved_for = -1
        self.reservation: Reservation | None = None
        self.timelines = Timelines(nodes) if policy.name == "conservative" else None
        self.promises: dict[int, tuple[float, Chosen, float]] = {}
        """Conservative: (start, nodes, planned end) of each waiting job."""
        self.early = False
        """Conservative: whether a job has just ended before its limit."""
        self.ends: list[tuple[float, int]] = []
        """easy: (planned end, number) of running jobs, ascending."""
        self.second: list[int] = [0] * len(nodes.sizes)
        """las: GPUs of each node that run jobs of the second queue."""
        self.lowest = min((job.priority for job in jobs), default=0)
        self.mixed = any(job.priority != self.lowest for job in jobs)
        self.shrinkable: set[int] = set()
        """Running jobs that can run on fewer GPUs."""

    def first(self) -> int | None:
        """Return the first waiting job."""
        if self.timelines is not None:
            return min(self.promises, default=None)
        best = min((queue[0] for queue in self.waiting.values() if queue), default=None)
        return None if best is None else best[1]

    def key(self, number: int) -> Key:
        """Return a waiting job's place in the order of the policy."""
        return policies.key(self.policy, self.jobs[number], number, self.active[number].attained)

    def wait(self, number: int) -> None:
        """Put a job in the queue of its width."""
        insort(self.waiting.setdefault(self.jobs[number].gpus, []), (self.key(number), number))

    def unwait(self, number: int) -> None:
        """Take a job out of its queue, before its sort key changes."""
        queue = self.waiting[self.jobs[number].gpus]
        del queue[bisect_left(queue, (self.key(number), number))]

    def speed(self, number: int, chosen: Chosen) -> float:
        """Return a job's speed on GPUs about to be taken, by their placement alone."""
        job = self.jobs[number]
        if self.speed_of is None or not job.plan:
            return 1.0
        return self.speed_of(job, tuple((node, (1 << gpus) - 1) for node, gpus in chosen))

    def start(self, number: int, nodes: Chosen, narrower: float, placed: float | None = None) -> None:
        """Start a job on (node, GPUs). `narrower`: speed of its width, over that of the width it asks for; `placed`:
        speed of the placement, if it is known already."""
        state, job = self.active[number], self.jobs[number]
        state.speed = narrower * (self.speed(number, nodes) if placed is None else placed)
        state.width = sum(gpus for _, gpus in nodes)
        state.gpus = self.nodes.take(nodes)
        self.history.waited[number] += self.now - state.since
        state.since = self.now
        state.end = self.now + state.left / state.speed
        # The limit is of the job as it asked to run: time lost to placement or width comes on top.
        state.planned_end = max(state.end, state.end + (job.planned - job.duration) / state.speed)
        state.version += 1
        self.running[number] = state
        if self.policy.elastic and job.widths and job.widths[0][0] < state.width:
            self.shrinkable.add(number)
        heapq.heappush(self.events, (state.end, END, number, state.version))
        if self.timelines is not None:
            self.timelines.change(nodes, self.now, state.planned_end, -1)
        if self.policy.name == "easy":
            insort(self.ends, (state.planned_end, number))
        if self.policy.name == "las":
            if state.attained >= THRESHOLD:
                self.count_second(state.gpus, 1)
            else:
                at = self.now + (THRESHOLD - state.attained) / state.width
                if at < state.end:
                    heapq.heappush(self.events, (at, DEMOTE, number, state.version))

    def leave(self, number: int) -> None:
        """Take a job off its GPUs."""
        state = self.running[number]
        if self.policy.name == "las" and state.attained >= THRESHOLD:
            self.count_second(state.gpus, -1)
        if self.policy.name == "easy":
            del self.ends[bisect_left(self.ends, (state.planned_end, number))]
        self.count_run(number)
        state.version += 1
        self.nodes.give_back(state.gpus)
        self.shrinkable.discard(number)
        del self.running[number]

    def count_run(self, number: int) -> None:
        """Count the work and the losses of a running job since it started, or since they were last counted."""
        state, job = self.running[number], self.jobs[number]
        ran = self.now - state.since
        state.attained += ran * state.width
        # Rounding may leave a last fraction of a second undone.
        state.left = 0.0 if self.now >= state.end else max(0.0, state.left - ran * state.speed)
        self.history.runs.append(JobRun(number, state.since, self.now, state.gpus))
        narrower = dict(job.widths).get(state.width, 1.0) if state.width != job.gpus else 1.0
        self.history.placement += ran * state.width * (1 - state.speed / narrower)
        state.since = self.now

    def count_second(self, held: HeldGpus, sign: int) -> None:
        """Count GPUs that a job of the second queue takes (1) or leaves (-1)."""
        for node, bits in held:
            self.second[node] += sign * bits.bit_count()
