"""Which waiting jobs start now: in order, past jobs that cannot start, or behind a reservation.

EASY backfilling (Lifka 1995): the first waiting job has a reservation, the earliest time at which its GPUs are free
by the planned ends of those that run. Others pass it if they end before then, or on GPUs that it leaves over.
"""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.shared_cluster.simulation import elastic, stopping
from phalanx.shared_cluster.simulation.cluster_state import Chosen, ClusterState
from phalanx.shared_cluster.simulation.jobs import TraceJob
from phalanx.shared_cluster.simulation.policy import DEPTH, Key
from phalanx.shared_cluster.simulation.reservations import earliest


def start_if_able(cluster: ClusterState, number: int) -> bool:
    """Start a waiting job if it can start now."""
    gpus, speed = cluster.nodes.choose(cluster.jobs[number].gpus, cluster.policy.rule), 1.0
    if not gpus and cluster.policy.elastic and cluster.jobs[number].widths:
        gpus, speed = elastic.narrower(cluster, number)
    if not gpus and stopping.may_stop_any(cluster, number):
        gpus, speed = stopping.stop_for(cluster, number), 1.0
    if not gpus and cluster.shrinkable:
        gpus, speed = elastic.shrink_for(cluster, number)
    if not gpus:
        return False
    cluster.unwait(number)
    cluster.start(number, gpus, speed)
    return True


def in_order(cluster: ClusterState, passing: bool) -> None:
    """Start jobs in their order. No job passes one that cannot start; with `passing`, jobs of other widths do."""
    for number in _merged(cluster):
        if not start_if_able(cluster, number) and not passing:
            return


def _merged(cluster: ClusterState) -> Iterator[int]:
    """Yield the first waiting job repeatedly, skipping widths whose first job did not start, unless elastic jobs of
    one width may differ."""
    closed: set[int] = set()
    while True:
        best: tuple[Key, int] | None = None
        for width, own in cluster.waiting.items():
            if own and width not in closed and (best is None or own[0] < best):
                best = own[0]
        if best is None:
            return
        yield best[1]
        width = cluster.jobs[best[1]].gpus
        own = cluster.waiting[width]
        if own and own[0][1] == best[1]:
            closed.add(width)


def easy(cluster: ClusterState) -> None:
    """Start jobs in their order; reserve for the first that cannot start, and let others pass it."""
    while (head := cluster.first()) is not None and start_if_able(cluster, head):
        if head != cluster.reserved_for:  # it came before the job with the reservation, which must be made again
            cluster.reserved_for = -1
    if head is None or not cluster.nodes.count:
        if head is not None:
            _reserve(cluster, head)
        return
    _reserve(cluster, head)
    _backfill(cluster, head)


def _reserve(cluster: ClusterState, head: int) -> None:
    if cluster.reserved_for != head:
        ends = ((time, cluster.running[n].gpus) for time, n in cluster.ends)
        gpus = cluster.jobs[head].gpus
        cluster.reservation = earliest(cluster.nodes, gpus, cluster.policy.rule == "scatter", ends)
        cluster.reserved_for = head
        cluster.history.promised[head] = cluster.reservation.time


def _backfill(cluster: ClusterState, head: int) -> None:
    """Start jobs behind the first if they end before its reservation or leave the reserved GPUs free."""
    reservation = cluster.reservation
    assert reservation is not None
    for width in sorted(cluster.waiting):
        queue, position, seen = cluster.waiting[width], 0, 0
        room = True  # whether jobs of this width may still find GPUs that are not reserved
        while position < len(queue) and seen < DEPTH:
            gpus = cluster.nodes.choose(width, cluster.policy.rule)
            if not gpus:
                break
            number = queue[position][1]
            job = cluster.jobs[number]
            seen += 1
            speed = cluster.speed(number, gpus)
            late = cluster.now + job.planned / speed > reservation.time
            if late and room and number != head:
                gpus = _beside(cluster, job)
                room = bool(gpus)
            if number == head or (late and not room):
                position += 1
                continue
            if late:
                speed = cluster.speed(number, gpus)
                reservation.use(gpus)
            cluster.unwait(number)
            cluster.start(number, gpus, 1.0, speed)


def _beside(cluster: ClusterState, job: TraceJob) -> Chosen:
    """Return nodes for a job that ends after the reservation."""
    reservation = cluster.reservation
    assert reservation is not None
    if reservation.anywhere is not None:
        enough = reservation.anywhere >= job.gpus
        return cluster.nodes.choose(job.gpus, cluster.policy.rule) if enough else []
    shape = cluster.nodes.shape(job.gpus)
    each = cluster.nodes.largest if shape.entire else shape.part
    return cluster.nodes.choose(job.gpus, cluster.policy.rule, lambda node: reservation.allows(node, each))
