"""Pending events: jobs end, change their queue, or start at a reserved time."""

import heapq

from phalanx.shared_cluster.simulation import elastic, stopping
from phalanx.shared_cluster.simulation.cluster_state import DEMOTE, END, ClusterState


def handle(cluster: ClusterState, last: int) -> None:
    """Handle the events of the present time, up to a kind."""
    while cluster.events and cluster.events[0][0] == cluster.now and cluster.events[0][1] <= last:
        _, kind, number, version = heapq.heappop(cluster.events)
        job = cluster.active.get(number)
        if job is None or job.version != version:
            continue
        if kind == END:
            _end(cluster, number)
        elif kind == DEMOTE:
            stopping.demote(cluster, number)
        else:
            assert cluster.timelines is not None
            start, chosen, end = cluster.promises.pop(number)
            cluster.timelines.change(chosen, start, end, 1)  # starting takes them again
            cluster.start(number, chosen, 1.0)


def _end(cluster: ClusterState, number: int) -> None:
    job = cluster.running[number]
    cluster.leave(number)
    del cluster.active[number]
    cluster.history.finish[number] = cluster.now
    if cluster.timelines is not None and job.planned_end > cluster.now:
        chosen = [(node, bits.bit_count()) for node, bits in job.gpus]
        cluster.timelines.change(chosen, cluster.now, job.planned_end, 1)
        cluster.early = True
    elif cluster.policy.elastic and not any(cluster.waiting.values()):
        elastic.widen(cluster)
