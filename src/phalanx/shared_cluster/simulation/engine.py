"""The event engine: jobs arrive, wait, run on GPUs and end; a policy decides which starts when and where.

Events at one time are handled in the order: ends, arrivals, changes of queue, reserved starts; then waiting jobs are
scheduled. What a job has done is kept when it is stopped; it loses `restart_s`.
"""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.shared_cluster.simulation import backfill, conservative
from phalanx.shared_cluster.simulation.cluster_state import END, RESERVED, ActiveJob, ClusterState, SpeedOf
from phalanx.shared_cluster.simulation.events import handle
from phalanx.shared_cluster.simulation.history import JobHistory
from phalanx.shared_cluster.simulation.jobs import TraceJob
from phalanx.shared_cluster.simulation.nodes import Nodes
from phalanx.shared_cluster.simulation.policy import SchedulingPolicy


def simulate(
    jobs: Sequence[TraceJob], nodes: Nodes, policy: SchedulingPolicy, speed_of: SpeedOf | None = None
) -> JobHistory:
    """Run the jobs of a trace, which must fit the empty cluster, in the order of their submission."""
    cluster = ClusterState(jobs, nodes, policy, speed_of)
    order = sorted(range(len(jobs)), key=lambda n: (jobs[n].submit, n))
    i, events = 0, cluster.events
    while i < len(order) or events:
        arrival = jobs[order[i]].submit if i < len(order) else float("inf")
        time = min(arrival, events[0][0]) if events else arrival
        cluster.history.fragmented += cluster.stuck * (time - cluster.now)
        cluster.now = time
        handle(cluster, END)
        if cluster.early:  # once all that end now have given back their GPUs
            conservative.bring_forward(cluster)
        while i < len(order) and jobs[order[i]].submit == time:
            _arrive(cluster, order[i])
            i += 1
        handle(cluster, RESERVED)
        if cluster.timelines is None:
            _schedule(cluster)
        head = cluster.first()
        cluster.stuck = 0
        if head is not None and jobs[head].gpus <= nodes.count:
            cluster.stuck = jobs[head].gpus
    return cluster.history


def _arrive(cluster: ClusterState, number: int) -> None:
    cluster.active[number] = ActiveJob(cluster.jobs[number].duration, cluster.now)
    if cluster.timelines is not None:
        conservative.promise(cluster, number)
    else:
        cluster.wait(number)


def _schedule(cluster: ClusterState) -> None:
    """Start the waiting jobs that the policy lets start now."""
    name = cluster.policy.name
    if name == "easy":
        backfill.easy(cluster)
    else:
        backfill.in_order(cluster, passing=name != "fifo")
