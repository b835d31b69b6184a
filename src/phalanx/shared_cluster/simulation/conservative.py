"""Conservative backfilling (Mu'alem and Feitelson 2001): every job gets a reservation when it arrives.

It is the earliest time at which the job fits between all that is reserved, so no later one delays it. When a job ends
before its limit, those that wait are brought forward in their order.
"""

from __future__ import annotations

import heapq

from phalanx.shared_cluster.simulation.cluster_state import END, RESERVED, Chosen, ClusterState
from phalanx.shared_cluster.simulation.events import handle
from phalanx.shared_cluster.simulation.policy import DEPTH


def promise(cluster: ClusterState, number: int) -> None:
    """Start a job now, or reserve the earliest time at which it fits between all reservations."""
    assert cluster.timelines is not None
    job = cluster.jobs[number]
    if not cluster.promises:
        chosen = cluster.nodes.choose(job.gpus, cluster.policy.rule)
        if chosen:
            _start_now(cluster, number, chosen)
            return
    start, chosen, planned = _find(cluster, number)
    if start <= cluster.now:
        _start_now(cluster, number, chosen)
    else:
        _reserve_for(cluster, number, start, chosen, start + planned)
        cluster.history.promised[number] = start


def _start_now(cluster: ClusterState, number: int, chosen: Chosen) -> None:
    cluster.start(number, chosen, 1.0)
    handle(cluster, END)  # of a job that takes no time: to the timelines its GPUs are free already


def _find(cluster: ClusterState, number: int) -> tuple[float, Chosen, float]:
    """Return the earliest start of a job, its nodes, and the seconds that it is planned to take on them."""
    assert cluster.timelines is not None
    job, speed = cluster.jobs[number], 1.0
    while True:
        start, chosen = cluster.timelines.find(job.gpus, job.planned / speed, cluster.now)
        placed = cluster.speed(number, chosen)
        if placed >= speed:
            return start, chosen, job.planned / speed
        speed = placed


def _reserve_for(cluster: ClusterState, number: int, start: float, chosen: Chosen, end: float) -> None:
    assert cluster.timelines is not None
    cluster.timelines.change(chosen, start, end, -1)
    cluster.promises[number] = (start, chosen, end)
    state = cluster.active[number]
    state.version += 1
    heapq.heappush(cluster.events, (start, RESERVED, number, state.version))


def bring_forward(cluster: ClusterState) -> None:
    """After an early end, give waiting jobs an earlier start where there is one, in their order."""
    assert cluster.timelines is not None
    cluster.early = False
    for number in sorted(cluster.promises)[:DEPTH]:
        start, chosen, end = cluster.promises.pop(number)
        cluster.timelines.change(chosen, start, end, 1)
        sooner, elsewhere, planned = _find(cluster, number)
        if sooner <= cluster.now:
            _start_now(cluster, number, elsewhere)
        elif sooner < start:
            _reserve_for(cluster, number, sooner, elsewhere, sooner + planned)
        else:
            _reserve_for(cluster, number, start, chosen, end)
