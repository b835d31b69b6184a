"""Preemption: of jobs of lower priority, and under `las` of jobs of the second queue by jobs of the first.

A preempted job loses `restart_s` and waits again. Least attained service is that of Tiresias (Gu et al., NSDI 2019),
with two queues: a job whose service, GPUs x time, reaches THRESHOLD moves to the second.
"""

from phalanx.shared_cluster.simulation.cluster_state import Chosen, ClusterState
from phalanx.shared_cluster.simulation.policy import THRESHOLD


def demote(cluster: ClusterState, number: int) -> None:
    """Move a running job to the second queue."""
    state = cluster.running[number]
    cluster.count_run(number)
    state.attained = THRESHOLD
    cluster.count_second(state.gpus, 1)


def _may_stop(cluster: ClusterState, number: int, other: int) -> bool:
    """Whether the waiting job `number` may preempt the running job `other`: its priority is higher, or under `las` it
    is in the first queue and the other in the second."""
    own, running = cluster.jobs[number].priority, cluster.jobs[other].priority
    if own < running:
        return False
    if own > running and cluster.policy.preempt:
        return True
    first = cluster.active[number].attained < THRESHOLD
    return cluster.policy.name == "las" and first and cluster.running[other].attained >= THRESHOLD


def stop_for(cluster: ClusterState, number: int) -> Chosen:
    """Preempt jobs so that a waiting job can start; return its nodes, none if preemption cannot make room."""
    shape, largest = cluster.nodes.shape(cluster.jobs[number].gpus), cluster.nodes.largest
    if cluster.mixed:
        room = list(cluster.nodes.free)
        for other, state in cluster.running.items():
            if _may_stop(cluster, number, other):
                for node, bits in state.gpus:
                    room[node] += bits.bit_count()
    else:
        room = [free + second for free, second in zip(cluster.nodes.free, cluster.second, strict=True)]
    parts = [(largest, shape.entire), (shape.part, 1 if shape.part else 0)]
    nodes: Chosen = []
    for gpus, count in parts:
        taken = {node for node, _ in nodes}
        # Where the fewest GPUs must be taken from others.
        fitting = sorted(
            (gpus - cluster.nodes.free[n], n) for n, k in enumerate(room) if k >= gpus and n not in taken
        )
        if len(fitting) < count:
            return []
        nodes += [(n, gpus) for _, n in fitting[:count]]
    for node, gpus in nodes:
        victims = [
            n
            for n, s in cluster.running.items()
            if any(at == node for at, _ in s.gpus) and _may_stop(cluster, number, n)
        ]
        for victim in sorted(victims, key=lambda n: (cluster.jobs[n].priority, -cluster.jobs[n].submit)):
            if cluster.nodes.free[node] >= gpus:
                break
            _stop(cluster, victim)
    return nodes


def _stop(cluster: ClusterState, number: int) -> None:
    """Preempt a running job, which loses `restart_s` and waits again."""
    cluster.leave(number)
    cluster.history.preempted[number] += 1
    cluster.active[number].left += cluster.policy.restart_s
    cluster.wait(number)


def may_stop_any(cluster: ClusterState, number: int) -> bool:
    """Whether a waiting job may preempt some running job."""
    if cluster.policy.preempt and cluster.jobs[number].priority > cluster.lowest:
        return True
    return cluster.policy.name == "las" and cluster.active[number].attained < THRESHOLD
