"""Scheduling policies, as data: the order of waiting jobs, which jobs may pass others, and which may be stopped.

fifo           arrival order; no job passes the first that cannot start
easy           as fifo, but the first has a reservation, and jobs that do not delay it may pass (Lifka 1995)
conservative   every job has a reservation when it arrives, which no later job delays (Mu'alem and Feitelson 2001)
smallest       fewest GPUs first, then shortest; no job waits for a wider one
las            least attained service in two queues: a job that has used THRESHOLD GPU-seconds goes to the second; the
               first may stop jobs of the second (Tiresias, Gu et al. 2019, discretised)
"""

from dataclasses import dataclass

from phalanx.shared_cluster.simulation.trace import TraceJob

POLICIES = ("fifo", "easy", "conservative", "smallest", "las")
THRESHOLD = 3600.0 * 8
"""GPU-seconds of service after which a job goes to the second queue of `las`."""
DEPTH = 100
"""The most jobs of one width that a backfilling pass considers."""
MOST_SHRUNK = 8
"""The most jobs that release GPUs to one other job."""


@dataclass(frozen=True)
class SchedulingPolicy:
    """A scheduling policy with its options."""

    name: str
    rule: str = "best-fit"
    """Rule by which GPUs are chosen for a gang: RULES in nodes.py."""
    elastic: bool = False
    """Whether elastic jobs start narrower if that lets them start at once, release GPUs if that lets the first
    waiting job start, and widen when no job waits."""
    restart_s: float = 60.0
    """Seconds that a job loses when it is stopped and starts again, or changes its width."""
    preempt: bool = False
    """Whether a job of higher priority may stop jobs of lower ones, if it can then start at once."""

    @property
    def title(self) -> str:
        """The name with the rule, for people."""
        more = [word for word, on in (("elastic", self.elastic), ("preempting", self.preempt)) if on]
        return ", ".join([self.name, self.rule, *more])


Key = tuple[float, float, float, int]
"""Sort key of waiting jobs."""


def key(policy: SchedulingPolicy, job: TraceJob, number: int, attained: float) -> Key:
    """Return a waiting job's place in the order of a policy, after its priority; `attained`: GPU-seconds of service
    so far."""
    if policy.name == "smallest":
        return (-job.priority, job.gpus, job.planned, number)
    if policy.name == "las":
        return (-job.priority, float(attained >= THRESHOLD), job.submit, number)
    return (-job.priority, job.submit, 0.0, number)
